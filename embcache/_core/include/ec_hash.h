/* The one hash of embcache: XXH3-64, and the mixes derived from it.
 *
 * ec_hash(key) is XXH3-64 (seed 0) of the key's 8 little-endian bytes. It is a bijection of the 64-bit keys, so equal
 * hashes mean equal keys. Owner rank and vshard come from its top 12 bits; bucket choice uses ec_mix, which stirs in
 * a per-table seed so that keys crafted to share their XXH3 bits do not share buckets.
 *
 * The algorithm is that of the xxHash project (Yann Collet, BSD-2), written here from its specification, version 0.8;
 * golden tests compare it with the reference package for every length class.
 */
#ifndef EC_HASH_H
#define EC_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "embcache supports little-endian machines only"
#endif

#define EC_VSHARD_BITS 12
#define EC_VSHARDS (1 << EC_VSHARD_BITS)

#define EC_P32_1 0x9E3779B1u
#define EC_P32_2 0x85EBCA77u
#define EC_P32_3 0xC2B2AE3Du
#define EC_P64_1 0x9E3779B185EBCA87ull
#define EC_P64_2 0xC2B2AE3D27D4EB4Full
#define EC_P64_3 0x165667B19E3779F9ull
#define EC_P64_4 0x85EBCA77C2B2AE63ull
#define EC_P64_5 0x27D4EB2F165667C5ull
#define EC_PRIME_MX1 0x165667919E3779F9ull
#define EC_PRIME_MX2 0x9FB21C651E98DF25ull

