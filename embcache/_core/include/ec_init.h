/* Initial values: a pure function of (base, key, element), where base stands for (table name, seed).
 *
 * A counter-based generator: word i of a key is splitmix(stream + (i + 1) * golden) with stream = splitmix(hash(key) ^
 * base), so nothing depends on threads, ranks or order (promise I8). Only IEEE basic operations are used (+ - * / and
 * sqrt, correctly rounded), never libm's transcendentals and never a fused multiply-add (-ffp-contract=off), so every
 * CPU gives the same bits. The tests hold a NumPy twin of each rule.
 *
 *   uniform     low + (high - low) * u in float32, u = 24 bits of half a word; a value that rounds to high or beyond
 *               becomes the float32 just below high.
 *   normal      mean + std * z in float32; z = float32 of the inverse normal distribution (P. J. Acklam's rational
 *               approximation, relative error 1.2e-9, in float64) at (k + 1/2) / 2^52, k = 52 bits of a word.
 *   truncated   the first z with |z| < 2 among words element, element + 2^32, ...; after 64 refusals (chance 1e-86), 0.
 *   ramp        start + (stop - start) * (j / dim) in float32.
 */
#ifndef EC_INIT_H
#define EC_INIT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ec_hash.h"
#include "ec_isa.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

enum { EC_INIT_CONSTANT = 0, EC_INIT_UNIFORM = 1, EC_INIT_NORMAL = 2, EC_INIT_TRUNCATED = 3, EC_INIT_RAMP = 4 };

#define EC_GOLDEN 0x9E3779B97F4A7C15ull
#define EC_TRUNCATED_TRIES 64

typedef struct ec_init {
    uint64_t base;
    float a; /* constant; low; mean; start */
    float b; /* high; std; stop */
    int kind;
} ec_init;

static inline uint64_t ec_init_word(uint64_t stream, uint64_t counter) { return ec_splitmix(stream + (counter + 1) * EC_GOLDEN); }

/* Natural logarithm of a normal, positive double by basic operations: x = m * 2^e, log m = 2 atanh((m - 1) / (m + 1)). */
static inline double ec_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m = m * 0.5;
        exponent += 1;
    }
    double s = (m - 1.0) / (m + 1.0);
    double t = s * s;
    double sum = 1.0 / 21.0;
    for (int odd = 19; odd >= 1; odd -= 2)
        sum = sum * t + 1.0 / (double)odd;
    return 2.0 * (s * sum) + (double)exponent * 0.6931471805599453;
}

