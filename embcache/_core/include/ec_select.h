/* Selection: the n-th smallest of what a table holds by a value and then by key, with an amount of memory that is a small
 * part of the table, and two looks at each place where all goes well.
 *
 * A sample of random places gives a bracket that the n-th lies in with near certainty; one look at every place counts what
 * is below the bracket and gathers what is inside, of which the n-th is chosen in memory (as in Floyd and Rivest,
 * "Expected time bounds for selection", 1975). Where the bracket misses or is too wide the search goes on inside
 * narrower bounds. The sample only decides how long it takes: the answer is exact.
 */
#ifndef EC_SELECT_H
#define EC_SELECT_H

#include <stdint.h>

#include "ec_old.h"
#include "ec_work.h"

#define EC_RUN 1024             /* places that are looked at together */
#define EC_POWERS 64            /* sweeps that a score may be behind by before its decay is computed afresh */
#define EC_SELECT_AT_ONCE 4096  /* so few are gathered without a sample, */
#define EC_SELECT_FEW 64        /* or one in so many places: a sample would have to try as many for each that it finds */
#define EC_SELECT_SAMPLE 16384  /* a place at random costs more than ten in a row */
#define EC_SELECT_LEAST 64      /* a smaller sample says nothing */
#define EC_SELECT_BRACKET 2.0   /* ec_work.bracket: four standard deviations to either side, or more */

/* What is selected by: a value in the upper half, then the key, both in the order of unsigned integers. Keys are all
 * different, so a rank is one place's. */
typedef unsigned __int128 ec_rank;

#define EC_UNSIGNED(number) ((uint64_t)(number) ^ ((uint64_t)1 << 63))
#define EC_SIGNED(number) ((int64_t)((number) ^ ((uint64_t)1 << 63)))

static inline ec_rank ec_rank_of(uint64_t value, int64_t key) { return (ec_rank)value << 64 | EC_UNSIGNED(key); }

/* Among whom is selected: rows with counters below a cut-off, by timestamp; rows with counters, by score; waiting keys,
 * by score. */
enum { EC_BY_TIME = 0, EC_BY_SCORE = 1, EC_WAITING_BY_SCORE = 2 };

typedef struct {
    const ec_work *w;
    int64_t t;
    int kind;
    int64_t cutoff;
    int64_t places;
    double power[EC_POWERS]; /* the decay of a score that was last changed so many sweeps ago */
} ec_field;

/* What was found at a run of places. */
typedef struct {
    int64_t size;   /* ranks */
    int64_t living; /* rows, those without a rank included */
    ec_rank rank[EC_RUN];
    int64_t place[EC_RUN];
} ec_run;

/* Where the living rows of a table are found: its slots, its host rows, and the batch's own host rows, whose counters are
 * in the work. Place `at` runs over all of them; waiting keys are at the places of their entries. */
static inline void ec_field_make(ec_field *f, const ec_work *w, int64_t t, int kind, int64_t cutoff) {
    const ec_side *s = &w->sides[t];
    f->w = w;
    f->t = t;
    f->kind = kind;
    f->cutoff = cutoff;
    f->places = kind == EC_WAITING_BY_SCORE ? s->filter->entries.size : s->cache.capacity + s->table->row_limit + w->parts[t].unique;
    for (int i = 0; i < EC_POWERS; i++) f->power[i] = ec_score_decayed(1.0, s->filter->rule.decay, i);
}

/* ------------------------------------------------------------------------------------------------------------- a look */

EC_INLINE void ec_run_add(ec_run *run, const ec_field *f, const ec_filter *filter, int kind, int64_t place, int64_t key, int64_t freq, int64_t last) {
    uint64_t value;
    run->living++;
    if (kind == EC_BY_TIME) {
        value = EC_UNSIGNED(last);
    } else {
        const int64_t behind = filter->epoch - last;
        const double score = (uint64_t)behind < EC_POWERS ? ec_score_of(freq) * f->power[behind] : ec_filter_score(filter, freq, last);
        value = (uint64_t)ec_score_count(score);
    }
    run->rank[run->size] = ec_rank_of(value, key);
    run->place[run->size] = place;
    run->size += freq != 0 && (kind != EC_BY_TIME || last < f->cutoff);
}

