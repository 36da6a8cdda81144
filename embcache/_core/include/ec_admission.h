/* Counting, sweeping and admission: what a plan does to the feature filter of a table, before any slot is given away.
 *
 * For a batch of step s: all its occurrences are counted; then, where s is a step of a sweep, a cut-off is set (ec_sweep.h);
 * then each unique key is admitted, or not, for the whole batch. Every change is in the plan's journal (ec_plan.h).
 */
#ifndef EC_ADMISSION_H
#define EC_ADMISSION_H

#include <stdint.h>

#include "ec_sweep.h"

/* Largest timestamp of each unique of table t in this batch, and the newest timestamp seen. */
static void ec_count_time(ec_work *w, int64_t t) {
    ec_filter *f = w->sides[t].filter;
    const int64_t begin = w->offsets[t], stop = w->offsets[t + 1], unique = w->parts[t].unique;
    int64_t newest = INT64_MIN;
    if (w->times) {
        for (int64_t u = begin; u < begin + unique; u++) w->occurred[u] = 0;
        for (int64_t i = begin; i < stop; i++) w->occurred[begin + w->out.inverse[i]] += w->times[i];
    }
    if (f->rule.scores) {
        for (int64_t u = begin; u < begin + unique; u++) w->clicks[u] = 0;
        for (int64_t i = begin; w->clicks_at && i < stop; i++) w->clicks[begin + w->out.inverse[i]] += w->clicks_at[i];
        for (int64_t i = begin; w->clicked && i < stop; i++) w->clicks[begin + w->out.inverse[i]] += w->clicked[i] != 0;
    } else if (f->rule.time_is_step) {
        for (int64_t u = begin; u < begin + unique; u++) w->last[u] = w->step;
        if (unique > 0) newest = w->step;
    } else {
        for (int64_t u = begin; u < begin + unique; u++) w->last[u] = INT64_MIN;
        if (w->timestamps) {
            const int64_t *id = w->out.inverse;
            for (int64_t i = begin; i < stop; i++) {
                const int64_t at = w->timestamps[i];
                if (at > w->last[begin + id[i]]) w->last[begin + id[i]] = at;
                if (at > newest) newest = at;
            }
        }
    }
    if (w->newest && !f->rule.scores) {
        newest = w->newest[t];
        if (f->rule.time_is_step && newest > INT64_MIN) newest = w->step;
    }
    if (newest > f->newest) f->newest = newest;
}

/* Adds the batch's `count` occurrences of unique u to counters: the sums go to w->freq and w->last. */
static inline void ec_count_add(ec_work *w, const ec_filter *f, int64_t u, int64_t count, int64_t freq, int64_t last) {
    if (f->rule.scores) {
        const double more = f->rule.alpha * (double)count + f->rule.beta * (double)w->clicks[u];
        w->freq[u] = ec_score_count(ec_filter_score(f, freq, last) + more);
        w->last[u] = f->epoch;
    } else {
        w->freq[u] = ec_add_saturated(freq, count);
        if (last > w->last[u]) w->last[u] = last;
    }
}

static inline void ec_count_prefetch(const ec_table *t, int64_t row) {
    EC_PREFETCH_READ(ec_table_freq(t, row));
    EC_PREFETCH_READ(ec_table_ts(t, row));
    EC_PREFETCH_WRITE(ec_table_flags(t, row));
}

/* Keys of the batch that an earlier sweep has killed are met now, before the pass has come to them: they start anew. */
static int ec_count_dead(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    for (int64_t u = begin; u < end; u++) {
        if (w->slot[u] >= 0) {
            if (!ec_side_slot_dead(s, &s->cache.slots[w->slot[u]])) continue;
            if (ec_side_kill_slot(s, p, (uint32_t)w->slot[u], w->step - 1) != EC_OK) return EC_NOMEM;
        } else if (w->row[u] >= 0) {
            if (!ec_side_row_dead(s, w->row[u])) continue;
            if (ec_side_kill_row(s, p, w->key[u], w->hash[u], w->row[u], *ec_table_ts(s->table, w->row[u]), w->step - 1) != EC_OK) return EC_NOMEM;
        }
        w->slot[u] = w->row[u] = -1;
    }
    return EC_OK;
}

/* Notes the batch's living keys that are below the cut-off of the pass: they came after its sweep. */
static int ec_count_late(ec_work *w, int64_t t) {
    ec_part *p = &w->parts[t];
    ec_filter *f = w->sides[t].filter;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    for (int64_t u = begin; u < end; u++) {
        const int has_row = w->slot[u] >= 0 || w->row[u] >= 0;
        if (w->last[u] >= (has_row ? f->pass.cutoff : f->pass.waiting_cutoff)) continue;
        if (ec_index_find(&f->late, w->key[u], w->hash[u]) >= 0) continue;
        if (ec_vec_reserve_one(&p->late, sizeof(int64_t)) || ec_take_refused() || ec_index_reserve(&f->late, 1)) return EC_NOMEM;
        ec_index_insert(&f->late, w->key[u], w->hash[u], 0);
        EC_PUSH(p->late, int64_t, w->key[u]);
    }
    return EC_OK;
}

