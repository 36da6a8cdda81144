/* Sweeps: the cut-off, the floor below it, and the pass that takes the dead away.
 *
 * A sweep is one comparison for each key of the batch and a new cut-off; the pass over everything else goes on in slices,
 * one a plan, each bounded by a number of places looked at (never by a clock: results do not depend on the machine). It
 * visits slots, then host rows, then waiting keys. A resident that is dead and becomes a victim is behind the pass in the
 * slots and before it in the rows, or the pass goes round once more: nothing dead is left when the pass is idle.
 *
 * What a slice takes away is in its plan's journal like any other change, so cancel() and failure bring it back.
 */
#ifndef EC_SWEEP_H
#define EC_SWEEP_H

#include <stdint.h>

#include "ec_bury.h"
#include "ec_select.h"

#define EC_AHEAD 16           /* prefetch distance of look-ups and of the policy's list */
#define EC_BURY_COST 64       /* a key taken away costs as much as this many places looked at */
#define EC_BURY_TOGETHER 1024 /* dead rows that are found before they are taken away */

static inline int64_t ec_unique_count(const ec_work *w, int64_t at, int64_t begin, int64_t origin) {
    if (w->times) return w->occurred[at];
    return w->end[at] - (at == begin ? origin : w->end[at - 1]);
}

/* --------------------------------------------------------------------------------------------------------------- pass */

/* Each function looks at places of its region from pass->at on, while *budget lasts. */
static int ec_pass_slots(ec_side *s, ec_part *p, int64_t step, int64_t *budget) {
    const ec_cache *c = &s->cache;
    ec_pass *pass = &s->filter->pass;
    for (; pass->at < c->capacity && *budget > 0; pass->at++, --*budget) {
        if (c->state[pass->at] != EC_SLOT_LIVE || !ec_side_slot_dead(s, &c->slots[pass->at])) continue;
        if (ec_side_kill_slot(s, p, (uint32_t)pass->at, step) != EC_OK) return EC_NOMEM;
        *budget -= EC_BURY_COST;
    }
    return EC_OK;
}

/* Host rows `first` .. first + n - 1, of one extent, that are not resident and below the cut-off. Returns how many. */
static inline int64_t ec_pass_candidates(const ec_table *t, int64_t first, int64_t n, int64_t cutoff, int avx2, int64_t *found) {
    const uint8_t *flags = ec_table_flags(t, first);
    const int64_t *last = ec_table_ts(t, first), *key = ec_table_key(t, first), *freq = ec_table_freq(t, first);
    uint64_t old[EC_EXTENT_ROWS / 64];
    int64_t got = 0;
    EC_CLONE_OF(ec_old_words, avx2)(last, n / 64, cutoff, old);
    for (int64_t word = 0; word < n / 64; word++) {
        if (!old[word]) continue;
        for (uint64_t rest = ec_old_at_home(flags + 64 * word, old[word]); rest; rest &= rest - 1) {
            const int64_t i = 64 * word + __builtin_ctzll(rest);
            EC_PREFETCH_WRITE(key + i);
            EC_PREFETCH_READ(freq + i);
            found[got++] = first + i;
        }
    }
    for (int64_t i = n / 64 * 64; i < n; i++)
        if (last[i] < cutoff && (flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE) found[got++] = first + i;
    return got;
}

static int ec_pass_rows(ec_side *s, ec_part *p, int64_t step, int avx2, int64_t *budget) {
    const ec_table *t = s->table;
    ec_pass *pass = &s->filter->pass;
    int64_t found[EC_BURY_TOGETHER + EC_EXTENT_ROWS];
    while (pass->at < t->row_limit && *budget > 0) {
        int64_t some = 0;
        while (pass->at < t->row_limit && *budget > 0 && some < EC_BURY_TOGETHER) { /* enough of them to look ahead */
            int64_t n = EC_EXTENT_ROWS - (pass->at & (EC_EXTENT_ROWS - 1));
            if (n > t->row_limit - pass->at) n = t->row_limit - pass->at;
            if (n > *budget) n = *budget;
            const int64_t more = ec_pass_candidates(t, pass->at, n, pass->cutoff, avx2, found + some);
            some += more;
            pass->at += n;
            *budget -= n + more * EC_BURY_COST;
        }
        if (ec_bury(s, p, step, found, some, 1) != EC_OK) return EC_NOMEM;
    }
    return EC_OK;
}

static int ec_pass_entries(ec_side *s, ec_part *p, int64_t *budget) {
    ec_filter *f = s->filter;
    for (; f->pass.at < f->entries.size && *budget > 0; f->pass.at++, --*budget) {
        if (!ec_filter_entry_dead(f, &EC_ENTRY(f, f->pass.at))) continue;
        if (ec_vec_reserve_one(&p->changes, sizeof(ec_filter_change)) != EC_OK) return EC_NOMEM;
        EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(f, (uint32_t)f->pass.at));
        p->totals[EC_FORGOTTEN]++;
        *budget -= EC_BURY_COST;
    }
    return EC_OK;
}

