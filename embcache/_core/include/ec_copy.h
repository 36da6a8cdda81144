/* Rows at known addresses, copied one after the other into one output.
 *
 * The loop holds nothing but prefetches, loads and stores, so that the processor's own window reaches over several rows.
 * Where rows lie in far more memory than the TLB covers this is worth more than any prefetch distance: with the search
 * for the row in the same loop, look-ups of 256-byte rows among 5 M took 1.6 times as long.
 */
#ifndef EC_COPY_H
#define EC_COPY_H

#include <stdint.h>
#include <string.h>

#include "ec_isa.h"
#include "ec_status.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

#define EC_COPY_LINES 8 /* cache lines of a row that are prefetched; the hardware follows from there */

/* Asks for the first lines of `bytes` bytes, EC_COPY_LINES at the most. Without a loop: the fewer instructions between
 * prefetches that miss the TLB, the more of them are served at the same time. */
EC_INLINE void ec_copy_prefetch(const void *row, int64_t bytes)
{
    const char *at = (const char *)row;
    switch (bytes > 64 * (EC_COPY_LINES - 1) ? EC_COPY_LINES : (int)((bytes + 63) / 64)) {
        case 8: EC_PREFETCH_READ(at + 448); /* fall through */
        case 7: EC_PREFETCH_READ(at + 384); /* fall through */
        case 6: EC_PREFETCH_READ(at + 320); /* fall through */
        case 5: EC_PREFETCH_READ(at + 256); /* fall through */
        case 4: EC_PREFETCH_READ(at + 192); /* fall through */
        case 3: EC_PREFETCH_READ(at + 128); /* fall through */
        case 2: EC_PREFETCH_READ(at + 64); /* fall through */
        case 1: EC_PREFETCH_READ(at);
    }
}

/* Rows between the prefetch and the copy: some 32 lines, which is what the memory system keeps in flight. */
static inline int64_t ec_copy_ahead(int64_t bytes) { return bytes <= 128 ? 16 : bytes <= 256 ? 8 : 6; }

#if EC_HAS_AVX2_CLONE
/* bytes and `to` are multiples of 32. */
EC_INLINE EC_TARGET_AVX2 void ec_copy_rows_of(const char *const *from, int64_t n, const int64_t bytes, char *to, const int stream)
{
    const int64_t ahead = ec_copy_ahead(bytes);
    for (int64_t i = 0; i < n; ++i, to += bytes) {
        ec_copy_prefetch(from[i + ahead < n ? i + ahead : n - 1], bytes);
        const char *row = from[i];
        for (int64_t at = 0; at < bytes; at += 32)
            if (stream)
                _mm256_stream_si256((__m256i *)(to + at), _mm256_loadu_si256((const __m256i *)(row + at)));
            else
                _mm256_storeu_si256((__m256i *)(to + at), _mm256_loadu_si256((const __m256i *)(row + at)));
    }
    if (stream)
        _mm_sfence();
}

/* The common sizes have a loop of their own, without a branch inside a row: with loops over its lines, look-ups of 256-byte
 * rows took 1.5 times as long. */
EC_TARGET_AVX2 static void ec_copy_rows_avx2(const char *const *from, int64_t n, int64_t bytes, char *to, int stream)
{
#define EC_COPY_SIZE(size)                              \
    case size:                                          \
        if (stream)                                     \
            ec_copy_rows_of(from, n, size, to, 1);      \
        else                                            \
            ec_copy_rows_of(from, n, size, to, 0);      \
        return;
    switch (bytes) {
        EC_COPY_SIZE(32)
        EC_COPY_SIZE(64)
        EC_COPY_SIZE(128)
        EC_COPY_SIZE(256)
        EC_COPY_SIZE(512)
    }
#undef EC_COPY_SIZE
    if (stream)
        ec_copy_rows_of(from, n, bytes, to, 1);
    else
        ec_copy_rows_of(from, n, bytes, to, 0);
}
#endif

/* to[i] = the `bytes` bytes at from[i]. With `stream`, written past the caches where the alignment allows it. */
static void ec_copy_rows(const char *const *from, int64_t n, int64_t bytes, char *to, int stream)
{
#if EC_HAS_AVX2_CLONE
    if (bytes % 32 == 0 && ec_cpu_has_avx2()) {
        ec_copy_rows_avx2(from, n, bytes, to, stream && ((uintptr_t)to & 31) == 0);
        return;
    }
#endif
    (void)stream;
    const int64_t ahead = ec_copy_ahead(bytes);
    for (int64_t i = 0; i < n; ++i, to += bytes) {
        ec_copy_prefetch(from[i + ahead < n ? i + ahead : n - 1], bytes);
        memcpy(to, from[i], (size_t)bytes);
    }
}

#endif
