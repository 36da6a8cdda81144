/* The slots of one table in HBM: who lives where, who is pinned, which rows are on their way out; and how to undo it.
 *
 * A slot is FREE, LIVE (its key is in `index` and its row may be read or trained there) or LIMBO (its key was evicted by
 * a plan that has not finished, so the row may still be asked for: by cancel(), by an earlier batch that pins the slot,
 * or by evaluation). A limbo slot without pins is in `dying` and may be taken: then its row is written back first.
 *
 * An evicted key's row in the host table stays allocated, unmapped, as long as its ec_limbo has holds: one for the
 * evicting plan until it finishes, one while its slot is pinned, one until a plan that took its slot has
 * finished. With the last hold go the row and, where it is still there, the slot.
 *
 * Invariants: LIVE = in index = with a standing in the policy, which knows the slot as its key's; FREE = in `free`; pins > 0 only where LIVE or LIMBO.
 * Every change has an exact inverse, to be called in reverse order; none of the inverses can fail.
 */
#ifndef EC_CACHE_H
#define EC_CACHE_H

#include <stdint.h>
#include <string.h>

#include "ec_index.h"
#include "ec_policy.h"
#include "ec_slotset.h"
#include "ec_vec.h"

enum { EC_FROM_FREE = 0, EC_FROM_DYING = 1, EC_FROM_VICTIM = 2 };
#define EC_NO_LIMBO UINT32_MAX

/* An evicted key whose row is not given back yet. */
typedef struct {
    int64_t key;
    int64_t row;
    uint32_t slot;  /* EC_NO_SLOT: the row is in the host table, or will be once the taker has written it back */
    uint32_t holds; /* 0: this entry is unused */
} ec_limbo;

typedef struct {
    int64_t capacity;
    ec_index index; /* key -> slot of LIVE slots */
    ec_block slots_block, seats_block, state_block, limbo_of_block;
    ec_slot *slots;
    ec_seat *seats;
    uint8_t *state;
    uint32_t *limbo_of;  /* of LIMBO slots */
    uint64_t *settled;   /* while a save reads beside training a bit a slot, else NULL: what the slot holds needs no copy any more (ec_cut.h) */
    ec_slotset free;
    ec_slotset dying;    /* LIMBO without pins */
    ec_policy policy;
    int64_t live;
    int64_t pinned;      /* slots with pins > 0, LIVE or LIMBO */
    uint32_t period;     /* rises with every save's cut */
    uint32_t since;      /* the one that began with the last cut whose save has succeeded: a slot used from then on holds what no save has */
    ec_vec limbo;        /* of ec_limbo */
    ec_vec limbo_unused; /* of uint32_t, last in first out */
    int64_t limbo_count; /* entries in use */
    void (*row_free)(void *table, int64_t key, int64_t row); /* gives a limbo row back to its table */
    void *table;
} ec_cache;

#define EC_GONE(cache, id) EC_AT((cache)->limbo, ec_limbo, id)

/* ------------------------------------------------------------------------------------------------------------ records */

typedef struct {
    uint32_t slot;
    uint32_t from;  /* EC_FROM_... */
    uint32_t limbo; /* EC_FROM_DYING: entry that waits for the write-back */
    uint32_t period; /* the seat's before */
    ec_slot before;
    int64_t host_freq, host_last; /* EC_FROM_VICTIM with counters: host columns before the merge */
    int64_t unique;               /* which of the table's unique keys came in */
} ec_take_record;

typedef struct {
    uint32_t slot; /* EC_NO_SLOT: the key was not resident */
    uint32_t limbo;
    ec_stood stood;
} ec_kill;

/* ---------------------------------------------------------------------------------------------------------- lifetime */

static inline void ec_cache_free(ec_cache *c) {
    ec_index_free(&c->index);
    ec_block_drop(&c->slots_block);
    ec_block_drop(&c->seats_block);
    ec_block_drop(&c->state_block);
    ec_block_drop(&c->limbo_of_block);
    ec_slotset_free(&c->free);
    ec_slotset_free(&c->dying);
    ec_policy_free(&c->policy);
    ec_vec_free(&c->limbo);
    ec_vec_free(&c->limbo_unused);
    free(c->settled);
    c->settled = NULL;
    c->slots = NULL;
    c->seats = NULL;
    c->state = NULL;
    c->limbo_of = NULL;
    c->capacity = c->live = c->pinned = c->limbo_count = 0;
}

