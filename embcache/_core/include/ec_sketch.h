/* A sketch of occurrence counts in bounded memory: what a filter keeps of keys that wait, in place of one entry a key.
 *
 * Count-min (Cormode and Muthukrishnan, "An improved data stream summary", 2005) with conservative update (Estan and
 * Varghese, "New directions in traffic measurement and accounting", 2002): EC_SKETCH_ROWS rows of counters; a key has one
 * counter in each, its estimate is the smallest, and adding raises only those that would be below the new estimate.
 * Estimates are never too low. After n occurrences an estimate exceeds the truth by more than e * n / width with a
 * probability of at most e ** -EC_SKETCH_ROWS, 1.8 %.
 *
 * Two generations, so that what was counted long ago does not fill the counters for ever: occurrences are added to the
 * young one, and a key's count is the sum of both estimates. When the young one has taken width / 2 occurrences, or when
 * all that it holds may be older than the last sweep's cut-off, it becomes the old one and the old one is forgotten. So the
 * bound is e / 2 = 1.36 for each generation: an estimate is too high by 2 or more in at most 1.8 % of the cases each. A
 * generation ends between batches only: with batches of more than width / 2 occurrences it holds more, and errs more.
 *
 * Counters are as narrow as the threshold allows, and stick at their largest value.
 */
#ifndef EC_SKETCH_H
#define EC_SKETCH_H

#include <stdint.h>
#include <string.h>

#include "ec_hash.h"
#include "ec_vec.h"

#define EC_SKETCH_ROWS 4
#define EC_WEYL 0x9E3779B97F4A7C15u /* 2^64 by the golden ratio */

typedef struct {
    int64_t width;      /* counters of a row; 0: there is no sketch */
    int32_t cell_bytes; /* of a counter: 1, 2 or 4 */
    uint64_t seed;
    ec_block young, old;
    int64_t added, old_added; /* occurrences in each */
    int64_t since;            /* newest timestamp when the young one began */
} ec_sketch;

/* A counter of the young generation before a plan raised it. */
typedef struct {
    int64_t at;
    int64_t before;
} ec_sketch_change;

/* What a turn of the generations changed. */
typedef struct {
    int turned;
    ec_block forgotten;
    int64_t added, old_added, since;
} ec_sketch_turn;

/* The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). */
static inline uint64_t ec_mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline size_t ec_sketch_block_bytes(const ec_sketch *k) { return (size_t)k->width * EC_SKETCH_ROWS * (size_t)k->cell_bytes; }

static inline void ec_sketch_free(ec_sketch *k) {
    ec_block_drop(&k->young);
    ec_block_drop(&k->old);
    k->width = 0;
}

/* A sketch of at most `bytes` whose counters reach `most`. On EC_NOMEM there is none. */
static inline int ec_sketch_init(ec_sketch *k, int64_t bytes, int64_t most, uint64_t seed) {
    memset(k, 0, sizeof *k);
    k->cell_bytes = most <= UINT8_MAX ? 1 : most <= UINT16_MAX ? 2 : 4;
    k->width = bytes / (2 * EC_SKETCH_ROWS * k->cell_bytes);
    k->seed = seed;
    k->since = INT64_MIN;
    if (ec_block_take(&k->young, ec_sketch_block_bytes(k)) == EC_OK && ec_block_take(&k->old, ec_sketch_block_bytes(k)) == EC_OK)
        return EC_OK;
    ec_sketch_free(k);
    return EC_NOMEM;
}

static inline int64_t ec_sketch_get(const ec_sketch *k, const ec_block *block, int64_t at) {
    if (k->cell_bytes == 1) return ((const uint8_t *)block->data)[at];
    return k->cell_bytes == 2 ? ((const uint16_t *)block->data)[at] : ((const uint32_t *)block->data)[at];
}

