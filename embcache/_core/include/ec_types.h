/* The element types that weights are stored in, and the conversions between them and float32.
 *
 * float16 is IEEE 754 binary16, bfloat16 the upper half of a float32. Widening is exact. Narrowing rounds to nearest,
 * ties to even; what rounds beyond the largest finite number becomes infinite, subnormal results are kept, a NaN stays a
 * NaN of the same sign with the upper bits of its payload, made quiet. The baseline clones use integer arithmetic and
 * the AVX2 clones F16C, with the same bits (the tests go through every half and through the ties of every exponent);
 * neither heeds the modes that flush subnormals to zero.
 */
#ifndef EC_TYPES_H
#define EC_TYPES_H

#include <stdint.h>
#include <string.h>

#include "ec_isa.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

enum { EC_FLOAT32 = 0, EC_FLOAT16 = 1, EC_BFLOAT16 = 2 };

static inline int64_t ec_type_bytes(int type) { return type == EC_FLOAT32 ? 4 : 2; }

EC_INLINE uint32_t ec_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

EC_INLINE float ec_bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* No branches, so that the loops below become vector code: all cases are computed, one is kept. */

EC_INLINE float ec_half_to_float(uint16_t half) {
    const uint32_t size = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t rebias = 112u << 23; /* float32's bias is 127, float16's 15 */
    const uint32_t normal = (size << 13) + rebias;
    const uint32_t special = (normal + rebias) | (size > 0x7C00u ? 0x400000u : 0u);
    const uint32_t tiny = ec_float_bits((float)(int32_t)size * 0x1p-24f);
    return ec_bits_float(sign | (size < 0x400u ? tiny : size < 0x7C00u ? normal : special));
}

EC_INLINE uint16_t ec_float_to_half(float value) {
    const uint32_t bits = ec_float_bits(value), size = bits & 0x7FFFFFFFu;
    const uint32_t rebias = 112u << 23;
    /* Adding just below half a unit, or half of one to an odd number, carries where it must, up to infinity. */
    const uint32_t normal = (size - rebias + 0xFFFu + ((size >> 13) & 1u)) >> 13;
    /* The unit of 0.5 is that of the subnormal halves: the addition rounds. */
    const uint32_t tiny = ec_float_bits(ec_bits_float(size) + 0.5f) - 0x3F000000u;
    const uint32_t special = size > 0x7F800000u ? 0x7E00u | ((size >> 13) & 0x3FFu) : 0x7C00u;
    return (uint16_t)(bits >> 16 & 0x8000u) | (uint16_t)(size < 0x38800000u ? tiny : size < 0x47800000u ? normal : special);
}

EC_INLINE float ec_bfloat_to_float(uint16_t value) { return ec_bits_float((uint32_t)value << 16); }

EC_INLINE uint16_t ec_float_to_bfloat(float value) {
    const uint32_t bits = ec_float_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

/* ---------------------------------------------------------------------------------------------------- rows at a time */

#define EC_DEFINE_CONVERSION(NAME, TARGET, OUT, FROM, ONE)                                                            \
    static __attribute__((noinline)) TARGET void NAME(OUT *restrict out, const FROM *restrict from, int64_t count) {                      \
        for (int64_t j = 0; j < count; j++) out[j] = ONE(from[j]);                                                    \
    }

EC_DEFINE_CONVERSION(ec_widen_half_baseline, , float, uint16_t, ec_half_to_float)
EC_DEFINE_CONVERSION(ec_narrow_half_baseline, , uint16_t, float, ec_float_to_half)
EC_DEFINE_CONVERSION(ec_widen_bfloat_baseline, , float, uint16_t, ec_bfloat_to_float)
EC_DEFINE_CONVERSION(ec_narrow_bfloat_baseline, , uint16_t, float, ec_float_to_bfloat)
EC_DEFINE_CONVERSION(ec_widen_bfloat_avx2, EC_TARGET_AVX2, float, uint16_t, ec_bfloat_to_float)
EC_DEFINE_CONVERSION(ec_narrow_bfloat_avx2, EC_TARGET_AVX2, uint16_t, float, ec_float_to_bfloat)

#if EC_HAS_AVX2_CLONE
static __attribute__((noinline)) EC_TARGET_AVX2 void ec_widen_half_avx2(float *restrict out, const uint16_t *restrict from, int64_t count) {
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j))));
    }
    for (; j < count; j++) out[j] = ec_half_to_float(from[j]);
}

static __attribute__((noinline)) EC_TARGET_AVX2 void ec_narrow_half_avx2(uint16_t *restrict out, const float *restrict from, int64_t count) {
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        const __m256 eight = _mm256_loadu_ps(from + j);
        _mm_storeu_si128((__m128i *)(out + j), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; j < count; j++) out[j] = ec_float_to_half(from[j]);
}
#else
#define ec_widen_half_avx2 ec_widen_half_baseline
#define ec_narrow_half_avx2 ec_narrow_half_baseline
#endif

/* `count` elements of a 2-byte `type` at `from`, as float32. */
EC_INLINE void ec_widen(float *out, const void *from, int type, int64_t count, int avx2) {
    if (type == EC_FLOAT16) EC_CLONE_OF(ec_widen_half, avx2)(out, (const uint16_t *)from, count);
    else EC_CLONE_OF(ec_widen_bfloat, avx2)(out, (const uint16_t *)from, count);
}

/* `count` float32 at `from`, rounded to a 2-byte `type`. */
EC_INLINE void ec_narrow(void *out, const float *from, int type, int64_t count, int avx2) {
    if (type == EC_FLOAT16) EC_CLONE_OF(ec_narrow_half, avx2)((uint16_t *)out, from, count);
    else EC_CLONE_OF(ec_narrow_bfloat, avx2)((uint16_t *)out, from, count);
}

#endif
