/* The phases of a plan. swap.pyx runs them in this order over all tables of a batch, in one call without the GIL:
 *
 *   dedup (tables; large tables by blocks and parts) -> lookup (chunks of uniques) -> decide (tables): count, sweep, admit,
 *   make room -> bear (tables): new rows -> place (tables): pin, take slots, order -> emit (tables): the plan's arrays
 *
 * Tasks of one phase touch disjoint data, and whatever is observable is settled by one task per table in the order of
 * the table's unique keys: the result is a function of state and batch at any number of threads (promise I4).
 * decide and bear may fail, and leave a journal that ec_plan_undo() takes back. place and emit cannot fail.
 */
#ifndef EC_PHASES_H
#define EC_PHASES_H

#include <stdint.h>
#include <string.h>

#include "ec_admission.h"

#define EC_BEAR_ALONE 8192 /* new rows from which a table's inserts get all threads */

/* -------------------------------------------------------------------------------------------------------------- dedup */

/* At most dedup_count tasks run at a time, so there always is an idle table. */
static inline int ec_dedup_borrow(ec_work *w) {
    for (int i = 0;; i = (i + 1) % w->dedup_count) {
        int idle = 0;
        if (__atomic_compare_exchange_n(&w->dedup_busy[i], &idle, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return i;
    }
}

static inline void ec_dedup_return(ec_work *w, int i) { __atomic_store_n(&w->dedup_busy[i], 0, __ATOMIC_RELEASE); }

static void ec_phase_dedup(void *context, int64_t task) {
    ec_work *w = (ec_work *)context;
    const int64_t t = EC_AT(w->plain, int64_t, task);
    const int i = ec_dedup_borrow(w);
    w->parts[t].status = ec_dedup_plain(&w->calls[t], &w->dedup[i]);
    ec_dedup_return(w, i);
}

static void ec_phase_block_count_parts(void *context, int64_t block) { ec_dedup_block_count_parts(((ec_work *)context)->cut, block); }
static void ec_phase_block_scatter(void *context, int64_t block) { ec_dedup_block_scatter(((ec_work *)context)->cut, block); }
static void ec_phase_block_number(void *context, int64_t block) { ec_dedup_block_number(((ec_work *)context)->cut, block); }
static void ec_phase_block_inverse(void *context, int64_t block) { ec_dedup_block_inverse(((ec_work *)context)->cut, block); }
static void ec_phase_range_order(void *context, int64_t range) { ec_dedup_range_order(((ec_work *)context)->cut, (int)range); }

static void ec_phase_part_run(void *context, int64_t part) {
    ec_work *w = (ec_work *)context;
    const int i = ec_dedup_borrow(w);
    if (ec_dedup_part_run(w->cut, (int)part, &w->dedup[i]) != EC_OK) __atomic_store_n(&w->dedup_status, EC_NOMEM, __ATOMIC_RELAXED);
    ec_dedup_return(w, i);
}

/* ------------------------------------------------------------------------------------------------------------- lookup */

/* For a chunk of uniques: hash, slot or -1, and for the others the host row or -1. */
static void ec_phase_lookup(void *context, int64_t task) {
    ec_work *w = (ec_work *)context;
    const ec_chunk *chunk = &EC_AT(w->chunks, ec_chunk, task);
    const ec_side *s = &w->sides[chunk->table];
    const ec_index *index = &s->cache.index;
    const int64_t begin = w->offsets[chunk->table] + chunk->begin, end = w->offsets[chunk->table] + chunk->end;
    int64_t others = begin;
    for (int64_t u = begin; u < begin + EC_AHEAD && u < end; u++) ec_index_prefetch(index, w->hash[u] = ec_hash(w->key[u]));
    for (int64_t u = begin; u < end; u++) {
        if (u + EC_AHEAD < end) ec_index_prefetch(index, w->hash[u + EC_AHEAD] = ec_hash(w->key[u + EC_AHEAD]));
        w->slot[u] = ec_index_find(index, w->key[u], w->hash[u]);
        w->row[u] = -1;
        if (w->slot[u] < 0) {
            w->some_key[others] = w->key[u];
            w->some_hash[others] = w->hash[u];
            w->some_at[others++] = u;
        }
    }
    if (others == begin) return;
    w->find(s->table, w->some_key + begin, w->some_hash + begin, others - begin, w->some_row + begin, 1);
    for (int64_t i = begin; i < others; i++) w->row[w->some_at[i]] = w->some_row[i];
}

/* ------------------------------------------------------------------------------------------------------------- decide */

static int ec_decide(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    memset(w->admitted + begin, 1, (size_t)p->unique);
    if (s->filter) {
        const int status = ec_filter_step(w, t);
        if (status != EC_OK) return status;
    }
    int64_t admitted = 0, hits = 0, pinned_hits = 0, born = 0;
    for (int64_t u = begin; u < end; u++) {
        if (!w->admitted[u]) continue;
        admitted++;
        if (w->slot[u] >= 0) {
            hits++;
            pinned_hits += c->pins[w->slot[u]] > 0;
        } else if (w->row[u] < 0) {
            w->some_key[begin + born] = w->key[u];
            w->some_hash[begin + born] = w->hash[u];
            w->some_at[begin + born++] = u;
        }
    }
    p->totals[EC_HITS] = hits;
    p->totals[EC_MISSES] = admitted - hits;
    p->totals[EC_ADMITTED] = admitted;
    p->totals[EC_REJECTED] = p->unique - admitted;
    p->totals[EC_BORN] = born;
    p->need = admitted;
    p->have = c->capacity - (c->pinned - pinned_hits);
    if (p->need > p->have) return EC_CAPACITY;
    /* from here on nothing may fail but the birth of rows, whose record has its room already */
    if (ec_vec_reserve(&p->births, born, sizeof(ec_birth)) || ec_vec_reserve(&p->takes, admitted - hits, sizeof(ec_take_record)) ||
        ec_vec_reserve(&p->touches, admitted, sizeof(ec_touch)) || ec_take_refused() ||
        ec_index_reserve(&c->index, admitted - hits))
        return EC_NOMEM;
    return EC_OK;
}

static void ec_phase_decide(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    w->parts[t].status = ec_decide(w, t);
}

/* --------------------------------------------------------------------------------------------------------------- bear */

/* Inserts the admitted keys that have no row. Nothing is left of it where it fails. */
static void ec_bear(ec_work *w, int64_t t, int threads) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const int64_t begin = w->offsets[t], born = p->totals[EC_BORN];
    if (born == 0) return;
    p->status = ec_take_refused() ? EC_NOMEM
                                  : w->bear(s->table, w->some_key + begin, w->some_hash + begin, born, w->some_row + begin,
                                            w->some_born + begin, threads);
    if (p->status != EC_OK) return;
    for (int64_t i = begin; i < begin + born; i++) {
        EC_ASSERT(w->some_born[i]);
        w->row[w->some_at[i]] = w->some_row[i];
        EC_PUSH(p->births, ec_birth, {w->some_key[i], w->some_hash[i], w->some_row[i]});
    }
}

static void ec_phase_bear(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    if (w->parts[t].totals[EC_BORN] < EC_BEAR_ALONE) ec_bear(w, t, 1);
}

/* -------------------------------------------------------------------------------------------------------------- place */

/* Looks at the coming victims ahead of time, so that their slots, index buckets and host rows are near when their turn
 * comes. Only a hint: ec_cache_take() chooses by itself, the same ones in the same order. */
typedef struct {
    uint32_t ring[2 * EC_AHEAD];
    int64_t seen, taken;
    uint32_t from; /* where to look on */
    int ended;
} ec_scout;

static inline void ec_scout_on(ec_scout *scout, const ec_side *s) {
    const ec_cache *c = &s->cache;
    while (!scout->ended && scout->seen < scout->taken + 2 * EC_AHEAD) {
        const uint32_t slot = ec_lru_victim(&c->lru, c->pins, scout->from);
        scout->from = slot == EC_NO_SLOT ? EC_NO_SLOT : c->lru.nodes[slot].next;
        scout->ended = scout->from == EC_NO_SLOT;
        if (slot == EC_NO_SLOT) break;
        EC_PREFETCH_WRITE(&c->slots[slot]);
        scout->ring[scout->seen++ % (2 * EC_AHEAD)] = slot;
    }
    if (scout->taken + EC_AHEAD < scout->seen) {
        const ec_slot *slot = &c->slots[scout->ring[(scout->taken + EC_AHEAD) % (2 * EC_AHEAD)]];
        ec_index_prefetch(&c->index, ec_hash(slot->key));
        EC_PREFETCH_WRITE(ec_table_flags(s->table, slot->row));
        if (s->filter) {
            EC_PREFETCH_WRITE(ec_table_freq(s->table, slot->row));
            EC_PREFETCH_WRITE(ec_table_ts(s->table, slot->row));
        }
    }
    scout->taken++;
}

/* A slot for every admitted key, then the new order of use. */
static void ec_phase_place(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    for (int64_t u = begin; u < end; u++) {
        if (u + EC_AHEAD < end && w->slot[u + EC_AHEAD] >= 0) EC_PREFETCH_WRITE(&c->pins[w->slot[u + EC_AHEAD]]);
        if (w->slot[u] >= 0) ec_cache_pin(c, (uint32_t)w->slot[u]); /* before any victim is chosen */
    }
    ec_scout scout = {.from = EC_NO_SLOT};
    uint32_t cursor = EC_NO_SLOT;
    for (int64_t u = begin; p->totals[EC_MISSES] > 0 && u < end; u++) {
        if (u + EC_AHEAD < end && w->slot[u + EC_AHEAD] < 0 && w->admitted[u + EC_AHEAD]) {
            ec_index_prefetch(&c->index, w->hash[u + EC_AHEAD]);
            EC_PREFETCH_WRITE(ec_table_flags(s->table, w->row[u + EC_AHEAD]));
        }
        if (!w->admitted[u] || w->slot[u] >= 0) continue;
        if (c->free.count == 0 && c->dying.count == 0) ec_scout_on(&scout, s);
        ec_take_record take = ec_cache_take(c, w->key[u], w->hash[u], w->row[u], &cursor);
        take.unique = u - begin;
        ec_row_mark(s->table, w->row[u]);
        if (s->filter) {
            c->slots[take.slot].freq = w->freq[u];
            c->slots[take.slot].last = w->last[u];
        }
        if (take.from == EC_FROM_VICTIM) {
            ec_row_unmark(s->table, take.before.row);
            if (s->filter) { /* the host columns are the authority again */
                int64_t *freq = ec_table_freq(s->table, take.before.row), *last = ec_table_ts(s->table, take.before.row);
                take.host_freq = *freq;
                take.host_last = *last;
                *freq = take.before.freq;
                *last = take.before.last;
            }
        }
        p->totals[EC_SWAP_OUT_ROWS] += take.from != EC_FROM_FREE;
        w->slot[u] = take.slot;
        EC_PUSH(p->takes, ec_take_record, take);
    }
    uint32_t place = 0;
    for (int64_t u = begin; u < end; u++) {
        if (u + 2 * EC_AHEAD < end && w->slot[u + 2 * EC_AHEAD] >= 0) EC_PREFETCH_WRITE(&c->lru.nodes[w->slot[u + 2 * EC_AHEAD]]);
        if (u + EC_AHEAD < end && w->slot[u + EC_AHEAD] >= 0) {
            const ec_lru_node *node = &c->lru.nodes[w->slot[u + EC_AHEAD]];
            if (node->prev != EC_NO_SLOT) EC_PREFETCH_WRITE(&c->lru.nodes[node->prev]);
            if (node->next != EC_NO_SLOT) EC_PREFETCH_WRITE(&c->lru.nodes[node->next]);
        }
        if (w->admitted[u]) EC_PUSH(p->touches, ec_touch, ec_cache_touch(c, (uint32_t)w->slot[u], w->step, place++));
    }
    for (int i = 0; i < EC_TOTALS; i++) s->totals[i] += p->totals[i];
}

/* --------------------------------------------------------------------------------------------------------------- emit */

/* Writes table t's part of the plan's arrays; the offsets are there already. */
static void ec_phase_emit(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    const ec_side *s = &w->sides[t];
    const ec_part *p = &w->parts[t];
    ec_arrays *o = &w->out;
    const int64_t begin = w->offsets[t], stop = w->offsets[t + 1], first = o->unique_offsets[t];
    int64_t in = o->in_offsets[t];
    memcpy(o->unique_keys + first, w->key + begin, (size_t)p->unique * sizeof(int64_t));
    memcpy(o->segment_offsets + first + 1, w->end + begin, (size_t)p->unique * sizeof(int64_t));
    memcpy(o->admitted + first, w->admitted + begin, (size_t)p->unique);
    if (first > 0)
        for (int64_t i = begin; i < stop; i++) o->inverse[i] += first;
    for (int64_t u = 0; u < p->unique; u++) {
        const int64_t slot = w->admitted[begin + u] ? w->slot[begin + u] : s->cache.capacity;
        o->slots[first + u] = s->base + slot;
    }
    int64_t out = o->out_offsets[t];
    for (int64_t i = 0; i < p->takes.size; i++, in++) {
        const ec_take_record *take = &EC_TAKE(p, i);
        o->in_keys[in] = w->key[begin + take->unique];
        o->in_slots[in] = s->base + take->slot;
        o->in_rows[in] = w->row[begin + take->unique];
        if (take->from == EC_FROM_FREE) continue;
        o->out_keys[out] = take->before.key;
        o->out_slots[out] = s->base + take->slot;
        o->out_rows[out++] = take->before.row;
    }
    o->hits[t] = p->totals[EC_HITS];
    o->misses[t] = p->totals[EC_MISSES];
}

#endif
