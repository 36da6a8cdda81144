/* A filter as of the last finished training batch, read piece by piece while training goes on.
 *
 * At the cut nothing is copied. What unfinished plans have changed is in their journals, with what was there before; so whoever
 * reads looks through these first (ec_filtercut_look): of each waiting key's entry, and of each counter of the sketch, that was not read
 * yet, what was there before its first change is kept. A plan must be looked through before it finishes, and a save is told when one
 * comes in. Keys that are removed by hand have to be kept before (ec_filtercut_keep). Entries keep their numbers while they live, and a
 * number that is given to another key is a change like any other. What a cancelled plan had changed is as it was before, kept or not.
 *
 * Where the generations of a block of the sketch turn, both are kept as they were, unless they have been read.
 *
 * A delta reads the entries and counters that have changed since its parent, where that is known and less (ec_filternews.h): what is
 * known is the cut's from ec_filtercut_take on, and given back if the save fails. While a pass is under way entries are looked at all the
 * same, as some of those that have not changed are dead.
 */
#ifndef EC_FILTERCUT_H
#define EC_FILTERCUT_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ec_plan.h"

typedef struct {
    int64_t at;
    int64_t before;
} ec_cell_before;

/* A block of the sketch that has turned since the cut: its generations before are among `turned`. */
typedef struct {
    int64_t at;   /* its place */
    int64_t read; /* bytes of the sketch that had been read when it was kept */
} ec_turned_before;

typedef struct {
    int64_t size;        /* entries at the cut */
    int64_t read;        /* entries below this have been read */
    uint64_t *seen;      /* a bit an entry: kept, or known to be none */
    ec_vec kept;         /* of ec_filter_entry */
    int64_t half;         /* bytes of a generation of the sketch; 0: there is none */
    int64_t sketch_read;  /* bytes of the young one, then of the old one, below this have been read */
    int64_t block_bytes;  /* of a generation of a block */
    int32_t cell_bytes;
    uint64_t *seen_cells; /* a bit a counter of the young one: kept, or its block is */
    ec_vec cells;         /* of ec_cell_before: of the young one */
    uint64_t *seen_blocks; /* a bit a block */
    ec_vec blocks;         /* of ec_turned_before */
    ec_vec turned;         /* bytes: young and old generation of each of these */
    const ec_filter_news *news; /* what is to be read; NULL: everything */
    int passing;         /* whether entries that have not changed may be dead */
    int taken;           /* whether `before` has what was known at the cut */
    ec_filter_news before;
} ec_filtercut;

static void ec_filtercut_free(ec_filtercut *c) {
    free(c->seen);
    free(c->seen_cells);
    free(c->seen_blocks);
    ec_vec_free(&c->kept);
    ec_vec_free(&c->cells);
    ec_vec_free(&c->blocks);
    ec_vec_free(&c->turned);
    ec_news_forget(&c->before);
    memset(c, 0, sizeof *c);
}

static inline int ec_filtercut_entries_read(const ec_filtercut *c) { return c->read >= c->size; }
static inline int ec_filtercut_sketch_read(const ec_filtercut *c) { return c->sketch_read >= 2 * c->half; }

/* Keeps what an entry was, unless it has been read, or was not there at the cut. */
static inline int ec_filtercut_keep_entry(ec_filtercut *c, int64_t id, const ec_filter_entry *before) {
    if (id < c->read || id >= c->size || ec_bit(c->seen, id)) return EC_OK;
    if (c->news && !c->passing && !ec_bit_in(&c->news->entries, id)) return EC_OK;
    if (before && before->count > 0) {
        if (ec_vec_reserve_one(&c->kept, sizeof(ec_filter_entry)) != EC_OK) return EC_NOMEM;
        EC_PUSH(c->kept, ec_filter_entry, *before);
    }
    ec_bit_set(c->seen, id);
    return EC_OK;
}

static inline int ec_filtercut_keep_cells(ec_filtercut *c, const ec_vec *changes) {
    for (int64_t i = 0; i < changes->size; i++) {
        const ec_sketch_change *change = &EC_AT(*changes, ec_sketch_change, i);
        if (change->at * c->cell_bytes < c->sketch_read || ec_bit(c->seen_cells, change->at)) continue;
        if (ec_bit(c->seen_blocks, change->at * c->cell_bytes / c->block_bytes)) continue;
        if (c->news && !ec_bit_in(&c->news->cells, change->at)) continue;
        if (ec_vec_reserve_one(&c->cells, sizeof(ec_cell_before)) != EC_OK) return EC_NOMEM;
        EC_PUSH(c->cells, ec_cell_before, {change->at, change->before});
        ec_bit_set(c->seen_cells, change->at);
    }
    return EC_OK;
}