/* Takes the pass on by `budget` places, or to its end. */
static int ec_pass_slice(ec_work *w, int64_t t, int64_t budget) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_pass *pass = &s->filter->pass;
    while (pass->region != EC_PASS_IDLE && budget > 0) {
        const int64_t end = pass->region == EC_PASS_SLOTS ? s->cache.capacity
                            : pass->region == EC_PASS_ROWS ? s->table->row_limit
                                                           : s->filter->entries.size;
        const int status = pass->region == EC_PASS_SLOTS ? ec_pass_slots(s, p, w->step, &budget)
                           : pass->region == EC_PASS_ROWS ? ec_pass_rows(s, p, w->step, w->avx2, &budget)
                                                          : ec_pass_entries(s, p, &budget);
        if (status != EC_OK) return status;
        if (pass->at < end) break;
        pass->at = 0;
        if (pass->region < EC_PASS_ENTRIES) {
            pass->region++;
        } else if (pass->again) {
            pass->again = 0;
            pass->region = EC_PASS_SLOTS;
        } else {
            pass->region = EC_PASS_IDLE;
        }
    }
    return EC_OK;
}

/* Shares the work of a plan's passes among the tables that have one under way, or begin one. */
static void ec_pass_share(ec_work *w) {
    int64_t passes = 0;
    for (int64_t t = 0; t < w->tables; t++) {
        const ec_filter *f = w->sides[t].filter;
        passes += f && (f->pass.region != EC_PASS_IDLE || ec_filter_sweeps_at(f, w->step));
    }
    w->slice = passes > 1 ? w->sweep_rows / passes + 1 : w->sweep_rows;
}

/* -------------------------------------------------------------------------------------------------------------- floor */

/* The cut-off for rows: `cutoff`, or a lower one so that keep_min rows survive; rows that are equally recent stay together.
 *
 * The search for survivors ends when it has found enough of them, so as long as the table is healthy it costs about
 * keep_min places. Where the floor binds, every place is looked at in this step: once where few are old (10 M rows, 1 %: 18 to 23 ms of
 * CPU, busy machine), else once more. */
static int ec_floor(const ec_work *w, int64_t t, int64_t cutoff, int64_t *floored) {
    int64_t missing = w->sides[t].filter->rule.keep_min, doomed = 0;
    int status = EC_OK;
    ec_field field;
    ec_rank oldest;
    ec_run run;
    ec_vec ranks = {0}; /* of ec_rank: all of the doomed while they are few */
    ec_field_make(&field, w, t, EC_BY_TIME, cutoff);
    *floored = cutoff;
    const int64_t few = ec_select_few(&field);
    for (int64_t at = 0; at < field.places && missing > 0 && status == EC_OK;) {
        at = ec_run_fill(&field, at, EC_RUN, &run);
        doomed += run.size;
        missing -= run.living - run.size;
        if (doomed > few || run.size == 0 || (status = ec_vec_reserve(&ranks, run.size, sizeof(ec_rank))) != EC_OK) continue;
        memcpy((ec_rank *)ranks.data + ranks.size, run.rank, (size_t)run.size * sizeof(ec_rank));
        ranks.size += run.size;
    }
    if (missing > 0 && status == EC_OK) {
        *floored = INT64_MIN;
        if (doomed > missing) {
            if (doomed <= few) oldest = ec_rank_nth((ec_rank *)ranks.data, doomed, doomed - missing);
            else status = ec_select(&field, doomed, doomed - missing + 1, &oldest);
            if (status == EC_OK) *floored = EC_SIGNED((uint64_t)(oldest >> 64));
        }
    }
    ec_vec_free(&ranks);
    return status;
}

/* ------------------------------------------------------------------------------------------------- sweep by show/click */

