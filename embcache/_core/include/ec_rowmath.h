/* Arithmetic on rows, in float32: sums of scattered rows of any element type, dot products, optimizer updates.
 *
 * Promise kept here (I9): a result is a pure function of the values, whatever the ISA, the thread count or the place
 * of a row. So: vectorized across the elements of a row only, reductions over a row in 16 fixed lanes, no fused
 * multiply-add (-ffp-contract=off), no reciprocal or square-root approximation. Bodies are inlined into a baseline and
 * an AVX2 clone. Only the latter may use the 32-byte vector type: gcc lowers it to memory traffic where the ISA has
 * 16-byte registers.
 */
#ifndef EC_ROWMATH_H
#define EC_ROWMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ec_copy.h"
#include "ec_isa.h"
#include "ec_types.h"

#define EC_ROW_FN static inline __attribute__((always_inline))
#define EC_ROW_CLONE static __attribute__((noinline))

typedef float ec_f8 __attribute__((vector_size(32)));
typedef float ec_f8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef float ec_f4 __attribute__((vector_size(16)));
typedef float ec_f4u __attribute__((vector_size(16), aligned(4), may_alias));

#define EC_MAX_DIM 8192
#define EC_SUM_BLOCK 256 /* occurrences of a key that are added up before the partial sum is added to the total */
#define EC_PLACES_AHEAD 16 /* items between the prefetch of a row's place and that of the row */
#define EC_PREFETCH_BYTES (64 * EC_COPY_LINES) /* beyond this much of a row the hardware prefetcher has caught on */

/* Brings the cache lines of a row near, wherever it begins. */
EC_ROW_FN void ec_prefetch_row(const void *row, int64_t row_bytes) {
    const uintptr_t within = (uintptr_t)row & 63;
    ec_copy_prefetch((const char *)row - within, row_bytes + (int64_t)within);
}

/* Rows to ask for in one go, before the ones before them are worked on, when each step touches `arrays` rows of `row_bytes`:
 * about 16 cache lines. In one go because a prefetch that misses the TLB holds up what comes after it until the page is
 * found, and only those next to each other are looked up at the same time. */
EC_ROW_FN int64_t ec_burst(int64_t row_bytes, int64_t arrays) {
    const int64_t bytes = row_bytes < EC_PREFETCH_BYTES ? row_bytes : EC_PREFETCH_BYTES;
    const int64_t rows = 16 / (arrays * ((bytes + 63) / 64));
    return rows < 2 ? 2 : rows;
}

/* Rows to prefetch ahead when each step touches `arrays` rows of `row_bytes`: about 64 cache lines. */
EC_ROW_FN int64_t ec_prefetch_distance(int64_t row_bytes, int64_t arrays) {
    const int64_t bytes = row_bytes < EC_PREFETCH_BYTES ? row_bytes : EC_PREFETCH_BYTES;
    const int64_t lines = arrays * ((bytes + 63) / 64);
    const int64_t distance = 64 / lines;
    return distance < 4 ? 4 : distance > 16 ? 16 : distance;
}

EC_ROW_FN void ec_copy_row(float *restrict out, const float *restrict row, int64_t dim) {
    memcpy(out, row, (size_t)dim * 4);
}

/* A row of `type` as float32. */
EC_ROW_FN void ec_give_row(float *restrict out, const void *restrict row, int type, int64_t dim, const int avx2) {
    if (type == EC_FLOAT32) ec_copy_row(out, (const float *)row, dim);
    else ec_widen(out, row, type, dim, avx2);
}

/* ------------------------------------------------------------------------------------------- sums of scattered rows */

/* Rows to be added, item by item. Item i is the row of id = ids[i] - id_base: base + places[id] * stride, or
 * base + id * stride without places. Whoever adds knows the element type. */
typedef struct {
    const char *base;
    const int64_t *ids;
    const int64_t *places; /* or NULL */
    const float *coefs;    /* of each item, or of each id; NULL: 1 */
    int64_t id_base;
    int64_t stride; /* bytes */
    int64_t dim;
    int64_t row_bytes;
    int64_t ahead; /* items between a prefetch and its use */
    int64_t end;   /* of the items that may be looked at */
    int coefs_by_id;
} ec_items;

