/* Host rows by their timestamps: which of many are below a cut-off.
 *
 * Timestamps are looked at first and flags of the old ones alone, so that a run of recent rows costs one look at one column.
 */
#ifndef EC_OLD_H
#define EC_OLD_H

#include <stdint.h>

#include "ec_isa.h"
#include "ec_table.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

/* Which of 64 timestamps are below the cut-off, a bit each. A clone of either kind reads timestamps and nothing else, so
 * that a run without any dead costs one look at this column. */
EC_INLINE uint64_t ec_old_word(const int64_t *last, int64_t cutoff) {
    uint64_t old = 0;
    for (int i = 0; i < 64; i++) old |= (uint64_t)(last[i] < cutoff) << i;
    return old;
}

static __attribute__((noinline)) void ec_old_words_baseline(const int64_t *last, int64_t words, int64_t cutoff, uint64_t *old) {
    for (int64_t i = 0; i < words; i++) old[i] = ec_old_word(last + 64 * i, cutoff);
}

#if EC_HAS_AVX2_CLONE
static __attribute__((noinline)) EC_TARGET_AVX2 void ec_old_words_avx2(const int64_t *last, int64_t words, int64_t cutoff, uint64_t *old) {
    const __m256i limit = _mm256_set1_epi64x(cutoff);
    for (int64_t i = 0; i < words; i++, last += 64) {
        uint64_t bits = 0;
        for (int j = 0; j < 16; j++) {
            const __m256i below = _mm256_cmpgt_epi64(limit, _mm256_loadu_si256((const __m256i *)(last + 4 * j)));
            bits |= (uint64_t)_mm256_movemask_pd(_mm256_castsi256_pd(below)) << 4 * j;
        }
        old[i] = bits;
    }
}
#else
#define ec_old_words_avx2 ec_old_words_baseline
#endif

/* Which of 64 rows, of those with a bit in `old`, are live and not resident. */
static inline uint64_t ec_old_at_home(const uint8_t *flags, uint64_t old) {
    uint64_t found = 0;
    for (; old; old &= old - 1) {
        const int i = __builtin_ctzll(old);
        found |= (uint64_t)((flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE) << i;
    }
    return found;
}

/* How many of `n` rows are live and not resident. */
static inline int64_t ec_count_at_home(const uint8_t *flags, int64_t n) {
    int64_t found = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        uint8_t some = 0; /* a byte, as the flags are: 16 and more of them are added at once */
        for (int j = 0; j < 64; j++) some = (uint8_t)(some + ((flags[i + j] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE));
        found += some;
    }
    for (; i < n; i++) found += (flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE;
    return found;
}

#endif