/* Evicts rows at places of a field, in order: those in the host table together, as their misses can overlap. */
static int ec_kill_places(ec_work *w, int64_t t, const int64_t *places, int64_t n) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const int64_t capacity = s->cache.capacity, limit = s->table->row_limit;
    int64_t rows[EC_BURY_TOGETHER + EC_RUN], at_home = 0;
    for (int64_t i = 0; i < n; i++) {
        if (places[i] >= capacity && places[i] < capacity + limit) {
            EC_PREFETCH_WRITE(ec_table_key(s->table, places[i] - capacity));
            rows[at_home++] = places[i] - capacity;
            continue;
        }
        if (places[i] < capacity) {
            if (ec_side_kill_slot(s, p, (uint32_t)places[i], w->step) != EC_OK) return EC_NOMEM;
            continue;
        }
        const int64_t u = w->offsets[t] + places[i] - capacity - limit;
        ec_row_unmark(s->table, w->row[u]);
        if (ec_side_kill_row(s, p, w->key[u], w->hash[u], w->row[u], 0, w->step) != EC_OK) return EC_NOMEM;
        w->row[u] = -1;
        w->admitted[u] = 0;
    }
    return ec_bury(s, p, w->step, rows, at_home, 0);
}

/* Removes waiting keys by their entries. */
static int ec_remove_entries(ec_work *w, int64_t t, const int64_t *entries, int64_t n) {
    ec_part *p = &w->parts[t];
    if (ec_vec_reserve(&p->changes, n, sizeof(ec_filter_change)) != EC_OK) return EC_NOMEM;
    for (int64_t i = 0; i < n; i++) EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(w->sides[t].filter, (uint32_t)entries[i]));
    p->totals[EC_FORGOTTEN] += n;
    return EC_OK;
}

/* Evicts some places of a field, in order. */
static int ec_kill_some(ec_work *w, const ec_field *field, const int64_t *places, int64_t n) {
    return field->kind == EC_WAITING_BY_SCORE ? ec_remove_entries(w, field->t, places, n) : ec_kill_places(w, field->t, places, n);
}

/* Evicts what has a rank of up to `most` in a field. */
static int ec_kill_up_to(ec_work *w, const ec_field *field, ec_rank most) {
    int64_t places[EC_BURY_TOGETHER + EC_RUN], some = 0;
    ec_run run;
    for (int64_t at = 0; at < field->places;) {
        at = ec_run_fill(field, at, EC_RUN, &run);
        for (int64_t i = 0; i < run.size; i++) {
            places[some] = run.place[i];
            some += run.rank[i] <= most;
        }
        if (some < EC_BURY_TOGETHER && at < field->places) continue;
        const int status = ec_kill_some(w, field, places, some);
        if (status != EC_OK) return status;
        some = 0;
    }
    return EC_OK;
}

/* Evicts the lowest ranks of a field, which has about `guess` of them: a share of all, and no more than `spare`. */
static int ec_kill_lowest(ec_work *w, ec_field *field, int64_t guess, double share, int64_t spare) {
    ec_lowest low = {0};
    ec_rank most = ~(ec_rank)0;
    int status = EC_OK;
    if (spare <= 0) return EC_OK;
    if (guess > ec_select_few(field)) status = ec_lowest_bound(field, (double)ec_doomed(share, guess, spare) / (double)guess, &most);
    if (status == EC_OK) status = ec_lowest_gather(field, most, &low);
    const int64_t doomed = ec_doomed(share, low.size, spare);
    if (status == EC_OK && doomed > 0) {
        if (low.full || doomed > low.ranks.size) { /* the sample was wrong, or they are too many to keep */
            if ((status = ec_select(field, low.size, doomed, &most)) == EC_OK) status = ec_kill_up_to(w, field, most);
        } else if ((status = ec_lowest_cut(&low, doomed)) == EC_OK) {
            for (int64_t at = 0; at < doomed && status == EC_OK; at += EC_BURY_TOGETHER)
                status = ec_kill_some(w, field, (const int64_t *)low.places.data + at, doomed - at < EC_BURY_TOGETHER ? doomed - at : EC_BURY_TOGETHER);
        }
    }
    ec_lowest_free(&low);
    return status;
}

