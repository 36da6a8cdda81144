/* Run-time choice of instruction sets: a hot body is inlined into a baseline and an AVX2 clone, and the caller picks.
 *
 * Both clones do the same integer and IEEE operations (-ffp-contract=off), so results never depend on the CPU.
 */
#ifndef EC_ISA_H
#define EC_ISA_H

#if defined(__x86_64__)
#define EC_HAS_AVX2_CLONE 1
#define EC_TARGET_AVX2 __attribute__((target("avx2")))
#else
#define EC_HAS_AVX2_CLONE 0
#define EC_TARGET_AVX2
#endif

#define EC_INLINE static inline __attribute__((always_inline))

static inline int ec_cpu_has_avx2(void) {
#if EC_HAS_AVX2_CLONE
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

#endif
