/* What a table knows besides its columns and indexes, as bytes: the file `metadata` of its directory.
 *
 * Everything is int64, or an array of uint32 padded to 8 bytes (ec_bytes.h), in the byte order that the header names:
 *
 *   index layout; version; live rows; row limit; extents; free extents; partitions; ranges; marked rows
 *   ranges: (place in the data file, bytes), in order
 *   6 columns: stride, segments, then the place of each segment     (a column that the table lacks: 0 segments)
 *   extent -> local extent: uint32[extents]; free extents: uint32[free extents]
 *   partitions: first vshard, last + 1; buckets, keys, place and bytes of the index; next, backed and first free local,
 *               free locals; extents of its list, then the list: uint32[]
 *   marked rows
 *
 * Marked rows are those whose flags speak of a planner that will not be there at the next open: resident, or in limbo.
 * Finding them reads the flags column once at each flush, so that opening need not.
 *
 * Reading costs as many bytes as there are extents (4 to 8 for 1,024 rows) and marked rows. Numbers are checked before
 * they are used; the digest in the header has been checked before.
 */
#ifndef EC_METADATA_H
#define EC_METADATA_H

#include "ec_bytes.h"
#include "ec_directory.h"
#include "ec_table.h"

/* -------------------------------------------------------------------------------------------------------------- writing */

static void ec_put_place(ec_bytes *out, const ec_backing *b, const void *address)
{
    const ec_range *range = address == NULL ? NULL : ec_backing_range(b, address);
    ec_put_number(out, range == NULL ? -1 : range->at);
}

/* Rows marked resident or in limbo, appended to `out`; returns how many. */
static int64_t ec_put_marked(ec_bytes *out, const ec_table *t)
{
    const uint64_t wanted = (EC_RESIDENT | EC_LIMBO) * UINT64_C(0x0101010101010101);
    int64_t row = 0, count = 0;
    for (int64_t segment = 0; segment < t->flags.segment_count; ++segment) {
        const uint8_t *flags = (const uint8_t *)t->flags.segments[segment];
        const int64_t rows = ec_arena_segment_rows(&t->flags, segment); /* a power of two, at least 8 */
        for (int64_t i = 0; i < rows; i += 8, row += 8) {
            uint64_t eight;
            memcpy(&eight, flags + i, sizeof eight);
            if ((eight & wanted) == 0)
                continue;
            for (int64_t j = 0; j < 8; ++j)
                if (flags[i + j] & (EC_RESIDENT | EC_LIMBO)) {
                    ec_put_number(out, row + j);
                    count += 1;
                }
        }
    }
    return count;
}

/* EC_OK or EC_NOMEM; the caller frees out->data either way. */
static int ec_metadata_write(ec_table *t, ec_bytes *out)
{
    const ec_backing *b = t->backing;
    ec_arena *columns[EC_COLUMNS];
    memset(out, 0, sizeof *out);
    ec_table_columns(t, columns);
    const int64_t numbers[] = {EC_INDEX_LAYOUT,       (int64_t)t->version, t->live,        t->row_limit, t->extent_count,
                               t->free_extent_count, t->partition_count,  b->range_count, 0};
    ec_put(out, numbers, sizeof numbers);
    for (int64_t i = 0; i < b->range_count; ++i) {
        ec_put_number(out, b->ranges[i].at);
        ec_put_number(out, b->ranges[i].bytes);
    }
    for (int i = 0; i < EC_COLUMNS; ++i) {
        const int64_t segments = columns[i] == NULL ? 0 : columns[i]->segment_count;
        ec_put_number(out, columns[i] == NULL ? 0 : columns[i]->stride);
        ec_put_number(out, segments);
        for (int64_t segment = 0; segment < segments; ++segment)
            ec_put_place(out, b, columns[i]->segments[segment]);
    }
    ec_put(out, t->extent_local, t->extent_count * (int64_t)sizeof(uint32_t));
    ec_put(out, t->free_extents, t->free_extent_count * (int64_t)sizeof(uint32_t));
    for (int64_t i = 0; i < t->partition_count; ++i) {
        const ec_partition *p = t->partitions + i;
        ec_put_number(out, p->vshard_from);
        ec_put_number(out, p->vshard_to);
        ec_put_number(out, (int64_t)p->index.bucket_count);
        ec_put_number(out, p->index.size);
        ec_put_place(out, b, p->index.buckets);
        const int64_t rest[] = {(int64_t)p->index.bytes, p->next_local, p->backed_local, p->free_head, p->free_count, p->extent_count};
        ec_put(out, rest, sizeof rest);
        ec_put(out, p->extents, p->extent_count * (int64_t)sizeof(uint32_t));
    }
    const int64_t marked = ec_put_marked(out, t);
    if (out->refused)
        return EC_NOMEM;
    memcpy(out->data + 8 * sizeof(int64_t), &marked, sizeof marked);
    return EC_OK;
}

/* Make the table's present content durable and its directory clean, if it is not. `filter`: the planner's state, or NULL
 * where that stays as it is. The caller holds the table's lock, for reading at least. EC_OK, EC_NOMEM or EC_DISK. */