/* The young generation of the block at place `at` before unfinished plan k turned it: it became the old one, until a later plan turned it again. */
static inline const char *ec_filtercut_young_before(const ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t k, int64_t at) {
    for (int64_t later = k + 1; later < plan_count; later++) {
        const ec_sketch_past *past = &plans[later]->parts[t].sketch;
        const int64_t *turned = (const int64_t *)past->turned.data;
        int64_t low = 0, high = past->turned.size;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (turned[middle] < at) low = middle + 1;
            else high = middle;
        }
        if (low < past->turned.size && turned[low] == at) return (const char *)past->forgotten.data + low * c->block_bytes;
    }
    return (const char *)f->sketch.old.data + at * c->block_bytes;
}

/* Keeps the blocks that unfinished plan k has turned. Those before it have been looked through. */
static int ec_filtercut_keep_turned(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t k) {
    const ec_sketch_past *past = &plans[k]->parts[t].sketch;
    const int64_t size = c->block_bytes, cells = size / c->cell_bytes, all = c->half / c->cell_bytes;
    for (int64_t i = 0; i < past->turned.size; i++) {
        const int64_t at = EC_AT(past->turned, int64_t, i);
        if (ec_bit(c->seen_blocks, at) || c->half + (at + 1) * size <= c->sketch_read) continue;
        if (c->news && !ec_bits_any(&c->news->cells, at * cells, (at + 1) * cells) && !ec_bits_any(&c->news->cells, all + at * cells, all + (at + 1) * cells))
            continue;
        if (ec_vec_reserve_one(&c->blocks, sizeof(ec_turned_before)) || ec_vec_reserve(&c->turned, 2 * size, 1)) return EC_NOMEM;
        EC_PUSH(c->blocks, ec_turned_before, {at, c->sketch_read});
        memcpy((char *)c->turned.data + c->turned.size, ec_filtercut_young_before(c, f, t, plans, plan_count, k, at), (size_t)size);
        memcpy((char *)c->turned.data + c->turned.size + size, (const char *)past->forgotten.data + i * size, (size_t)size);
        c->turned.size += 2 * size;
        ec_bit_set(c->seen_blocks, at);
    }
    return EC_OK;
}

/* Looks through the journals of all unfinished plans, of table t. EC_NOMEM: the cut is lost. */
static int ec_filtercut_look(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    if (!ec_filtercut_entries_read(c))
        for (int64_t k = 0; k < plan_count; k++) {
            const ec_vec *changes = &plans[k]->parts[t].changes;
            for (int64_t i = 0; i < changes->size; i++) {
                const ec_filter_change *change = &EC_AT(*changes, ec_filter_change, i);
                if (ec_filtercut_keep_entry(c, change->id, change->kind == EC_FILTER_ADDED ? NULL : &change->before) != EC_OK) return EC_NOMEM;
            }
        }
    for (int64_t k = 0; k < plan_count && !ec_filtercut_sketch_read(c); k++) { /* oldest first, as the first change says what was there */
        if (ec_filtercut_keep_turned(c, f, t, plans, plan_count, k) != EC_OK) return EC_NOMEM;
        if (ec_filtercut_keep_cells(c, &plans[k]->parts[t].sketch.cells) != EC_OK) return EC_NOMEM;
    }
    return EC_OK;
}

/* Keeps what waiting keys have, which are about to be changed by hand. Journals have been looked through. */
static int ec_filtercut_keep(ec_filtercut *c, const ec_filter *f, const int64_t *keys, int64_t n) {
    if (ec_filtercut_entries_read(c)) return EC_OK;
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = ec_filter_find(f, keys[i], ec_hash(keys[i]));
        if (id >= 0 && ec_filtercut_keep_entry(c, id, &EC_ENTRY(f, id)) != EC_OK) return EC_NOMEM;
    }
    return EC_OK;
}