/* An empty cache of `capacity` slots (at most 2^31 - 1), `policy` being EC_LRU, ... On EC_NOMEM nothing is held. */
static inline int ec_cache_init(ec_cache *c, int64_t capacity, int policy, uint64_t seed) {
    memset(c, 0, sizeof *c);
    ec_index_init(&c->index, seed);
    const size_t n = (size_t)capacity;
    if (ec_block_take(&c->slots_block, n * sizeof(ec_slot)) || ec_block_take(&c->seats_block, n * sizeof(ec_seat)) ||
        ec_block_take(&c->state_block, n) || ec_block_take(&c->limbo_of_block, n * sizeof(uint32_t)) ||
        ec_slotset_init(&c->free, capacity) || ec_slotset_init(&c->dying, capacity) ||
        ec_policy_init(&c->policy, policy, capacity, seed)) {
        ec_cache_free(c);
        return EC_NOMEM;
    }
    c->capacity = capacity;
    c->period = c->since = 1; /* seats start with 0 */
    c->slots = (ec_slot *)c->slots_block.data;
    c->seats = (ec_seat *)c->seats_block.data;
    c->state = (uint8_t *)c->state_block.data;
    c->limbo_of = (uint32_t *)c->limbo_of_block.data;
    for (int64_t slot = 0; slot < capacity; slot++) ec_slotset_add(&c->free, (uint32_t)slot);
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------------------------- settled */

static inline size_t ec_cache_settled_words(int64_t capacity) { return ((size_t)capacity + 63) / 64; }

/* Nothing is settled, from now until ec_cache_unsettle(). EC_NOMEM changes nothing. */
static inline int ec_cache_settle(ec_cache *c) {
    const size_t bytes = ec_cache_settled_words(c->capacity) * sizeof(uint64_t);
    uint64_t *settled = (uint64_t *)ec_take(NULL, bytes);
    if (!settled) return EC_NOMEM;
    memset(settled, 0, bytes);
    free(c->settled);
    c->settled = settled;
    return EC_OK;
}

/* Nobody asks any more. */
static inline void ec_cache_unsettle(ec_cache *c) {
    free(c->settled);
    c->settled = NULL;
}

/* The slot holds another row from now on. */
static inline void ec_cache_held_anew(ec_cache *c, uint32_t slot) {
    if (c->settled) c->settled[slot >> 6] &= ~(UINT64_C(1) << (slot & 63));
}

/* Settles a slot; returns whether it was not. */
static inline int ec_cache_settle_slot(ec_cache *c, uint32_t slot) {
    uint64_t *word = &c->settled[slot >> 6];
    const uint64_t before = *word, bit = UINT64_C(1) << (slot & 63);
    *word = before | bit;
    return (before & bit) == 0;
}

/* ------------------------------------------------------------------------------------------------------- limbo entries */

/* Room for `n` more limbo entries, and for giving every entry back, so that neither can fail later. */
static inline int ec_limbo_reserve(ec_cache *c, int64_t n) {
    const int64_t fresh = n - c->limbo_unused.size;
    if (fresh <= 0) return EC_OK;
    if (c->limbo.size > (int64_t)EC_NO_LIMBO - 1 - fresh) return EC_LIMIT;
    if (ec_vec_reserve(&c->limbo, fresh < 16 ? 16 : fresh, sizeof(ec_limbo)) != EC_OK) return EC_NOMEM;
    const int64_t missing = c->limbo.size + fresh - c->limbo_unused.size;
    return ec_vec_reserve(&c->limbo_unused, missing < 16 ? 16 : missing + missing / 2, sizeof(uint32_t));
}

static inline uint32_t ec_limbo_new(ec_cache *c, int64_t key, int64_t row, uint32_t slot, uint32_t holds) {
    uint32_t id;
    if (c->limbo_unused.size > 0) {
        id = EC_AT(c->limbo_unused, uint32_t, --c->limbo_unused.size);
    } else {
        id = (uint32_t)c->limbo.size++;
    }
    EC_GONE(c, id) = (ec_limbo){key, row, slot, holds};
    c->limbo_count++;
    return id;
}

static inline void ec_limbo_forget(ec_cache *c, uint32_t id) {
    EC_GONE(c, id).holds = 0;
    EC_PUSH(c->limbo_unused, uint32_t, id);
    c->limbo_count--;
}

static inline void ec_limbo_release(ec_cache *c, uint32_t id) {
    ec_limbo *limbo = &EC_GONE(c, id);
    EC_ASSERT(limbo->holds > 0);
    if (--limbo->holds > 0) return;
    if (limbo->slot != EC_NO_SLOT) {
        EC_ASSERT(c->seats[limbo->slot].pins == 0 && ec_slotset_has(&c->dying, limbo->slot));
        ec_slotset_remove(&c->dying, limbo->slot);
        ec_slotset_add(&c->free, limbo->slot);
        c->state[limbo->slot] = EC_SLOT_FREE;
    }
    c->row_free(c->table, limbo->key, limbo->row);
    ec_limbo_forget(c, id);
}

/* ---------------------------------------------------------------------------------------------------------------- pins */

static inline void ec_cache_pin(ec_cache *c, uint32_t slot) {
    if (c->seats[slot].pins++ == 0) c->pinned++;
    c->seats[slot].period = c->period; /* an undo leaves it: what counts as changed without need costs a save some bytes */
}

/* Takes back one pin; with the last one an evicted key's slot becomes takeable or, its plan finished, free. */
static inline void ec_cache_unpin(ec_cache *c, uint32_t slot) {
    ec_seat *seat = &c->seats[slot];
    EC_ASSERT(seat->pins > 0);
    if (--seat->pins > 0) return;
    c->pinned--;
    if (seat->standing.version == 0 && c->state[slot] == EC_SLOT_LIMBO) {
        ec_slotset_add(&c->dying, slot);
        ec_limbo_release(c, c->limbo_of[slot]);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- take */

/* A key has come into a slot, which is pinned. The key is touched later. */
static inline void ec_cache_arrive(ec_cache *c, uint32_t slot, int64_t key, uint64_t hash, ec_choice *choice) {
    ec_cache_held_anew(c, slot);
    ec_cache_pin(c, slot);
    ec_policy_arrive(&c->policy, slot, key, hash);
    ec_policy_welcome(&c->policy, &c->seats[slot], key, hash, choice);
}

/* Puts a key in the place of a victim, which the policy has chosen. The caller takes the one out of the index and puts the
 * other into it, and says so (ec_cache_arrive). */
static inline ec_take_record ec_cache_displace(ec_cache *c, uint32_t slot, int64_t key, int64_t row) {
    const ec_take_record record = {.slot = slot, .from = EC_FROM_VICTIM, .period = c->seats[slot].period, .before = c->slots[slot]};
    ec_policy_depart(&c->policy, slot);
    c->slots[slot] = (ec_slot){key, row, 0, 0};
    return record;
}

/* Gives a key the smallest free slot, or else the smallest dying one. The caller has reserved room in `index`. */
static inline ec_take_record ec_cache_take(ec_cache *c, int64_t key, uint64_t hash, int64_t row, ec_choice *choice) {
    ec_take_record record = {0};
    uint32_t slot = ec_slotset_first(&c->free);
    if (slot != EC_NO_SLOT) {
        record.from = EC_FROM_FREE;
        ec_slotset_remove(&c->free, slot);
    } else {
        slot = ec_slotset_first(&c->dying);
        EC_ASSERT(slot != EC_NO_SLOT);
        record.from = EC_FROM_DYING;
        record.limbo = c->limbo_of[slot];
        ec_slotset_remove(&c->dying, slot);
        EC_GONE(c, record.limbo).slot = EC_NO_SLOT;
        EC_GONE(c, record.limbo).holds++;
    }
    c->live++;
    record.slot = slot;
    record.period = c->seats[slot].period;
    record.before = c->slots[slot];
    c->slots[slot] = (ec_slot){key, row, 0, 0};
    c->state[slot] = EC_SLOT_LIVE;
    ec_index_insert(&c->index, key, hash, slot);
    ec_cache_arrive(c, slot, key, hash, choice);
    return record;
}

/* The standing of a victim comes back by itself (ec_policy_undo). */
static inline void ec_cache_untake(ec_cache *c, const ec_take_record *record) {
    const uint32_t slot = record->slot;
    EC_ASSERT(c->state[slot] == EC_SLOT_LIVE && c->seats[slot].pins == 1);
    ec_cache_unpin(c, slot);
    c->seats[slot].standing = (ec_standing){0};
    ec_policy_depart(&c->policy, slot);
    ec_index_erase(&c->index, c->slots[slot].key, ec_hash(c->slots[slot].key));
    c->live--;
    c->slots[slot] = record->before;
    ec_cache_held_anew(c, slot);
    if (record->from == EC_FROM_FREE) {
        c->state[slot] = EC_SLOT_FREE;
        ec_slotset_add(&c->free, slot);
    } else if (record->from == EC_FROM_DYING) {
        c->state[slot] = EC_SLOT_LIMBO;
        c->limbo_of[slot] = record->limbo;
        ec_slotset_add(&c->dying, slot);
        EC_GONE(c, record->limbo).slot = slot;
        ec_limbo_release(c, record->limbo); /* frees both where the evicting plan has finished meanwhile */
    } else {
        const uint64_t hash = ec_hash(record->before.key);
        ec_index_insert(&c->index, record->before.key, hash, slot);
        ec_policy_arrive(&c->policy, slot, record->before.key, hash);
        c->live++;
    }
}

/* ---------------------------------------------------------------------------------------------------------------- kill */

/* Evicts a LIVE slot's key. Needs ec_limbo_reserve(). The caller unmaps the key in the host table. */
static inline ec_kill ec_cache_kill(ec_cache *c, uint32_t slot) {
    const ec_slot *it = &c->slots[slot];
    ec_kill record = {slot, 0, ec_policy_leave(&c->policy, c->seats, slot)};
    ec_policy_depart(&c->policy, slot);
    ec_index_erase(&c->index, it->key, ec_hash(it->key));
    c->live--;
    record.limbo = ec_limbo_new(c, it->key, it->row, slot, c->seats[slot].pins ? 2 : 1);
    c->state[slot] = EC_SLOT_LIMBO;
    c->limbo_of[slot] = record.limbo;
    if (c->seats[slot].pins == 0) ec_slotset_add(&c->dying, slot);
    return record;
}

/* Evicts a key that is not resident. Needs ec_limbo_reserve(). */
static inline ec_kill ec_cache_kill_row(ec_cache *c, int64_t key, int64_t row) {
    return (ec_kill){EC_NO_SLOT, ec_limbo_new(c, key, row, EC_NO_SLOT, 1), {{0}, EC_NO_SLOT, EC_NO_SLOT}};
}

/* Undoes either kill; the caller maps the key in the host table again. Room in `index` was never given away. */
static inline void ec_cache_unkill(ec_cache *c, const ec_kill *record) {
    const uint32_t slot = record->slot;
    if (slot != EC_NO_SLOT) {
        if (c->seats[slot].pins == 0) ec_slotset_remove(&c->dying, slot);
        c->state[slot] = EC_SLOT_LIVE;
        c->live++;
        const uint64_t hash = ec_hash(c->slots[slot].key);
        ec_index_insert(&c->index, c->slots[slot].key, hash, slot);
        ec_policy_arrive(&c->policy, slot, c->slots[slot].key, hash);
        ec_policy_restore(&c->policy, c->seats, &record->stood);
    }
    ec_limbo_forget(c, record->limbo);
}

/* ---------------------------------------------------------------------------------------------------------------- drop */

/* Empties an unpinned LIVE slot; what it held is not written back. */
static inline void ec_cache_drop(ec_cache *c, uint32_t slot) {
    EC_ASSERT(c->state[slot] == EC_SLOT_LIVE && c->seats[slot].pins == 0);
    ec_policy_leave(&c->policy, c->seats, slot);
    ec_policy_depart(&c->policy, slot);
    ec_index_erase(&c->index, c->slots[slot].key, ec_hash(c->slots[slot].key));
    c->state[slot] = EC_SLOT_FREE;
    c->live--;
    ec_slotset_add(&c->free, slot);
}

/* Moves to `capacity` >= the present one; slots keep their numbers, pins and limbo. EC_NOMEM changes nothing. */
static inline int ec_cache_grow(ec_cache *c, int64_t capacity) {
    ec_cache wider;
    EC_ASSERT(capacity >= c->capacity);
    if (ec_cache_init(&wider, capacity, c->policy.kind, c->index.seed) != EC_OK) return EC_NOMEM;
    if (c->settled && ec_cache_settle(&wider) != EC_OK) {
        ec_cache_free(&wider);
        return EC_NOMEM;
    }
    if (ec_policy_grow(&c->policy, capacity) != EC_OK) {
        ec_cache_free(&wider);
        return EC_NOMEM;
    }
    const ec_policy unused = wider.policy;
    wider.policy = c->policy;
    c->policy = unused;
    const size_t n = (size_t)c->capacity;
    memcpy(wider.slots, c->slots, n * sizeof(ec_slot));
    memcpy(wider.seats, c->seats, n * sizeof(ec_seat));
    memcpy(wider.state, c->state, n);
    memcpy(wider.limbo_of, c->limbo_of, n * sizeof(uint32_t));
    if (c->settled) memcpy(wider.settled, c->settled, ec_cache_settled_words(c->capacity) * sizeof(uint64_t));
    for (uint32_t slot = 0; slot < (uint32_t)n; slot++)
        if (c->state[slot] != EC_SLOT_FREE) {
            ec_slotset_remove(&wider.free, slot);
            if (ec_slotset_has(&c->dying, slot)) ec_slotset_add(&wider.dying, slot);
        }
    ec_index_free(&wider.index);
    wider.index = c->index; /* slots keep their numbers, so the index stays as it is */
    ec_index_init(&c->index, 0);
    wider.limbo = c->limbo; /* entries name slots, which keep their numbers too */
    wider.limbo_unused = c->limbo_unused;
    wider.limbo_count = c->limbo_count;
    memset(&c->limbo, 0, sizeof c->limbo);
    memset(&c->limbo_unused, 0, sizeof c->limbo_unused);
    wider.live = c->live;
    wider.pinned = c->pinned;
    wider.period = c->period;
    wider.since = c->since;
    wider.row_free = c->row_free;
    wider.table = c->table;
    ec_cache_free(c);
    *c = wider;
    return EC_OK;
}

/* EC_OK, or EC_BROKEN where an invariant does not hold. O(capacity). */
static inline int ec_cache_check(const ec_cache *c) {
    int64_t live = 0, pinned = 0, free_slots = 0, dying = 0, limbo_slots = 0, limbo = 0, longest;
    const int status = ec_index_check(&c->index, &longest);
    if (status != EC_OK) return status;
    for (uint32_t slot = 0; slot < (uint32_t)c->capacity; slot++) {
        const ec_slot *it = &c->slots[slot];
        const int placed = c->seats[slot].standing.version != 0, pins = c->seats[slot].pins;
        if (pins < 0) return EC_BROKEN;
        pinned += pins > 0;
        free_slots += ec_slotset_has(&c->free, slot);
        dying += ec_slotset_has(&c->dying, slot);
        if (c->state[slot] == EC_SLOT_LIVE) {
            live++;
            if (ec_index_find(&c->index, it->key, ec_hash(it->key)) != (int64_t)slot || !placed) return EC_BROKEN;
        } else if (c->state[slot] == EC_SLOT_FREE) {
            if (pins != 0 || !ec_slotset_has(&c->free, slot) || placed) return EC_BROKEN;
        } else {
            const ec_limbo *entry = &EC_GONE(c, c->limbo_of[slot]);
            limbo_slots++;
            if (entry->holds == 0 || entry->slot != slot || entry->key != it->key || entry->row != it->row || placed) return EC_BROKEN;
            if ((pins == 0) != ec_slotset_has(&c->dying, slot)) return EC_BROKEN;
        }
    }
    for (int64_t id = 0; id < c->limbo.size; id++) limbo += EC_GONE(c, id).holds > 0;
    if (live != c->live || live != c->index.size || live != c->policy.placed) return EC_BROKEN;
    if (pinned != c->pinned || free_slots != c->free.count || dying != c->dying.count) return EC_BROKEN;
    if (free_slots + live + limbo_slots != c->capacity) return EC_BROKEN;
    if (limbo != c->limbo_count || c->limbo.size - c->limbo_unused.size != limbo) return EC_BROKEN;
    return ec_policy_check(&c->policy, c->seats);
}

#endif
