/* What a plan works with: the batch, the sides of all tables, scratch memory that is reused, and the plan's arrays. */
#ifndef EC_WORK_H
#define EC_WORK_H

#include <stdint.h>
#include <string.h>

#include "ec_dedup.h"
#include "ec_halves.h"
#include "ec_plan.h"

#define EC_CHUNK 4096 /* uniques of a look-up task */
#define EC_THREADS_MAX 64

typedef struct {
    int64_t table;
    int64_t begin, end; /* uniques, relative to the table */
} ec_chunk;

/* What of a table a sweep takes away, where others hold the rest of the table: the cut-off of rows, or the largest ranks
 * (ec_select.h) of rows and of waiting keys that go, as a high and a low half; `rows`, `waiting`: whether any do. */
typedef struct {
    int64_t cutoff;
    int64_t rows, waiting;
    uint64_t rows_most[2], waiting_most[2];
} ec_limit;

/* The plan's arrays, as carved from its two blocks: what has a known size, or at most one item a key; and the moves. */
typedef struct {
    int64_t *table_offsets, *unique_offsets, *in_offsets, *out_offsets, *hits, *misses;
    int64_t *inverse, *order, *segment_offsets, *unique_keys, *slots;
    uint8_t *admitted;
    int64_t *in_keys, *in_slots, *in_rows;
    int64_t *out_keys, *out_slots, *out_rows;
    void *front, *back; /* from ec_take() */
    size_t front_bytes, back_bytes;
} ec_arrays;

typedef struct {
    /* the batch */
    int64_t tables;
    int64_t n;
    const int64_t *keys;
    const int64_t *offsets;
    const int64_t *timestamps; /* NULL: none */
    const uint8_t *clicked;    /* whether an occurrence was clicked; NULL: none was */
    /* where the batch is a part of a larger one, which others plan the rest of: */
    const int64_t *times;    /* occurrences that a position stands for; NULL: one each */
    const int64_t *clicks_at; /* clicks of a position's occurrences, in place of `clicked`; NULL: none */
    const int64_t *newest;   /* by table: the newest timestamp of the larger batch, INT64_MIN: it has no key; NULL: this is all there is */
    ec_limit *limits;        /* by table: what a sweep of this step takes away, decided with the others; NULL: it decides alone */
    int counted;             /* whether the occurrences have been counted before the decision */
    int64_t step;
    uint32_t notice;    /* the one that told of this batch, or EC_NO_NOTICE */
    int64_t sweep_rows; /* work of a pass in one plan, all tables together: slots, rows and waiting keys looked at */
    int64_t slice;      /* a table's share of it in this plan */
    uint32_t long_ago;  /* uses of slots from which on a hit's last one is noted apart: EC_LONG_AGO */
    int in_turn;        /* whether the tables go their way one after the other */
    int avx2;           /* whether the CPU has it */
    double bracket;     /* half the width of a selection's bracket: times the root of its sample's size */
    /* state and journal */
    ec_side *sides;
    ec_part *parts;
    ec_arrays out;
    /* per unique, table t's from offsets[t] on */
    int64_t *key, *end, *slot, *row, *freq, *last, *entry, *clicks, *occurred;
    uint64_t *hash;
    uint8_t *admitted;
    /* per unique, compacted inside a chunk or a table: those not resident, then those without a row */
    int64_t *some_key, *some_row, *some_at, *missing;
    uint64_t *some_hash;
    uint8_t *some_born;
    /* dedup */
    uint64_t seed[2];
    ec_dedup_table dedup[EC_THREADS_MAX];
    int dedup_busy[EC_THREADS_MAX];
    int dedup_count;
    ec_dedup_call *calls; /* one a table */
    ec_dedup_call *cut;   /* the call that is cut now */
    uint32_t *first, *counts, *part_uid, *starts, *fresh;
    int64_t *part_unique, *block_first, *block_count;
    ec_dedup_item *items;
    int dedup_status;
    ec_vec quick;  /* of int64_t: tables that go the short way (ec_resident.h) */
    ec_vec plain;  /* of int64_t: tables whose dedup is one task */
    ec_vec chunks; /* of ec_chunk */
    ec_block scratch; /* what the arrays above are carved from */
    void *spare;      /* a block of an earlier plan that is large enough for this one's `front`, or NULL */
    /* batch doors of the host table */
    void (*find)(ec_table *, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, int threads);
    int (*bear)(ec_table *, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, uint8_t *born, int threads);
} ec_work;

