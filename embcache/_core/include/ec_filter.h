/* Keys that have been seen and have no row yet: their counts and largest timestamps; and how to undo a batch.
 *
 * Counters of keys that have a row live beside the slot or in the host columns; a key is in one of the three places
 * only (but for a row that the user has put in: the planner takes the counters over when it meets the key).
 *
 * Sweeps. A sweep sets a cut-off and kills nothing by itself: from then on every key with a smaller last timestamp is
 * dead, wherever it is met. Row, slot and counters of the dead are taken away by a pass over slots, host rows and waiting
 * keys (ec_sweep.h) that goes on a slice a plan. Dead and not yet taken away is a key only while a pass is under way.
 *
 * Late keys. A key that comes *after* a sweep with a timestamp below the cut-off lives until the next sweep, as it would
 * if the sweep had taken everything at once. While a pass is under way such keys are in `late`.
 *
 * Records. Evaluation sees the state after the last finished batch (I6), so it has to know whether the sweep that killed
 * a key belongs to a finished plan. Each sweep leaves a record of what held before it, until its plan and those of all
 * sweeps before it have finished; and undo puts that back. (Where plans finish out of order, a later one that has taken a
 * dead row away may have finished before the sweep's: evaluation then sees the row gone with the first of the two.)
 */
#ifndef EC_FILTER_H
#define EC_FILTER_H

#include <stdint.h>
#include <string.h>

#include "ec_filternews.h"
#include "ec_index.h"
#include "ec_score.h"
#include "ec_sketch.h"
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
    int64_t keep_min;        /* rows that a sweep leaves at least, the most recent ones */
    int time_is_step;        /* the step number is the timestamp */
    int needs_timestamps;
    int admit_always;        /* an occurrence that may admit does */
    uint64_t admit_below;    /* else: in admit_below of 2^64 cases */
    uint64_t seed;           /* of admission by chance and of the sketch */
    int64_t sketch_bytes;    /* 0: exact counts of waiting keys */
    int64_t low, high;       /* vshards of keys that come here, from low to high - 1 */
    int scores;              /* the show/click policy (ec_score.h) */
    double alpha, beta, decay, evict_share, admit_score;
} ec_filter_rule;

enum { EC_PASS_IDLE = 0, EC_PASS_SLOTS = 1, EC_PASS_ROWS = 2, EC_PASS_ENTRIES = 3 };

/* The cut-offs of the last sweep, and how far the pass has come that takes away what they killed. */
typedef struct {
    int64_t cutoff;         /* rows with a smaller last timestamp are dead */
    int64_t waiting_cutoff; /* the same for keys without a row, which the floor does not protect */
    int64_t at;             /* the next slot, row or entry */
    int32_t region;         /* EC_PASS_...; IDLE: nothing dead is left */
    int32_t again;          /* a sweep came while the pass was under way: it goes round once more */
} ec_pass;

/* A sweep, and what held before it. */
typedef struct {
    int64_t step;
    int64_t cutoff;
    int active;   /* whether a pass was under way */
    int finished; /* whether the plan has finished */
    ec_index late;
} ec_sweep_record;

typedef struct {
    ec_filter_rule rule;
    ec_index index; /* key -> entry */
    ec_vec entries; /* of ec_filter_entry */
    ec_vec unused;  /* of uint32_t, last in first out */
    int64_t newest; /* largest timestamp seen; INT64_MIN: none yet */
    ec_pass pass;
    ec_index late; /* keys below the cut-off that came after the sweep; meaningful while a pass is under way */
    ec_vec sweeps; /* of ec_sweep_record, oldest first */
    ec_sketch sketch;
    int64_t epoch; /* show/click: sweeps so far */
    ec_filter_news news;
} ec_filter;

enum { EC_FILTER_ADDED = 0, EC_FILTER_BUMPED = 1, EC_FILTER_REMOVED = 2 };

/* One change of one entry: what it was before. */
typedef struct {
    uint32_t id;
    uint32_t kind;
    ec_filter_entry before;
} ec_filter_change;

#define EC_ENTRY(filter, id) EC_AT((filter)->entries, ec_filter_entry, id)
#define EC_SWEEP(filter, i) EC_AT((filter)->sweeps, ec_sweep_record, i)

/* An empty sketch as the rule wants it, in `blocks` (0: as many as is right). */
static inline int ec_filter_sketch(const ec_filter *f, int64_t blocks, ec_sketch *sketch) {
    const ec_filter_rule *rule = &f->rule;
    return ec_sketch_init(sketch, rule->sketch_bytes, rule->admit_threshold, rule->seed, blocks, rule->low, rule->high);
}