/* Bytes of a filter, and of what has changed of it since the last save, which is no more: counters have their places with them. */
static inline int64_t ec_filter_bytes(const ec_filter *f, int64_t *changed) {
    const ec_filter_news *n = &f->news;
    const int64_t entry_bytes = sizeof(ec_filter_entry), sketch_bytes = 2 * ec_sketch_bytes(&f->sketch);
    const int64_t all = f->index.size * entry_bytes + sketch_bytes;
    *changed = all;
    if (!n->known || sketch_bytes > UINT32_MAX) return all;
    const int64_t few = n->changed * entry_bytes + n->gone.size * (int64_t)sizeof(int64_t) + n->raised * (int64_t)(sizeof(uint32_t) + f->sketch.cell_bytes);
    if (few < all) *changed = few;
    return all;
}

/* Starts one, of a `whole` filter, or of what has changed of it if that pays. `passing`: ec_cut_passing. EC_NOMEM: nothing is held. */
static int ec_filtercut_make(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int whole, int passing) {
    int64_t changed;
    const int64_t all = ec_filter_bytes(f, &changed);
    memset(c, 0, sizeof *c);
    c->news = !whole && changed < all ? &f->news : NULL;
    c->passing = passing;
    c->size = f->entries.size;
    c->half = ec_sketch_bytes(&f->sketch);
    c->block_bytes = ec_sketch_block_bytes(&f->sketch);
    c->cell_bytes = f->sketch.cell_bytes;
    c->seen = (uint64_t *)calloc((size_t)(c->size / 64 + 1), sizeof(uint64_t));
    if (c->half > 0) {
        c->seen_cells = (uint64_t *)calloc((size_t)(c->half / c->cell_bytes / 64 + 1), sizeof(uint64_t));
        c->seen_blocks = (uint64_t *)calloc((size_t)(f->sketch.count / 64 + 1), sizeof(uint64_t));
    }
    if (c->seen && (c->half == 0 || (c->seen_cells && c->seen_blocks)) && ec_filtercut_look(c, f, t, plans, plan_count) == EC_OK) return EC_OK;
    ec_filtercut_free(c);
    return EC_NOMEM;
}

/* What has changed counts from now on anew. Of no effect but this one; where there is no memory, the next save writes all. */
static void ec_filtercut_take(ec_filtercut *c, ec_filter *f) {
    c->before = f->news;
    c->taken = 1;
    if (c->news) c->news = &c->before;
    memset(&f->news, 0, sizeof f->news);
    ec_news_begin(&f->news, 2 * f->sketch.count * ec_sketch_block_cells(&f->sketch));
}

/* The save has failed: what was known at the cut counts again. Nothing is read any more. Again does nothing. */
static void ec_filtercut_give_back(ec_filtercut *c, ec_filter *f) {
    if (!c->taken) return;
    c->news = NULL;
    c->taken = 0;
    ec_news_join(&f->news, &c->before);
}

/* Reads of the next entries those that nothing has happened to, and that are to be read: at most `most`, for which `entries` and `changed` have
 * room. `changed`: whether they are to be written; while a pass is under way those that are not are read too. Returns how many. */
static int64_t ec_filtercut_read(ec_filtercut *c, const ec_filter *f, int64_t most, ec_filter_entry *entries, uint8_t *changed) {
    const int64_t looked = c->news && !c->passing ? most * 64 : most;
    const int64_t end = c->size - c->read > looked ? c->read + looked : c->size;
    int64_t n = 0, id = c->read;
    for (; id < end && n < most; id++) {
        const int wanted = !c->news || ec_bit_in(&c->news->entries, id);
        if (!wanted && !c->passing) continue;
        entries[n] = EC_ENTRY(f, id);
        changed[n] = (uint8_t)wanted;
        n += entries[n].count > 0 && !ec_bit(c->seen, id);
    }
    c->read = id;
    return n;
}

/* Where byte `at` of the sketch is: of the young generation, then of the old one. */
static inline const char *ec_filtercut_at(const ec_filtercut *c, const ec_filter *f, int64_t at) {
    return at < c->half ? (const char *)f->sketch.young.data + at : (const char *)f->sketch.old.data + (at - c->half);
}

