/* The batch loops of the table over rows: look up, copy. Each works on a span of a batch, in one thread.
 *
 * All of them ask for rows some time before they copy them, so that cache misses overlap. Large outputs are written past the cache, which would otherwise first read what it is
 * about to overwrite.
 */
#ifndef EC_ROWS_H
#define EC_ROWS_H

#include "ec_copy.h"
#include "ec_find.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define EC_LOOKUP_BLOCK 512 /* keys that are found before their rows are copied */
#define EC_ROW_AHEAD 8      /* rows that are asked for at once, before the rows before them are copied */
#define EC_STREAM_BYTES ((int64_t)8 << 20)
#define EC_WIDEN_AT_ONCE 256 /* weights that are widened in the cache before they are written past it */

/* Whether an output of `rows` rows of `bytes` bytes should be written past the cache. */
static inline int ec_streams(const void *out, int64_t stride, int64_t bytes, int64_t rows)
{
#ifdef __SSE2__
    return bytes % 16 == 0 && stride % 16 == 0 && ((uintptr_t)out & 15) == 0 && rows * bytes >= EC_STREAM_BYTES;
#else
    (void)out, (void)stride, (void)bytes, (void)rows;
    return 0;
#endif
}

static inline void ec_row_copy(void *to, const void *from, int64_t bytes, int stream)
{
#ifdef __SSE2__
    if (stream) {
        for (int64_t j = 0; j < bytes; j += 16)
            _mm_stream_ps((float *)((char *)to + j), _mm_loadu_ps((const float *)((const char *)from + j)));
        return;
    }
#endif
    (void)stream;
    memcpy(to, from, (size_t)bytes);
}

/* A row's weights to where elements of `type` are wanted: the table's own, `bytes` of them, or float32. */
static inline void ec_row_give(const ec_table *t, void *to, int type, const void *from, int64_t bytes, int stream)
{
    if (type == t->type) {
        ec_row_copy(to, from, bytes, stream);
    } else if (!stream) {
        ec_table_give(t, to, type, from, t->dim);
    } else {
        float wide[EC_WIDEN_AT_ONCE];
        for (int64_t j = 0; j < t->dim; j += EC_WIDEN_AT_ONCE) {
            const int64_t count = t->dim - j < EC_WIDEN_AT_ONCE ? t->dim - j : EC_WIDEN_AT_ONCE;
            ec_table_give(t, wide, type, (const uint16_t *)from + j, count);
            ec_row_copy((float *)to + j, wide, count * 4, 1);
        }
    }
}

static inline void ec_stream_fence(int stream)
{
#ifdef __SSE2__
    if (stream)
        _mm_sfence();
#endif
    (void)stream;
}

/* Give the rows of one block, some of whose keys may be absent. Returns the number absent. */
static int64_t ec_lookup_block(const ec_table *t, const int64_t *keys, const int64_t *rows, int64_t n, char *out, int type,
                               uint8_t *missing, int stream)
{
    const int64_t row_bytes = t->dim * ec_type_bytes(t->type), out_bytes = t->dim * ec_type_bytes(type);
    int64_t absent = 0;
    for (int64_t i = 0; i < n; ++i, out += out_bytes) {
        if (i + EC_ROW_AHEAD < n && rows[i + EC_ROW_AHEAD] >= 0)
            ec_copy_prefetch((const char *)ec_table_weights(t, rows[i + EC_ROW_AHEAD]), row_bytes);
        if (missing != NULL)
            missing[i] = rows[i] < 0;
        if (rows[i] >= 0) {
            ec_row_give(t, out, type, ec_table_weights(t, rows[i]), row_bytes, stream);
        } else {
            absent += 1;
            if (missing == NULL)
                ec_table_initial(t, ec_hash(keys[i]), out, type);
        }
    }
    ec_stream_fence(stream);
    return absent;
}

/* Find a block of keys, then copy its rows. out row i = weights of keys[i] as elements of `type`; an absent key gets its
 * initial value where `missing` is NULL; else its out row is left alone and missing[i] = 1 (0 for the others). Returns
 * the number absent. */
static int64_t ec_lookup_span(const ec_table *t, const int64_t *keys, int64_t n, void *out, int type, uint8_t *missing, int stream)
{
    int64_t rows[EC_LOOKUP_BLOCK];
    const char *addresses[EC_LOOKUP_BLOCK];
    const int64_t out_bytes = t->dim * ec_type_bytes(type);
    int64_t absent = 0;
    for (int64_t begin = 0; begin < n; begin += EC_LOOKUP_BLOCK) {
        const int64_t count = n - begin < EC_LOOKUP_BLOCK ? n - begin : EC_LOOKUP_BLOCK;
        char *to = (char *)out + begin * out_bytes;
        uint8_t *absences = missing == NULL ? NULL : missing + begin;
        int64_t least = 0; /* negative where a key is absent */
        ec_find_span(t, keys + begin, NULL, count, rows);
        for (int64_t i = 0; i < count; ++i)
            least |= rows[i];
        if (least < 0 || type != t->type) {
            absent += ec_lookup_block(t, keys + begin, rows, count, to, type, absences, stream);
            continue;
        }
        for (int64_t i = 0; i < count; ++i)
            addresses[i] = (const char *)ec_table_weights(t, rows[i]);
        ec_copy_rows(addresses, count, out_bytes, to, stream);
        if (absences != NULL)
            memset(absences, 0, (size_t)count);
    }
    return absent;
}

