/* Run-time choice of instruction sets: a hot body is inlined into a baseline and an AVX2 clone, and the caller picks.
 *
 * Both clones do the same integer and IEEE operations (-ffp-contract=off), so results never depend on the CPU. The AVX2
 * clone may use F16C as well, which is asked for by name though no CPU has AVX2 without it.
 */
#ifndef EC_ISA_H
#define EC_ISA_H

#if defined(__x86_64__)
#define EC_HAS_AVX2_CLONE 1
#define EC_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#else
#define EC_HAS_AVX2_CLONE 0
#define EC_TARGET_AVX2
#endif

#define EC_INLINE static inline __attribute__((always_inline))

/* The clone of NAME that belongs to a caller whose own ISA is the constant `avx2`. */
#define EC_CLONE_OF(NAME, avx2) ((avx2) ? NAME##_avx2 : NAME##_baseline)

static inline int ec_cpu_has_avx2(void) {
#if EC_HAS_AVX2_CLONE
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

/* Whether the CPU is one of AMD's. */
static inline int ec_cpu_is_amd(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

#endif