/* Looks at places from `at` on, `most` of them or to the end of what lies together. Returns where it has stopped. */
EC_INLINE int64_t ec_run_look(const ec_field *f, int kind, int64_t at, int64_t most, ec_run *run) {
    const ec_work *w = f->w;
    const ec_side *s = &w->sides[f->t];
    const ec_filter *filter = s->filter;
    const int64_t capacity = s->cache.capacity, limit = s->table->row_limit, passing = filter->pass.region != EC_PASS_IDLE;
    int64_t stop = at + most < f->places ? at + most : f->places;
    run->size = run->living = 0;
    if (kind == EC_WAITING_BY_SCORE) {
        for (; at < stop; at++) {
            const ec_filter_entry *entry = &EC_ENTRY(filter, at);
            if (entry->count != 0) ec_run_add(run, f, filter, kind, at, entry->key, entry->count, entry->last);
        }
    } else if (at < capacity) {
        stop = stop < capacity ? stop : capacity;
        for (; at < stop; at++) {
            const ec_slot *slot = &s->cache.slots[at];
            if (s->cache.state[at] != EC_SLOT_LIVE || (passing && ec_side_slot_dead(s, slot))) continue;
            ec_run_add(run, f, filter, kind, at, slot->key, slot->freq, slot->last);
        }
    } else if (at < capacity + limit) {
        const int64_t row = at - capacity, together = EC_EXTENT_ROWS - (row & (EC_EXTENT_ROWS - 1));
        stop = stop < at + together ? stop : at + together;
        stop = stop < capacity + limit ? stop : capacity + limit;
        const uint8_t *flags = ec_table_flags(s->table, row);
        const int64_t *key = ec_table_key(s->table, row), *freq = ec_table_freq(s->table, row), *last = ec_table_ts(s->table, row);
        int64_t i = 0;
        if (kind == EC_BY_TIME && !passing) { /* most rows are recent, and only counted */
            const int64_t words = (stop - at) / 64;
            uint64_t old[EC_RUN / 64];
            EC_CLONE_OF(ec_old_words, w->avx2)(last, words, f->cutoff, old);
            run->living = ec_count_at_home(flags, 64 * words);
            for (; i < 64 * words; i += 64) {
                for (uint64_t rest = old[i / 64] ? ec_old_at_home(flags + i, old[i / 64]) : 0; rest; rest &= rest - 1) {
                    const int64_t at_home = i + __builtin_ctzll(rest);
                    ec_run_add(run, f, filter, kind, at + at_home, key[at_home], freq[at_home], last[at_home]);
                    run->living--; /* it was counted */
                }
            }
        }
        for (; i < stop - at; i++) {
            if ((flags[i] & (EC_LIVE | EC_RESIDENT)) != EC_LIVE) continue;
            if (passing && ec_filter_row_dead(filter, key[i], freq[i], last[i])) continue;
            ec_run_add(run, f, filter, kind, at + i, key[i], freq[i], last[i]);
        }
        at = stop;
    } else {
        for (; at < stop; at++) {
            const int64_t u = w->offsets[f->t] + at - capacity - limit;
            if (w->slot[u] < 0 && w->row[u] >= 0) ec_run_add(run, f, filter, kind, at, w->key[u], w->freq[u], w->last[u]);
        }
    }
    return at;
}

static int64_t ec_run_fill(const ec_field *f, int64_t at, int64_t most, ec_run *run) {
    if (f->kind == EC_BY_TIME) return ec_run_look(f, EC_BY_TIME, at, most, run);
    return f->kind == EC_BY_SCORE ? ec_run_look(f, EC_BY_SCORE, at, most, run) : ec_run_look(f, EC_WAITING_BY_SCORE, at, most, run);
}

/* Rows of a table that have a score, as training has met them: the ranks of its EC_BY_SCORE field, counted without making them. */
static int64_t ec_scored_rows(const ec_work *w, int64_t t) {
    const ec_side *s = &w->sides[t];
    const int64_t limit = s->table->row_limit, end = w->offsets[t] + w->parts[t].unique;
    int64_t found = 0;
    EC_ASSERT(s->filter->pass.region == EC_PASS_IDLE);
    for (int64_t at = 0; at < s->cache.capacity; at++) found += s->cache.state[at] == EC_SLOT_LIVE && s->cache.slots[at].freq != 0;
    for (int64_t row = 0; row < limit; row += EC_EXTENT_ROWS) {
        const uint8_t *flags = ec_table_flags(s->table, row);
        const int64_t *freq = ec_table_freq(s->table, row), n = limit - row < EC_EXTENT_ROWS ? limit - row : EC_EXTENT_ROWS;
        for (int64_t i = 0; i < n; i++) found += (flags[i] & (EC_LIVE | EC_RESIDENT)) == EC_LIVE && freq[i] != 0;
    }
    for (int64_t u = w->offsets[t]; u < end; u++) found += w->slot[u] < 0 && w->row[u] >= 0 && w->freq[u] != 0;
    return found;
}

