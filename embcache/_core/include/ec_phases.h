/* The phases of a plan. swap.pyx runs them in this order over all tables of a batch, in one call without the GIL:
 *
 *   dedup (tables; large tables by halves, or by blocks and parts) -> lookup (chunks of uniques) -> decide (tables): count, sweep, admit,
 *   make room -> bear (tables): new rows -> place (tables): pin, choose victims, take slots, use -> emit (tables): the plan's arrays
 *
 * Tables without a filter whose keys are nearly all resident go the short way instead (ec_resident.h): one pass does dedup,
 * lookup and what place does for hits, with the same result.
 *
 * Tasks of one phase touch disjoint data, and whatever is observable is settled by one task per table in the order of
 * the table's unique keys: the result is a function of state and batch at any number of threads (promise I4).
 * decide, bear and place may fail, and leave a journal that ec_plan_undo() takes back. emit cannot fail.
 */
#ifndef EC_PHASES_H
#define EC_PHASES_H

#include <stdint.h>
#include <string.h>

#include "ec_admission.h"
#include "ec_find.h"
#include "ec_resident.h"

#define EC_ALONE 8192 /* keys from which a table's search for host rows, or its inserts, get all threads */

/* -------------------------------------------------------------------------------------------------------------- dedup */

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
static void ec_phase_part_order(void *context, int64_t part) { ec_dedup_part_order(((ec_work *)context)->cut, (int)part); }

static void ec_phase_half_run(void *context, int64_t half) {
    ec_work *w = context;
    if (ec_dedup_half_run(w->cut, (int)half, &w->dedup[half]) != EC_OK) __atomic_store_n(&w->dedup_status, EC_NOMEM, __ATOMIC_RELAXED);
}
static void ec_phase_half_match(void *context, int64_t half) {
    ec_work *w = context;
    ec_dedup_half_match(w->cut, (int)half, &w->dedup[0]);
}
static void ec_phase_half_inverse(void *context, int64_t half) { ec_dedup_half_inverse(((ec_work *)context)->cut, (int)half); }
static void ec_phase_half_inverse_and_ends(void *context, int64_t task) { /* the ends take longest, so they are begun first */
    if (task == 0) ec_dedup_half_ends(((ec_work *)context)->cut);
    else ec_phase_half_inverse(context, task - 1);
}
static void ec_phase_half_order(void *context, int64_t half) { ec_dedup_half_order(((ec_work *)context)->cut, (int)half); }

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
    for (int64_t u = begin; u < end; u++) w->hash[u] = ec_hash(w->key[u]);
    ec_find_values(index, w->key + begin, w->hash + begin, end - begin, w->slot + begin);
    for (int64_t u = begin; u < end; u++) {
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

/* A table of the short way: its uniques, who of them is resident, and the others' host rows. */
static void ec_phase_resident(void *context, int64_t task) {
    ec_work *w = (ec_work *)context;
    const int64_t t = EC_AT(w->quick, int64_t, task);
    w->parts[t].status = ec_resident_run(w, t);
    if (w->parts[t].status == EC_OK && w->parts[t].missing < EC_ALONE) ec_resident_rows(w, t, 1);
}

/* ------------------------------------------------------------------------------------------------------------- decide */

/* Counting alone, where the decision then waits for others. */
static void ec_phase_count(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    w->parts[t].status = w->sides[t].filter ? ec_filter_begin(w, t) : EC_OK;
}

static int ec_decide(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    if (!p->quick) memset(w->admitted + begin, 1, (size_t)p->unique);
    if (s->filter) {
        const int status = ec_filter_step(w, t);
        if (status != EC_OK) return status;
    }
    int64_t admitted = 0, hits = 0, born = 0;
    if (p->quick) {
        admitted = p->unique;
        hits = p->unique - p->missing;
        born = ec_resident_unborn(w, t);
    }
    for (int64_t u = begin; u < end && !p->quick; u++) {
        if (!w->admitted[u]) continue;
        admitted++;
        if (w->slot[u] >= 0) {
            hits++;
        } else if (w->row[u] < 0) {
            w->some_key[begin + born] = w->key[u];
            w->some_hash[begin + born] = w->hash[u];
            w->some_at[begin + born++] = u;
        }
    }
    s->met = p->unique;
    s->missed = admitted - hits;
    p->totals[EC_HITS] = hits;
    p->totals[EC_MISSES] = admitted - hits;
    p->totals[EC_ADMITTED] = admitted;
    p->totals[EC_REJECTED] = p->unique - admitted;
    p->totals[EC_BORN] = born;
    p->need = admitted;
    p->have = c->capacity - (p->quick ? p->pinned_before : c->pinned);
    if (p->quick) {
        p->have += hits - (c->pinned - p->pinned_before);
        if (p->need > p->have) return EC_CAPACITY;
    } else if (p->need > p->have) { /* hits that are pinned already need no slot of their own: rarely worth a look */
        for (int64_t u = begin; u < end; u++) p->have += w->admitted[u] && w->slot[u] >= 0 && c->seats[w->slot[u]].pins > 0;
        if (p->need > p->have) return EC_CAPACITY;
    }
    /* from here on nothing may fail but the birth of rows, whose record has its room already, and the choice of victims */
    if (ec_vec_reserve(&p->births, born, sizeof(ec_birth)) || ec_vec_reserve(&p->takes, admitted - hits, sizeof(ec_take_record)) ||
        ec_vec_reserve(&p->touches, p->quick ? 0 : admitted, sizeof(ec_stood)) || ec_take_refused() ||
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
    if (w->parts[t].totals[EC_BORN] < EC_ALONE) ec_bear(w, t, 1);
}

#endif