EC_ROW_FN const void *ec_item_row(const ec_items *items, int64_t item, const int placed) {
    const int64_t id = items->ids[item] - items->id_base;
    return items->base + (placed ? items->places[id] : id) * items->stride;
}

EC_ROW_FN float ec_item_coef(const ec_items *items, int64_t item) {
    return items->coefs[items->coefs_by_id ? items->ids[item] - items->id_base : item];
}

/* Fetches item `later` while others are added: where its row is, long before, and the bytes from `from` on to be added. */
EC_ROW_FN void ec_prefetch_item(const ec_items *items, int64_t later, int64_t from, int bytes, const int placed) {
    if (later >= items->end) return;
    const char *row = (const char *)ec_item_row(items, later, placed) + from;
    for (int j = 0; j < bytes; j += 64) __builtin_prefetch(row + j);
    if (placed && from == 0 && later + EC_PLACES_AHEAD < items->end) {
        const int64_t id = items->ids[later + EC_PLACES_AHEAD] - items->id_base;
        __builtin_prefetch(items->places + id);
        if (items->coefs_by_id) __builtin_prefetch(items->coefs + id);
    }
}

/* Fetches the items that nobody will have fetched when a task begins. */
EC_ROW_FN void ec_prefetch_first(const ec_items *items, int64_t first) {
    for (int64_t i = first; i < first + items->ahead && i < items->end; i++) {
        ec_prefetch_row(items->places ? ec_item_row(items, i, 1) : ec_item_row(items, i, 0), items->row_bytes);
    }
}

/* Asks for the rows of the placed items [at, stop), as far as there are any. Returns where it stopped. */
EC_ROW_FN int64_t ec_items_ask(const ec_items *items, int64_t at, int64_t stop) {
    if (stop > items->end) stop = items->end;
    for (; at < stop; at++) ec_prefetch_row(ec_item_row(items, at, 1), items->row_bytes);
    return at;
}

/* The row of an item that is used by itself; fetches a later one. */
EC_ROW_FN const void *ec_lone_row(const ec_items *items, int64_t item) {
    const int64_t later = item + items->ahead;
    if (items->places) {
        if (later < items->end) ec_prefetch_row(ec_item_row(items, later, 1), items->row_bytes);
        return ec_item_row(items, item, 1);
    }
    if (later < items->end) ec_prefetch_row(ec_item_row(items, later, 0), items->row_bytes);
    return ec_item_row(items, item, 0);
}

/* out (+)= sum of items [at, stop), for LANES * VECTORS elements from `column` on, kept in registers. LOAD(p) widens the
 * LANES elements at p. */
#define EC_FOR_VECTORS _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++)
#define EC_DEFINE_SUM(NAME, TARGET, VECTOR, UNALIGNED, LANES, VECTORS, ELEMENT, LOAD)                                 \
    EC_ROW_FN TARGET void NAME(float *restrict out, const ec_items *restrict items, int64_t at, int64_t stop,         \
                               int64_t column, int accumulate, const int weighted, const int placed) {                \
        enum { vectors = VECTORS, bytes = LANES * VECTORS * (int)sizeof(ELEMENT) };                                   \
        const int64_t from = column * (int64_t)sizeof(ELEMENT);                                                       \
        const int fetches = bytes >= 64 || from % 64 == 0;                                                            \
        const int64_t ahead = items->ahead;                                                                           \
        VECTOR sum[vectors];                                                                                          \
        out += column;                                                                                                \
        if (accumulate) {                                                                                             \
            EC_FOR_VECTORS sum[v] = *(const UNALIGNED *)(out + v * LANES);                                            \
        } else {                                                                                                      \
            const ELEMENT *row = (const ELEMENT *)ec_item_row(items, at, placed) + column;                            \
            EC_FOR_VECTORS {                                                                                          \
                sum[v] = LOAD(row + v * LANES);                                                                       \
                if (weighted) sum[v] *= ec_item_coef(items, at);                                                      \
            }                                                                                                         \
            if (fetches) ec_prefetch_item(items, at + ahead, from, bytes, placed);                                    \
            at++;                                                                                                     \
        }                                                                                                             \
        for (; at < stop; at++) {                                                                                     \
            const ELEMENT *row = (const ELEMENT *)ec_item_row(items, at, placed) + column;                            \
            EC_FOR_VECTORS {                                                                                          \
                VECTOR term = LOAD(row + v * LANES);                                                                  \
                if (weighted) term *= ec_item_coef(items, at);                                                        \
                sum[v] += term;                                                                                       \
            }                                                                                                         \
            if (fetches) ec_prefetch_item(items, at + ahead, from, bytes, placed);                                    \
        }                                                                                                             \
        EC_FOR_VECTORS *(UNALIGNED *)(out + v * LANES) = sum[v];                                                      \
    }

