/* Arithmetic on float32 rows: sums of scattered rows, dot products, optimizer updates.
 *
 * Promise kept here (I9): a result is a pure function of the values, whatever the ISA, the thread count or the place
 * of a row. So: vectorized across the elements of a row only, reductions over a row in 16 fixed lanes, no fused
 * multiply-add (-ffp-contract=off), no reciprocal or square-root approximation. Bodies are inlined into a baseline and
 * an AVX2 clone; the 32-byte vector type is lowered to two registers where the ISA has 16-byte ones.
 */
#ifndef EC_ROWMATH_H
#define EC_ROWMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define EC_HAS_AVX2_CLONE 1
#define EC_TARGET_AVX2 __attribute__((target("avx2")))
#else
#define EC_HAS_AVX2_CLONE 0
#define EC_TARGET_AVX2
#endif

#define EC_ROW_FN static inline __attribute__((always_inline))
#define EC_ROW_CLONE static __attribute__((noinline))

/* The clone of NAME that belongs to a caller whose own ISA is the constant `avx2`. */
#define EC_CLONE_OF(NAME, avx2) ((avx2) ? NAME##_avx2 : NAME##_baseline)

typedef float ec_f8 __attribute__((vector_size(32)));
typedef float ec_f8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef float ec_f4 __attribute__((vector_size(16)));
typedef float ec_f4u __attribute__((vector_size(16), aligned(4), may_alias));

#define EC_MAX_DIM 8192
#define EC_SUM_BLOCK 256 /* occurrences of a key that are added up before the partial sum is added to the total */
#define EC_RING 512      /* power of two >= EC_SUM_BLOCK + the longest prefetch distance */
#define EC_RING_MASK (EC_RING - 1)
#define EC_PLACES_AHEAD 32 /* items between the prefetch of a row's place and that of the row */
#define EC_PREFETCH_BYTES 512 /* beyond this much of a row the hardware prefetcher has caught on */

/* Brings the cache lines of a row near. */
EC_ROW_FN void ec_prefetch_row(const float *row, int64_t dim) {
    const int64_t bytes = dim * 4 < EC_PREFETCH_BYTES ? dim * 4 : EC_PREFETCH_BYTES;
    const uintptr_t end = (uintptr_t)row + (uintptr_t)bytes;
    for (uintptr_t line = (uintptr_t)row & ~(uintptr_t)63; line < end; line += 64) __builtin_prefetch((const void *)line);
}

/* Rows to prefetch ahead when each step touches `arrays` rows of `dim`: about 64 cache lines. */
EC_ROW_FN int64_t ec_prefetch_distance(int64_t dim, int64_t arrays) {
    const int64_t bytes = dim * 4 < EC_PREFETCH_BYTES ? dim * 4 : EC_PREFETCH_BYTES;
    const int64_t lines = arrays * ((bytes + 63) / 64);
    const int64_t distance = 64 / lines;
    return distance < 4 ? 4 : distance > 16 ? 16 : distance;
}

EC_ROW_FN void ec_copy_row(float *restrict out, const float *restrict row, int64_t dim) {
    memcpy(out, row, (size_t)dim * 4);
}

/* Copies past the caches; `out` must be 16-byte aligned and `dim` a multiple of 4. */
EC_ROW_FN void ec_stream_row(float *restrict out, const float *restrict row, int64_t dim) {
#if defined(__x86_64__)
    for (int64_t j = 0; j < dim; j += 4) _mm_stream_ps(out + j, _mm_loadu_ps(row + j));
#else
    memcpy(out, row, (size_t)dim * 4);
#endif
}

/* Makes streamed rows visible to whoever synchronizes with this thread next. */
EC_ROW_FN void ec_stream_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* ------------------------------------------------------------------------------------------- sums of scattered rows */

/* One row to be added: where it is, and its factor. */
typedef struct {
    const float *row;
    float coef;
} ec_source;

/* A stream of rows to be added, item by item. Item i is the row of id = ids[i] - id_base: base + places[id] * stride,
 * or base + id * stride without places. Items `ahead` of the one being added are looked up, prefetched and noted in a
 * ring, one for each that is added, so that cache misses are spread evenly over the arithmetic. */
typedef struct {
    const float *base;
    const int64_t *ids;
    const int64_t *places; /* or NULL */
    const float *coefs;    /* of each item, or of each id; NULL: 1 */
    int64_t id_base;
    int64_t stride;
    int64_t dim;
    int64_t ahead;
    int64_t next; /* first item that is not in the ring */
    int64_t end;  /* of the items of this task */
    int coefs_by_id;
} ec_feed;

