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

#include "ec_isa.h"
#include "ec_work.h"

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>
#endif

#define EC_AHEAD 16           /* prefetch distance of look-ups and of the policy's list */
#define EC_BURY_COST 64       /* a key taken away costs as much as this many places looked at */
#define EC_BURY_TOGETHER 1024 /* dead rows that are found before they are taken away */
#define EC_DIGIT_BITS 16
#define EC_DIGITS ((size_t)1 << EC_DIGIT_BITS)

static inline int64_t ec_unique_count(const ec_work *w, int64_t at, int64_t begin, int64_t origin) {
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

/* Which of 64 timestamps are below the cut-off, a bit each. A clone of either kind reads timestamps and nothing else, so
 * that a run without any dead costs one look at this column. */
EC_INLINE uint64_t ec_pass_old_baseline(const int64_t *last, int64_t cutoff) {
    uint64_t old = 0;
    for (int i = 0; i < 64; i++) old |= (uint64_t)(last[i] < cutoff) << i;
    return old;
}

static __attribute__((noinline)) void ec_pass_words_baseline(const int64_t *last, int64_t words, int64_t cutoff, uint64_t *old) {
    for (int64_t i = 0; i < words; i++) old[i] = ec_pass_old_baseline(last + 64 * i, cutoff);
}

#if EC_HAS_AVX2_CLONE
static __attribute__((noinline)) EC_TARGET_AVX2 void ec_pass_words_avx2(const int64_t *last, int64_t words, int64_t cutoff, uint64_t *old) {
    const __m256i limit = _mm256_set1_epi64x(cutoff);
    for (int64_t i = 0; i < words; i++, last += 64) {
        uint64_t bits = 0;
        for (int j = 0; j < 16; j++) {
            const __m256i below = _mm256_cmpgt_epi64(limit, _mm256_loadu_si256((const __m256i *)(last + 4 * j)));
            bits |= (uint64_t)_mm256_movemask_pd(_mm256_castsi256_pd(below)) << 4 * j;
        }
        old[i] = bits;
    }
}
#else
#define ec_pass_words_avx2 ec_pass_words_baseline
#endif

/* Which of 64 rows, of those with a bit in `old`, are live and not resident. */
static inline uint64_t ec_pass_at_home(const uint8_t *flags, uint64_t old) {
    uint64_t found = 0;
    for (; old; old &= old - 1) {
        const int i = __builtin_ctzll(old);
        found |= (uint64_t)((flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE) << i;
    }
    return found;
}

/* Host rows `first` .. first + n - 1, of one extent, that are not resident and below the cut-off. Returns how many. */
static inline int64_t ec_pass_candidates(const ec_table *t, int64_t first, int64_t n, int64_t cutoff, int avx2, int64_t *found) {
    const uint8_t *flags = ec_table_flags(t, first);
    const int64_t *last = ec_table_ts(t, first);
    uint64_t old[EC_EXTENT_ROWS / 64];
    int64_t got = 0;
    EC_CLONE_OF(ec_pass_words, avx2)(last, n / 64, cutoff, old);
    for (int64_t word = 0; word < n / 64; word++) {
        if (!old[word]) continue;
        for (uint64_t rest = ec_pass_at_home(flags + 64 * word, old[word]); rest; rest &= rest - 1)
            found[got++] = first + 64 * word + __builtin_ctzll(rest);
    }
    for (int64_t i = n / 64 * 64; i < n; i++)
        if (last[i] < cutoff && (flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE) found[got++] = first + i;
    return got;
}

/* Takes away those of `rows` that are dead: key and counters of a row are asked for two windows ahead, its bucket one. */
static int ec_pass_bury(ec_side *s, ec_part *p, int64_t step, const int64_t *rows, int64_t n) {
    ec_table *t = s->table;
    for (int64_t i = 0; i < n + 2 * EC_AHEAD; i++) {
        if (i < n) {
            EC_PREFETCH_WRITE(ec_table_key(t, rows[i]));
            EC_PREFETCH_READ(ec_table_freq(t, rows[i]));
        }
        if (i >= EC_AHEAD && i - EC_AHEAD < n) {
            const uint64_t hash = ec_hash(*ec_table_key(t, rows[i - EC_AHEAD]));
            ec_index_prefetch(&ec_table_partition(t, hash)->index, hash);
        }
        if (i < 2 * EC_AHEAD) continue;
        const int64_t row = rows[i - 2 * EC_AHEAD], key = *ec_table_key(t, row);
        if (!ec_side_row_dead(s, row)) continue;
        if (ec_side_kill_row(s, p, key, ec_hash(key), row, *ec_table_ts(t, row), step) != EC_OK) return EC_NOMEM;
    }
    return EC_OK;
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
        if (ec_pass_bury(s, p, step, found, some) != EC_OK) return EC_NOMEM;
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

/* ---------------------------------------------------------------------------------------------------------- selection */

/* A row of a table with its counters as they are in this batch. */
typedef struct {
    int64_t key;
    int64_t freq, last;
} ec_counted;

/* Where the living rows of a table are found: its slots, its host rows, and the batch's own host rows, whose counters are
 * in the work. Place `at` runs over all of them; returns whether there is a row. */
static inline int64_t ec_row_places(const ec_work *w, int64_t t) {
    return w->sides[t].cache.capacity + w->sides[t].table->row_limit + w->parts[t].unique;
}

static inline int ec_row_place(const ec_work *w, int64_t t, int64_t at, ec_counted *row) {
    const ec_side *s = &w->sides[t];
    const int64_t capacity = s->cache.capacity, limit = s->table->row_limit;
    if (at < capacity) {
        const ec_slot *slot = &s->cache.slots[at];
        if (s->cache.state[at] != EC_SLOT_LIVE || ec_side_slot_dead(s, slot)) return 0;
        *row = (ec_counted){slot->key, slot->freq, slot->last};
    } else if (at < capacity + limit) {
        const int64_t r = at - capacity;
        if ((*ec_table_flags(s->table, r) & (EC_LIVE | EC_RESIDENT)) != EC_LIVE || ec_side_row_dead(s, r)) return 0;
        *row = (ec_counted){*ec_table_key(s->table, r), *ec_table_freq(s->table, r), *ec_table_ts(s->table, r)};
    } else {
        const int64_t u = w->offsets[t] + at - capacity - limit;
        if (w->slot[u] >= 0 || w->row[u] < 0) return 0;
        *row = (ec_counted){w->key[u], w->freq[u], w->last[u]};
    }
    return 1;
}

/* What is selected by: a value, then the key, both in the order of unsigned integers. */
typedef struct {
    uint64_t value, key;
} ec_rank;

/* The rank of what is at place `at`, or 0 where there is nothing to select from. */
typedef int (*ec_rank_fn)(const ec_work *w, int64_t t, int64_t at, int64_t cutoff, ec_rank *rank);

#define EC_UNSIGNED(number) ((uint64_t)(number) ^ ((uint64_t)1 << 63))
#define EC_SIGNED(number) ((int64_t)((number) ^ ((uint64_t)1 << 63)))

/* The nth smallest rank, n >= 1, by counting 16 bits at a time; `counts` is scratch. Keys are all different, so the rank
 * is one place's. O(8 * places), and no memory for the candidates. */
static ec_rank ec_select(const ec_work *w, int64_t t, ec_rank_fn rank_of, int64_t places, int64_t cutoff, int64_t n, int64_t *counts) {
    ec_rank found = {0, 0}, rank;
    for (int part = 0; part < 2; part++) {
        uint64_t prefix = 0;
        for (int shift = 64 - EC_DIGIT_BITS; shift >= 0; shift -= EC_DIGIT_BITS) {
            memset(counts, 0, EC_DIGITS * sizeof(int64_t));
            for (int64_t at = 0; at < places; at++) {
                if (!rank_of(w, t, at, cutoff, &rank) || (part == 1 && rank.value != found.value)) continue;
                const uint64_t number = part == 0 ? rank.value : rank.key;
                if (shift + EC_DIGIT_BITS < 64 && number >> (shift + EC_DIGIT_BITS) != prefix) continue;
                counts[number >> shift & (EC_DIGITS - 1)]++;
            }
            uint64_t digit = 0;
            while (counts[digit] < n) n -= counts[digit++];
            prefix = prefix << EC_DIGIT_BITS | digit;
        }
        if (part == 0) found.value = prefix;
        else found.key = prefix;
    }
    return found;
}

static inline int ec_rank_within(const ec_rank *rank, const ec_rank *most) {
    return rank->value < most->value || (rank->value == most->value && rank->key <= most->key);
}

/* -------------------------------------------------------------------------------------------------------------- floor */

static int ec_rank_doomed(const ec_work *w, int64_t t, int64_t at, int64_t cutoff, ec_rank *rank) {
    ec_counted row;
    if (!ec_row_place(w, t, at, &row) || row.freq == 0 || row.last >= cutoff) return 0;
    *rank = (ec_rank){EC_UNSIGNED(row.last), EC_UNSIGNED(row.key)};
    return 1;
}

/* The cut-off for rows: `cutoff`, or a lower one so that keep_min rows survive; rows that are equally recent stay together.
 *
 * The search for survivors ends when it has found enough of them, so as long as the table is healthy it costs about
 * keep_min places. Where the floor binds, the oldest row that stays is selected, in this step. */
static int ec_floor(const ec_work *w, int64_t t, int64_t cutoff, int64_t *floored) {
    const int64_t places = ec_row_places(w, t);
    int64_t missing = w->sides[t].filter->rule.keep_min, doomed = 0;
    ec_counted row;
    *floored = cutoff;
    for (int64_t at = 0; at < places && missing > 0; at++) {
        if (!ec_row_place(w, t, at, &row)) continue;
        if (row.freq > 0 && row.last < cutoff) doomed++;
        else missing--;
    }
    if (missing <= 0) return EC_OK;
    *floored = INT64_MIN;
    if (doomed <= missing) return EC_OK;
    int64_t *counts = (int64_t *)ec_take(NULL, EC_DIGITS * sizeof(int64_t));
    if (!counts) return EC_NOMEM;
    *floored = EC_SIGNED(ec_select(w, t, ec_rank_doomed, places, cutoff, doomed - missing + 1, counts).value);
    free(counts);
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------------- sweep by show/click */

static int ec_rank_row(const ec_work *w, int64_t t, int64_t at, int64_t cutoff, ec_rank *rank) {
    (void)cutoff;
    ec_counted row;
    if (!ec_row_place(w, t, at, &row) || row.freq == 0) return 0;
    *rank = (ec_rank){(uint64_t)ec_score_count(ec_filter_score(w->sides[t].filter, row.freq, row.last)), EC_UNSIGNED(row.key)};
    return 1;
}

static int ec_rank_entry(const ec_work *w, int64_t t, int64_t at, int64_t cutoff, ec_rank *rank) {
    (void)cutoff;
    const ec_filter_entry *entry = &EC_ENTRY(w->sides[t].filter, at);
    if (entry->count == 0) return 0;
    *rank = (ec_rank){(uint64_t)ec_score_count(ec_filter_score(w->sides[t].filter, entry->count, entry->last)), EC_UNSIGNED(entry->key)};
    return 1;
}

/* Evicts what is at a place of ec_row_place(). */
static int ec_kill_place(ec_work *w, int64_t t, int64_t at) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    const int64_t capacity = s->cache.capacity, limit = s->table->row_limit;
    if (at < capacity) return ec_side_kill_slot(s, p, (uint32_t)at, w->step);
    if (at < capacity + limit) {
        const int64_t key = *ec_table_key(s->table, at - capacity);
        return ec_side_kill_row(s, p, key, ec_hash(key), at - capacity, 0, w->step);
    }
    const int64_t u = w->offsets[t] + at - capacity - limit;
    ec_row_unmark(s->table, w->row[u]);
    if (ec_side_kill_row(s, p, w->key[u], w->hash[u], w->row[u], 0, w->step) != EC_OK) return EC_NOMEM;
    w->row[u] = -1;
    w->admitted[u] = 0;
    return EC_OK;
}

/* Decays every score, and evicts the share of the rows, and of the waiting keys, that have the lowest ones; ties by key.
 * All of it in this step: which ones these are depends on all of them. */
static int ec_sweep_scores(ec_work *w, int64_t t) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_filter *f = s->filter;
    const int64_t places = ec_row_places(w, t), begin = w->offsets[t], end = begin + p->unique;
    int64_t rows = 0, status = EC_OK;
    ec_rank rank;
    f->epoch++;
    if (f->rule.evict_share <= 0) return EC_OK;
    if (ec_vec_reserve_one(&f->sweeps, sizeof(ec_sweep_record)) != EC_OK) return EC_NOMEM;
    EC_PUSH(f->sweeps, ec_sweep_record, {w->step, INT64_MIN, 0, 0, f->late});
    ec_index_init(&f->late, f->index.seed);
    p->swept = w->step;
    for (int64_t at = 0; at < places; at++) rows += ec_rank_row(w, t, at, 0, &rank);
    int64_t doomed = (int64_t)(f->rule.evict_share * (double)rows);
    const int64_t spare = s->table->live - f->rule.keep_min, waiting = (int64_t)(f->rule.evict_share * (double)f->index.size);
    if (doomed > spare) doomed = spare;
    int64_t *counts = (int64_t *)ec_take(NULL, EC_DIGITS * sizeof(int64_t));
    if (!counts) return EC_NOMEM;
    if (doomed > 0) {
        const ec_rank most = ec_select(w, t, ec_rank_row, places, 0, doomed, counts);
        for (int64_t at = 0; at < places && status == EC_OK; at++)
            if (ec_rank_row(w, t, at, 0, &rank) && ec_rank_within(&rank, &most)) status = ec_kill_place(w, t, at);
    }
    if (waiting > 0 && status == EC_OK) {
        const ec_rank most = ec_select(w, t, ec_rank_entry, f->entries.size, 0, waiting, counts);
        status = ec_vec_reserve(&p->changes, waiting, sizeof(ec_filter_change));
        for (int64_t id = 0; id < f->entries.size && status == EC_OK; id++) {
            if (!ec_rank_entry(w, t, id, 0, &rank) || !ec_rank_within(&rank, &most)) continue;
            EC_PUSH(p->changes, ec_filter_change, ec_filter_remove(f, (uint32_t)id));
            p->totals[EC_FORGOTTEN]++;
        }
    }
    free(counts);
    for (int64_t u = begin; u < end && status == EC_OK; u++) { /* those of the batch itself */
        if (w->slot[u] >= 0 && s->cache.state[w->slot[u]] != EC_SLOT_LIVE) {
            w->slot[u] = -1;
            w->admitted[u] = 0;
        }
        if (w->entry[u] >= 0 && EC_ENTRY(f, w->entry[u]).count == 0) {
            w->entry[u] = -1;
            w->admitted[u] = 0;
        }
    }
    return (int)status;
}

/* -------------------------------------------------------------------------------------------------------------- sweep */

/* Sets the cut-offs of this step's sweep and begins the pass, or has the one under way go round again. */
static int ec_sweep_start(ec_work *w, int64_t t, int64_t cutoff) {
    ec_part *p = &w->parts[t];
    ec_filter *f = w->sides[t].filter;
    int64_t rows_cutoff = cutoff;
    if (f->rule.keep_min > 0 && ec_floor(w, t, cutoff, &rows_cutoff) != EC_OK) return EC_NOMEM;
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
