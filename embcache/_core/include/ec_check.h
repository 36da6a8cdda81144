/* Check of every invariant of a table, for tests and for `check()`: returns NULL, or what is broken. *longest and *total
 * receive the longest probe of a key and the sum of all, in buckets.
 */
#ifndef EC_CHECK_H
#define EC_CHECK_H

#include "ec_table.h"

enum { EC_SEEN_FREE = 0x80 }; /* a mark in a copy of the flags */

static const char *ec_check_partition(const ec_table *t, const ec_partition *p, uint8_t *seen, int64_t *longest, int64_t *total)
{
    int64_t probe = 0, probes = 0, counted = 0, limbo = 0;
    int status = ec_index_check_probes(&p->index, &probe, &probes);
    if (status == EC_NOMEM)
        return "no memory for the check";
    if (status != EC_OK)
        return "an index has a wrong size, a wrong overflow count, or a key that its home does not lead to";
    *longest = probe > *longest ? probe : *longest;
    *total += probes;
    if (p->index.size + p->limbo > p->index.grow_at)
        return "an index lacks room for the keys of limbo rows";
    if (p->grow_at > p->index.grow_at)
        return "a partition would let its index grow too late";
    for (uint64_t at = 0; at < p->index.bucket_count; ++at) {
        const ec_bucket *bucket = p->index.buckets + at;
        for (uint32_t rest = bucket->meta & EC_OCCUPANCY; rest; rest &= rest - 1) {
            int place = __builtin_ctz(rest);
            int64_t key = bucket->keys[place], local = bucket->vals[place];
            int32_t vshard = (int32_t)ec_vshard(ec_hash(key));
            if (vshard < p->vshard_from || vshard >= p->vshard_to)
                return "a key lies in the partition of other vshards";
            if (local >= p->extent_count * EC_EXTENT_ROWS)
                return "a key points beyond its partition's extents";
            int64_t row = ec_partition_row(p, local);
            if (row >= t->row_limit || *ec_table_key(t, row) != key)
                return "a key points to a row that holds another key";
            if (!(seen[row] & EC_LIVE) || (seen[row] & EC_LIMBO))
                return "a key points to a row that is not live, or two keys point to one row";
            seen[row] = 0;
            if (ec_table_local(t, row) != local)
                return "an extent is listed at two places";
        }
    }
    for (int64_t local = p->free_head; local >= 0; local = *ec_table_key(t, ec_partition_row(p, local)), ++counted) {
        if (counted == p->free_count || local >= p->extent_count * EC_EXTENT_ROWS)
            return "a free list is longer than its count, or leaves its partition";
        int64_t row = ec_partition_row(p, local);
        if (row >= t->row_limit || seen[row] != 0 || *ec_table_flags(t, row) != 0)
            return "a free row is live, in limbo, or in two free lists";
        seen[row] = EC_SEEN_FREE;
    }
    if (counted != p->free_count)
        return "a free list is shorter than its count";
    for (int32_t vshard = p->vshard_from; vshard < p->vshard_to; ++vshard) {
        if (t->partitions + t->partition_of[vshard] != p)
            return "a vshard is mapped to another partition";
        limbo += t->limbo_of[vshard];
    }
    if (limbo != p->limbo)
        return "a partition miscounts its limbo rows";
    return NULL;
}

static const char *ec_table_check(const ec_table *t, int64_t *longest, int64_t *total)
{
    const char *broken = NULL;
    int64_t live = 0, limbo_rows = 0, vshards = 0;
    *longest = *total = 0;
    uint8_t *seen = (uint8_t *)calloc((size_t)t->row_limit + 1, 1);
    if (seen == NULL)
        return "no memory for the check";
    for (int64_t row = 0; row < t->row_limit; ++row)
        seen[row] = *ec_table_flags(t, row);
    for (int64_t i = 0; i < t->partition_count && broken == NULL; ++i) {
        live += t->partitions[i].index.size;
        vshards += t->partitions[i].vshard_to - t->partitions[i].vshard_from;
        broken = ec_check_partition(t, t->partitions + i, seen, longest, total);
    }
    for (int64_t row = 0; row < t->row_limit && broken == NULL; ++row) {
        if (seen[row] & EC_LIVE)
            broken = "a live row is in no index";
        if (seen[row] != EC_SEEN_FREE)
            limbo_rows += (seen[row] & EC_LIMBO) != 0;
    }
    if (broken == NULL && (live != t->live || limbo_rows != t->limbo))
        broken = "the table miscounts its live or limbo rows";
    if (broken == NULL && vshards != EC_VSHARDS)
        broken = "the partitions do not cover the vshards once";
    for (int64_t i = 1; i < t->free_extent_count && broken == NULL; ++i)
        if (t->free_extents[i - 1] <= t->free_extents[i])
            broken = "the free extents are out of order";
    free(seen);
    return broken;
}

#endif