/* ------------------------------------------------------------------------------------------------------------- memory */

/* Hands out 64-byte aligned pieces of a block; with `at` NULL it only adds up. */
typedef struct {
    char *at;
    size_t used;
} ec_carver;

static inline void *ec_carve(ec_carver *c, int64_t items, size_t item_bytes) {
    void *piece = c->at ? c->at + c->used : NULL;
    c->used += ((size_t)items * item_bytes + 63) & ~(size_t)63;
    return piece;
}

static void ec_work_carve(ec_work *w, ec_carver *c, int64_t n, int64_t large) {
    w->key = (int64_t *)ec_carve(c, n, 8);
    w->end = (int64_t *)ec_carve(c, n, 8);
    w->slot = (int64_t *)ec_carve(c, n, 8);
    w->row = (int64_t *)ec_carve(c, n, 8);
    w->freq = (int64_t *)ec_carve(c, n, 8);
    w->last = (int64_t *)ec_carve(c, n, 8);
    w->entry = (int64_t *)ec_carve(c, n, 8);
    w->clicks = (int64_t *)ec_carve(c, n, 8);
    w->occurred = (int64_t *)ec_carve(c, w->times ? n : 0, 8);
    w->hash = (uint64_t *)ec_carve(c, n, 8);
    w->some_key = (int64_t *)ec_carve(c, n, 8);
    w->some_row = (int64_t *)ec_carve(c, n, 8);
    w->some_at = (int64_t *)ec_carve(c, n, 8);
    w->missing = w->entry; /* of tables without a filter: their uniques that are not resident */
    w->some_hash = (uint64_t *)ec_carve(c, n, 8);
    w->admitted = (uint8_t *)ec_carve(c, n, 1);
    w->some_born = (uint8_t *)ec_carve(c, n, 1);
    w->counts = (uint32_t *)ec_carve(c, n, 4);
    const int64_t blocks = ec_dedup_blocks(large);
    w->items = (ec_dedup_item *)ec_carve(c, large, sizeof(ec_dedup_item));
    w->part_unique = (int64_t *)ec_carve(c, large, 8);
    w->first = (uint32_t *)ec_carve(c, large, 4);
    w->part_uid = (uint32_t *)ec_carve(c, large, 4);
    w->starts = (uint32_t *)ec_carve(c, EC_PARTS * (blocks + 1), 4);
    w->fresh = (uint32_t *)ec_carve(c, EC_PARTS * (blocks + 1), 4);
    w->block_first = (int64_t *)ec_carve(c, blocks + 1, 8);
    w->block_count = (int64_t *)ec_carve(c, blocks + 1, 8);
}

/* Scratch for a batch of n keys whose largest cut table has `large` keys. It grows with the largest batch and stays. */
static int ec_work_reserve(ec_work *w, int64_t n, int64_t large) {
    ec_carver sizes = {NULL, 0};
    ec_work_carve(w, &sizes, n, large);
    if (sizes.used > w->scratch.held) {
        ec_block wider;
        const size_t half_more = w->scratch.held + w->scratch.held / 2;
        if (ec_block_take(&wider, sizes.used > half_more ? sizes.used : half_more) != EC_OK) return EC_NOMEM;
        ec_block_drop(&w->scratch);
        w->scratch = wider;
    }
    ec_carver pieces = {(char *)w->scratch.data, 0};
    ec_work_carve(w, &pieces, n, large);
    return EC_OK;
}

/* Distinct keys to expect among n, after what a table's last batch held. A little more, since one too many is dear. */
static inline int64_t ec_expected_unique(const ec_dedup_call *last, int64_t n) {
    const double share = last->n > 0 ? (double)last->unique / (double)last->n : 0.5;
    return (int64_t)(share * (double)n * 1.05);
}

