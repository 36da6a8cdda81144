/* Host rows by their scores: which of many may be low.
 *
 * A score that was last changed so many sweeps ago is low where it was no larger then than a bound, which is a matter of the
 * sweeps alone; so a look compares two numbers a row, without making its score. The bounds are a little too high rather than
 * too low, as a quotient is rounded: whoever may be low is looked at exactly.
 */
#ifndef EC_LOW_H
#define EC_LOW_H

#include <stdint.h>

#include "ec_isa.h"
#include "ec_score.h"
#include "ec_table.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

#define EC_LOW_SWEEPS 1024 /* bounds; the last one is for all scores that were changed longer ago, and lets everyone pass for low */
#define EC_LOW_SAMPLE 4096 /* ranks at random places that tell what is low */
#define EC_LOW_ROOM 8      /* one place in so many may be low and kept: 5 bytes of a table's row */

/* Bounds of counts, for scores that are no larger than that of `count` once they have decayed. */
static inline void ec_low_bounds(int64_t count, double decay, int64_t *up_to) {
    double power = 1.0;
    for (int i = 0; i < EC_LOW_SWEEPS; i++, power *= decay) {
        if (i == EC_LOW_SWEEPS - 1 || power < 1e-290) up_to[i] = INT64_MAX; /* of so small a power few digits are known */
        else up_to[i] = ec_score_count((ec_score_of(count) + DBL_MIN) / power * (1.0 + 1e-9)); /* DBL_MIN: where products are rounded to fewer digits */
    }
}

EC_INLINE int ec_low_maybe(int64_t count, int64_t last, int64_t epoch, const int64_t *up_to) {
    const uint64_t sweeps = (uint64_t)(epoch - last);
    return count <= up_to[sweeps < EC_LOW_SWEEPS ? sweeps : EC_LOW_SWEEPS - 1];
}

/* Which of 64 * words rows are live, not resident, scored, and maybe low: a bit each. Returns how many are all but low. */
static __attribute__((noinline)) int64_t ec_low_words_baseline(const uint8_t *flags, const int64_t *counts, const int64_t *last, int64_t words, int64_t epoch,
                                                               const int64_t *up_to, uint64_t *low) {
    int64_t passed = 0;
    for (int64_t word = 0; word < words; word++) {
        low[word] = 0;
        for (int64_t i = 64 * word; i < 64 * word + 64; i++) {
            if ((flags[i] & (EC_LIVE | EC_RESIDENT)) != EC_LIVE || counts[i] == 0) continue;
            const int maybe = ec_low_maybe(counts[i], last[i], epoch, up_to);
            low[word] |= (uint64_t)maybe << (i & 63);
            passed += !maybe;
        }
    }
    return passed;
}

#if EC_HAS_AVX2_CLONE
EC_INLINE EC_TARGET_AVX2 uint32_t ec_low_at_home(const uint8_t *flags) {
    const __m256i both = _mm256_set1_epi8(EC_LIVE | EC_RESIDENT), live = _mm256_set1_epi8(EC_LIVE);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)flags), both), live));
}

static __attribute__((noinline)) EC_TARGET_AVX2 int64_t ec_low_words_avx2(const uint8_t *flags, const int64_t *counts, const int64_t *last, int64_t words, int64_t epoch,
                                                                         const int64_t *up_to, uint64_t *low) {
    const __m256i now = _mm256_set1_epi64x(epoch), known = _mm256_set1_epi64x(EC_LOW_SWEEPS - 1), zero = _mm256_setzero_si256();
    int64_t passed = 0;
    for (int64_t word = 0; word < words; word++, flags += 64, counts += 64, last += 64) {
        const uint64_t at_home = ec_low_at_home(flags) | (uint64_t)ec_low_at_home(flags + 32) << 32;
        uint64_t scored = 0, high = 0;
        if (at_home != 0) {
            for (int i = 0; i < 64; i += 4) {
                const __m256i count = _mm256_loadu_si256((const __m256i *)(counts + i));
                const __m256i sweeps = _mm256_sub_epi64(now, _mm256_loadu_si256((const __m256i *)(last + i)));
                const __m256i bound = _mm256_i64gather_epi64((const long long *)up_to, _mm256_and_si256(sweeps, known), 8);
                const __m256i near = _mm256_cmpeq_epi64(_mm256_andnot_si256(known, sweeps), zero);
                high |= (uint64_t)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_and_si256(_mm256_cmpgt_epi64(count, bound), near))) << i;
                scored |= (uint64_t)(uint32_t)(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(count, zero))) ^ 15) << i;
            }
        }
        scored &= at_home;
        low[word] = scored & ~high;
        passed += __builtin_popcountll(scored & high);
    }
    return passed;
}
#else
#define ec_low_words_avx2 ec_low_words_baseline
#endif

#endif