/* Looks up the next item, if there is one. */
EC_ROW_FN void ec_feed_one(ec_feed *feed, ec_source *ring) {
    const int64_t item = feed->next;
    if (item >= feed->end) return;
    ec_source *source = &ring[item & EC_RING_MASK];
    const int64_t id = feed->ids[item] - feed->id_base;
    if (feed->places && item + EC_PLACES_AHEAD < feed->end) {
        /* The place is a scattered read itself. */
        const int64_t later = feed->ids[item + EC_PLACES_AHEAD] - feed->id_base;
        __builtin_prefetch(feed->places + later);
        if (feed->coefs_by_id) __builtin_prefetch(feed->coefs + later);
    }
    source->row = feed->base + (feed->places ? feed->places[id] : id) * feed->stride;
    if (feed->coefs) source->coef = feed->coefs[feed->coefs_by_id ? id : item];
    ec_prefetch_row(source->row, feed->dim);
    feed->next = item + 1;
}

/* Makes sure that items item .. item + ahead are in the ring, those before may be forgotten. */
EC_ROW_FN void ec_feed_from(ec_feed *feed, ec_source *ring, int64_t item) {
    if (feed->next < item) feed->next = item;
    while (feed->next < feed->end && feed->next <= item + feed->ahead) ec_feed_one(feed, ring);
}

/* out (+)= sum of items [at, stop), for LANES * VECTORS elements from `column` on, kept in registers. */
#define EC_FOR_VECTORS _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)
#define EC_DEFINE_SUM(NAME, VECTOR, UNALIGNED, LANES, VECTORS)                                                        \
    EC_ROW_FN void NAME(float *out, ec_feed *feed, ec_source *ring, int64_t at, int64_t stop, int64_t column,         \
                        int accumulate, const int weighted, const int feeds) {                                        \
        enum { vectors = VECTORS };                                                                                   \
        VECTOR sum[vectors];                                                                                          \
        out += column;                                                                                                \
        if (accumulate) {                                                                                             \
            EC_FOR_VECTORS sum[v] = *(const UNALIGNED *)(out + v * LANES);                                            \
        } else {                                                                                                      \
            const ec_source *source = &ring[at & EC_RING_MASK];                                                       \
            EC_FOR_VECTORS {                                                                                          \
                sum[v] = *(const UNALIGNED *)(source->row + column + v * LANES);                                      \
                if (weighted) sum[v] *= source->coef;                                                                 \
            }                                                                                                         \
            at++;                                                                                                     \
        }                                                                                                             \
        for (; at < stop; at++) {                                                                                     \
            const ec_source *source = &ring[at & EC_RING_MASK];                                                       \
            if (feeds) ec_feed_one(feed, ring);                                                                       \
            EC_FOR_VECTORS {                                                                                          \
                VECTOR term = *(const UNALIGNED *)(source->row + column + v * LANES);                                 \
                if (weighted) term *= source->coef;                                                                   \
                sum[v] += term;                                                                                       \
            }                                                                                                         \
        }                                                                                                             \
        EC_FOR_VECTORS *(UNALIGNED *)(out + v * LANES) = sum[v];                                                      \
    }

EC_DEFINE_SUM(ec_sum_64, ec_f8, ec_f8u, 8, 8)
EC_DEFINE_SUM(ec_sum_32, ec_f8, ec_f8u, 8, 4)
EC_DEFINE_SUM(ec_sum_16, ec_f8, ec_f8u, 8, 2)
EC_DEFINE_SUM(ec_sum_8, ec_f8, ec_f8u, 8, 1)
EC_DEFINE_SUM(ec_sum_4, ec_f4, ec_f4u, 4, 1)
EC_DEFINE_SUM(ec_sum_1, float, float, 1, 1)