static int ec_table_flush(ec_table *t, const void *filter, int64_t filter_bytes)
{
    ec_backing *b = t->backing;
    ec_bytes metadata;
    int status = EC_OK;
    pthread_mutex_lock(&b->flushing);
    if (filter != NULL && !b->filter_torn && (uint64_t)filter_bytes == b->filter_bytes && ec_xxh3(filter, (size_t)filter_bytes, 0) == b->filter_digest)
        filter = NULL;
    if (!b->clean || filter != NULL) {
        status = ec_metadata_write(t, &metadata);
        if (status == EC_OK)
            status = ec_directory_save(b, metadata.data, metadata.size, filter, filter_bytes);
        free(metadata.data);
    }
    pthread_mutex_unlock(&b->flushing);
    return status;
}

/* -------------------------------------------------------------------------------------------------------------- reading */

/* A copy of an array of uint32 below `limit`; NULL and *status where there is no memory. */
static uint32_t *ec_get_u32(ec_reader *in, int64_t count, int64_t limit, int *status)
{
    const uint32_t *here = (const uint32_t *)ec_get(in, count * (int64_t)sizeof(uint32_t));
    uint32_t *copy = here == NULL ? NULL : (uint32_t *)ec_take(NULL, (size_t)count * sizeof *copy);
    if (here == NULL)
        return NULL;
    if (copy == NULL) {
        *status = EC_NOMEM;
        in->broken = 1;
        return NULL;
    }
    memcpy(copy, here, (size_t)count * sizeof *copy);
    for (int64_t i = 0; i < count; ++i)
        in->broken |= copy[i] >= limit;
    return copy;
}

/* Address of the range at `place`, which has `bytes`; NULL, and broken, where there is none. */
static char *ec_get_block(ec_reader *in, const ec_backing *b, int64_t bytes)
{
    const int64_t place = ec_get_number(in, -1, INT64_MAX);
    int64_t low = 0, high = b->range_count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (b->ranges[middle].at < place)
            low = middle + 1;
        else
            high = middle;
    }
    if (bytes == 0 && place == -1)
        return NULL;
    if (in->broken || low == b->range_count || b->ranges[low].at != place || b->ranges[low].bytes != bytes) {
        in->broken = 1;
        return NULL;
    }
    return b->ranges[low].address;
}

static int ec_get_ranges(ec_reader *in, ec_backing *b, int64_t count)
{
    const int64_t page = (int64_t)ec_page_round(1);
    int64_t end = 0;
    if (in->broken || count > (in->end - in->at) / 16)
        return EC_BROKEN;
    b->ranges = (ec_range *)calloc((size_t)count + 1, sizeof *b->ranges);
    if (b->ranges == NULL)
        return EC_NOMEM;
    b->range_slots = count + 1;
    for (int64_t i = 0; i < count; ++i) {
        b->ranges[i].at = ec_get_number(in, end, b->length);
        b->ranges[i].bytes = ec_get_number(in, page, b->length - b->ranges[i].at);
        if (in->broken || b->ranges[i].at % page != 0 || b->ranges[i].bytes % page != 0)
            return EC_BROKEN;
        end = b->ranges[i].at + b->ranges[i].bytes;
    }
    b->range_count = count;
    return ec_backing_map(b);
}

static int ec_get_column(ec_reader *in, const ec_backing *b, ec_arena *column, int64_t row_limit)
{
    const int64_t stride = ec_get_number(in, 0, INT64_MAX);
    const int64_t segments = ec_get_number(in, 0, (in->end - in->at) / 8);
    if (in->broken || stride != (column == NULL ? 0 : column->stride) || (column == NULL && segments != 0))
        return EC_BROKEN;
    if (column == NULL)
        return EC_OK;
    column->segments = (char **)calloc((size_t)segments + 8, sizeof *column->segments);
    if (column->segments == NULL)
        return EC_NOMEM;
    column->segment_slots = segments + 8;
    for (int64_t segment = 0; segment < segments; ++segment) {
        const size_t bytes = ec_arena_segment_bytes(column, segment);
        column->segments[segment] = ec_get_block(in, b, (int64_t)bytes);
        if (in->broken)
            return EC_BROKEN;
        column->segment_count = segment + 1;
        column->rows += ec_arena_segment_rows(column, segment);
        column->bytes += bytes;
    }
    return column->rows >= row_limit ? EC_OK : EC_BROKEN;
}