/* Inverse of the standard normal distribution for 0 < p < 1. */
static inline double ec_probit(double p)
{
    static const double a[6] = {-3.969683028665376e+01, 2.209460984245205e+02, -2.759285104469687e+02,
                                1.383577518672690e+02, -3.066479806614716e+01, 2.506628277459239e+00};
    static const double b[5] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02,
                                6.680131188771972e+01, -1.328068155288572e+01};
    static const double c[6] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                                -2.549732539343734e+00, 4.374664141464968e+00, 2.938163982698783e+00};
    static const double d[4] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00};
    const double edge = 0.02425;
    if (p < edge || p > 1.0 - edge) {
        double tail = p < edge ? p : 1.0 - p;
        double q = sqrt(-2.0 * ec_log(tail));
        double up = ((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5];
        double down = (((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1.0;
        return p < edge ? up / down : -(up / down);
    }
    double q = p - 0.5;
    double r = q * q;
    double up = (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q;
    double down = ((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1.0;
    return up / down;
}

static inline double ec_init_gauss(uint64_t word) { return ec_probit(((double)(word >> 12) + 0.5) * 0x1p-52); }

/* The largest float32 below x, which is finite and not the lowest. */
static inline float ec_float_below(float x)
{
    uint32_t bits;
    if (x == 0.0f)
        return -0x1p-149f;
    memcpy(&bits, &x, 4);
    bits += x > 0.0f ? -1u : 1u;
    memcpy(&x, &bits, 4);
    return x;
}

static void ec_init_uniform(uint64_t stream, float a, float span, float top, float *out, int64_t from, int64_t dim)
{
    for (int64_t j = from; j < dim; ++j) {
        uint64_t word = ec_init_word(stream, (uint64_t)j >> 1);
        uint32_t half = (uint32_t)(j & 1 ? word >> 32 : word);
        float value = a + span * ((float)(half >> 8) * 0x1p-24f);
        out[j] = value < top ? value : top;
    }
}

#if EC_HAS_AVX2_CLONE
#define EC_INIT_TOGETHER 4 /* vectors of eight elements */
#define EC_INIT_SPAN_MIN 0x1p-100f

/* x * m modulo 2^64 in four lanes: a 64-bit product of the low halves, and 32-bit ones of each low half with the other's high. */
EC_TARGET_AVX2 static inline __m256i ec_mul64(__m256i x, uint64_t m)
{
    const __m256i crossed = _mm256_mullo_epi32(x, _mm256_set1_epi64x((int64_t)(m << 32 | m >> 32)));
    const __m256i high = _mm256_and_si256(crossed, _mm256_set1_epi64x((int64_t)0xFFFFFFFF00000000ull));
    const __m256i low = _mm256_mul_epu32(x, _mm256_set1_epi64x((int64_t)m));
    return _mm256_add_epi64(_mm256_add_epi64(low, _mm256_slli_epi64(crossed, 32)), high);
}

/* `count` vectors from `at` on. Step by step for all of them: one after the other, the chain of some 30 instructions that makes
 * one vector leaves the processor's schedulers no room for the next (41 ns a row of 64, together 27). */
EC_INLINE EC_TARGET_AVX2 void ec_init_vectors(__m256i at, const int count, float a, float scale, float top, float *out)
{
    __m256i x[EC_INIT_TOGETHER];
    for (int k = 0; k < count; ++k, at = _mm256_add_epi64(at, _mm256_set1_epi64x((int64_t)(4 * EC_GOLDEN))))
        x[k] = _mm256_xor_si256(at, _mm256_srli_epi64(at, 30));
    for (int k = 0; k < count; ++k)
        x[k] = ec_mul64(x[k], 0xBF58476D1CE4E5B9ull);
    for (int k = 0; k < count; ++k)
        x[k] = _mm256_xor_si256(x[k], _mm256_srli_epi64(x[k], 27));
    for (int k = 0; k < count; ++k)
        x[k] = ec_mul64(x[k], 0x94D049BB133111EBull);
    for (int k = 0; k < count; ++k)
        x[k] = _mm256_srli_epi32(_mm256_xor_si256(x[k], _mm256_srli_epi64(x[k], 31)), 8);
    for (int k = 0; k < count; ++k) {
        const __m256 value = _mm256_add_ps(_mm256_set1_ps(a), _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(x[k])));
        _mm256_storeu_ps(out + 8 * k, _mm256_min_ps(value, _mm256_set1_ps(top)));
    }
}

/* The same bits, eight elements (four words) in a vector. span * 2^-24 is exact, so it may come before the product. */
EC_TARGET_AVX2 static void ec_init_uniform_avx2(uint64_t stream, float a, float span, float top, float *out, int64_t dim)
{
    const float scale = span * 0x1p-24f;
    const __m256i step = _mm256_set1_epi64x((int64_t)(4 * EC_GOLDEN));
    const __m256i jump = _mm256_set1_epi64x((int64_t)(EC_INIT_TOGETHER * 4 * EC_GOLDEN));
    __m256i at = _mm256_set_epi64x((int64_t)(4 * EC_GOLDEN), (int64_t)(3 * EC_GOLDEN), (int64_t)(2 * EC_GOLDEN), (int64_t)EC_GOLDEN);
    int64_t j = 0;
    at = _mm256_add_epi64(at, _mm256_set1_epi64x((int64_t)stream));
    for (; j + 8 * EC_INIT_TOGETHER <= dim; j += 8 * EC_INIT_TOGETHER, at = _mm256_add_epi64(at, jump))
        ec_init_vectors(at, EC_INIT_TOGETHER, a, scale, top, out + j);
    for (; j + 8 <= dim; j += 8, at = _mm256_add_epi64(at, step))
        ec_init_vectors(at, 1, a, scale, top, out + j);
    ec_init_uniform(stream, a, span, top, out, j, dim);
}
#endif

/* Write the `dim` initial weights of the key whose hash is given. */
static void ec_init_row(const ec_init *init, uint64_t hash, float *out, int64_t dim)
{
    const uint64_t stream = ec_splitmix(hash ^ init->base);
    const float a = init->a, b = init->b;
    switch (init->kind) {
    case EC_INIT_UNIFORM: {
        const float span = b - a;
        const float top = a < b ? ec_float_below(b) : a;
#if EC_HAS_AVX2_CLONE
        if (dim >= 8 && span >= EC_INIT_SPAN_MIN && ec_cpu_has_avx2()) {
            ec_init_uniform_avx2(stream, a, span, top, out, dim);
            break;
        }
#endif
        ec_init_uniform(stream, a, span, top, out, 0, dim);
        break;
    }
    case EC_INIT_NORMAL:
        for (int64_t j = 0; j < dim; ++j)
            out[j] = a + b * (float)ec_init_gauss(ec_init_word(stream, (uint64_t)j));
        break;
    case EC_INIT_TRUNCATED:
        for (int64_t j = 0; j < dim; ++j) {
            double z = 0.0;
            for (uint64_t attempt = 0; attempt < EC_TRUNCATED_TRIES; ++attempt) {
                double drawn = ec_init_gauss(ec_init_word(stream, (uint64_t)j + (attempt << 32)));
                if (drawn > -2.0 && drawn < 2.0) {
                    z = drawn;
                    break;
                }
            }
            out[j] = a + b * (float)z;
        }
        break;
    case EC_INIT_RAMP: {
        const float span = b - a;
        for (int64_t j = 0; j < dim; ++j)
            out[j] = a + span * ((float)j / (float)dim);
        break;
    }
    default:
        for (int64_t j = 0; j < dim; ++j)
            out[j] = a;
    }
}

#endif
