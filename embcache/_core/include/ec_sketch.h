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
 * Blocks. All this holds of each block by itself: a sketch is a power of two of them, each of equally many vshards, whose
 * keys count in it and nowhere else, and whose generations turn when it is time for them. So what is counted of a key depends
 * on keys of its own block alone. Where many ranks share a table, each has the blocks of its vshards, and estimates are those of one
 * process as long as no block has vshards of two ranks: at any number of ranks where every vshard has a block, at powers of
 * two up to the number of blocks where it has not. (A block of several ranks is on each of them, and has counted its keys
 * only.) There are as many blocks as leave each wide enough for its window, EC_SKETCH_LEAST counters and EC_SKETCH_WINDOW times
 * the threshold: a key that alone came to its block would be lost between two windows that are shorter. A sketch keeps the
 * number of blocks that it was made with, wherever it is saved and restored; those of earlier versions have one, on each rank.
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
#define EC_SKETCH_LEAST 64 /* counters of a row of a block, where there are several */
#define EC_SKETCH_WINDOW 8 /* the same, by the threshold */
#define EC_WEYL 0x9E3779B97F4A7C15u /* 2^64 by the golden ratio */

/* How far the generations of a block are. */
typedef struct {
    int64_t added, old_added; /* occurrences in each */
    int64_t since;            /* newest timestamp when the young one began */
} ec_sketch_clock;

typedef struct {
    int64_t width;      /* counters of a row of a block; 0: there is no sketch */
    int64_t blocks;     /* of the whole table, wherever they are: a power of two */
    int64_t first;      /* block that is here, and how many are */
    int64_t count;
    int32_t shift;      /* of a hash, which leaves the number of its block; 64: there is one block */
    int32_t cell_bytes; /* of a counter: 1, 2 or 4 */
    uint64_t seed;
    ec_block young, old; /* block by block, each row by row */
    ec_block clocks;     /* of ec_sketch_clock, one a block that is here */
} ec_sketch;

/* A counter of the young generation before a plan raised it. */
typedef struct {
    int64_t at;
    int64_t before;
} ec_sketch_change;

/* What a plan has done to a sketch: its turns came before its changes. */
typedef struct {
    ec_vec clocks;    /* of ec_sketch_clock: those before it, of all blocks that are here; empty: it has not come to the sketch */
    ec_vec turned;    /* of int64_t: places of the blocks that it turned, rising */
    ec_vec forgotten; /* bytes: the old generations of these before */
    ec_vec cells;     /* of ec_sketch_change */
} ec_sketch_past;

#define EC_CLOCK(sketch, at) (((ec_sketch_clock *)(sketch)->clocks.data)[at])

/* The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). */
static inline uint64_t ec_mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Counters of a generation of a block; bytes of one, and of one of all blocks that are here. */
static inline int64_t ec_sketch_block_cells(const ec_sketch *k) { return k->width * EC_SKETCH_ROWS; }
static inline int64_t ec_sketch_block_bytes(const ec_sketch *k) { return ec_sketch_block_cells(k) * k->cell_bytes; }
static inline int64_t ec_sketch_bytes(const ec_sketch *k) { return k->count * ec_sketch_block_bytes(k); }

static inline void ec_sketch_free(ec_sketch *k) {
    ec_block_drop(&k->young);
    ec_block_drop(&k->old);
    ec_block_drop(&k->clocks);
    k->width = k->count = 0;
}

static inline void ec_sketch_past_free(ec_sketch_past *p) {
    ec_vec_free(&p->clocks);
    ec_vec_free(&p->turned);
    ec_vec_free(&p->forgotten);
    ec_vec_free(&p->cells);
}

/* The blocks that a sketch with so many counters in a row has where they are to reach `most`. */
static inline int64_t ec_sketch_blocks_for(int64_t width, int64_t most) {
    int64_t blocks = 1;
    while (blocks < EC_VSHARDS && width / (2 * blocks) >= EC_SKETCH_LEAST && width / (2 * blocks) / EC_SKETCH_WINDOW >= most) blocks *= 2;
    return blocks;
}

/* The part for vshards `low` to `high` - 1 of a sketch of at most `bytes` whose counters reach `most`, in `blocks` (0: as many as
 * is right). On EC_NOMEM there is none. */
