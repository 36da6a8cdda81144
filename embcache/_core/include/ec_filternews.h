/* What has changed of a filter since the last save began, so that a delta writes that alone.
 *
 * A bit an entry and a bit a counter of the sketch, and the keys that wait no more. Where a block of the sketch has turned, all its counters have changed. Counting knows nothing of it: bits
 * are set when a plan finishes, whose journal names all that it has changed (ec_filter_note), and when waiting keys are removed by hand. What
 * an unfinished plan has changed is not news yet. Where there is no memory to note something, nothing is known, and the next save
 * writes the filter whole; so is it before the first save.
 */
#ifndef EC_FILTERNEWS_H
#define EC_FILTERNEWS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ec_vec.h"

typedef struct {
    int known;       /* 0: all of it may have changed */
    ec_vec entries;  /* of uint64_t, a bit an entry; of entries beyond, none has changed */
    int64_t changed; /* how many bits of `entries` are set */
    ec_vec gone;     /* of int64_t: keys that waited and do not any more; some may wait again */
    ec_vec cells;    /* of uint64_t, a bit a counter: of the young generation, then of the old one */
    int64_t raised;  /* how many bits of `cells` are set */
} ec_filter_news;

static inline int ec_bit(const uint64_t *bits, int64_t at) { return (int)(bits[at >> 6] >> (at & 63) & 1); }
static inline void ec_bit_set(uint64_t *bits, int64_t at) { bits[at >> 6] |= (uint64_t)1 << (at & 63); }

static inline int ec_bit_in(const ec_vec *bits, int64_t at) { return at >> 6 < bits->size && ec_bit((const uint64_t *)bits->data, at); }

static inline int ec_bits_grow(ec_vec *bits, int64_t words) {
    const int64_t fresh = words - bits->size;
    if (fresh <= 0) return EC_OK;
    if (ec_vec_reserve(bits, fresh, sizeof(uint64_t)) != EC_OK) return EC_NOMEM;
    memset((uint64_t *)bits->data + bits->size, 0, (size_t)fresh * sizeof(uint64_t));
    bits->size = words;
    return EC_OK;
}

/* Sets a bit, and counts it if it was not set. EC_NOMEM: there is no room for it. */
static inline int ec_bit_note(ec_vec *bits, int64_t at, int64_t *count) {
    if (ec_bits_grow(bits, (at >> 6) + 1) != EC_OK) return EC_NOMEM;
    *count += !ec_bit((const uint64_t *)bits->data, at);
    ec_bit_set((uint64_t *)bits->data, at);
    return EC_OK;
}

/* Those of the word `at` that are among the bits `from` to `to` - 1. */
static inline uint64_t ec_bits_between(int64_t at, int64_t from, int64_t to) {
    const uint64_t low = at > from >> 6 ? ~(uint64_t)0 : ~(uint64_t)0 << (from & 63);
    return at < to >> 6 ? low : low & ~(~(uint64_t)0 << (to & 63));
}

/* Sets the bits `from` to `to` - 1, which are there, and counts those that were not set. */
static inline void ec_bits_fill(ec_vec *bits, int64_t from, int64_t to, int64_t *count) {
    for (int64_t at = from >> 6; at << 6 < to; at++) {
        uint64_t *word = &EC_AT(*bits, uint64_t, at);
        const uint64_t more = ec_bits_between(at, from, to) & ~*word;
        *count += __builtin_popcountll(more);
        *word |= more;
    }
}

/* Whether one of the bits `from` to `to` - 1 is set, which are there. */
static inline int ec_bits_any(const ec_vec *bits, int64_t from, int64_t to) {
    for (int64_t at = from >> 6; at << 6 < to; at++)
        if (EC_AT(*bits, uint64_t, at) & ec_bits_between(at, from, to)) return 1;
    return 0;
}

/* From now on nothing is known. */
static inline void ec_news_forget(ec_filter_news *n) {
    ec_vec_free(&n->entries);
    ec_vec_free(&n->gone);
    ec_vec_free(&n->cells);
    memset(n, 0, sizeof *n);
}

/* From now on everything is known, of a filter whose sketch has so many counters, in both generations. */
static inline void ec_news_begin(ec_filter_news *n, int64_t counters) {
    ec_news_forget(n);
    const int64_t words = (counters + 63) / 64;
    if (words > 0) {
        if (ec_take_refused() || !(n->cells.data = calloc((size_t)words, sizeof(uint64_t)))) return;
        n->cells.size = n->cells.room = words;
    }
    n->known = 1;
}

/* A key waits no more. */
static inline void ec_news_gone(ec_filter_news *n, int64_t key) {
    if (!n->known) return;
    if (ec_vec_reserve_one(&n->gone, sizeof(int64_t)) == EC_OK) EC_PUSH(n->gone, int64_t, key);
    else ec_news_forget(n);
}

/* Sets the bits that `more` has, and counts those that were not set. EC_NOMEM: none. */
static inline int ec_bits_join(ec_vec *bits, const ec_vec *more, int64_t *count) {
    int64_t before = 0, after = 0;
    if (ec_bits_grow(bits, more->size) != EC_OK) return EC_NOMEM;
    for (int64_t at = 0; at < more->size; at++) {
        uint64_t *word = &EC_AT(*bits, uint64_t, at);
        before += __builtin_popcountll(*word);
        *word |= EC_AT(*more, uint64_t, at);
        after += __builtin_popcountll(*word);
    }
    *count += after - before;
    return EC_OK;
}

/* Takes over what was known before a save that has failed; `older` has nothing then. */
static inline void ec_news_join(ec_filter_news *n, ec_filter_news *older) {
    if (n->known && older->known && ec_bits_join(&n->entries, &older->entries, &n->changed) == EC_OK &&
        ec_bits_join(&n->cells, &older->cells, &n->raised) == EC_OK && ec_vec_reserve(&n->gone, older->gone.size, sizeof(int64_t)) == EC_OK) {
        for (int64_t i = 0; i < older->gone.size; i++) EC_PUSH(n->gone, int64_t, EC_AT(older->gone, int64_t, i));
    } else {
        ec_news_forget(n);
    }
    ec_news_forget(older);
}

#endif