static void ec_arrays_carve_front(ec_arrays *o, ec_carver *c, int64_t tables, int64_t n) {
    o->table_offsets = (int64_t *)ec_carve(c, tables + 1, 8);
    o->unique_offsets = (int64_t *)ec_carve(c, tables + 1, 8);
    o->in_offsets = (int64_t *)ec_carve(c, tables + 1, 8);
    o->out_offsets = (int64_t *)ec_carve(c, tables + 1, 8);
    o->hits = (int64_t *)ec_carve(c, tables, 8);
    o->misses = (int64_t *)ec_carve(c, tables, 8);
    o->inverse = (int64_t *)ec_carve(c, n, 8);
    o->order = (int64_t *)ec_carve(c, n, 8);
    o->unique_keys = (int64_t *)ec_carve(c, n, 8);
    o->slots = (int64_t *)ec_carve(c, n, 8);
    o->segment_offsets = (int64_t *)ec_carve(c, n + 1, 8);
    o->admitted = (uint8_t *)ec_carve(c, n, 1);
}

/* Bytes of the first block of a plan of n keys. */
static size_t ec_arrays_front_bytes(int64_t tables, int64_t n) {
    ec_arrays unused;
    ec_carver sizes = {NULL, 0};
    ec_arrays_carve_front(&unused, &sizes, tables, n);
    return sizes.used;
}

/* Says what every table's dedup reads and writes, and which tables are cut. */
static int ec_work_begin(ec_work *w, const int64_t *keys, const int64_t *offsets, const int64_t *timestamps, int64_t step,
                         int threads) {
    const int64_t cut_from = threads > 1 ? EC_DEDUP_LARGE : INT64_MAX;
    int64_t large = 0;
    w->keys = keys;
    w->offsets = offsets;
    w->timestamps = timestamps;
    w->step = step;
    w->n = offsets[w->tables];
    w->quick.size = w->plain.size = w->chunks.size = 0;
    if (ec_vec_reserve(&w->quick, w->tables, sizeof(int64_t)) != EC_OK) return EC_NOMEM;
    for (int64_t t = 0; t < w->tables; t++) {
        const int64_t size = offsets[t + 1] - offsets[t];
        w->parts[t].quick = ec_side_quick(&w->sides[t], size);
        if (w->parts[t].quick) EC_PUSH(w->quick, int64_t, t);
        else if (size >= cut_from && size > large) large = size;
    }
    if (ec_vec_reserve(&w->plain, w->tables, sizeof(int64_t)) || ec_work_reserve(w, w->n, large)) return EC_NOMEM;
    w->out.front_bytes = ec_arrays_front_bytes(w->tables, w->n);
    w->out.front = w->spare ? w->spare : ec_take(NULL, w->out.front_bytes);
    if (!w->out.front) return EC_NOMEM;
    w->spare = NULL;
    ec_carver pieces = {(char *)w->out.front, 0};
    ec_arrays_carve_front(&w->out, &pieces, w->tables, w->n);
    memcpy(w->out.table_offsets, offsets, (size_t)(w->tables + 1) * sizeof(int64_t));
    w->in_turn = threads == 1;
    for (int64_t t = 0; t < w->tables; t++) {
        const int64_t begin = offsets[t], size = offsets[t + 1] - begin;
        const int64_t expected = ec_expected_unique(&w->calls[t], size);
        w->calls[t] = (ec_dedup_call){
            .keys = keys + begin, .n = size, .seed = w->seed, .inverse = w->out.inverse + begin, .order = w->out.order + begin,
            .unique_keys = w->key + begin, .ends = w->end + begin, .position_base = begin, .expected = expected,
            .counts = w->counts + begin, .first = w->first, .blocks = ec_dedup_blocks(size), .items = w->items,
            .part_uid = w->part_uid, .part_unique = w->part_unique, .starts = w->starts, .fresh = w->fresh,
            .block_first = w->block_first, .block_count = w->block_count};
        if (size < cut_from && !w->parts[t].quick) EC_PUSH(w->plain, int64_t, t);
    }
    return EC_OK;
}

