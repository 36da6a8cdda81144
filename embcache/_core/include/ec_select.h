/* Selection: the n-th smallest of what a table holds by a value and then by key, with an amount of memory that is a small
 * part of the table, and one look at each place where all goes well.
 *
 * A sample of random places gives a bracket that the n-th lies in with near certainty; one look at every place counts what
 * is below the bracket and gathers what is inside, of which the n-th is chosen in memory (as in Floyd and Rivest,
 * "Expected time bounds for selection", 1975). Where the bracket misses or is too wide the search goes on inside
 * narrower bounds. The sample only decides how long it takes: the answer is exact.
 */
#ifndef EC_SELECT_H
#define EC_SELECT_H

#include <stdint.h>

#include "ec_low.h"
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
    const int64_t *up_to;    /* NULL, or who has a low score at most (ec_low.h): the others are counted, and not looked at */
} ec_field;

/* What was found at a run of places. */
typedef struct {
    int64_t size;   /* ranks */
    int64_t passed; /* those that have a rank, and one too high for the field */
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
    f->up_to = NULL;
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

/* Whether a rank is too high for the field: it is counted. */
EC_INLINE int ec_run_passes(ec_run *run, const ec_field *f, const ec_filter *filter, int64_t freq, int64_t last) {
    const int passes = f->up_to && !ec_low_maybe(freq, last, filter->epoch, f->up_to);
    run->passed += passes;
    return passes;
}

/* Looks at places from `at` on, `most` of them or to the end of what lies together. Returns where it has stopped. */
EC_INLINE int64_t ec_run_look(const ec_field *f, int kind, int64_t at, int64_t most, ec_run *run) {
    const ec_work *w = f->w;
    const ec_side *s = &w->sides[f->t];
    const ec_filter *filter = s->filter;
    const int64_t capacity = s->cache.capacity, limit = s->table->row_limit, passing = filter->pass.region != EC_PASS_IDLE;
    int64_t stop = at + most < f->places ? at + most : f->places;
    run->size = run->passed = run->living = 0;
    if (kind == EC_WAITING_BY_SCORE) {
        for (; at < stop; at++) {
            const ec_filter_entry *entry = &EC_ENTRY(filter, at);
            if (entry->count != 0 && !ec_run_passes(run, f, filter, entry->count, entry->last)) ec_run_add(run, f, filter, kind, at, entry->key, entry->count, entry->last);
        }
    } else if (at < capacity) {
        stop = stop < capacity ? stop : capacity;
        for (; at < stop; at++) {
            const ec_slot *slot = &s->cache.slots[at];
            if (s->cache.state[at] != EC_SLOT_LIVE || (passing && ec_side_slot_dead(s, slot))) continue;
            if (kind == EC_BY_SCORE && ec_run_passes(run, f, filter, slot->freq, slot->last)) continue;
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
        if (kind == EC_BY_SCORE && f->up_to && !passing) { /* most have a higher score, and are only counted */
            const int64_t words = (stop - at) / 64;
            uint64_t low[EC_RUN / 64];
            run->passed += EC_CLONE_OF(ec_low_words, w->avx2)(flags, freq, last, words, filter->epoch, f->up_to, low);
            for (; i < 64 * words; i += 64) {
                for (uint64_t rest = low[i / 64]; rest; rest &= rest - 1) {
                    const int64_t at_home = i + __builtin_ctzll(rest);
                    ec_run_add(run, f, filter, kind, at + at_home, key[at_home], freq[at_home], last[at_home]);
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

/* The most ranks that are gathered without a sample. */
static inline int64_t ec_select_few(const ec_field *f) {
    return f->places / EC_SELECT_FEW > EC_SELECT_AT_ONCE ? f->places / EC_SELECT_FEW : EC_SELECT_AT_ONCE;
}

/* The nth smallest, n >= 1, of the `size` ranks of a field. EC_NOMEM changes nothing. */
static int ec_select(const ec_field *f, int64_t size, int64_t n, ec_rank *nth) {
    ec_rank least = 0, most = ~(ec_rank)0;
    uint64_t drawn = 0;
    ec_vec inside = {0};
    ec_run run;
    ec_rank *sample = NULL;
    int status = EC_OK;
    const int64_t few = ec_select_few(f);
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

/* --------------------------------------------------------------------------------------------------------- the lowest */

/* The ranks of a field that are low enough, in the order of their places. */
typedef struct {
    ec_vec ranks;  /* of ec_rank */
    ec_vec places; /* of int64_t */
    int64_t size;  /* all ranks of the field */
    int full;      /* whether there were more than one place in EC_LOW_ROOM: those beyond are missing */
} ec_lowest;

static inline void ec_lowest_free(ec_lowest *low) {
    ec_vec_free(&low->ranks);
    ec_vec_free(&low->places);
}

/* How many of `size` ranks go: a share of them, and no more than `spare`. */
static inline int64_t ec_doomed(double share, int64_t size, int64_t spare) {
    const int64_t doomed = (int64_t)(share * (double)size);
    return doomed < spare ? doomed : spare;
}

/* A rank that `share` of a field's ranks do not exceed, nor a few more, by a sample; the largest where that says nothing. */
static int ec_lowest_bound(const ec_field *f, double share, ec_rank *most) {
    uint64_t drawn = 0;
    ec_rank *sample = (ec_rank *)ec_take(NULL, EC_LOW_SAMPLE * sizeof *sample);
    *most = ~(ec_rank)0;
    if (!sample) return EC_NOMEM;
    const int64_t got = ec_select_sample(f, 0, *most, EC_LOW_SAMPLE, &drawn, sample);
    const double middle = share * (double)got;
    const int64_t at = (int64_t)(middle + f->w->bracket * (2.0 * __builtin_sqrt(middle) + 2.0)) + 1;
    if (got >= EC_SELECT_LEAST && at < got) *most = ec_rank_nth(sample, got, at);
    free(sample);
    return EC_OK;
}

/* One look at a field: how many ranks it has, and those of them up to `most`. */
static int ec_lowest_gather(ec_field *f, ec_rank most, ec_lowest *low) {
    int64_t up_to[EC_LOW_SWEEPS];
    const int64_t room = f->places / EC_LOW_ROOM + EC_SELECT_AT_ONCE;
    int status = EC_OK;
    ec_run run;
    if (most < ~(ec_rank)0) {
        ec_low_bounds((int64_t)(uint64_t)(most >> 64), f->w->sides[f->t].filter->rule.decay, up_to);
        f->up_to = up_to;
    }
    for (int64_t at = 0; at < f->places && status == EC_OK;) {
        at = ec_run_fill(f, at, EC_RUN, &run);
        low->size += run.size + run.passed;
        if (low->full || (low->full = low->ranks.size + run.size > room)) continue;
        if (ec_vec_reserve(&low->ranks, run.size, sizeof(ec_rank)) != EC_OK || ec_vec_reserve(&low->places, run.size, sizeof(int64_t)) != EC_OK) {
            status = EC_NOMEM;
            break;
        }
        for (int64_t i = 0; i < run.size; i++) {
            if (run.rank[i] > most) continue;
            EC_PUSH(low->ranks, ec_rank, run.rank[i]);
            EC_PUSH(low->places, int64_t, run.place[i]);
        }
    }
    f->up_to = NULL;
    return status;
}

/* Keeps the `n` lowest alone, n >= 1, of as many or more. */
static int ec_lowest_cut(ec_lowest *low, int64_t n) {
    const int64_t size = low->ranks.size;
    const ec_rank *ranks = (const ec_rank *)low->ranks.data;
    ec_rank *copy = (ec_rank *)ec_take(NULL, (size_t)size * sizeof *copy);
    if (!copy) return EC_NOMEM;
    memcpy(copy, ranks, (size_t)size * sizeof *copy);
    const ec_rank most = ec_rank_nth(copy, size, n - 1);
    int64_t kept = 0, *places = (int64_t *)low->places.data;
    for (int64_t i = 0; i < size; i++) {
        places[kept] = places[i];
        kept += ranks[i] <= most;
    }
    low->places.size = kept;
    free(copy);
    return EC_OK;
}

#endif