#define EC_LOAD8(p) (*(const ec_f8u *)(p))
#define EC_LOAD4(p) (*(const ec_f4u *)(p))
#define EC_LOAD1(p) (*(p))

EC_DEFINE_SUM(ec_sum_64_wide, , ec_f8, ec_f8u, 8, 8, float, EC_LOAD8)
EC_DEFINE_SUM(ec_sum_32_wide, , ec_f8, ec_f8u, 8, 4, float, EC_LOAD8)
EC_DEFINE_SUM(ec_sum_16_wide, , ec_f8, ec_f8u, 8, 2, float, EC_LOAD8)
EC_DEFINE_SUM(ec_sum_8_wide, , ec_f8, ec_f8u, 8, 1, float, EC_LOAD8)
EC_DEFINE_SUM(ec_sum_32, , ec_f4, ec_f4u, 4, 8, float, EC_LOAD4)
EC_DEFINE_SUM(ec_sum_16, , ec_f4, ec_f4u, 4, 4, float, EC_LOAD4)
EC_DEFINE_SUM(ec_sum_8, , ec_f4, ec_f4u, 4, 2, float, EC_LOAD4)
EC_DEFINE_SUM(ec_sum_4, , ec_f4, ec_f4u, 4, 1, float, EC_LOAD4)
EC_DEFINE_SUM(ec_sum_1, , float, float, 1, 1, float, EC_LOAD1)

EC_ROW_FN void ec_sum_columns(float *restrict out, const ec_items *restrict items, int64_t at, int64_t stop,
                              int accumulate, const int weighted, const int placed, const int avx2) {
    const int64_t dim = items->dim;
    int64_t c = 0;
    if (avx2) {
        for (; c + 64 <= dim; c += 64) ec_sum_64_wide(out, items, at, stop, c, accumulate, weighted, placed);
        for (; c + 32 <= dim; c += 32) ec_sum_32_wide(out, items, at, stop, c, accumulate, weighted, placed);
        for (; c + 16 <= dim; c += 16) ec_sum_16_wide(out, items, at, stop, c, accumulate, weighted, placed);
        for (; c + 8 <= dim; c += 8) ec_sum_8_wide(out, items, at, stop, c, accumulate, weighted, placed);
    } else {
        for (; c + 32 <= dim; c += 32) ec_sum_32(out, items, at, stop, c, accumulate, weighted, placed);
        for (; c + 16 <= dim; c += 16) ec_sum_16(out, items, at, stop, c, accumulate, weighted, placed);
        for (; c + 8 <= dim; c += 8) ec_sum_8(out, items, at, stop, c, accumulate, weighted, placed);
    }
    for (; c + 4 <= dim; c += 4) ec_sum_4(out, items, at, stop, c, accumulate, weighted, placed);
    for (; c < dim; c++) ec_sum_1(out, items, at, stop, c, accumulate, weighted, placed);
}

EC_ROW_FN void ec_sum_items_body(float *restrict out, const ec_items *restrict items, int64_t at, int64_t stop,
                                 int accumulate, const int avx2) {
    if (items->places) {
        if (items->coefs) ec_sum_columns(out, items, at, stop, accumulate, 1, 1, avx2);
        else ec_sum_columns(out, items, at, stop, accumulate, 0, 1, avx2);
    } else {
        if (items->coefs) ec_sum_columns(out, items, at, stop, accumulate, 1, 0, avx2);
        else ec_sum_columns(out, items, at, stop, accumulate, 0, 0, avx2);
    }
}

