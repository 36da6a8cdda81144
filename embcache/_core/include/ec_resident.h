/* The short way of a plan, for a table without a filter under "lru" whose keys are nearly all resident: instead of
 * dedup, look-up and the pins of the hits, one pass over the batch's keys.
 *
 * Each key is looked up where it stands, repeated or not, and its slot's seat says whether this plan has met it: a plan gives
 * its uniques versions in a row, above all versions so far, so a version above the last plan's is this plan's, and its
 * distance from there is the number of the unique. A resident key costs its bucket and its seat, which a plan needs anyway,
 * and no entry of a probe table. Only keys that are not resident are numbered by a probe table, as ec_dedup.h does it.
 * Occurrences are grouped when somebody asks for them (ec_group.h).
 *
 * The result is that of the long way. What differs is that hits are used (their versions rise) before victims are chosen,
 * which changes nothing: victims are chosen among those that nobody pins, and hits are pinned.
 */
#ifndef EC_RESIDENT_H
#define EC_RESIDENT_H

#include <stdint.h>
#include <string.h>

#include "ec_find.h"
#include "ec_work.h"

#define EC_RESIDENT_BLOCK 256 /* keys that are looked up before their seats are looked at */
#define EC_RESIDENT_AHEAD 32  /* seats between a prefetch and its use */

/* One pass over a table's keys. */
typedef struct {
    ec_work *w;
    ec_cache *cache;
    ec_part *part;
    ec_dedup_table *dedup; /* numbers those not resident; NULL until there is one */
    int lent;              /* which one it is */
    uint64_t base;         /* version of whatever was used last before this batch */
    int64_t begin, n;      /* the table's positions */
    int64_t first;         /* number of the table's unique 0, where that is known */
    int64_t slot_base;     /* of the table's slot 0 */
    int64_t *unique_keys, *unique_slots; /* where they go */
    int64_t unique, hits, missing;
} ec_meeting;

/* The number of a key that is not resident: known, or the next one. -1: out of memory. */
static __attribute__((noinline)) int64_t ec_resident_miss(ec_meeting *m, int64_t key) {
    ec_work *w = m->w;
    if (!m->dedup) {
        m->lent = ec_dedup_borrow(w);
        m->dedup = &w->dedup[m->lent];
        if (ec_dedup_begin(m->dedup, m->n, m->n) != EC_OK) return -1;
    }
    ec_dedup_entry *entries = (ec_dedup_entry *)m->dedup->block.data;
    const uint64_t hash = ec_dedup_hash(key, w->seed), mask = ((uint64_t)1 << m->dedup->log2) - 1;
    for (uint64_t at = hash >> (64 - m->dedup->log2);; at = (at + 1) & mask) {
        const ec_dedup_entry entry = entries[at];
        const uint32_t id = entry.stamp - m->dedup->base;
        if (id < m->unique) {
            if (entry.tag == (uint32_t)hash && m->unique_keys[id] == key) return id;
            continue;
        }
        const int64_t u = m->begin + m->unique, i = m->begin + m->missing++;
        entries[at] = (ec_dedup_entry){(uint32_t)hash, m->dedup->base + (uint32_t)m->unique};
        m->unique_keys[m->unique] = w->key[u] = w->some_key[i] = key;
        w->missing[i] = u;
        return m->unique++;
    }
}

static inline void ec_resident_ask(const ec_seat *seats, const int64_t *slots, int64_t from, int64_t end) {
    const int64_t to = from + EC_AHEAD < end ? from + EC_AHEAD : end;
    for (int64_t i = from; i < to; i++)
        if (slots[i] >= 0) EC_PREFETCH_WRITE(&seats[slots[i]]);
}