/* An empty filter. EC_NOMEM: there is no room for the sketch, and nothing is held. */
static inline int ec_filter_init(ec_filter *f, const ec_filter_rule *rule, uint64_t seed) {
    memset(f, 0, sizeof *f);
    ec_index_init(&f->index, seed);
    f->rule = *rule;
    f->newest = INT64_MIN;
    f->pass.cutoff = f->pass.waiting_cutoff = INT64_MIN;
    ec_index_init(&f->late, seed);
    return rule->sketch_bytes > 0 ? ec_filter_sketch(f, 0, &f->sketch) : EC_OK;
}

static inline void ec_filter_free(ec_filter *f) {
    ec_index_free(&f->index);
    ec_vec_free(&f->entries);
    ec_vec_free(&f->unused);
    ec_index_free(&f->late);
    for (int64_t i = 0; i < f->sweeps.size; i++) ec_index_free(&EC_SWEEP(f, i).late);
    ec_vec_free(&f->sweeps);
    ec_sketch_free(&f->sketch);
    ec_news_forget(&f->news);
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
    return f->rule.evict_interval > 0 && step % f->rule.evict_interval == 0;
}

/* Whether a key may have to wait for its row, and whether it has an entry meanwhile. */
static inline int ec_filter_counts(const ec_filter *f) { return f->rule.scores ? f->rule.admit_score > 0 : f->rule.admit_threshold > 1; }
static inline int ec_filter_waits(const ec_filter *f) { return ec_filter_counts(f) || !f->rule.admit_always; }
static inline int ec_filter_lists(const ec_filter *f) { return ec_filter_counts(f) && f->sketch.width == 0; }

static inline double ec_filter_score(const ec_filter *f, int64_t count, int64_t last) {
    return count > 0 ? ec_score_decayed(ec_score_of(count), f->rule.decay, f->epoch - last) : 0.0;
}

/* Whether one of a key's `draws` occurrences in step `step` is drawn: a function of seed, key and step alone. */
static inline int ec_filter_drawn(const ec_filter *f, int64_t key, int64_t step, int64_t draws) {
    if (f->rule.admit_always) return 1;
    uint64_t state = ec_mix64(ec_mix64(ec_mix64(f->rule.seed + EC_WEYL) ^ (uint64_t)key) + (uint64_t)step * EC_WEYL);
    for (int64_t i = 0; i < draws; i++)
        if (ec_mix64(state += EC_WEYL) < f->rule.admit_below) return 1;
    return 0;
}

/* Makes the next `added` additions and any number of removals infallible. */
static inline int ec_filter_reserve(ec_filter *f, int64_t added) {
    const int64_t fresh = added > f->unused.size ? added - f->unused.size : 0;
    if (f->entries.size + fresh > EC_FILTER_MAX_ENTRIES) return EC_LIMIT;
    if (ec_index_reserve(&f->index, added) != EC_OK) return EC_NOMEM;
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

static inline ec_filter_change ec_filter_set(ec_filter *f, uint32_t id, int64_t count, int64_t last) {
    ec_filter_entry *entry = &EC_ENTRY(f, id);
    const ec_filter_change change = {id, EC_FILTER_BUMPED, *entry};
    entry->count = count;
    entry->last = last;
    return change;
}

static inline ec_filter_change ec_filter_remove(ec_filter *f, uint32_t id) {
    const ec_filter_change change = {id, EC_FILTER_REMOVED, EC_ENTRY(f, id)};
    ec_index_erase(&f->index, change.before.key, ec_hash(change.before.key));
    EC_ENTRY(f, id).count = 0;
    EC_PUSH(f->unused, uint32_t, id);
    return change;
}

/* Takes an entry off the list of unused ones: its last, unless others were freed by hand since. */
static inline void ec_filter_unfree(ec_filter *f, uint32_t id) {
    uint32_t *list = (uint32_t *)f->unused.data;
    int64_t at = --f->unused.size;
    for (uint32_t above = list[at]; above != id;) {
        const uint32_t next = list[--at];
        list[at] = above;
        above = next;
    }
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
            ec_filter_unfree(f, change->id);
            ec_index_insert(&f->index, change->before.key, ec_hash(change->before.key), change->id);
        }
        *entry = change->before;
    }
}

#define EC_MOST_GONE (1 << 16) /* beside two for each entry: then a filter is as well written whole */