/* The first columns feed the ring, the others find it fed. */
EC_ROW_FN void ec_sum_columns(float *out, ec_feed *feed, ec_source *ring, int64_t at, int64_t stop, int accumulate,
                              const int weighted) {
    const int64_t dim = feed->dim;
    int64_t column;
    if (dim >= 64) { ec_sum_64(out, feed, ring, at, stop, 0, accumulate, weighted, 1); column = 64; }
    else if (dim >= 32) { ec_sum_32(out, feed, ring, at, stop, 0, accumulate, weighted, 1); column = 32; }
    else if (dim >= 16) { ec_sum_16(out, feed, ring, at, stop, 0, accumulate, weighted, 1); column = 16; }
    else if (dim >= 8) { ec_sum_8(out, feed, ring, at, stop, 0, accumulate, weighted, 1); column = 8; }
    else { ec_sum_1(out, feed, ring, at, stop, 0, accumulate, weighted, 1); column = 1; }
    for (; column + 64 <= dim; column += 64) ec_sum_64(out, feed, ring, at, stop, column, accumulate, weighted, 0);
    for (; column + 16 <= dim; column += 16) ec_sum_16(out, feed, ring, at, stop, column, accumulate, weighted, 0);
    for (; column + 4 <= dim; column += 4) ec_sum_4(out, feed, ring, at, stop, column, accumulate, weighted, 0);
    for (; column < dim; column++) ec_sum_1(out, feed, ring, at, stop, column, accumulate, weighted, 0);
}

EC_ROW_FN void ec_sum_rows_body(float *restrict out, ec_feed *restrict feed, ec_source *restrict ring, int64_t at,
                                int64_t stop, int accumulate) {
    ec_feed_from(feed, ring, at);
    if (feed->coefs) ec_sum_columns(out, feed, ring, at, stop, accumulate, 1);
    else ec_sum_columns(out, feed, ring, at, stop, accumulate, 0);
}

/* out (+)= sum of coef * row over the items [at, stop), at least one and at most EC_SUM_BLOCK, added in that order. */
EC_ROW_CLONE void ec_sum_rows_baseline(float *restrict out, ec_feed *restrict feed, ec_source *restrict ring, int64_t at,
                                       int64_t stop, int accumulate) {
    ec_sum_rows_body(out, feed, ring, at, stop, accumulate);
}

EC_ROW_CLONE EC_TARGET_AVX2 void ec_sum_rows_avx2(float *restrict out, ec_feed *restrict feed, ec_source *restrict ring,
                                                  int64_t at, int64_t stop, int accumulate) {
    ec_sum_rows_body(out, feed, ring, at, stop, accumulate);
}

EC_ROW_FN void ec_add_row(float *restrict out, const float *restrict row, int64_t dim) {
    for (int64_t j = 0; j < dim; j++) out[j] += row[j];
}

EC_ROW_FN void ec_divide_row(float *out, float divisor, int64_t dim) {
    for (int64_t j = 0; j < dim; j++) out[j] /= divisor;
}