/* Reads of the next `most` bytes of the sketch the counters that have changed: their places and values. Returns how many. */
static int64_t ec_filtercut_read_raised(ec_filtercut *c, const ec_filter *f, int64_t most, uint32_t *places, char *values) {
    const int64_t size = c->cell_bytes, first = c->sketch_read / size, all = 2 * c->half / size;
    const int64_t end = all - first > most / size ? first + most / size : all;
    const uint64_t *bits = (const uint64_t *)c->news->cells.data;
    int64_t n = 0;
    for (int64_t at = first; at < end; at++) {
        if (at % 64 == 0 && bits[at >> 6] == 0) {
            at += 63;
            continue;
        }
        if (!ec_bit(bits, at)) continue;
        memcpy(values + n * size, ec_filtercut_at(c, f, at * size), (size_t)size);
        places[n++] = (uint32_t)at;
    }
    c->sketch_read = end * size;
    return n;
}

static inline void ec_cell_put(void *cells, int64_t size, int64_t at, int64_t count) {
    if (size == 1) ((uint8_t *)cells)[at] = (uint8_t)count;
    else if (size == 2) ((uint16_t *)cells)[at] = (uint16_t)count;
    else ((uint32_t *)cells)[at] = (uint32_t)count;
}

/* The first of n places, which rise, that is `at` or above. */
static inline int64_t ec_places_from(const uint32_t *places, int64_t n, int64_t at) {
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = (low + n) / 2;
        if (places[middle] < at) low = middle + 1;
        else n = middle;
    }
    return low;
}

/* What generation `old` of the b-th block kept was, as far as nothing of it had been read then: returns how many bytes, and which of the sketch is the first. */
static inline int64_t ec_filtercut_kept(const ec_filtercut *c, int64_t b, int old, int64_t *begin, const char **content) {
    const ec_turned_before *block = &EC_AT(c->blocks, ec_turned_before, b);
    const int64_t first = old * c->half + block->at * c->block_bytes, end = first + c->block_bytes;
    *begin = block->read < first ? first : block->read < end ? block->read : end;
    *content = (const char *)c->turned.data + (2 * b + old) * c->block_bytes + (*begin - first);
    return end - *begin;
}

/* The same as ec_filtercut_mend for the n counters that ec_filtercut_read_raised gave, in the order of their places. */
static void ec_filtercut_mend_raised(const ec_filtercut *c, const uint32_t *places, int64_t n, char *values) {
    const int64_t size = c->cell_bytes;
    for (int64_t b = 0; b < 2 * c->blocks.size; b++) {
        const char *content;
        int64_t begin;
        const int64_t bytes = ec_filtercut_kept(c, b / 2, b % 2, &begin, &content);
        for (int64_t i = ec_places_from(places, n, begin / size); i < n && places[i] < (begin + bytes) / size; i++)
            memcpy(values + i * size, content + (places[i] * size - begin), (size_t)size);
    }
    for (int64_t i = 0; i < c->cells.size; i++) {
        const ec_cell_before *cell = &EC_AT(c->cells, ec_cell_before, i);
        const int64_t at = ec_places_from(places, n, cell->at);
        if (at < n && places[at] == cell->at) ec_cell_put(values, size, at, cell->before);
    }
}

/* Reads the next bytes of the sketch, at most `most`, to where they belong in `whole`, which has both generations. */
static void ec_filtercut_read_sketch(ec_filtercut *c, const ec_filter *f, int64_t most, char *whole) {
    const int64_t end = 2 * c->half - c->sketch_read < most ? 2 * c->half : c->sketch_read + most;
    while (c->sketch_read < end) {
        const int64_t stop = c->sketch_read < c->half && c->half < end ? c->half : end;
        memcpy(whole + c->sketch_read, ec_filtercut_at(c, f, c->sketch_read), (size_t)(stop - c->sketch_read));
        c->sketch_read = stop;
    }
}

/* Puts what of `whole`, all of which was read, had changed before it was read back to what it was. */
static void ec_filtercut_mend(const ec_filtercut *c, char *whole) {
    for (int64_t b = 0; b < 2 * c->blocks.size; b++) {
        const char *content;
        int64_t begin;
        const int64_t bytes = ec_filtercut_kept(c, b / 2, b % 2, &begin, &content);
        memcpy(whole + begin, content, (size_t)bytes);
    }
    for (int64_t i = 0; i < c->cells.size; i++) {
        const ec_cell_before *cell = &EC_AT(c->cells, ec_cell_before, i);
        ec_cell_put(whole, c->cell_bytes, cell->at, cell->before);
    }
}

#endif
