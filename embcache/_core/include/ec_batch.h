/* Lengths of a batch's bags, checked and summed up in one pass: they index memory later, so none is taken on trust. */
#ifndef EC_BATCH_H
#define EC_BATCH_H

#include <stddef.h>
#include <stdint.h>

/* Whether `count` lengths are all >= 0 and sum to `total` (< 2^62). offsets[i], where wanted, becomes the sum of the
 * lengths before i, for i = 0 .. count; it is of no use where they do not fit.
 *
 * Branch-free: a length that is negative or above `total`, and a sum above it, leave a sign bit in `bad`. Up to the
 * first such length no sum exceeds 2 * total, so none wraps round unseen. */
static inline __attribute__((always_inline)) int ec_sum_lengths(const int64_t *lengths, int64_t count, int64_t total,
                                                                int64_t *offsets) {
    uint64_t sum = 0, bad = 0;
    if (offsets) offsets[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t length = (uint64_t)lengths[i];
        sum += length;
        bad |= length | ((uint64_t)total - length) | ((uint64_t)total - sum);
        if (offsets) offsets[i + 1] = (int64_t)sum;
    }
    return !(bad >> 63) && sum == (uint64_t)total;
}

static inline int ec_lengths_fit(const int64_t *lengths, int64_t count, int64_t total) {
    return ec_sum_lengths(lengths, count, total, NULL);
}

static inline int ec_running_offsets(const int64_t *lengths, int64_t count, int64_t total, int64_t *offsets) {
    return ec_sum_lengths(lengths, count, total, offsets);
}

#endif