/* Adds the batch to the counters. w->freq and w->last hold each unique's totals afterwards, w->entry its filter entry. */
static int ec_count(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_filter *f = s->filter;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    int64_t resident = 0, absent = 0;
    if (f->pass.region != EC_PASS_IDLE && ec_count_dead(w, t) != EC_OK) return EC_NOMEM;
    for (int64_t u = begin; u < end; u++) {
        resident += w->slot[u] >= 0;
        absent += w->slot[u] < 0 && w->row[u] < 0;
    }
    if (ec_vec_reserve(&p->counts, resident, sizeof(ec_count_record)) || ec_vec_reserve(&p->marks, p->unique - resident, sizeof(int64_t)))
        return EC_NOMEM;
    /* a unique's entry is bumped, then removed or left; or removed as dead, then added: at most two changes */
    if (ec_vec_reserve(&p->changes, 2 * (p->unique - resident), sizeof(ec_filter_change))) return EC_NOMEM;
    if (ec_filter_lists(f)) {
        const int status = ec_filter_reserve(f, absent);
        if (status != EC_OK) return status;
    } else if (f->sketch.width > 0) {
        if (ec_vec_reserve(&p->sketch.cells, EC_SKETCH_ROWS * absent, sizeof(ec_sketch_change)) != EC_OK) return EC_NOMEM;
        if (ec_sketch_begin(&f->sketch, f->pass.waiting_cutoff, f->newest, &p->sketch) != EC_OK) return EC_NOMEM;
    }
    ec_count_time(w, t);
    for (int64_t u = begin; u < end; u++) {
        const int64_t count = ec_unique_count(w, u, begin, begin);
        if (u + EC_AHEAD < end) {
            if (w->slot[u + EC_AHEAD] >= 0) EC_PREFETCH_WRITE(&s->cache.slots[w->slot[u + EC_AHEAD]]);
            else if (w->row[u + EC_AHEAD] >= 0) ec_count_prefetch(s->table, w->row[u + EC_AHEAD]);
            else if (f->sketch.width > 0) ec_sketch_prefetch(&f->sketch, w->key[u + EC_AHEAD], w->hash[u + EC_AHEAD]);
            else ec_index_prefetch(&f->index, w->hash[u + EC_AHEAD]);
        }
        w->entry[u] = -1;
        if (w->slot[u] >= 0) {
            ec_slot *slot = &s->cache.slots[w->slot[u]];
            EC_PUSH(p->counts, ec_count_record, {(uint32_t)w->slot[u], slot->freq, slot->last});
            ec_count_add(w, f, u, count, slot->freq, slot->last);
            slot->freq = w->freq[u];
            slot->last = w->last[u];
            continue;
        }
        int64_t freq = 0, last = INT64_MIN;
        if (w->row[u] >= 0) {
            freq = *ec_table_freq(s->table, w->row[u]);
            last = *ec_table_ts(s->table, w->row[u]);
            ec_row_mark(s->table, w->row[u]); /* the sweep's scan of the host rows passes it over: it is looked at by itself */
            EC_PUSH(p->marks, int64_t, w->row[u]);
        }
        if (freq == 0 && w->row[u] < 0 && f->sketch.width > 0) {
            w->freq[u] = ec_sketch_add(&f->sketch, w->key[u], w->hash[u], count, &p->sketch.cells);
            continue;
        }
        if (freq == 0) w->entry[u] = ec_filter_find(f, w->key[u], w->hash[u]);
        if (w->entry[u] >= 0 && ec_filter_entry_dead(f, &EC_ENTRY(f, w->entry[u]))) {
            EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(f, (uint32_t)w->entry[u]));
            p->totals[EC_FORGOTTEN]++;
            w->entry[u] = -1;
        }
        if (w->entry[u] >= 0) {
            freq = EC_ENTRY(f, w->entry[u]).count;
            last = EC_ENTRY(f, w->entry[u]).last;
        }
        ec_count_add(w, f, u, count, freq, last);
        if (w->entry[u] < 0) continue;
        if (w->row[u] < 0) {
            EC_PUSH(p->changes, ec_filter_change, ec_filter_set(f, (uint32_t)w->entry[u], w->freq[u], w->last[u]));
        } else { /* the user has made this row: it takes over the key's counters */
            EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(f, (uint32_t)w->entry[u]));
            w->entry[u] = -1;
        }
    }
    return f->pass.region == EC_PASS_IDLE ? EC_OK : ec_count_late(w, t);
}

