// Hash maps of C++ libraries, doing our batch work on the same arrays. Compiled by the bench, once for each map:
// -DMAP_BOOST, -DMAP_ROBIN or -DMAP_ABSL; with -DHUGE_PAGES the map's memory is advised to be huge pages, as ours is.
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <thread>
#include <utility>
#include <vector>

// Allocations from 2 MiB on: an anonymous mapping, aligned and advised. Smaller ones: the usual place.
template <class T>
struct HugeAllocator {
    using value_type = T;
    HugeAllocator() = default;
    template <class U>
    HugeAllocator(const HugeAllocator<U> &) {}
    static constexpr size_t kHuge = size_t(2) << 20;
    static size_t span(size_t n) { return (n * sizeof(T) + kHuge - 1) / kHuge * kHuge + kHuge; }
    T *allocate(size_t n)
    {
        if (n * sizeof(T) < kHuge)
            return static_cast<T *>(::operator new(n * sizeof(T), std::align_val_t(64)));
        char *base = static_cast<char *>(mmap(nullptr, span(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base == MAP_FAILED)
            throw std::bad_alloc();
        // Always behind `base`, by a page at least: the gap's end keeps the start of the mapping for deallocate.
        char *data = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(base) + kHuge) / kHuge * kHuge);
        madvise(data, n * sizeof(T), MADV_HUGEPAGE);
        reinterpret_cast<char **>(data)[-1] = base;
        return reinterpret_cast<T *>(data);
    }
    void deallocate(T *data, size_t n)
    {
        if (n * sizeof(T) < kHuge)
            ::operator delete(data, std::align_val_t(64));
        else
            munmap(reinterpret_cast<char **>(data)[-1], span(n));
    }
    template <class U>
    bool operator==(const HugeAllocator<U> &) const { return true; }
    template <class U>
    bool operator!=(const HugeAllocator<U> &) const { return false; }
};

using Pair = std::pair<const int64_t, int64_t>;
#ifdef HUGE_PAGES
template <class T>
using Memory = HugeAllocator<T>;
#else
template <class T>
using Memory = std::allocator<T>;
#endif

#if defined(MAP_BOOST)
#include <boost/unordered/unordered_flat_map.hpp>
using Map = boost::unordered_flat_map<int64_t, int64_t, boost::hash<int64_t>, std::equal_to<int64_t>, Memory<Pair>>;
#elif defined(MAP_ROBIN)
#include <tsl/robin_map.h>
using Map = tsl::robin_map<int64_t, int64_t, std::hash<int64_t>, std::equal_to<int64_t>, Memory<std::pair<int64_t, int64_t>>>;
#elif defined(MAP_ABSL)
#include <absl/container/flat_hash_map.h>
using Map = absl::flat_hash_map<int64_t, int64_t, absl::Hash<int64_t>, std::equal_to<int64_t>, Memory<Pair>>;
#endif

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

void *map_new() { return new Map(); }

int64_t map_size(void *map) { return int64_t(static_cast<Map *>(map)->size()); }

void map_delete(void *map) { delete static_cast<Map *>(map); }

// The k-th new key gets the value size + k, as a table hands out row indexes.
void map_insert(void *map, const int64_t *keys, int64_t n)
{
    Map &m = *static_cast<Map *>(map);
    for (int64_t i = 0; i < n; ++i)
        m.insert({keys[i], int64_t(m.size())});
}

void map_find(void *map, const int64_t *keys, int64_t n, int64_t *out, int64_t threads)
{
    const Map &m = *static_cast<const Map *>(map);
    split(n, threads, [&](int64_t from, int64_t to) {
        const auto end = m.end();
        for (int64_t i = from; i < to; ++i) {
            const auto at = m.find(keys[i]);
            out[i] = at == end ? -1 : at->second;
        }
    });
}

// Look-up as a plain cache does it: find, then copy the row.
void map_lookup(void *map, const int64_t *keys, int64_t n, const float *rows, int64_t dim, float *out, int64_t threads)
{
    const Map &m = *static_cast<const Map *>(map);
    split(n, threads, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i)
            memcpy(out + i * dim, rows + m.find(keys[i])->second * dim, dim * sizeof(float));
    });
}
}