static const unsigned char EC_XXH3_SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
    0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3,
    0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8,
    0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa,
    0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b,
    0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,
    0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t ec_rotl64(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static inline uint32_t ec_load32(const void *at) { uint32_t v; memcpy(&v, at, 4); return v; }
static inline uint64_t ec_load64(const void *at) { uint64_t v; memcpy(&v, at, 8); return v; }

static inline uint64_t ec_fold128(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t ec_rrmxmx(uint64_t h, uint64_t length)
{
    h ^= ec_rotl64(h, 49) ^ ec_rotl64(h, 24);
    h *= EC_PRIME_MX2;
    h ^= (h >> 35) + length;
    h *= EC_PRIME_MX2;
    return h ^ (h >> 28);
}

/* Canonical hash of a key. */
static inline uint64_t ec_hash(int64_t key)
{
    uint64_t x = (uint64_t)key;
    uint64_t bitflip = ec_load64(EC_XXH3_SECRET + 8) ^ ec_load64(EC_XXH3_SECRET + 16);
    return ec_rrmxmx(ec_rotl64(x, 32) ^ bitflip, 8);
}

static inline uint32_t ec_vshard(uint64_t hash) { return (uint32_t)(hash >> (64 - EC_VSHARD_BITS)); }

/* What chooses the bucket, by its top bits: under an unknown seed, keys crafted from the hash spread like any others. A
 * product of 128 bits folded and multiplied again (two products modulo 2^64 with a shift between them let hashes that
 * differ in their top bits only pile up: a mean probe of 1.66 buckets for 1.22). */
static inline uint64_t ec_mix(uint64_t hash, uint64_t seed) { return ec_fold128(hash ^ seed, EC_P64_1) * EC_PRIME_MX2; }

/* The finalizer of SplitMix64 (Steele, Lea, Flood 2014): the counter-based generator of initial values. */
static inline uint64_t ec_splitmix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* ------------------------------------------------------------------------------------- XXH3-64 of any bytes and seed */

static inline uint64_t ec_xxh64_avalanche(uint64_t h)
{
    h ^= h >> 33;
    h *= EC_P64_2;
    h ^= h >> 29;
    h *= EC_P64_3;
    return h ^ (h >> 32);
}

static inline uint64_t ec_xxh3_avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= EC_PRIME_MX1;
    return h ^ (h >> 32);
}

static inline uint64_t ec_xxh3_mix16(const unsigned char *in, const unsigned char *secret, uint64_t seed)
{
    return ec_fold128(ec_load64(in) ^ (ec_load64(secret) + seed), ec_load64(in + 8) ^ (ec_load64(secret + 8) - seed));
}

static inline void ec_xxh3_stripe(uint64_t acc[8], const unsigned char *in, const unsigned char *secret)
{
    for (int lane = 0; lane < 8; ++lane) {
        uint64_t value = ec_load64(in + 8 * lane);
        uint64_t keyed = value ^ ec_load64(secret + 8 * lane);
        acc[lane ^ 1] += value;
        acc[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

static uint64_t ec_xxh3_long(const unsigned char *in, size_t length, uint64_t seed)
{
    enum { STRIPE = 64, STRIPES_PER_BLOCK = (192 - STRIPE) / 8 };
    const size_t block = (size_t)STRIPE * STRIPES_PER_BLOCK;
    unsigned char secret[192];
    for (int i = 0; i < 192; i += 16) {
        uint64_t low = ec_load64(EC_XXH3_SECRET + i) + seed;
        uint64_t high = ec_load64(EC_XXH3_SECRET + i + 8) - seed;
        memcpy(secret + i, &low, 8);
        memcpy(secret + i + 8, &high, 8);
    }
    uint64_t acc[8] = {EC_P32_3, EC_P64_1, EC_P64_2, EC_P64_3, EC_P64_4, EC_P32_2, EC_P64_5, EC_P32_1};
    const size_t blocks = (length - 1) / block;
    for (size_t b = 0; b < blocks; ++b) {
        for (int s = 0; s < STRIPES_PER_BLOCK; ++s)
            ec_xxh3_stripe(acc, in + b * block + (size_t)s * STRIPE, secret + 8 * s);
        for (int lane = 0; lane < 8; ++lane) {
            acc[lane] ^= acc[lane] >> 47;
            acc[lane] ^= ec_load64(secret + 192 - STRIPE + 8 * lane);
            acc[lane] *= EC_P32_1;
        }
    }
    const size_t stripes = (length - 1 - block * blocks) / STRIPE;
    for (size_t s = 0; s < stripes; ++s)
        ec_xxh3_stripe(acc, in + blocks * block + s * STRIPE, secret + 8 * s);
    ec_xxh3_stripe(acc, in + length - STRIPE, secret + 192 - STRIPE - 7);

    uint64_t h = (uint64_t)length * EC_P64_1;
    for (int i = 0; i < 4; ++i)
        h += ec_fold128(acc[2 * i] ^ ec_load64(secret + 11 + 16 * i), acc[2 * i + 1] ^ ec_load64(secret + 11 + 16 * i + 8));
    return ec_xxh3_avalanche(h);
}

static uint64_t ec_xxh3(const void *bytes, size_t length, uint64_t seed)
{
    const unsigned char *in = (const unsigned char *)bytes;
    const unsigned char *secret = EC_XXH3_SECRET;
    if (length == 0)
        return ec_xxh64_avalanche(seed ^ ec_load64(secret + 56) ^ ec_load64(secret + 64));
    if (length <= 3) {
        uint32_t combined = ((uint32_t)in[0] << 16) | ((uint32_t)in[length >> 1] << 24) | in[length - 1] | ((uint32_t)length << 8);
        uint64_t flip = (uint64_t)(ec_load32(secret) ^ ec_load32(secret + 4)) + seed;
        return ec_xxh64_avalanche(combined ^ flip);
    }
    if (length <= 8) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t flip = (ec_load64(secret + 8) ^ ec_load64(secret + 16)) - seed;
        uint64_t value = ec_load32(in + length - 4) + ((uint64_t)ec_load32(in) << 32);
        return ec_rrmxmx(value ^ flip, length);
    }
    if (length <= 16) {
        uint64_t flip1 = (ec_load64(secret + 24) ^ ec_load64(secret + 32)) + seed;
        uint64_t flip2 = (ec_load64(secret + 40) ^ ec_load64(secret + 48)) - seed;
        uint64_t low = ec_load64(in) ^ flip1;
        uint64_t high = ec_load64(in + length - 8) ^ flip2;
        return ec_xxh3_avalanche(length + __builtin_bswap64(low) + high + ec_fold128(low, high));
    }
    if (length <= 128) {
        uint64_t h = length * EC_P64_1;
        for (int i = (int)((length - 1) / 32); i >= 0; --i) {
            h += ec_xxh3_mix16(in + 16 * i, secret + 32 * i, seed);
            h += ec_xxh3_mix16(in + length - 16 * (i + 1), secret + 32 * i + 16, seed);
        }
        return ec_xxh3_avalanche(h);
    }
    if (length <= 240) {
        uint64_t h = length * EC_P64_1;
        for (int i = 0; i < 8; ++i)
            h += ec_xxh3_mix16(in + 16 * i, secret + 16 * i, seed);
        h = ec_xxh3_avalanche(h);
        for (int i = 8; i < (int)(length / 16); ++i)
            h += ec_xxh3_mix16(in + 16 * i, secret + 16 * (i - 8) + 3, seed);
        h += ec_xxh3_mix16(in + length - 16, secret + 136 - 17, seed);
        return ec_xxh3_avalanche(h);
    }
    return ec_xxh3_long(in, length, seed);
}

#endif
