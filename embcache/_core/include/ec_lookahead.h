/* Replays a trace under a policy that knows the next accesses: the victim is the key whose next use is farthest.
 *
 * Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966, seen
 * through a window of the next accesses: keys that are not used in the window go first, the least recently used of them
 * in front. So a window of 0 is LRU, and one over the whole trace hits as often as is possible at all.
 */
#ifndef EC_LOOKAHEAD_H
#define EC_LOOKAHEAD_H

#include <stdint.h>
#include <string.h>

#include "ec_index.h"
#include "ec_queues.h"
#include "ec_slotset.h"

#define EC_LOOKAHEAD_MOST 0xFFFFFFF0 /* accesses of a trace */
#define EC_NEVER UINT32_MAX

typedef struct {
    const int64_t *keys;
    int64_t n, window;
    ec_block next_block, held_block, seats_block;
    uint32_t *next;    /* of an access: the next one of its key, or EC_NEVER */
    int64_t *held;     /* key of a slot */
    ec_seat *seats;
    ec_queues outside; /* list 0: slots whose key is not used in the window, the least recently used first */
    ec_slotset inside; /* next uses in the window, counted from the end of the trace: the smallest is the farthest */
    ec_index index;    /* key -> slot */
} ec_lookahead;

static void ec_lookahead_free(ec_lookahead *l) {
    ec_block_drop(&l->next_block);
    ec_block_drop(&l->held_block);
    ec_block_drop(&l->seats_block);
    ec_queues_free(&l->outside);
    ec_slotset_free(&l->inside);
    ec_index_free(&l->index);
}

static int ec_lookahead_init(ec_lookahead *l, const int64_t *keys, int64_t n, int64_t capacity, int64_t window, uint64_t seed) {
    memset(l, 0, sizeof *l);
    l->keys = keys;
    l->n = n;
    l->window = window;
    ec_index_init(&l->index, seed);
    if (ec_block_take(&l->next_block, (size_t)n * sizeof(uint32_t)) || ec_block_take(&l->held_block, (size_t)capacity * sizeof(int64_t)) ||
        ec_block_take(&l->seats_block, (size_t)capacity * sizeof(ec_seat)) || ec_queues_init(&l->outside, capacity) ||
        ec_slotset_init(&l->inside, n))
        return EC_NOMEM;
    l->next = (uint32_t *)l->next_block.data;
    l->held = (int64_t *)l->held_block.data;
    l->seats = (ec_seat *)l->seats_block.data;
    for (int64_t i = n - 1; i >= 0; i--) { /* the index serves as key -> access before it serves as key -> slot */
        const uint64_t hash = ec_hash(keys[i]);
        const int64_t later = ec_index_find(&l->index, keys[i], hash);
        l->next[i] = later < 0 ? EC_NEVER : (uint32_t)later;
        if (later >= 0) {
            ec_index_set(&l->index, keys[i], hash, (uint32_t)i);
        } else {
            if (ec_index_reserve(&l->index, 1) != EC_OK) return EC_NOMEM;
            ec_index_insert(&l->index, keys[i], hash, (uint32_t)i);
        }
    }
    ec_index_free(&l->index);
    ec_index_init(&l->index, seed);
    return ec_index_reserve(&l->index, capacity);
}

/* Access i has used `slot`. */
static inline void ec_lookahead_use(ec_lookahead *l, uint32_t slot, int64_t i) {
    ec_standing *it = &l->seats[slot].standing;
    const int64_t next = l->next[i];
    it->version = (uint64_t)i + 1;
    it->list = next != EC_NEVER && next - i <= l->window; /* whether it is inside */
    if (it->list) ec_slotset_add(&l->inside, (uint32_t)(l->n - 1 - next));
    else ec_queues_append(&l->outside, slot, 0);
}

/* The slot of the victim, which leaves. */
static inline uint32_t ec_lookahead_victim(ec_lookahead *l) {
    uint32_t slot = l->outside.head[0];
    if (slot != EC_NO_SLOT) {
        ec_queues_unlink(&l->outside, slot, 0);
    } else {
        const uint32_t farthest = ec_slotset_first(&l->inside);
        const int64_t key = l->keys[l->n - 1 - farthest];
        ec_slotset_remove(&l->inside, farthest);
        slot = (uint32_t)ec_index_find(&l->index, key, ec_hash(key));
    }
    ec_index_erase(&l->index, l->held[slot], ec_hash(l->held[slot]));
    return slot;
}

/* Hits of the trace of at most EC_LOOKAHEAD_MOST accesses in a cache of `capacity` slots, `window` accesses being known
 * at each time; or EC_NOMEM. O(1) an access. */
static int64_t ec_simulate_lookahead(const int64_t *keys, int64_t n, int64_t capacity, int64_t window, uint64_t seed) {
    ec_lookahead l;
    int64_t hits = 0, used = 0;
    int status = ec_lookahead_init(&l, keys, n, capacity, window, seed);
    for (int64_t i = 0; status == EC_OK && i < n; i++) {
        const uint64_t hash = ec_hash(keys[i]);
        int64_t slot;
        if (window > 0 && window < n - i) { /* one more access comes into view */
            slot = ec_index_find(&l.index, keys[i + window], ec_hash(keys[i + window]));
            if (slot >= 0 && !l.seats[slot].standing.list) {
                ec_queues_unlink(&l.outside, (uint32_t)slot, 0);
                l.seats[slot].standing.list = 1;
                ec_slotset_add(&l.inside, (uint32_t)(n - 1 - (i + window)));
            }
        }
        slot = ec_index_find(&l.index, keys[i], hash);
        if (slot >= 0) {
            hits++;
            if (l.seats[slot].standing.list) ec_slotset_remove(&l.inside, (uint32_t)(n - 1 - i));
            else ec_queues_unlink(&l.outside, (uint32_t)slot, 0);
        } else {
            slot = used < capacity ? used++ : ec_lookahead_victim(&l);
            l.held[slot] = keys[i];
            ec_index_insert(&l.index, keys[i], hash, (uint32_t)slot);
        }
        ec_lookahead_use(&l, (uint32_t)slot, i);
    }
    ec_lookahead_free(&l);
    return status == EC_OK ? hits : EC_NOMEM;
}

#endif