/* Numbers a block of keys; their slots (or -1) stand where the numbers go. */
static int ec_resident_block(ec_meeting *m, const int64_t *keys, int64_t n, int64_t *inverse) {
    ec_cache *c = m->cache;
    ec_seat *seats = c->seats;
    const uint64_t base = m->base;
    const int64_t first = m->first;
    const uint32_t period = c->period;
    ec_hit *hits = (ec_hit *)m->part->hits.data;
    ec_resident_ask(seats, inverse, 0, n);
    ec_resident_ask(seats, inverse, EC_AHEAD, n);
    for (int64_t i = 0; i < n; i++) {
        if (i % EC_AHEAD == 0) ec_resident_ask(seats, inverse, i + EC_RESIDENT_AHEAD, n);
        const int64_t slot = inverse[i];
        if (EC_LIKELY(slot >= 0)) {
            ec_seat *seat = &seats[slot];
            const ec_standing before = seat->standing;
            if (before.version > base) {
                inverse[i] = first + (int64_t)(before.version - base - 1);
                continue;
            }
            const int64_t id = m->unique++;
            const uint64_t ago = base - before.version;
            if (!EC_LIKELY(ago < m->w->long_ago)) {
                if (ec_vec_reserve_one(&m->part->long_ago, sizeof(uint64_t)) != EC_OK) return EC_NOMEM;
                EC_PUSH(m->part->long_ago, uint64_t, ago);
            }
            hits[m->hits++] = (ec_hit){(uint32_t)slot, ago < m->w->long_ago ? (uint32_t)ago : EC_LONG_AGO};
            seat->standing.version = base + 1 + (uint64_t)id;
            c->pinned += seat->pins++ == 0;
            seat->period = period;
            m->unique_keys[id] = keys[i];
            m->unique_slots[id] = m->slot_base + slot;
            inverse[i] = first + id;
        } else {
            const int64_t id = ec_resident_miss(m, keys[i]);
            if (id < 0) return EC_NOMEM;
            inverse[i] = first + id;
        }
    }
    return EC_OK;
}

/* Uniques, inverse and slots of table t; its hits are pinned and used. On failure the journal says what to take back. */
static int ec_resident_run(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const int64_t begin = w->offsets[t], n = w->offsets[t + 1] - begin;
    const int64_t *keys = w->keys + begin;
    int64_t *inverse = w->out.inverse + begin;
    ec_meeting m = {.w = w, .cache = &s->cache, .part = p, .base = s->cache.policy.version, .begin = begin, .n = n,
                    .slot_base = s->base, .unique_keys = w->key + begin, .unique_slots = w->slot + begin};
    int status = EC_OK;
    if (w->in_turn) { /* all numbers before are known */
        m.first = ec_work_first(w, t);
        m.unique_keys = w->out.unique_keys + m.first;
        m.unique_slots = w->out.slots + m.first;
    }
    if (ec_vec_reserve(&p->hits, n, sizeof(ec_hit)) != EC_OK) return EC_NOMEM;
    ec_policy_mark(&s->cache.policy, &p->choice);
    p->pinned_before = s->cache.pinned;
    for (int64_t from = 0; from < n && status == EC_OK; from += EC_RESIDENT_BLOCK) {
        const int64_t size = from + EC_RESIDENT_BLOCK < n ? EC_RESIDENT_BLOCK : n - from;
        ec_find_values(&s->cache.index, keys + from, NULL, size, inverse + from);
        status = ec_resident_block(&m, keys + from, size, inverse + from);
        p->hits.size = m.hits;
    }
    s->cache.policy.version = m.base + (uint64_t)m.unique;
    if (m.dedup) {
        m.dedup->base += (uint32_t)m.unique;
        ec_dedup_return(w, m.lent);
    }
    p->unique = m.unique;
    p->missing = m.missing;
    return status;
}

/* Host rows, or -1, of the keys of table t that are not resident. */
static void ec_resident_rows(ec_work *w, int64_t t, int threads) {
    const ec_part *p = &w->parts[t];
    const int64_t begin = w->offsets[t], end = begin + p->missing;
    if (begin == end) return;
    for (int64_t i = begin; i < end; i++) w->some_hash[i] = ec_hash(w->some_key[i]);
    w->find(w->sides[t].table, w->some_key + begin, w->some_hash + begin, p->missing, w->some_row + begin, threads);
    for (int64_t i = begin; i < end; i++) {
        w->row[w->missing[i]] = w->some_row[i];
        w->hash[w->missing[i]] = w->some_hash[i];
    }
}

/* The keys without a host row, as ec_bear() wants them. Returns how many. */
static int64_t ec_resident_unborn(ec_work *w, int64_t t) {
    const int64_t begin = w->offsets[t], end = begin + w->parts[t].missing;
    int64_t born = 0;
    for (int64_t i = begin; i < end; i++) {
        if (w->some_row[i] >= 0) continue;
        w->some_key[begin + born] = w->some_key[i];
        w->some_hash[begin + born] = w->some_hash[i];
        w->some_at[begin + born++] = w->missing[i];
    }
    return born;
}

#endif