/* A probe table that nobody uses. At most dedup_count tasks run at a time, so there always is one. */
static inline int ec_dedup_borrow(ec_work *w) {
    for (int i = 0;; i = (i + 1) % w->dedup_count) {
        int idle = 0;
        if (__atomic_compare_exchange_n(&w->dedup_busy[i], &idle, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return i;
    }
}

static inline void ec_dedup_return(ec_work *w, int i) { __atomic_store_n(&w->dedup_busy[i], 0, __ATOMIC_RELEASE); }

/* Cuts the uniques of all tables into look-up tasks. */
static int ec_work_chunk(ec_work *w) {
    int64_t chunks = 0;
    for (int64_t t = 0; t < w->tables; t++) {
        if (w->parts[t].quick) continue;
        w->parts[t].unique = w->calls[t].unique;
        chunks += (w->parts[t].unique + EC_CHUNK - 1) / EC_CHUNK;
    }
    if (ec_vec_reserve(&w->chunks, chunks, sizeof(ec_chunk)) != EC_OK) return EC_NOMEM;
    for (int64_t t = 0; t < w->tables; t++) {
        const int64_t unique = w->parts[t].quick ? 0 : w->parts[t].unique;
        for (int64_t begin = 0; begin < unique; begin += EC_CHUNK)
            EC_PUSH(w->chunks, ec_chunk, {t, begin, begin + EC_CHUNK < unique ? begin + EC_CHUNK : unique});
    }
    return EC_OK;
}

/* Number of table t's unique 0, where the uniques of all tables before are known. */
static inline int64_t ec_work_first(const ec_work *w, int64_t t) {
    int64_t first = 0;
    for (int64_t before = 0; before < t; before++) first += w->parts[before].unique;
    return first;
}

static void ec_arrays_carve_back(ec_arrays *o, ec_carver *c, int64_t in) {
    o->in_keys = (int64_t *)ec_carve(c, in, 8);
    o->in_slots = (int64_t *)ec_carve(c, in, 8);
    o->in_rows = (int64_t *)ec_carve(c, in, 8);
    o->out_keys = (int64_t *)ec_carve(c, in, 8); /* at most as many as come in */
    o->out_slots = (int64_t *)ec_carve(c, in, 8);
    o->out_rows = (int64_t *)ec_carve(c, in, 8);
}

/* The plan's other arrays, once it is known how many swap-ins there are; and the offsets. */
static int ec_arrays_reserve(ec_work *w) {
    ec_arrays *o = &w->out;
    o->unique_offsets[0] = o->in_offsets[0] = o->segment_offsets[0] = 0;
    for (int64_t t = 0; t < w->tables; t++) {
        o->unique_offsets[t + 1] = o->unique_offsets[t] + w->parts[t].unique;
        o->in_offsets[t + 1] = o->in_offsets[t] + w->parts[t].totals[EC_MISSES];
    }
    ec_carver sizes = {NULL, 0};
    ec_arrays_carve_back(o, &sizes, o->in_offsets[w->tables]);
    char *back = (char *)ec_take(NULL, sizes.used);
    if (!back) return EC_NOMEM;
    ec_carver pieces = {back, 0};
    ec_arrays_carve_back(o, &pieces, o->in_offsets[w->tables]);
    o->back = back;
    o->back_bytes = sizes.used;
    return EC_OK;
}

/* Offsets of the swap-outs, known after the place phase. */
static void ec_arrays_out_offsets(ec_work *w) {
    w->out.out_offsets[0] = 0;
    for (int64_t t = 0; t < w->tables; t++)
        w->out.out_offsets[t + 1] = w->out.out_offsets[t] + w->parts[t].totals[EC_SWAP_OUT_ROWS];
}

static void ec_work_free(ec_work *w) {
    for (int i = 0; i < w->dedup_count; i++) ec_dedup_table_free(&w->dedup[i]);
    ec_block_drop(&w->scratch);
    ec_vec_free(&w->quick);
    ec_vec_free(&w->plain);
    ec_vec_free(&w->chunks);
    free(w->calls);
    w->calls = NULL;
}

#endif