static int ec_get_partition(ec_reader *in, ec_table *t, ec_partition *p)
{
    int status = EC_OK;
    p->vshard_from = (int32_t)ec_get_number(in, 0, EC_VSHARDS - 1);
    p->vshard_to = (int32_t)ec_get_number(in, p->vshard_from + 1, EC_VSHARDS);
    p->index.bucket_count = (uint64_t)ec_get_number(in, 0, t->backing->length / (int64_t)sizeof(ec_bucket));
    p->index.grow_at = ec_index_room(p->index.bucket_count);
    p->index.size = ec_get_number(in, 0, p->index.grow_at);
    const size_t bytes = p->index.bucket_count == 0 ? 0 : ec_page_round((size_t)p->index.bucket_count * sizeof(ec_bucket));
    p->index.buckets = (ec_bucket *)(void *)ec_get_block(in, t->backing, (int64_t)bytes);
    p->index.bytes = (size_t)ec_get_number(in, (int64_t)bytes, (int64_t)bytes);
    p->next_local = ec_get_number(in, 0, (int64_t)UINT32_MAX + 1);
    p->backed_local = ec_get_number(in, 0, p->next_local);
    p->free_head = ec_get_number(in, -1, p->next_local - 1);
    p->free_count = ec_get_number(in, 0, p->next_local);
    p->extent_count = p->extent_slots = ec_get_number(in, 0, (in->end - in->at) / 4);
    p->extents = ec_get_u32(in, p->extent_count, t->extent_count, &status);
    if (status == EC_OK && (in->broken || p->extent_count * EC_EXTENT_ROWS < p->next_local))
        status = EC_BROKEN;
    ec_partition_pace(p);
    return status;
}

/* Fill an empty table from its metadata. *marked points into it. After a failure the table can only be destroyed. */
static int ec_metadata_read(ec_table *t, const void *metadata, int64_t bytes, const int64_t **marked, int64_t *marked_count)
{
    ec_reader in = {(const char *)metadata, (const char *)metadata + bytes, 0};
    const uint64_t seed = t->partitions[0].index.seed;
    ec_arena *columns[EC_COLUMNS];
    int status = EC_OK;
    ec_get_number(&in, EC_INDEX_LAYOUT, EC_INDEX_LAYOUT);
    t->version = (uint64_t)ec_get_number(&in, INT64_MIN, INT64_MAX);
    t->live = ec_get_number(&in, 0, EC_ROWS_MAX);
    const int64_t row_limit = ec_get_number(&in, 0, EC_ROWS_MAX);
    t->extent_count = ec_get_number(&in, 0, EC_ROWS_MAX / EC_EXTENT_ROWS);
    t->free_extent_count = ec_get_number(&in, 0, t->extent_count);
    const int64_t partition_count = ec_get_number(&in, 1, EC_PARTITIONS_MAX);
    const int64_t range_count = ec_get_number(&in, 0, INT64_MAX);
    *marked_count = ec_get_number(&in, 0, row_limit);
    status = ec_get_ranges(&in, t->backing, range_count);
    ec_table_columns(t, columns);
    for (int i = 0; i < EC_COLUMNS && status == EC_OK; ++i)
        status = ec_get_column(&in, t->backing, columns[i], row_limit);
    if (status != EC_OK)
        return status;
    t->row_limit = row_limit;
    t->extent_slots = t->extent_count;
    t->extent_local = ec_get_u32(&in, t->extent_count, (int64_t)1 << (32 - EC_EXTENT_BITS), &status);
    /* As long as extent_local: every extent may become free. */
    uint32_t *free_extents = ec_get_u32(&in, t->free_extent_count, t->extent_count, &status);
    t->free_extents = free_extents;
    if (status == EC_OK && !in.broken && ec_grow_u32(&t->free_extents, t->extent_slots + 1) != EC_OK)
        status = EC_NOMEM;
    ec_partition *partitions = ec_partitions_copy(NULL, 0, partition_count);
    if (partitions == NULL)
        return EC_NOMEM;
    free(t->partitions);
    t->partitions = partitions;
    t->partition_count = t->partition_slots = partition_count;
    int64_t keys = 0;
    for (int64_t i = 0; i < partition_count; ++i)
        ec_index_init_in(&partitions[i].index, seed, t->backing);
    uint8_t seen[EC_VSHARDS] = {0};
    int64_t vshards = 0;
    for (int64_t i = 0; i < partition_count && status == EC_OK; ++i) {
        status = ec_get_partition(&in, t, partitions + i);
        for (int32_t vshard = partitions[i].vshard_from; status == EC_OK && vshard < partitions[i].vshard_to; ++vshard) {
            status = seen[vshard] ? EC_BROKEN : EC_OK;
            seen[vshard] = 1;
            t->partition_of[vshard] = (uint8_t)i;
            vshards += 1;
        }
        keys += partitions[i].index.size;
    }
    *marked = (const int64_t *)ec_get(&in, *marked_count * (int64_t)sizeof(int64_t));
    if (status == EC_OK && (in.broken || in.at != in.end || keys != t->live || vshards != EC_VSHARDS))
        status = EC_BROKEN;
    for (int64_t i = 0; i < *marked_count && status == EC_OK; ++i)
        if ((*marked)[i] < 0 || (*marked)[i] >= row_limit)
            status = EC_BROKEN;
    return status;
}

/* The planner that marked these rows is gone: nothing is resident, and what was in limbo is free. */
static void ec_metadata_settle(ec_table *t, const int64_t *marked, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        uint8_t *flags = ec_table_flags(t, marked[i]);
        if (*flags & EC_LIMBO)
            ec_partition_push(t, ec_table_partition(t, ec_hash(*ec_table_key(t, marked[i]))), ec_table_local(t, marked[i]));
        else
            *flags &= (uint8_t)~EC_RESIDENT;
    }
}

#endif