/* Appends all ranks of a field to `ranks`; `living` becomes the number of living rows. EC_NOMEM: some are missing. */
static int ec_field_ranks(const ec_field *f, ec_vec *ranks, int64_t *living) {
    ec_run run;
    *living = 0;
    for (int64_t at = 0; at < f->places;) {
        at = ec_run_fill(f, at, EC_RUN, &run);
        if (ec_vec_reserve(ranks, run.size, sizeof(ec_rank)) != EC_OK) return EC_NOMEM;
        for (int64_t i = 0; i < run.size; i++) EC_AT(*ranks, ec_rank, ranks->size++) = run.rank[i];
        *living += run.living;
    }
    return EC_OK;
}

/* ---------------------------------------------------------------------------------------------------------- selection */

/* The element of index `at` in the order of ranks; the others end up around it. Hoare's algorithm. */
static ec_rank ec_rank_nth(ec_rank *ranks, int64_t size, int64_t at) {
    int64_t first = 0, last = size - 1;
    while (first < last) {
        const ec_rank a = ranks[first], b = ranks[first + (last - first) / 2], c = ranks[last];
        const ec_rank pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t i = first, j = last;
        while (i <= j) {
            while (ranks[i] < pivot) i++;
            while (ranks[j] > pivot) j--;
            if (i > j) break;
            const ec_rank other = ranks[i];
            ranks[i++] = ranks[j];
            ranks[j--] = other;
        }
        if (at <= j) last = j;
        else if (at >= i) first = i;
        else break;
    }
    return ranks[at];
}

/* Ranks from `least` to `most` at random places, until there are `wanted` of them or many more places have been tried. */
static int64_t ec_select_sample(const ec_field *f, ec_rank least, ec_rank most, int64_t wanted, uint64_t *drawn, ec_rank *sample) {
    int64_t got = 0;
    ec_run run;
    for (int64_t tries = 16 * wanted; tries > 0 && got < wanted; tries--) {
        const uint64_t number = ec_mix64(*drawn += EC_WEYL);
        ec_run_fill(f, (int64_t)((unsigned __int128)number * (uint64_t)f->places >> 64), 1, &run);
        if (run.size > 0 && run.rank[0] >= least && run.rank[0] <= most) sample[got++] = run.rank[0];
    }
    return got;
}

/* The nth smallest, n >= 1, of the `size` ranks of a field. EC_NOMEM changes nothing. */
static int ec_select(const ec_field *f, int64_t size, int64_t n, ec_rank *nth) {
    ec_rank least = 0, most = ~(ec_rank)0;
    uint64_t drawn = 0;
    ec_vec inside = {0};
    ec_run run;
    ec_rank *sample = NULL;
    int status = EC_OK;
    const int64_t few = f->places / EC_SELECT_FEW > EC_SELECT_AT_ONCE ? f->places / EC_SELECT_FEW : EC_SELECT_AT_ONCE;
    if (size > few && !(sample = (ec_rank *)ec_take(NULL, EC_SELECT_SAMPLE * sizeof *sample))) return EC_NOMEM;
    for (int found = 0; !found && status == EC_OK;) {
        ec_rank low = least, high = most;
        const int64_t room = size > 16 * EC_SELECT_AT_ONCE ? size / 16 : EC_SELECT_AT_ONCE;
        int64_t below = 0, within = 0, got = 0;
        if (size > few)
            got = ec_select_sample(f, least, most, size / 4 < EC_SELECT_SAMPLE ? size / 4 : EC_SELECT_SAMPLE, &drawn, sample);
        const int bracketed = got >= EC_SELECT_LEAST;
        if (bracketed) {
            const int64_t middle = (int64_t)((double)n / (double)size * (double)got), margin = (int64_t)(f->w->bracket * __builtin_sqrt((double)got)) + 1;
            if (middle - margin >= 0) low = ec_rank_nth(sample, got, middle - margin);
            if (middle + margin < got) high = ec_rank_nth(sample, got, middle + margin);
        }
        inside.size = 0;
        for (int64_t at = 0; at < f->places && status == EC_OK;) {
            at = ec_run_fill(f, at, EC_RUN, &run);
            if ((status = ec_vec_reserve(&inside, EC_RUN, sizeof(ec_rank))) != EC_OK) break;
            for (int64_t i = 0; i < run.size; i++) {
                const ec_rank rank = run.rank[i];
                below += rank >= least && rank < low;
                EC_AT(inside, ec_rank, inside.size) = rank;
                const int in = rank >= low && rank <= high;
                within += in;
                inside.size += in && (!bracketed || within <= room);
            }
        }
        if (n <= below) {
            most = low - 1;
            size = below;
        } else if (n > below + within) {
            least = high + 1;
            n -= below + within;
            size -= below + within;
        } else {
            least = low;
            most = high;
            n -= below;
            size = within;
            found = inside.size == within;
        }
    }
    if (status == EC_OK) *nth = ec_rank_nth((ec_rank *)inside.data, inside.size, n - 1);
    ec_vec_free(&inside);
    free(sample);
    return status;
}

#endif
