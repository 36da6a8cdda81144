/* Replays a trace of accesses, one key at a time, through the planner's own cache and policy. */
#ifndef EC_SIMULATE_H
#define EC_SIMULATE_H

#include <stdint.h>

#include "ec_cache.h"

/* Hits of the trace in a cache of `capacity` slots, or EC_NOMEM. O(1) an access. */
static int64_t ec_simulate(const int64_t *keys, int64_t n, int64_t capacity, uint64_t seed) {
    ec_cache cache;
    int64_t hits = 0;
    if (ec_cache_init(&cache, capacity, seed) != EC_OK) return EC_NOMEM;
    if (ec_index_reserve(&cache.index, capacity) != EC_OK) {
        ec_cache_free(&cache);
        return EC_NOMEM;
    }
    for (int64_t i = 0; i < n; i++) {
        if (i + 16 < n) ec_index_prefetch(&cache.index, ec_hash(keys[i + 16]));
        const uint64_t hash = ec_hash(keys[i]);
        int64_t slot = ec_index_find(&cache.index, keys[i], hash);
        if (slot >= 0) {
            hits++;
        } else {
            uint32_t cursor = EC_NO_SLOT;
            slot = ec_cache_take(&cache, keys[i], hash, 0, &cursor).slot;
            ec_cache_unpin(&cache, (uint32_t)slot);
        }
        ec_cache_touch(&cache, (uint32_t)slot, i + 1, 0);
    }
    ec_cache_free(&cache);
    return hits;
}

#endif
