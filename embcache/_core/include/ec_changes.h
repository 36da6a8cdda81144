/* What a checkpoint asks of a table: which rows and keys have changed, and in which order to read rows.
 *
 * Changes. A row counts as changed from its birth or a write on until the table is marked saved; keys whose rows were freed
 * are listed meanwhile (ec_table_log_erased). It may count as changed without need, which costs a delta some bytes and is no
 * fault. Flags and list are of this process: what lies in a directory says nothing of checkpoints.
 *
 * Order. A chunk should hold keys of few vshards, and rows should be read as they lie. Partitions are walked in the order
 * of their vshards, and each extent is read once, with the first partition that lists it. Extents from before a split are
 * listed by all its heirs: a run of extents with the same number of listings belongs to one ancestor, so runs are what
 * chunks are cut at. Rows of an ancestor's extents are of wider ranges of vshards; of a large table they are few.
 */
#ifndef EC_CHANGES_H
#define EC_CHANGES_H

#include "ec_table.h"

/* Forget all changes, and list erased keys from now on. */
static void ec_table_mark_saved(ec_table *t)
{
    const uint64_t clear = ~(EC_CHANGED * UINT64_C(0x0101010101010101));
    for (int64_t segment = 0; segment < t->flags.segment_count; ++segment) {
        uint8_t *flags = (uint8_t *)t->flags.segments[segment];
        const int64_t rows = ec_arena_segment_rows(&t->flags, segment); /* a power of two, at least 8 */
        for (int64_t i = 0; i < rows; i += 8) {
            uint64_t eight;
            memcpy(&eight, flags + i, sizeof eight);
            if ((eight & ~clear) == 0)
                continue; /* a page without changes is not written */
            eight &= clear;
            memcpy(flags + i, &eight, sizeof eight);
        }
    }
    t->erased_count = 0;
    t->tracking = EC_TRACKED;
}

/* Rows that are live and have all of `flags`. */
static int64_t ec_table_count(const ec_table *t, uint8_t flags)
{
    const uint8_t wanted = flags | EC_LIVE;
    int64_t count = 0;
    for (int64_t segment = 0; segment < t->flags.segment_count; ++segment) {
        const uint8_t *at = (const uint8_t *)t->flags.segments[segment];
        const int64_t rows = ec_arena_segment_rows(&t->flags, segment);
        for (int64_t begin = 0; begin < rows; begin += 128) {
            const int64_t end = begin + 128 < rows ? begin + 128 : rows;
            uint8_t some = 0; /* of a byte's width, so that the loop is one of vectors */
            for (int64_t i = begin; i < end; ++i)
                some = (uint8_t)(some + ((at[i] & wanted) == wanted));
            count += some;
        }
    }
    return count;
}

/* All extents in the order in which to read them, and starts[i] = 1 where a run begins. Both have room for extent_count.
 * Returns their number, which is less where extents were given back; -1: no memory. */
static int64_t ec_table_save_order(const ec_table *t, int64_t *extents, uint8_t *starts)
{
    int64_t count = 0;
    uint32_t *listed = (uint32_t *)calloc((size_t)t->extent_count + 1, sizeof *listed);
    if (listed == NULL)
        return -1;
    for (int64_t i = 0; i < t->partition_count; ++i)
        for (int64_t j = 0; j < t->partitions[i].extent_count; ++j)
            listed[t->partitions[i].extents[j]] += 1;
    for (int32_t vshard = 0; vshard < EC_VSHARDS; vshard = t->partitions[t->partition_of[vshard]].vshard_to) {
        const ec_partition *p = t->partitions + t->partition_of[vshard];
        uint32_t before = 0;
        for (int64_t j = 0; j < p->extent_count; ++j) {
            const uint32_t extent = p->extents[j];
            if (listed[extent] == 0)
                continue; /* read with an earlier partition */
            starts[count] = listed[extent] != before;
            before = listed[extent];
            listed[extent] = 0;
            extents[count++] = extent;
        }
    }
    free(listed);
    return count;
}

/* Live rows of an extent that have all of `flags`, in order; returns how many. `rows` has room for EC_EXTENT_ROWS. */
static int64_t ec_table_rows_of_extent(const ec_table *t, int64_t extent, uint8_t flags, int64_t *rows)
{
    const uint8_t wanted = flags | EC_LIVE;
    const uint64_t low = UINT64_C(0x7F7F7F7F7F7F7F7F), mask = wanted * UINT64_C(0x0101010101010101);
    const int64_t begin = extent * EC_EXTENT_ROWS;
    const int64_t end = begin + EC_EXTENT_ROWS < t->row_limit ? begin + EC_EXTENT_ROWS : t->row_limit;
    int64_t count = 0, i = 0;
    if (begin >= end)
        return 0;
    const uint8_t *at = ec_table_flags(t, begin); /* an extent lies in one segment */
    for (; begin + i + 8 <= end; i += 8) {
        uint64_t lacks; /* of eight rows: the flags that each has not */
        memcpy(&lacks, at + i, sizeof lacks);
        lacks = (lacks & mask) ^ mask;
        uint64_t found = ~(((lacks & low) + low) | lacks | low); /* the top bit of each byte that is 0 */
        for (; found != 0; found &= found - 1)
            rows[count++] = begin + i + (__builtin_ctzll(found) >> 3);
    }
    for (; begin + i < end; ++i)
        if ((at[i] & wanted) == wanted)
            rows[count++] = begin + i;
    return count;
}

#endif
