/* Replays a trace of accesses, one key at a time, through the planner's own cache and policies. */
#ifndef EC_SIMULATE_H
#define EC_SIMULATE_H

#include <stdint.h>

#include "ec_cache.h"

/* One access: 1 for a hit, 0 for a miss, or EC_NOMEM. */
static inline int ec_simulate_access(ec_cache *c, int64_t key, ec_choice *choice) {
    const uint64_t hash = ec_hash(key);
    int64_t slot = ec_index_find(&c->index, key, hash);
    const int hit = slot >= 0;
    if (!hit) {
        uint32_t victim = EC_NO_SLOT;
        choice->stood.size = choice->ghosts.size = 0; /* nothing is taken back here */
        if (ec_policy_choose(&c->policy, c->seats, c->slots, 0, c->free.count == 0, 1, &victim, choice) != EC_OK) return EC_NOMEM;
        if (victim == EC_NO_SLOT) {
            slot = ec_cache_take(c, key, hash, 0, choice).slot;
        } else {
            const int64_t gone = ec_cache_displace(c, victim, key, 0).before.key;
            ec_index_erase(&c->index, gone, ec_hash(gone));
            ec_index_insert(&c->index, key, hash, victim);
            ec_cache_arrive(c, victim, key, hash, choice);
            slot = victim;
        }
        ec_cache_unpin(c, (uint32_t)slot);
    }
    ec_policy_touch(&c->policy, c->seats, (uint32_t)slot);
    return hit;
}

/* Hits of the trace in a cache of `capacity` slots, or EC_NOMEM. O(1) an access, amortized. */
static int64_t ec_simulate(const int64_t *keys, int64_t n, int64_t capacity, int policy, uint64_t seed) {
    ec_cache cache;
    ec_choice choice;
    memset(&choice, 0, sizeof choice);
    if (ec_cache_init(&cache, capacity, policy, seed) != EC_OK) return EC_NOMEM;
    int64_t hits = 0;
    int status = ec_index_reserve(&cache.index, capacity);
    for (int64_t i = 0; status == EC_OK && i < n; i++) {
        if (i + 16 < n) ec_index_prefetch(&cache.index, ec_hash(keys[i + 16]));
        const int hit = ec_simulate_access(&cache, keys[i], &choice);
        if (hit < 0) status = hit;
        else hits += hit;
    }
    ec_choice_free(&choice);
    ec_cache_free(&cache);
    return status == EC_OK ? hits : EC_NOMEM;
}

#endif