/* A buffer of rows outside the table: weights, and the state cut into `parts` arrays of `widths` floats a row. */
typedef struct ec_rows_buffer {
    void *weights;
    int64_t stride;        /* bytes from one row of `weights` to the next */
    int type;              /* of `weights`: the table's, copied bit by bit, or float32 */
    float *const *states;  /* one pointer for each part */
    const int64_t *widths; /* floats of a row of each part; rows lie next to each other */
    int64_t parts;         /* 0: weights only; -1: writing sets the state to zero */
    const int64_t *places; /* buffer row of element i; NULL: i */
    int home;              /* writing: a row comes back from where it changed, and whether it did is known already */
} ec_rows_buffer;

static inline void ec_rows_prefetch(const ec_table *t, int64_t row, int64_t parts)
{
    if (row < 0)
        return;
    ec_copy_prefetch((const char *)ec_table_weights(t, row), t->dim * ec_type_bytes(t->type));
    if (parts != 0 && t->state_dim > 0)
        ec_copy_prefetch((const char *)ec_table_state(t, row), t->state_dim * (int64_t)sizeof(float));
}

/* Ask for the EC_ROW_AHEAD rows from `from` on that belong to the share: all at once, since a prefetch that misses the TLB
 * holds up what comes after it until the page is found, and only those next to each other are looked up at the same time
 * (a body of some 150 instructions a row: 152 ns for rows of 256 bytes with one prefetch each, 38 with bursts). */
static inline void ec_rows_ask(const ec_table *t, const int64_t *rows, int64_t from, int64_t n, int64_t parts, int64_t share, int64_t shares)
{
    const int64_t to = from + EC_ROW_AHEAD < n ? from + EC_ROW_AHEAD : n;
    for (int64_t i = from; i < to; ++i)
        if (shares == 1 || (rows[i] >> 4) % shares == share)
            ec_rows_prefetch(t, rows[i], parts);
}

/* Table rows -> buffer rows, elements from .. to - 1. A negative row is passed over. */
static void ec_read_span(const ec_table *t, const int64_t *rows, int64_t from, int64_t to, const ec_rows_buffer *buffer, int stream)
{
    const int64_t row_bytes = t->dim * ec_type_bytes(t->type);
    ec_rows_ask(t, rows, from, to, buffer->parts, 0, 1);
    for (int64_t i = from; i < to; ++i) {
        if ((i - from) % EC_ROW_AHEAD == 0)
            ec_rows_ask(t, rows, i + EC_ROW_AHEAD, to, buffer->parts, 0, 1);
        if (rows[i] < 0)
            continue;
        const int64_t place = buffer->places == NULL ? i : buffer->places[i];
        ec_row_give(t, (char *)buffer->weights + place * buffer->stride, buffer->type, ec_table_weights(t, rows[i]), row_bytes, stream);
        if (buffer->parts == 0)
            continue;
        const float *state = ec_table_state(t, rows[i]);
        for (int64_t part = 0; part < buffer->parts; ++part) {
            const int64_t width = buffer->widths[part];
            memcpy(buffer->states[part] + place * width, state, (size_t)width * sizeof(float));
            state += width;
        }
    }
    ec_stream_fence(stream);
}

/* The values of a row whose weights are at `weights`, from row `place` of a buffer. */
static inline void ec_write_values(const ec_table *t, int64_t row, void *weights, int64_t place, const ec_rows_buffer *buffer)
{
    ec_table_take(t, weights, buffer->type, (const char *)buffer->weights + place * buffer->stride, t->dim);
    if (buffer->parts == 0 || t->state_dim == 0)
        return;
    float *state = ec_table_state(t, row);
    if (buffer->parts < 0)
        memset(state, 0, (size_t)t->state_dim * sizeof(float));
    for (int64_t part = 0; part < buffer->parts; ++part) {
        const int64_t width = buffer->widths[part];
        memcpy(state, buffer->states[part] + place * width, (size_t)width * sizeof(float));
        state += width;
    }
}

static inline void ec_write_row(const ec_table *t, int64_t row, int64_t place, const ec_rows_buffer *buffer)
{
    if (!buffer->home)
        *ec_table_flags(t, row) |= EC_CHANGED;
    ec_write_values(t, row, ec_table_weights(t, row), place, buffer);
}

/* Buffer rows -> table rows, all n elements in order, of which this call serves the rows of residue `share` modulo
 * `shares`: each row belongs to one share, so the last of several writes to a row wins at any number of threads. */
static void ec_write_share(const ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int64_t share, int64_t shares)
{
    ec_rows_ask(t, rows, 0, n, buffer->parts, share, shares);
    for (int64_t i = 0; i < n; ++i) {
        if (i % EC_ROW_AHEAD == 0)
            ec_rows_ask(t, rows, i + EC_ROW_AHEAD, n, buffer->parts, share, shares);
        if (rows[i] >= 0 && (shares == 1 || (rows[i] >> 4) % shares == share))
            ec_write_row(t, rows[i], buffer->places == NULL ? i : buffer->places[i], buffer);
    }
}

#endif
