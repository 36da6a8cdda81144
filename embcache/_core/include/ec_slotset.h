/* A set of slots that hands out its smallest member: a bitmap with 64-ary summaries above it.
 *
 * The set has no memory of the order of additions. So undoing a plan gives back exactly the state before it, and the
 * next slot is a function of the set alone, however plans finished and cancelled meanwhile (promise I4).
 */
#ifndef EC_SLOTSET_H
#define EC_SLOTSET_H

#include <stdint.h>
#include <string.h>

#include "ec_vec.h"

#define EC_SLOTSET_LEVELS 6 /* 64^6 slots */
#define EC_NO_SLOT UINT32_MAX

typedef struct {
    uint64_t *level[EC_SLOTSET_LEVELS]; /* level[0]: a bit a slot; a bit of level[k + 1]: whether a word of level[k] is non-zero */
    int levels;
    int64_t capacity;
    int64_t count;
} ec_slotset;

static inline void ec_slotset_free(ec_slotset *s) {
    for (int k = 0; k < EC_SLOTSET_LEVELS; k++) free(s->level[k]);
    memset(s, 0, sizeof *s);
}

/* An empty set over the slots 0 .. capacity - 1. */
static inline int ec_slotset_init(ec_slotset *s, int64_t capacity) {
    memset(s, 0, sizeof *s);
    s->capacity = capacity;
    int64_t words = capacity;
    do {
        words = (words + 63) / 64;
        uint64_t *level = (uint64_t *)ec_take(NULL, (size_t)words * sizeof(uint64_t));
        if (!level) {
            ec_slotset_free(s);
            return EC_NOMEM;
        }
        memset(level, 0, (size_t)words * sizeof(uint64_t));
        s->level[s->levels++] = level;
    } while (words > 1);
    return EC_OK;
}

static inline int ec_slotset_has(const ec_slotset *s, uint32_t slot) { return s->level[0][slot >> 6] >> (slot & 63) & 1; }

static inline void ec_slotset_add(ec_slotset *s, uint32_t slot) {
    uint64_t at = slot;
    for (int k = 0; k < s->levels; k++) {
        uint64_t *word = &s->level[k][at >> 6];
        const uint64_t before = *word;
        *word = before | (uint64_t)1 << (at & 63);
        if (before) break; /* the summaries above know already */
        at >>= 6;
    }
    s->count++;
}

static inline void ec_slotset_remove(ec_slotset *s, uint32_t slot) {
    uint64_t at = slot;
    for (int k = 0; k < s->levels; k++) {
        uint64_t *word = &s->level[k][at >> 6];
        *word &= ~((uint64_t)1 << (at & 63));
        if (*word) break;
        at >>= 6;
    }
    s->count--;
}

/* The smallest member, or EC_NO_SLOT. */
static inline uint32_t ec_slotset_first(const ec_slotset *s) {
    if (s->count == 0) return EC_NO_SLOT;
    uint64_t at = 0;
    for (int k = s->levels - 1; k >= 0; k--) at = at << 6 | (uint64_t)__builtin_ctzll(s->level[k][at]);
    return (uint32_t)at;
}

#endif
