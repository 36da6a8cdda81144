/* Which memory a table's indexes will move to next, and when: what ec_spare.h makes ready.
 *
 * Looked at once an insert, or once in 2,048 keys where inserts are smaller, so that it costs a small call nothing. A partition that
 * gets its share of such calls has so many more calls until it grows or splits; some calls before that its blocks are mapped, and
 * each call from then on touches one huge page of them.
 *
 * Thread safety: needs the table's write lock.
 */
#ifndef EC_AHEAD_H
#define EC_AHEAD_H

#include "ec_table.h"

#define EC_READY_FAR 512 /* calls before a move from which on a block made ready for it is kept */
#define EC_READY_STEP 2048 /* keys; smaller calls count together as one */
#define EC_READY_CALL ((int64_t)1 << 16) /* keys of a call up to which memory is made ready ahead: larger ones take their time anyway */

/* Where a partition's index moves to next: `blocks` of `bytes` each (two for a split, one for a growth), when `left` more keys
 * have come. */
typedef struct ec_move_ahead {
    size_t bytes;
    int64_t left;
    int blocks;
} ec_move_ahead;

/* The next move of a partition that gets `share` keys a call. 0 where it is far away, and nothing is filled in. */
static int ec_partition_next_move(const ec_table *t, const ec_partition *p, int64_t share, ec_move_ahead *move)
{
    const int64_t grow_left = p->grow_at - p->index.size - p->limbo;
    int64_t split_left = INT64_MAX, keys;
    uint64_t buckets;
    if (t->partition_count < EC_PARTITIONS_MAX && p->vshard_to - p->vshard_from > 1)
        split_left = ec_partition_split_above(p, t->split_above) - p->index.size;
    move->left = split_left < grow_left ? split_left : grow_left;
    if (move->left > share * EC_READY_FAR)
        return 0;
    if (split_left > grow_left) {
        move->blocks = 1;
        buckets = ec_partition_buckets(t, ec_index_buckets_for(p->grow_at + 1), p->index.bucket_count);
    } else {
        move->blocks = 2;
        keys = p->index.size + (split_left > 0 ? split_left : 0);
        keys = keys / 2 + keys / 200; /* the call that sets it off brings a few more */
        buckets = ec_partition_buckets(t, ec_index_buckets_for(keys + keys / 8 + p->limbo / 2 + 1), 0);
    }
    move->bytes = ec_page_round(buckets * sizeof(ec_bucket));
    return move->bytes >= EC_HUGE_BYTES;
}

/* Before an insert of `n` keys: make one huge page ready for an index that will move within the next calls like this one, and drop
 * blocks that none will move to for long. Where memory is short nothing is made ready. */
static void ec_table_make_ready(ec_table *t, int64_t n)
{
    size_t held = 0;
    int kept[EC_SPARES] = {0};
    const int64_t keys = t->unready + n;
    t->unready = keys < EC_READY_STEP ? keys : 0;
    if (t->backing != NULL || n > EC_READY_CALL || keys < EC_READY_STEP)
        return;
    for (int64_t i = 0; i < t->partition_count; ++i)
        held += t->partitions[i].index.bytes;
    for (int64_t i = 0; i < t->partition_count && held >= EC_HUGE_BYTES; ++i) {
        const ec_partition *p = t->partitions + i;
        const int64_t share = ec_partition_share_of(p, keys) + 1;
        ec_move_ahead move;
        if (!ec_partition_next_move(t, p, share, &move))
            continue;
        for (int at = 0; at < EC_SPARES && move.blocks > 0; ++at)
            if (t->spares[at].at != NULL && !kept[at] && ec_spare_fits(t->spares[at].bytes, move.bytes)) {
                kept[at] = 1;
                move.blocks -= 1;
            }
        /* Twice as many calls ahead as there are pages: its neighbours may be making ready too. */
        if (move.left > share * (2 * move.blocks * (int64_t)(move.bytes / EC_HUGE_BYTES + 1) + 4))
            continue;
        for (int at = 0; at < EC_SPARES && move.blocks > 0; ++at) {
            ec_spare *spare = t->spares + at;
            if (spare->at != NULL)
                continue;
            if ((spare->at = (char *)ec_block_alloc(move.bytes, &spare->bytes)) == NULL)
                break;
            spare->ready = 0;
            kept[at] = 1;
            move.blocks -= 1;
        }
    }
    int touched = 0;
    for (int at = 0; at < EC_SPARES; ++at) {
        ec_spare *spare = t->spares + at;
        if (spare->at != NULL && !kept[at])
            ec_spare_drop(spare);
        else if (spare->at != NULL && !touched && spare->ready < spare->bytes && ec_spare_ready(t->spares) + EC_HUGE_BYTES <= held / 3) {
            ec_spare_touch(spare);
            touched = 1;
        }
    }
}

#endif
