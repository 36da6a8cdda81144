/* A huge batch cut by partition, so that an insert takes one partition after the other.
 *
 * In the order of the batch each key leads to another of many indexes and, when its row is written, to another of as many places
 * in each column: the near caches and translations of addresses serve none of them twice. Cut by partition, a part of the
 * batch works in one index, and its new rows follow one another in memory. Keys of one partition stay in their order, so every
 * key gets the row that it would have got. Costs eight bytes a key while it lasts; where they are refused the batch stays as it is.
 */
#ifndef EC_BULK_H
#define EC_BULK_H

#include "ec_table.h"

#define EC_BULK_AHEAD 32 /* elements of a partition between the prefetch and the use; more streams run side by side than hardware follows */

typedef struct ec_bulk {
    int64_t *keys; /* of the batch, by partition */
    size_t held;
    int64_t begin[EC_PARTITIONS_MAX + 1]; /* the keys of partition p: begin[p] .. begin[p + 1] - 1 */
} ec_bulk;

static inline int ec_bulk_partition(const ec_table *t, int64_t key) { return t->partition_of[ec_vshard(ec_hash(key))]; }

/* Cut a batch. 0 where there is no memory, and nothing has changed. */
static int ec_bulk_cut(ec_bulk *bulk, const ec_table *t, const int64_t *keys, int64_t n)
{
    int64_t at[EC_PARTITIONS_MAX] = {0};
    bulk->keys = (int64_t *)ec_block_alloc((size_t)n * sizeof *keys, &bulk->held);
    if (bulk->keys == NULL)
        return 0;
    for (int64_t i = 0; i < n; ++i)
        at[ec_bulk_partition(t, keys[i])] += 1;
    bulk->begin[0] = 0;
    for (int64_t p = 0; p < t->partition_count; ++p) {
        bulk->begin[p + 1] = bulk->begin[p] + at[p];
        at[p] = bulk->begin[p];
    }
    for (int64_t i = 0; i < n; ++i) {
        int64_t *to = bulk->keys + at[ec_bulk_partition(t, keys[i])]++;
        EC_PREFETCH_WRITE(to + EC_BULK_AHEAD);
        *to = keys[i];
    }
    ec_block_written(bulk->held);
    return 1;
}

/* Put what was found for each key, rows and born, back into the order of the batch. The keys are gone afterwards. */
static void ec_bulk_join(ec_bulk *bulk, const ec_table *t, const int64_t *keys, int64_t n, int64_t *rows, uint8_t *born)
{
    int64_t at[EC_PARTITIONS_MAX];
    memcpy(at, bulk->begin, sizeof at);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t from = at[ec_bulk_partition(t, keys[i])]++;
        EC_PREFETCH_READ(rows + from + EC_BULK_AHEAD);
        bulk->keys[i] = rows[from] << 1 | born[from];
    }
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = bulk->keys[i] >> 1;
        born[i] = (uint8_t)(bulk->keys[i] & 1);
    }
}

static void ec_bulk_drop(ec_bulk *bulk) { ec_block_free(bulk->keys, bulk->held); }

#endif