/* out (+)= sum of coef * row over the items [at, stop), at least one, added in that order. */
EC_ROW_CLONE void ec_sum_items_baseline(float *restrict out, const ec_items *restrict items, int64_t at, int64_t stop,
                                        int accumulate) {
    ec_sum_items_body(out, items, at, stop, accumulate, 0);
}

EC_ROW_CLONE EC_TARGET_AVX2 void ec_sum_items_avx2(float *restrict out, const ec_items *restrict items, int64_t at,
                                                   int64_t stop, int accumulate) {
    ec_sum_items_body(out, items, at, stop, accumulate, 1);
}

/* The same for rows of a 2-byte type, which are never gradients: always placed. Fewer widths, as there is more code in each. */
#define EC_DEFINE_NARROW_SUM(NAME, TARGET, VECTOR, UNALIGNED, LANES, WIDEST, LOAD, LOAD4, LOAD1)                      \
    EC_DEFINE_SUM(NAME##_most, TARGET, VECTOR, UNALIGNED, LANES, WIDEST, uint16_t, LOAD)                              \
    EC_DEFINE_SUM(NAME##_some, TARGET, VECTOR, UNALIGNED, LANES, 2, uint16_t, LOAD)                                   \
    EC_DEFINE_SUM(NAME##_four, TARGET, ec_f4, ec_f4u, 4, 1, uint16_t, LOAD4)                                          \
    EC_DEFINE_SUM(NAME##_one, TARGET, float, float, 1, 1, uint16_t, LOAD1)                                            \
    EC_ROW_FN TARGET void NAME##_columns(float *restrict out, const ec_items *restrict items, int64_t at,             \
                                         int64_t stop, int accumulate, const int weighted) {                          \
        enum { most = LANES * WIDEST, some = LANES * 2 };                                                             \
        const int64_t dim = items->dim;                                                                               \
        int64_t c = 0;                                                                                                \
        for (; c + most <= dim; c += most) NAME##_most(out, items, at, stop, c, accumulate, weighted, 1);             \
        for (; c + some <= dim; c += some) NAME##_some(out, items, at, stop, c, accumulate, weighted, 1);             \
        for (; c + 4 <= dim; c += 4) NAME##_four(out, items, at, stop, c, accumulate, weighted, 1);                   \
        for (; c < dim; c++) NAME##_one(out, items, at, stop, c, accumulate, weighted, 1);                            \
    }                                                                                                                 \
    EC_ROW_CLONE TARGET void NAME(float *restrict out, const ec_items *restrict items, int64_t at, int64_t stop,      \
                                  int accumulate) {                                                                   \
        if (items->coefs) NAME##_columns(out, items, at, stop, accumulate, 1);                                        \
        else NAME##_columns(out, items, at, stop, accumulate, 0);                                                     \
    }

#define EC_HALF1(p) ec_half_to_float(*(p))
#define EC_BFLOAT1(p) ec_bfloat_to_float(*(p))
#define EC_HALF4(p) ((ec_f4){EC_HALF1(p), EC_HALF1((p) + 1), EC_HALF1((p) + 2), EC_HALF1((p) + 3)})
#define EC_BFLOAT4(p) ((ec_f4){EC_BFLOAT1(p), EC_BFLOAT1((p) + 1), EC_BFLOAT1((p) + 2), EC_BFLOAT1((p) + 3)})

EC_DEFINE_NARROW_SUM(ec_sum_half_baseline, , ec_f4, ec_f4u, 4, 4, EC_HALF4, EC_HALF4, EC_HALF1)
EC_DEFINE_NARROW_SUM(ec_sum_bfloat_baseline, , ec_f4, ec_f4u, 4, 4, EC_BFLOAT4, EC_BFLOAT4, EC_BFLOAT1)

#if EC_HAS_AVX2_CLONE
#define EC_HALF8_AVX2(p) ((ec_f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define EC_HALF4_AVX2(p) ((ec_f4)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(p))))
#define EC_BFLOAT8_AVX2(p)                                                                                            \
    ((ec_f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define EC_BFLOAT4_AVX2(p) ((ec_f4)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(p))), 16))

EC_DEFINE_NARROW_SUM(ec_sum_half_avx2, EC_TARGET_AVX2, ec_f8, ec_f8u, 8, 8, EC_HALF8_AVX2, EC_HALF4_AVX2, EC_HALF1)
EC_DEFINE_NARROW_SUM(ec_sum_bfloat_avx2, EC_TARGET_AVX2, ec_f8, ec_f8u, 8, 8, EC_BFLOAT8_AVX2, EC_BFLOAT4_AVX2, EC_BFLOAT1)
#else
#define ec_sum_half_avx2 ec_sum_half_baseline
#define ec_sum_bfloat_avx2 ec_sum_bfloat_baseline
#endif

/* out (+)= sum of coef * row over the items [at, stop), whose rows are of `type` and placed. */
EC_ROW_FN void ec_sum_rows(float *restrict out, const ec_items *restrict items, int type, int64_t at, int64_t stop,
                           int accumulate, const int avx2) {
    if (type == EC_FLOAT32) EC_CLONE_OF(ec_sum_items, avx2)(out, items, at, stop, accumulate);
    else if (type == EC_FLOAT16) EC_CLONE_OF(ec_sum_half, avx2)(out, items, at, stop, accumulate);
    else EC_CLONE_OF(ec_sum_bfloat, avx2)(out, items, at, stop, accumulate);
}

EC_ROW_FN void ec_add_row(float *restrict out, const float *restrict row, int64_t dim) {
    for (int64_t j = 0; j < dim; j++) out[j] += row[j];
}

EC_ROW_FN void ec_divide_row(float *out, float divisor, int64_t dim) {
    for (int64_t j = 0; j < dim; j++) out[j] /= divisor;
}

#define EC_FOR_QUARTERS _Pragma("GCC unroll 4") for (int q = 0; q < 4; q++)

/* Adds up 16 lanes in the one order that every reduction over a row uses: halves onto halves. */
EC_ROW_FN float ec_reduce_lanes(const float *lanes) {
    float eight[8], four[4];
    for (int k = 0; k < 8; k++) eight[k] = lanes[k] + lanes[k + 8];
    for (int k = 0; k < 4; k++) four[k] = eight[k] + eight[k + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Element j of a row belongs to lane j % 16; a lane adds its products in order of j. */
EC_ROW_FN float ec_dot(const float *a, const float *b, int64_t dim) {
    ec_f4 sums[4] = {{0}};
    float lanes[16];
    int64_t j = 0;
    for (; j + 16 <= dim; j += 16) {
        EC_FOR_QUARTERS sums[q] += *(const ec_f4u *)(a + j + 4 * q) * *(const ec_f4u *)(b + j + 4 * q);
    }
    EC_FOR_QUARTERS *(ec_f4u *)(lanes + 4 * q) = sums[q];
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
    ec_f4 squares[4] = {{0}};
    float lanes[16];
    int64_t j = 0;
    for (; j + 16 <= dim; j += 16) {
        EC_FOR_QUARTERS {
            ec_f4 g = *(const ec_f4u *)(grad + j + 4 * q);
            if (decays) g += decay * *(const ec_f4u *)(weights + j + 4 * q);
            squares[q] += g * g;
        }
    }
    EC_FOR_QUARTERS *(ec_f4u *)(lanes + 4 * q) = squares[q];
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

/* The same for a row of a 2-byte type: computed on the widened weights, which are rounded once. */
EC_ROW_FN void ec_update_narrow_body(const ec_rule *rule, void *weights, int type, float *state0, float *state1,
                                     const float *grad, int64_t dim, const int avx2) {
    float wide[EC_MAX_DIM];
    ec_widen(wide, weights, type, dim, avx2);
    EC_CLONE_OF(ec_update_row, avx2)(rule, wide, state0, state1, grad, dim);
    ec_narrow(weights, wide, type, dim, avx2);
}

EC_ROW_CLONE void ec_update_narrow_baseline(const ec_rule *rule, void *weights, int type, float *state0, float *state1,
                                            const float *grad, int64_t dim) {
    ec_update_narrow_body(rule, weights, type, state0, state1, grad, dim, 0);
}

EC_ROW_CLONE EC_TARGET_AVX2 void ec_update_narrow_avx2(const ec_rule *rule, void *weights, int type, float *state0,
                                                       float *state1, const float *grad, int64_t dim) {
    ec_update_narrow_body(rule, weights, type, state0, state1, grad, dim, 1);
}

#endif