/* A plan with these changes, of entries and of the sketch, has finished, or none: what a save after it has to write. */
static inline void ec_filter_note(ec_filter *f, const ec_vec *changes, const ec_sketch_past *past) {
    const int64_t cells = ec_sketch_block_cells(&f->sketch), all = f->sketch.count * cells;
    ec_filter_news *n = &f->news;
    for (int64_t i = 0; i < changes->size && n->known; i++) {
        const ec_filter_change *change = &EC_AT(*changes, ec_filter_change, i);
        if (change->kind == EC_FILTER_REMOVED) ec_news_gone(n, change->before.key);
        else if (ec_bit_note(&n->entries, change->id, &n->changed) != EC_OK) ec_news_forget(n);
    }
    for (int64_t i = 0; i < past->turned.size && n->known; i++) {
        const int64_t at = EC_AT(past->turned, int64_t, i) * cells;
        ec_bits_fill(&n->cells, at, at + cells, &n->raised);
        ec_bits_fill(&n->cells, all + at, all + at + cells, &n->raised);
    }
    for (int64_t i = 0; i < past->cells.size && n->known; i++)
        if (ec_bit_note(&n->cells, EC_AT(past->cells, ec_sketch_change, i).at, &n->raised) != EC_OK) ec_news_forget(n);
    if (n->gone.size > 2 * f->entries.size + EC_MOST_GONE) ec_news_forget(n);
}

/* Writes the late keys, in no order. */
static inline void ec_filter_late_keys(const ec_filter *f, int64_t *keys) {
    for (uint64_t at = 0; at < f->late.bucket_count; at++)
        for (uint32_t rest = f->late.buckets[at].meta & EC_OCCUPANCY; rest; rest &= rest - 1) *keys++ = f->late.buckets[at].keys[__builtin_ctz(rest)];
}

/* Puts entries and late keys into an empty filter; keys of each must be distinct. EC_NOMEM and EC_LIMIT change nothing. */
static inline int ec_filter_fill(ec_filter *f, const int64_t *keys, const int64_t *counts, const int64_t *last, int64_t n, const int64_t *late, int64_t late_n) {
    int status = ec_filter_reserve(f, n);
    if (status == EC_OK && (ec_take_refused() || ec_index_reserve(&f->late, late_n) != EC_OK)) status = EC_NOMEM;
    if (status != EC_OK) return status;
    for (int64_t i = 0; i < n; i++) ec_filter_add(f, keys[i], ec_hash(keys[i]), counts[i], last[i]);
    for (int64_t i = 0; i < late_n; i++) ec_index_insert(&f->late, late[i], ec_hash(late[i]), 0);
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------------------- who is dead */

static inline int ec_filter_late(const ec_index *late, int64_t key) { return late->size > 0 && ec_index_find(late, key, ec_hash(key)) >= 0; }

/* Whether a mapped row with these counters is dead. A row that training has never met (frequency 0) has no timestamp. */
static inline int ec_filter_row_dead(const ec_filter *f, int64_t key, int64_t freq, int64_t last) {
    return f->pass.region != EC_PASS_IDLE && last < f->pass.cutoff && freq > 0 && !ec_filter_late(&f->late, key);
}

static inline int ec_filter_entry_dead(const ec_filter *f, const ec_filter_entry *entry) {
    return f->pass.region != EC_PASS_IDLE && entry->last < f->pass.waiting_cutoff && entry->count > 0 && !ec_filter_late(&f->late, entry->key);
}

/* For a row that was found dead at `step`: whether the sweep that killed it belongs to a finished plan. A key that was late before a sweep was
 * alive up to it; from there on, or from the first sweep that is on record, the first cut-off above `last` killed it. */
static inline int ec_filter_death_trained(const ec_filter *f, int64_t key, int64_t last, int64_t step) {
    int64_t n = f->sweeps.size;
    while (n > 0 && EC_SWEEP(f, n - 1).step > step) n--; /* what came later is another life of the key */
    int64_t i = n - 1;
    if (n == 0) return 1;
    while (i >= 0 && EC_SWEEP(f, i).active && !ec_filter_late(&EC_SWEEP(f, i).late, key)) i--;
    if (i < 0) {
        if (last < EC_SWEEP(f, 0).cutoff) return 1;
        i = 0;
    }
    while (i + 1 < n && last >= EC_SWEEP(f, i + 1).cutoff) i++;
    return EC_SWEEP(f, i).finished;
}

/* The plan of the sweep at `step` has finished. */
static inline void ec_filter_sweep_finished(ec_filter *f, int64_t step) {
    int64_t gone = 0;
    for (int64_t i = 0; i < f->sweeps.size; i++)
        if (EC_SWEEP(f, i).step == step) EC_SWEEP(f, i).finished = 1;
    while (gone < f->sweeps.size && EC_SWEEP(f, gone).finished) ec_index_free(&EC_SWEEP(f, gone++).late);
    f->sweeps.size -= gone;
    if (gone > 0) memmove(f->sweeps.data, &EC_SWEEP(f, gone), (size_t)f->sweeps.size * sizeof(ec_sweep_record));
}

/* Takes back the newest sweep, whose record has everything but the pass. */
static inline void ec_filter_unsweep(ec_filter *f) {
    ec_index_free(&f->late);
    f->late = EC_SWEEP(f, --f->sweeps.size).late;
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
