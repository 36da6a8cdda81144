/* The split of a partition that has become too large.
 *
 * A split gives the upper half of the vshards to a new partition. Both keep the parent's extents (a local has the same
 * number in both) and share nothing else; extents taken later belong to one. Only the lower half goes on filling the
 * parent's last extent. Undo gives an extent back when nothing in it is handed out; a sibling that lists it too has no
 * row there (undo stops at the sibling's rows) and will not use its own entry again, so sharing needs no count.
 */
#ifndef EC_SPLIT_H
#define EC_SPLIT_H

#include "ec_table.h"

/* Copy the keys of an index to the halves, those of vshards from `middle` on to the upper. 0 where a half had no room. */
static int ec_split_copy(const ec_index *index, int32_t middle, ec_index *lower, ec_index *upper)
{
    for (uint64_t at = 0; at < index->bucket_count; ++at) {
        const ec_bucket *bucket = index->buckets + at;
        for (uint32_t rest = bucket->meta & EC_OCCUPANCY; rest; rest &= rest - 1) {
            int place = __builtin_ctz(rest);
            uint64_t hash = ec_hash(bucket->keys[place]);
            ec_index *half = (int32_t)ec_vshard(hash) >= middle ? upper : lower;
            if (half->size == half->grow_at)
                return 0;
            ec_index_insert(half, bucket->keys[place], hash, bucket->vals[place]);
        }
    }
    return 1;
}

static int64_t ec_split_count(const ec_index *index, int32_t middle)
{
    int64_t upper = 0;
    for (uint64_t at = 0; at < index->bucket_count; ++at) {
        const ec_bucket *bucket = index->buckets + at;
        for (uint32_t rest = bucket->meta & EC_OCCUPANCY; rest; rest &= rest - 1)
            upper += (int32_t)ec_vshard(ec_hash(bucket->keys[__builtin_ctz(rest)])) >= middle;
    }
    return upper;
}

/* Make the halves of a partition's index, each with room for its limbo rows and for an eighth more keys than it gets (a
 * half that had to grow at its next insert would be copied twice), and for one at least, as look-ups expect a bucket in
 * every partition of a table that holds a key. Keys spread evenly, so the halves are sized for half of them; should that
 * not do, keys are counted first. Where one half gets all of them it gets the index itself: *moved says so. */
static int ec_split_index(const ec_table *t, const ec_partition *p, int32_t middle, int64_t upper_limbo, ec_index *lower,
                          ec_index *upper, int *moved)
{
    const ec_index *index = &p->index;
    const int64_t lower_limbo = p->limbo - upper_limbo;
    int64_t upper_keys = index->size / 2, lower_keys = index->size - upper_keys;
    *moved = 0;
    for (int counted = 0;; counted = 1) {
        ec_index_init_in(lower, index->seed, t->backing);
        ec_index_init_in(upper, index->seed, t->backing);
        const uint64_t lower_need = ec_index_buckets_for(lower_keys + lower_keys / 8 + lower_limbo + 1);
        const uint64_t upper_need = ec_index_buckets_for(upper_keys + upper_keys / 8 + upper_limbo + 1);
        const int keep_lower = counted && upper_keys == 0, keep_upper = counted && lower_keys == 0;
        int status = keep_lower ? EC_OK : ec_table_resize_index(t, lower, ec_partition_buckets(t, lower_need, 0), 1);
        if (status == EC_OK && !keep_upper)
            status = ec_table_resize_index(t, upper, ec_partition_buckets(t, upper_need, 0), 1);
        if (status == EC_OK && (keep_lower || keep_upper)) {
            *(keep_lower ? lower : upper) = *index;
            *moved = 1;
            return EC_OK;
        }
        if (status == EC_OK && ec_split_copy(index, middle, lower, upper) && lower->grow_at - lower->size >= lower_limbo &&
            upper->grow_at - upper->size >= upper_limbo)
            return EC_OK;
        ec_index_free(lower);
        ec_index_free(upper);
        if (status != EC_OK)
            return status;
        EC_ASSERT(!counted);
        upper_keys = ec_split_count(index, middle);
        lower_keys = index->size - upper_keys;
    }
}

static int ec_table_split(ec_table *t, int64_t which)
{
    if (t->partition_count == t->partition_slots) {
        int64_t slots = t->partition_slots * 2;
        ec_partition *wider = ec_partitions_copy(t->partitions, t->partition_count, slots);
        if (wider == NULL)
            return EC_NOMEM;
        free(t->partitions);
        t->partitions = wider;
        t->partition_slots = slots;
    }
    ec_partition *p = t->partitions + which;
    const int32_t middle = p->vshard_from + (p->vshard_to - p->vshard_from) / 2;
    const int64_t limbo_from = p->limbo;
    int64_t upper_limbo = 0;
    for (int32_t vshard = middle; vshard < p->vshard_to; ++vshard)
        upper_limbo += t->limbo_of[vshard];

    ec_index lower, upper;
    int moved;
    ec_partition q = *p;
    q.extents = NULL;
    q.extent_slots = p->extent_count;
    int status = p->extent_count > 0 ? ec_grow_u32(&q.extents, q.extent_slots) : EC_OK;
    if (status == EC_OK)
        status = ec_split_index(t, p, middle, upper_limbo, &lower, &upper, &moved);
    if (status != EC_OK) {
        free(q.extents);
        return status;
    }
    if (p->extent_count > 0)
        memcpy(q.extents, p->extents, (size_t)p->extent_count * sizeof *q.extents);
    q.index = upper;
    q.next_local = q.extent_count * EC_EXTENT_ROWS; /* the lower half goes on filling the last extent */
    q.backed_local = q.next_local;
    q.limbo = upper_limbo;
    q.vshard_from = middle;

    /* The lower half keeps the top of the free list, the upper half gets the rest. */
    const int64_t kept = p->free_count - p->free_count / 2;
    q.free_count = p->free_count - kept;
    q.free_head = p->free_head;
    int64_t last = -1;
    for (int64_t i = 0; i < kept; ++i) {
        last = q.free_head;
        q.free_head = *ec_table_key(t, ec_partition_row(p, last));
    }
    if (last >= 0)
        *ec_table_key(t, ec_partition_row(p, last)) = -1;

    if (!moved)
        ec_index_free(&p->index);
    p->index = lower;
    p->limbo = limbo_from - upper_limbo;
    p->vshard_to = middle;
    p->free_count = kept;
    ec_partition_pace(p);
    ec_partition_pace(&q);
    for (int32_t vshard = middle; vshard < q.vshard_to; ++vshard)
        t->partition_of[vshard] = (uint8_t)t->partition_count;
    t->partitions[t->partition_count++] = q;
    return EC_OK;
}

/* Split a partition while it is too large, or would be with its share of `distinct` keys in the table. */
static int ec_table_split_large(ec_table *t, int64_t which, int64_t distinct)
{
    for (;;) {
        const ec_partition *p = t->partitions + which;
        const int64_t share = ec_partition_share_of(p, distinct), keys = p->index.size > share ? p->index.size : share;
        if (keys <= ec_partition_split_above(p, t->split_above) || t->partition_count == EC_PARTITIONS_MAX || p->vshard_to - p->vshard_from == 1)
            return EC_OK;
        int status = ec_table_split(t, which);
        if (status != EC_OK)
            return status;
    }
}

#endif