static inline void ec_sketch_set(const ec_sketch *k, int64_t at, int64_t count) {
    if (k->cell_bytes == 1) ((uint8_t *)k->young.data)[at] = (uint8_t)count;
    else if (k->cell_bytes == 2) ((uint16_t *)k->young.data)[at] = (uint16_t)count;
    else ((uint32_t *)k->young.data)[at] = (uint32_t)count;
}

static inline void ec_sketch_places(const ec_sketch *k, int64_t key, int64_t places[EC_SKETCH_ROWS]) {
    const uint64_t first = ec_mix64((uint64_t)key ^ k->seed), second = ec_mix64(first + EC_WEYL) | 1;
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        const uint64_t hash = first + (uint64_t)row * second;
        places[row] = row * k->width + (int64_t)((unsigned __int128)hash * (uint64_t)k->width >> 64);
    }
}

static inline void ec_sketch_prefetch(const ec_sketch *k, int64_t key) {
    int64_t places[EC_SKETCH_ROWS];
    ec_sketch_places(k, key, places);
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        EC_PREFETCH_WRITE((char *)k->young.data + places[row] * k->cell_bytes);
        EC_PREFETCH_READ((char *)k->old.data + places[row] * k->cell_bytes);
    }
}

static inline int64_t ec_sketch_smallest(const ec_sketch *k, const ec_block *block, const int64_t places[EC_SKETCH_ROWS]) {
    int64_t least = INT64_MAX;
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        const int64_t count = ec_sketch_get(k, block, places[row]);
        if (count < least) least = count;
    }
    return least;
}

/* Adds occurrences of a key; returns its estimate. `changes` has room for EC_SKETCH_ROWS more. */
static inline int64_t ec_sketch_add(ec_sketch *k, int64_t key, int64_t count, ec_vec *changes) {
    const int64_t top = ((int64_t)1 << (8 * k->cell_bytes)) - 1;
    int64_t places[EC_SKETCH_ROWS];
    ec_sketch_places(k, key, places);
    const int64_t young = ec_sketch_smallest(k, &k->young, places);
    const int64_t raised = count > top - young ? top : young + count;
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        const int64_t before = ec_sketch_get(k, &k->young, places[row]);
        if (before >= raised) continue;
        EC_PUSH(*changes, ec_sketch_change, {places[row], before});
        ec_sketch_set(k, places[row], raised);
    }
    k->added += count;
    return raised + ec_sketch_smallest(k, &k->old, places);
}

/* Turns the generations where it is time: the young one is full, or began before `cutoff`. */
static inline int ec_sketch_turn_if_due(ec_sketch *k, int64_t cutoff, int64_t newest, ec_sketch_turn *turn) {
    ec_block fresh;
    turn->added = k->added;
    turn->old_added = k->old_added;
    turn->since = k->since;
    if (k->added + k->old_added == 0 || (k->added < k->width / 2 && k->since >= cutoff)) return EC_OK;
    if (ec_block_take(&fresh, ec_sketch_block_bytes(k)) != EC_OK) return EC_NOMEM;
    turn->turned = 1;
    turn->forgotten = k->old;
    k->old = k->young;
    k->young = fresh;
    k->old_added = k->added;
    k->added = 0;
    k->since = newest;
    return EC_OK;
}

/* Takes back what a plan did: its turn, if there was one, came before its changes. */
static inline void ec_sketch_undo(ec_sketch *k, const ec_vec *changes, ec_sketch_turn *turn) {
    for (int64_t i = changes->size - 1; i >= 0; i--) {
        const ec_sketch_change *change = &EC_AT(*changes, ec_sketch_change, i);
        ec_sketch_set(k, change->at, change->before);
    }
    k->added = turn->added;
    k->old_added = turn->old_added;
    k->since = turn->since;
    if (!turn->turned) return;
    ec_block_drop(&k->young);
    k->young = k->old;
    k->old = turn->forgotten;
    memset(turn, 0, sizeof *turn);
}

#endif
