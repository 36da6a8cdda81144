/* Keys that have been seen and have no row yet: their counts and largest timestamps; and how to undo a batch.
 *
 * Counters of keys that have a row live beside the slot or in the host columns; a key is in one of the three places
 * only (but for a row that the user has put in: the planner takes the counters over when it meets the key).
 */
#ifndef EC_FILTER_H
#define EC_FILTER_H

#include <stdint.h>
#include <string.h>

#include "ec_index.h"
#include "ec_vec.h"

#define EC_FILTER_MAX_ENTRIES ((int64_t)UINT32_MAX - 1)

typedef struct {
    int64_t key;
    int64_t count; /* occurrences; 0: this entry is unused */
    int64_t last;  /* largest timestamp; INT64_MIN: none yet */
} ec_filter_entry;

/* Thresholds: the configuration in plain numbers. */
typedef struct {
    int64_t admit_threshold; /* <= 1: every key is admitted */
    int64_t evict_threshold; /* 0: no sweeps */
    int64_t evict_interval;  /* steps between sweeps */
    int time_is_step;        /* the step number is the timestamp */
    int needs_timestamps;
} ec_filter_rule;

typedef struct {
    ec_filter_rule rule;
    ec_index index; /* key -> entry */
    ec_vec entries; /* of ec_filter_entry */
    ec_vec unused;  /* of uint32_t, last in first out */
    int64_t newest; /* largest timestamp seen; INT64_MIN: none yet */
} ec_filter;

enum { EC_FILTER_ADDED = 0, EC_FILTER_BUMPED = 1, EC_FILTER_REMOVED = 2 };

/* One change of one entry: what it was before. */
typedef struct {
    uint32_t id;
    uint32_t kind;
    ec_filter_entry before;
} ec_filter_change;

#define EC_ENTRY(filter, id) EC_AT((filter)->entries, ec_filter_entry, id)

static inline void ec_filter_init(ec_filter *f, const ec_filter_rule *rule, uint64_t seed) {
    memset(f, 0, sizeof *f);
    ec_index_init(&f->index, seed);
    f->rule = *rule;
    f->newest = INT64_MIN;
}

static inline void ec_filter_free(ec_filter *f) {
    ec_index_free(&f->index);
    ec_vec_free(&f->entries);
    ec_vec_free(&f->unused);
}

static inline int64_t ec_add_saturated(int64_t a, int64_t b) {
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* Whether a sweep at `newest` kills anything, and below which timestamp. No int64 overflows. */
static inline int ec_filter_cutoff(const ec_filter *f, int64_t *cutoff) {
    return !__builtin_sub_overflow(f->newest, f->rule.evict_threshold, cutoff);
}

static inline int ec_filter_sweeps_at(const ec_filter *f, int64_t step) {
    return f->rule.evict_threshold > 0 && step % f->rule.evict_interval == 0;
}

/* Makes the next `added` additions and any number of removals infallible. */
static inline int ec_filter_reserve(ec_filter *f, int64_t added) {
    const int64_t fresh = added > f->unused.size ? added - f->unused.size : 0;
    if (f->entries.size + fresh > EC_FILTER_MAX_ENTRIES) return EC_LIMIT;
    if (ec_take_refused() || ec_index_reserve(&f->index, added) != EC_OK) return EC_NOMEM;
    if (ec_vec_reserve(&f->entries, fresh, sizeof(ec_filter_entry)) != EC_OK) return EC_NOMEM;
    /* every entry may have to go onto the list of unused ones */
    const int64_t all = f->entries.size + fresh;
    return ec_vec_reserve(&f->unused, all - f->unused.size, sizeof(uint32_t));
}

static inline int64_t ec_filter_find(const ec_filter *f, int64_t key, uint64_t hash) { return ec_index_find(&f->index, key, hash); }

/* Adds an absent key; needs ec_filter_reserve(). */
static inline ec_filter_change ec_filter_add(ec_filter *f, int64_t key, uint64_t hash, int64_t count, int64_t last) {
    const uint32_t id = f->unused.size > 0 ? EC_AT(f->unused, uint32_t, --f->unused.size) : (uint32_t)f->entries.size++;
    EC_ENTRY(f, id) = (ec_filter_entry){key, count, last};
    ec_index_insert(&f->index, key, hash, id);
    return (ec_filter_change){id, EC_FILTER_ADDED, {0}};
}

static inline ec_filter_change ec_filter_bump(ec_filter *f, uint32_t id, int64_t count, int64_t last) {
    ec_filter_entry *entry = &EC_ENTRY(f, id);
    const ec_filter_change change = {id, EC_FILTER_BUMPED, *entry};
    entry->count = ec_add_saturated(entry->count, count);
    if (last > entry->last) entry->last = last;
    return change;
}

static inline ec_filter_change ec_filter_remove(ec_filter *f, uint32_t id) {
    const ec_filter_change change = {id, EC_FILTER_REMOVED, EC_ENTRY(f, id)};
    ec_index_erase(&f->index, change.before.key, ec_hash(change.before.key));
    EC_ENTRY(f, id).count = 0;
    EC_PUSH(f->unused, uint32_t, id);
    return change;
}

/* Undoes the newest change that is not undone yet. Entries and the order of unused ones are then as they were. */
static inline void ec_filter_undo(ec_filter *f, const ec_filter_change *change) {
    ec_filter_entry *entry = &EC_ENTRY(f, change->id);
    if (change->kind == EC_FILTER_ADDED) {
        ec_index_erase(&f->index, entry->key, ec_hash(entry->key));
        entry->count = 0;
        EC_PUSH(f->unused, uint32_t, change->id);
    } else {
        if (change->kind == EC_FILTER_REMOVED) {
            f->unused.size--;
            ec_index_insert(&f->index, change->before.key, ec_hash(change->before.key), change->id);
        }
        *entry = change->before;
    }
}

static inline int ec_filter_check(const ec_filter *f) {
    int64_t used = 0, longest;
    const int status = ec_index_check(&f->index, &longest);
    if (status != EC_OK) return status;
    for (int64_t id = 0; id < f->entries.size; id++) {
        const ec_filter_entry *entry = &EC_ENTRY(f, id);
        if (entry->count == 0) continue;
        used++;
        if (entry->count < 0 || ec_index_find(&f->index, entry->key, ec_hash(entry->key)) != id) return EC_BROKEN;
    }
    return used == f->index.size && used + f->unused.size == f->entries.size ? EC_OK : EC_BROKEN;
}

#endif