static inline int ec_sketch_init(ec_sketch *k, int64_t bytes, int64_t most, uint64_t seed, int64_t blocks, int64_t low, int64_t high) {
    memset(k, 0, sizeof *k);
    k->cell_bytes = most <= UINT8_MAX ? 1 : most <= UINT16_MAX ? 2 : 4;
    k->width = bytes / (2 * EC_SKETCH_ROWS * k->cell_bytes);
    k->blocks = blocks > 0 ? blocks : ec_sketch_blocks_for(k->width, most);
    k->width /= k->blocks;
    k->first = low * k->blocks / EC_VSHARDS;
    k->count = (high * k->blocks + EC_VSHARDS - 1) / EC_VSHARDS - k->first;
    k->shift = 64 - __builtin_ctzll((uint64_t)k->blocks);
    k->seed = seed;
    if (ec_block_take(&k->young, (size_t)ec_sketch_bytes(k)) == EC_OK && ec_block_take(&k->old, (size_t)ec_sketch_bytes(k)) == EC_OK &&
        ec_block_take(&k->clocks, (size_t)k->count * sizeof(ec_sketch_clock)) == EC_OK) {
        for (int64_t at = 0; at < k->count; at++) EC_CLOCK(k, at).since = INT64_MIN;
        return EC_OK;
    }
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

/* The place here of the block in which a key with this hash counts. One of another rank's vshards counts somewhere. */
static inline int64_t ec_sketch_block_of(const ec_sketch *k, uint64_t hash) {
    if (k->shift == 64) return 0;
    const uint64_t at = (hash >> k->shift) - (uint64_t)k->first;
    return (int64_t)(at < (uint64_t)k->count ? at : at % (uint64_t)k->count);
}

/* A key's counters, of which the first row's are below ec_sketch_block_cells(). In several blocks the rows have bits of their own: they
 * are so few that two keys which share the start and the step of a progression would share all four. */
static inline void ec_sketch_places(const ec_sketch *k, int64_t key, int64_t block, int64_t places[EC_SKETCH_ROWS]) {
    const uint64_t first = ec_mix64((uint64_t)key ^ k->seed), second = ec_mix64(first + EC_WEYL);
    const uint64_t halves[EC_SKETCH_ROWS] = {first >> 32, first & UINT32_MAX, second >> 32, second & UINT32_MAX};
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        const uint64_t hash = k->blocks > 1 ? halves[row] << 32 : first + (uint64_t)row * (second | 1);
        places[row] = (block * EC_SKETCH_ROWS + row) * k->width + (int64_t)((unsigned __int128)hash * (uint64_t)k->width >> 64);
    }
}

static inline void ec_sketch_prefetch(const ec_sketch *k, int64_t key, uint64_t hash) {
    int64_t places[EC_SKETCH_ROWS];
    ec_sketch_places(k, key, ec_sketch_block_of(k, hash), places);
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
static inline int64_t ec_sketch_add(ec_sketch *k, int64_t key, uint64_t hash, int64_t count, ec_vec *changes) {
    const int64_t top = ((int64_t)1 << (8 * k->cell_bytes)) - 1, block = ec_sketch_block_of(k, hash);
    int64_t places[EC_SKETCH_ROWS];
    ec_sketch_places(k, key, block, places);
    const int64_t young = ec_sketch_smallest(k, &k->young, places);
    const int64_t raised = count > top - young ? top : young + count;
    for (int row = 0; row < EC_SKETCH_ROWS; row++) {
        const int64_t before = ec_sketch_get(k, &k->young, places[row]);
        if (before >= raised) continue;
        EC_PUSH(*changes, ec_sketch_change, {places[row], before});
        ec_sketch_set(k, places[row], raised);
    }
    EC_CLOCK(k, block).added += count;
    return raised + ec_sketch_smallest(k, &k->old, places);
}

/* Whether it is time for a block's generations to turn: the young one is full, or began before `cutoff`. */
static inline int ec_sketch_due(const ec_sketch *k, int64_t at, int64_t cutoff) {
    const ec_sketch_clock *clock = &EC_CLOCK(k, at);
    return (clock->added >= k->width / 2 || clock->since < cutoff) && clock->added + clock->old_added > 0;
}

/* A plan comes to the sketch: the generations turn for which it is time. EC_NOMEM changes nothing. */
static inline int ec_sketch_begin(ec_sketch *k, int64_t cutoff, int64_t newest, ec_sketch_past *past) {
    const int64_t size = ec_sketch_block_bytes(k);
    int64_t due = 0;
    for (int64_t at = 0; at < k->count; at++) due += ec_sketch_due(k, at, cutoff);
    if (ec_vec_reserve(&past->turned, due, sizeof(int64_t)) || ec_vec_reserve(&past->forgotten, due * size, 1)) return EC_NOMEM;
    if (ec_vec_reserve(&past->clocks, k->count, sizeof(ec_sketch_clock)) != EC_OK) return EC_NOMEM;
    memcpy(past->clocks.data, k->clocks.data, (size_t)k->count * sizeof(ec_sketch_clock));
    past->clocks.size = k->count;
    for (int64_t at = 0; at < k->count && past->turned.size < due; at++) {
        if (!ec_sketch_due(k, at, cutoff)) continue;
        char *young = (char *)k->young.data + at * size, *old = (char *)k->old.data + at * size;
        memcpy((char *)past->forgotten.data + past->forgotten.size, old, (size_t)size);
        past->forgotten.size += size;
        EC_PUSH(past->turned, int64_t, at);
        memcpy(old, young, (size_t)size);
        memset(young, 0, (size_t)size);
        EC_CLOCK(k, at) = (ec_sketch_clock){0, EC_CLOCK(k, at).added, newest};
    }
    return EC_OK;
}

/* Takes back what a plan did. */
static inline void ec_sketch_undo(ec_sketch *k, const ec_sketch_past *past) {
    const int64_t size = ec_sketch_block_bytes(k);
    if (past->clocks.size == 0) return;
    for (int64_t i = past->cells.size - 1; i >= 0; i--) {
        const ec_sketch_change *change = &EC_AT(past->cells, ec_sketch_change, i);
        ec_sketch_set(k, change->at, change->before);
    }
    for (int64_t i = 0; i < past->turned.size; i++) {
        const int64_t at = EC_AT(past->turned, int64_t, i) * size;
        memcpy((char *)k->young.data + at, (char *)k->old.data + at, (size_t)size);
        memcpy((char *)k->old.data + at, (char *)past->forgotten.data + i * size, (size_t)size);
    }
    memcpy(k->clocks.data, past->clocks.data, (size_t)k->count * sizeof(ec_sketch_clock));
}

#endif