/* Adds up 16 lanes in the one order that every reduction over a row uses: halves onto halves. */
EC_ROW_FN float ec_reduce_lanes(const float *lanes) {
    float eight[8], four[4];
    for (int k = 0; k < 8; k++) eight[k] = lanes[k] + lanes[k + 8];
    for (int k = 0; k < 4; k++) four[k] = eight[k] + eight[k + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Element j of a row belongs to lane j % 16; a lane adds its products in order of j. */
EC_ROW_FN float ec_dot(const float *a, const float *b, int64_t dim) {
    ec_f8 low = {0}, high = {0};
    float lanes[16];
    int64_t j = 0;
    for (; j + 16 <= dim; j += 16) {
        low += *(const ec_f8u *)(a + j) * *(const ec_f8u *)(b + j);
        high += *(const ec_f8u *)(a + j + 8) * *(const ec_f8u *)(b + j + 8);
    }
    *(ec_f8u *)lanes = low;
    *(ec_f8u *)(lanes + 8) = high;
    for (int k = 0; j < dim; j++, k++) lanes[k] += a[j] * b[j];
    return ec_reduce_lanes(lanes);
}

/* --------------------------------------------------------------------------------------------------- optimizers */

enum { EC_SGD = 0, EC_ADAGRAD = 1, EC_ROWWISE_ADAGRAD = 2, EC_ADAM = 3 };

/* An update with its numbers already in float32; `lr` is Adam's step size with both bias corrections in it. */
typedef struct {
    int kind;
    int decays; /* weight_decay != 0: adding 0 * w would turn -0 into 0 and spread a NaN */
    float lr;
    float weight_decay;
    float eps;
    float one_minus_beta1;
    float one_minus_beta2;
} ec_rule;

/* Gradient of element j, decay included. */
#define EC_DECAYED(j) (decays ? grad[j] + decay * weights[j] : grad[j])

EC_ROW_FN void ec_update_sgd(const ec_rule *rule, float *restrict weights, const float *restrict grad, int64_t dim,
                             const int decays) {
    const float lr = rule->lr, decay = rule->weight_decay;
    for (int64_t j = 0; j < dim; j++) weights[j] -= lr * EC_DECAYED(j);
}

EC_ROW_FN void ec_update_adagrad(const ec_rule *rule, float *restrict weights, float *restrict sums,
                                 const float *restrict grad, int64_t dim, const int decays) {
    const float lr = rule->lr, decay = rule->weight_decay, eps = rule->eps;
    for (int64_t j = 0; j < dim; j++) {
        const float g = EC_DECAYED(j);
        const float sum = sums[j] + g * g;
        sums[j] = sum;
        weights[j] -= lr * (g / (sqrtf(sum) + eps));
    }
}

EC_ROW_FN void ec_update_rowwise_adagrad(const ec_rule *rule, float *restrict weights, float *restrict sums,
                                         const float *restrict grad, int64_t dim, const int decays) {
    const float lr = rule->lr, decay = rule->weight_decay, eps = rule->eps;
    ec_f8 low = {0}, high = {0};
    float lanes[16];
    int64_t j = 0;
    for (; j + 16 <= dim; j += 16) {
        ec_f8 a = *(const ec_f8u *)(grad + j), b = *(const ec_f8u *)(grad + j + 8);
        if (decays) {
            a += decay * *(const ec_f8u *)(weights + j);
            b += decay * *(const ec_f8u *)(weights + j + 8);
        }
        low += a * a;
        high += b * b;
    }
    *(ec_f8u *)lanes = low;
    *(ec_f8u *)(lanes + 8) = high;
    for (int k = 0; j < dim; j++, k++) {
        const float g = EC_DECAYED(j);
        lanes[k] += g * g;
    }
    const float sum = *sums + ec_reduce_lanes(lanes) / (float)dim;
    *sums = sum;
    const float scale = sqrtf(sum) + eps;
    for (j = 0; j < dim; j++) weights[j] -= lr * (EC_DECAYED(j) / scale);
}

EC_ROW_FN void ec_update_adam(const ec_rule *rule, float *restrict weights, float *restrict means,
                              float *restrict squares, const float *restrict grad, int64_t dim, const int decays) {
    const float step = rule->lr, decay = rule->weight_decay, eps = rule->eps;
    const float c1 = rule->one_minus_beta1, c2 = rule->one_minus_beta2;
    for (int64_t j = 0; j < dim; j++) {
        const float g = EC_DECAYED(j);
        const float mean = means[j] + c1 * (g - means[j]);
        const float square = squares[j] + c2 * (g * g - squares[j]);
        means[j] = mean;
        squares[j] = square;
        weights[j] -= step * (mean / (sqrtf(square) + eps));
    }
}

EC_ROW_FN void ec_update_row_body(const ec_rule *rule, float *weights, float *state0, float *state1, const float *grad,
                                  int64_t dim) {
    switch (rule->kind) {
    case EC_SGD:
        if (rule->decays) ec_update_sgd(rule, weights, grad, dim, 1);
        else ec_update_sgd(rule, weights, grad, dim, 0);
        break;
    case EC_ADAGRAD:
        if (rule->decays) ec_update_adagrad(rule, weights, state0, grad, dim, 1);
        else ec_update_adagrad(rule, weights, state0, grad, dim, 0);
        break;
    case EC_ROWWISE_ADAGRAD:
        if (rule->decays) ec_update_rowwise_adagrad(rule, weights, state0, grad, dim, 1);
        else ec_update_rowwise_adagrad(rule, weights, state0, grad, dim, 0);
        break;
    default:
        if (rule->decays) ec_update_adam(rule, weights, state0, state1, grad, dim, 1);
        else ec_update_adam(rule, weights, state0, state1, grad, dim, 0);
    }
}

/* Applies one update to one row; `state0`/`state1` are the row's first and second state array, where it has them. */
EC_ROW_CLONE void ec_update_row_baseline(const ec_rule *rule, float *weights, float *state0, float *state1,
                                         const float *grad, int64_t dim) {
    ec_update_row_body(rule, weights, state0, state1, grad, dim);
}

EC_ROW_CLONE EC_TARGET_AVX2 void ec_update_row_avx2(const ec_rule *rule, float *weights, float *state0, float *state1,
                                                    const float *grad, int64_t dim) {
    ec_update_row_body(rule, weights, state0, state1, grad, dim);
}

#endif