/* Evicts the batch's own keys that the sweep of this step kills; they are not admitted in this batch. */
static int ec_sweep_batch(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const ec_pass *pass = &s->filter->pass;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    /* what ec_count() had reserved may be used up: a pass that a lower cut-off ends at once takes entries away as well */
    if (ec_vec_reserve(&p->changes, p->unique, sizeof(ec_filter_change)) != EC_OK) return EC_NOMEM;
    for (int64_t u = begin; u < end; u++) {
        if (w->last[u] >= (w->slot[u] >= 0 || w->row[u] >= 0 ? pass->cutoff : pass->waiting_cutoff)) continue;
        w->admitted[u] = 0;
        if (w->slot[u] >= 0) {
            if (ec_side_kill_slot(s, p, (uint32_t)w->slot[u], w->step) != EC_OK) return EC_NOMEM;
            w->slot[u] = -1;
        } else if (w->row[u] >= 0) {
            ec_row_unmark(s->table, w->row[u]);
            if (ec_side_kill_row(s, p, w->key[u], w->hash[u], w->row[u], w->last[u], w->step) != EC_OK) return EC_NOMEM;
        } else {
            p->totals[EC_FORGOTTEN] += w->entry[u] >= 0;
        }
        if (w->entry[u] >= 0) EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(s->filter, (uint32_t)w->entry[u]));
    }
    return EC_OK;
}

/* Whether a key without a row earns one: it has occurred often enough, and one of the occurrences of this batch since
 * then is drawn. */
static inline int ec_earns(const ec_work *w, const ec_filter *f, int64_t u, int64_t begin) {
    int64_t draws = ec_unique_count(w, u, begin, begin);
    if (f->rule.scores) {
        if (ec_filter_score(f, w->freq[u], w->last[u]) < f->rule.admit_score) return 0;
    } else {
        if (w->freq[u] < f->rule.admit_threshold) return 0;
        const int64_t since = f->rule.admit_threshold > 1 ? w->freq[u] - f->rule.admit_threshold + 1 : draws;
        if (since < draws) draws = since;
    }
    return ec_filter_drawn(f, w->key[u], w->step, draws);
}

/* Admits each unique, or not: a key with a row or that earns one is in. */
static int ec_admit(ec_work *w, int64_t t) {
    ec_part *p = &w->parts[t];
    ec_filter *f = w->sides[t].filter;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    /* the sweep may have used up what ec_count() had reserved for this */
    if (ec_vec_reserve(&p->changes, p->unique, sizeof(ec_filter_change)) != EC_OK) return EC_NOMEM;
    for (int64_t u = begin; u < end; u++) {
        if (!w->admitted[u]) continue;
        if (w->slot[u] >= 0 || w->row[u] >= 0 || ec_earns(w, f, u, begin)) {
            if (w->entry[u] >= 0) EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(f, (uint32_t)w->entry[u]));
        } else {
            w->admitted[u] = 0;
            if (w->entry[u] < 0 && ec_filter_lists(f))
                EC_PUSH(p->changes, ec_filter_change, ec_filter_add(f, w->key[u], w->hash[u], w->freq[u], w->last[u]));
        }
    }
    return EC_OK;
}

/* What table t's filter does first. */
static int ec_filter_begin(ec_work *w, int64_t t) {
    const ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    p->newest_before = s->filter->newest;
    p->pass_before = s->filter->pass;
    p->epoch_before = s->filter->epoch;
    return ec_count(w, t);
}

/* Whether what a sweep of this step takes away of table t may depend on all of the table: on what others hold of it too. */
static inline int ec_filter_depends(const ec_work *w, int64_t t) {
    const ec_filter *f = w->sides[t].filter;
    if (!f || !ec_filter_sweeps_at(f, w->step)) return 0;
    return f->rule.scores ? f->rule.evict_share > 0 : f->rule.keep_min > 0;
}

/* All that step w->step does to table t's filter. */
static int ec_filter_step(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    int64_t cutoff;
    int status = w->counted ? EC_OK : ec_filter_begin(w, t);
    if (status != EC_OK) return status;
    if (s->filter->rule.scores) {
        if (ec_filter_sweeps_at(s->filter, w->step) && (status = ec_sweep_scores(w, t)) != EC_OK) return status;
    } else if (ec_filter_sweeps_at(s->filter, w->step) && ec_filter_cutoff(s->filter, &cutoff)) {
        if ((status = ec_sweep_start(w, t, cutoff)) != EC_OK) return status;
        if ((status = ec_sweep_batch(w, t)) != EC_OK) return status;
    }
    if ((status = ec_pass_slice(w, t, w->slice)) != EC_OK) return status;
    return ec_admit(w, t);
}

#endif
