// What the memory system itself allows: the same accesses with every address known beforehand. Nothing here hashes.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

template <class Work>
static void split(int64_t n, int64_t threads, Work work)
{
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t)
        others.emplace_back(work, n * t / threads, n * (t + 1) / threads);
    work(0, n / (threads > 1 ? threads : 1));
    for (auto &other : others)
        other.join();
}

extern "C" {

// An anonymous mapping, advised to be huge pages and written once. NULL if refused. `bytes` is rounded up.
void *huge_new(int64_t bytes)
{
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return nullptr;
    madvise(data, bytes, MADV_HUGEPAGE);
    memset(data, 1, bytes);
    return data;
}

void huge_delete(void *data, int64_t bytes) { munmap(data, bytes); }

// A fresh mapping, one memset: the least that filling this much new memory takes.
void fresh_memset(int64_t bytes)
{
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(data, bytes, MADV_HUGEPAGE);
    memset(data, 1, bytes);
    munmap(data, bytes);
}

// One 64-byte line a key, prefetched 16 ahead.
void lines_read(const char *lines, const int64_t *at, int64_t n, int64_t *out, int64_t threads)
{
    split(n, threads, [=](int64_t from, int64_t to) {
        const int64_t last = to - 1;
        for (int64_t i = from; i < to; ++i) {
            __builtin_prefetch(lines + 64 * at[std::min(i + 16, last)]);
            out[i] = *reinterpret_cast<const int64_t *>(lines + 64 * at[i]);
        }
    });
}

// One 64-byte line to read and 16 bytes of another to write a key: what a planner touches that finds each key and notes its use.
void lines_and_seats(const char *lines, const int64_t *at, char *seats, const int64_t *seat, int64_t n)
{
    const int64_t last = n - 1;
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        __builtin_prefetch(lines + 64 * at[std::min(i + 48, last)]);
        __builtin_prefetch(seats + 16 * seat[std::min(i + 24, last)], 1, 3);
        sum += *reinterpret_cast<const int64_t *>(lines + 64 * at[i]);
        *reinterpret_cast<int64_t *>(seats + 16 * seat[i]) += 1;
    }
    asm volatile("" ::"r"(sum));
}

// Rows of known addresses to one place after another: prefetched, written past the caches. dim must be a multiple of 8.
void rows_copy(const float *rows, const int64_t *at, int64_t n, int64_t dim, float *out, int64_t threads)
{
    const int64_t ahead = dim <= 32 ? 16 : dim <= 64 ? 8 : 6;
    split(n, threads, [=](int64_t from, int64_t to) {
        const int64_t last = to - 1;
        for (int64_t i = from; i < to; ++i) {
            const float *later = rows + at[std::min(i + ahead, last)] * dim;
            for (int64_t c = 0; c < dim; c += 16)
                __builtin_prefetch(later + c);
            const float *row = rows + at[i] * dim;
            for (int64_t c = 0; c < dim; c += 8)
                _mm256_stream_ps(out + i * dim + c, _mm256_loadu_ps(row + c));
        }
        _mm_sfence();
    });
}
}