/* Rows and waiting keys that go, where that was decided with those who hold the rest of the table. */
static int ec_kill_agreed(ec_work *w, int64_t t) {
    const ec_limit *limit = &w->limits[t];
    ec_field field;
    ec_field_make(&field, w, t, EC_BY_SCORE, 0);
    if (limit->rows && ec_kill_up_to(w, &field, (ec_rank)limit->rows_most[0] << 64 | limit->rows_most[1]) != EC_OK) return EC_NOMEM;
    ec_field_make(&field, w, t, EC_WAITING_BY_SCORE, 0);
    return limit->waiting ? ec_kill_up_to(w, &field, (ec_rank)limit->waiting_most[0] << 64 | limit->waiting_most[1]) : EC_OK;
}

/* Decays every score (by counting sweeps: no row is touched), and evicts the share of the rows, and of the waiting keys,
 * that have the lowest ones; ties by key. All of it in this step: which ones these are depends on all of them. Each
 * place is looked at once where few go and the sample is right: of 10 M rows, 46 to 64 ms where 1 % went (CPU; busy machine; 130 to 198
 * when each was counted and looked at twice). */
static int ec_sweep_scores(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_filter *f = s->filter;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    ec_field field;
    f->epoch++;
    if (f->rule.evict_share <= 0) return EC_OK;
    if (ec_vec_reserve_one(&f->sweeps, sizeof(ec_sweep_record)) != EC_OK) return EC_NOMEM;
    EC_PUSH(f->sweeps, ec_sweep_record, {w->step, INT64_MIN, 0, 0, f->late});
    ec_index_init(&f->late, f->index.seed);
    p->swept = w->step;
    if (w->limits) {
        if (ec_kill_agreed(w, t) != EC_OK) return EC_NOMEM;
    } else {
        EC_ASSERT(f->pass.region == EC_PASS_IDLE);
        ec_field_make(&field, w, t, EC_BY_SCORE, 0);
        if (ec_kill_lowest(w, &field, s->table->live, f->rule.evict_share, s->table->live - f->rule.keep_min) != EC_OK) return EC_NOMEM;
        ec_field_make(&field, w, t, EC_WAITING_BY_SCORE, 0);
        if (ec_kill_lowest(w, &field, f->index.size, f->rule.evict_share, INT64_MAX) != EC_OK) return EC_NOMEM;
    }
    for (int64_t u = begin; u < end; u++) { /* those of the batch itself */
        if (w->slot[u] >= 0 && s->cache.state[w->slot[u]] != EC_SLOT_LIVE) {
            w->slot[u] = -1;
            w->admitted[u] = 0;
        }
        if (w->entry[u] >= 0 && EC_ENTRY(f, w->entry[u]).count == 0) {
            w->entry[u] = -1;
            w->admitted[u] = 0;
        }
    }
    return EC_OK;
}

/* -------------------------------------------------------------------------------------------------------------- sweep */

/* Sets the cut-offs of this step's sweep and begins the pass, or has the one under way go round again. */
static int ec_sweep_start(ec_work *w, int64_t t, int64_t cutoff) {
    ec_part *p = &w->parts[t];
    ec_filter *f = w->sides[t].filter;
    int64_t rows_cutoff = cutoff;
    if (f->rule.keep_min > 0 && w->limits) rows_cutoff = w->limits[t].cutoff;
    else if (f->rule.keep_min > 0 && ec_floor(w, t, cutoff, &rows_cutoff) != EC_OK) return EC_NOMEM;
    /* The floor may lower the cut-off, and then who died of the old one must be gone. */
    const int active = f->pass.region != EC_PASS_IDLE;
    while (rows_cutoff < f->pass.cutoff && f->pass.region != EC_PASS_IDLE) {
        const int status = ec_pass_slice(w, t, INT64_MAX);
        if (status != EC_OK) return status;
    }
    if (ec_vec_reserve_one(&f->sweeps, sizeof(ec_sweep_record)) != EC_OK) return EC_NOMEM;
    EC_PUSH(f->sweeps, ec_sweep_record, {w->step, f->pass.cutoff, active, 0, f->late});
    ec_index_init(&f->late, f->index.seed);
    p->swept = w->step;
    f->pass.cutoff = rows_cutoff;
    f->pass.waiting_cutoff = cutoff;
    f->pass.again = f->pass.region != EC_PASS_IDLE;
    if (f->pass.region == EC_PASS_IDLE) {
        f->pass.region = EC_PASS_SLOTS;
        f->pass.at = 0;
    }
    return EC_OK;
}

#endif
