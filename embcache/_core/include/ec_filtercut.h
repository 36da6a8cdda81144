/* A filter as of the last finished training batch, read piece by piece while training goes on.
 *
 * At the cut nothing is copied. What unfinished plans have changed is in their journals, with what was there before; so whoever
 * reads looks through these first (ec_filtercut_look): of each waiting key's entry, and of each counter of the sketch, that was not read
 * yet, what was there before its first change is kept. A plan must be looked through before it finishes, and a save is told when one
 * comes in. Keys that are removed by hand have to be kept before (ec_filtercut_keep). Entries keep their numbers while they live, and a
 * number that is given to another key is a change like any other. What a cancelled plan had changed is as it was before, kept or not.
 *
 * A sketch turns its generations seldom: then what is left of the block that will be freed is copied at once.
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

/* A generation of the sketch. */
typedef struct {
    const char *data; /* NULL: it was freed, and `copy` has what had not been read */
    char *copy;       /* bytes from `copied` on */
    int64_t copied;
    int64_t read;     /* bytes below this have been read */
} ec_filtercut_block;

typedef struct {
    int64_t size;        /* entries at the cut */
    int64_t read;        /* entries below this have been read */
    uint64_t *seen;      /* a bit an entry: kept, or known to be none */
    ec_vec kept;         /* of ec_filter_entry */
    int64_t block_bytes; /* of a generation of the sketch; 0: there is none */
    int32_t cell_bytes;
    uint64_t *seen_cells; /* a bit a counter of `young` */
    ec_vec cells;         /* of ec_cell_before */
    ec_filtercut_block young, old;
    const ec_filter_news *news; /* what is to be read; NULL: everything */
    int passing;         /* whether entries that have not changed may be dead */
    int taken;           /* whether `before` has what was known at the cut */
    ec_filter_news before;
} ec_filtercut;

static void ec_filtercut_free(ec_filtercut *c) {
    free(c->seen);
    free(c->seen_cells);
    free(c->young.copy);
    free(c->old.copy);
    ec_vec_free(&c->kept);
    ec_vec_free(&c->cells);
    ec_news_forget(&c->before);
    memset(c, 0, sizeof *c);
}

static inline int ec_filtercut_entries_read(const ec_filtercut *c) { return c->read >= c->size; }
static inline int ec_filtercut_block_read(const ec_filtercut *c, const ec_filtercut_block *b) { return b->read >= c->block_bytes; }

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
        if (change->at * c->cell_bytes < c->young.read || ec_bit(c->seen_cells, change->at)) continue;
        if (c->news && !ec_bit_in(&c->news->cells, change->at)) continue;
        if (ec_vec_reserve_one(&c->cells, sizeof(ec_cell_before)) != EC_OK) return EC_NOMEM;
        EC_PUSH(c->cells, ec_cell_before, {change->at, change->before});
        ec_bit_set(c->seen_cells, change->at);
    }
    return EC_OK;
}

/* A block is going to be freed: have a copy of what was not read. */
static inline int ec_filtercut_detach(ec_filtercut *c, ec_filtercut_block *b) {
    if (!b->data || ec_filtercut_block_read(c, b)) return EC_OK;
    const size_t left = (size_t)(c->block_bytes - b->read);
    b->copy = (char *)malloc(left);
    if (!b->copy) return EC_NOMEM;
    memcpy(b->copy, b->data + b->read, left);
    b->copied = b->read;
    b->data = NULL;
    return EC_OK;
}

/* The generations of the sketch as of unfinished plan k, its turn included; of -1: before all of them. */
static inline void ec_filtercut_blocks(const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t k, const void **young, const void **old) {
    *young = f->sketch.young.data;
    *old = f->sketch.old.data;
    for (int64_t i = plan_count - 1; i > k; i--) {
        const ec_part *p = &plans[i]->parts[t];
        if (!p->turned_to || !p->turn.turned) continue;
        *young = *old;
        *old = p->turn.forgotten.data;
    }
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
    if (c->block_bytes == 0 || (ec_filtercut_block_read(c, &c->young) && ec_filtercut_block_read(c, &c->old))) return EC_OK;
    for (int64_t k = 0; k < plan_count; k++) { /* oldest first, as the first change says what was there */
        const ec_part *p = &plans[k]->parts[t];
        if (!p->turned_to) continue;
        if (p->turn.turned && p->turn.forgotten.data == c->old.data && ec_filtercut_detach(c, &c->old) != EC_OK) return EC_NOMEM;
        if (p->turn.turned && p->turn.forgotten.data == c->young.data && ec_filtercut_detach(c, &c->young) != EC_OK) return EC_NOMEM;
        const void *young, *old;
        ec_filtercut_blocks(f, t, plans, plan_count, k, &young, &old);
        if (young == c->young.data && !ec_filtercut_block_read(c, &c->young) && ec_filtercut_keep_cells(c, &p->cells) != EC_OK) return EC_NOMEM;
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
    const int64_t entry_bytes = sizeof(ec_filter_entry), block_bytes = (int64_t)ec_sketch_block_bytes(&f->sketch);
    const int64_t all = f->index.size * entry_bytes + 2 * block_bytes;
    *changed = all;
    if (!n->known || n->turned || block_bytes > UINT32_MAX) return all;
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
    c->block_bytes = (int64_t)ec_sketch_block_bytes(&f->sketch);
    c->cell_bytes = f->sketch.cell_bytes;
    c->seen = (uint64_t *)calloc((size_t)(c->size / 64 + 1), sizeof(uint64_t));
    if (c->block_bytes > 0) c->seen_cells = (uint64_t *)calloc((size_t)(c->block_bytes / c->cell_bytes / 64 + 1), sizeof(uint64_t));
    if (c->seen && (c->seen_cells || c->block_bytes == 0)) {
        const void *young, *old;
        ec_filtercut_blocks(f, t, plans, plan_count, -1, &young, &old);
        c->young.data = (const char *)young;
        c->old.data = (const char *)old;
        if (c->news) c->old.read = c->block_bytes; /* it has not turned: the parent's still holds */
        if (ec_filtercut_look(c, f, t, plans, plan_count) == EC_OK) return EC_OK;
    }
    ec_filtercut_free(c);
    return EC_NOMEM;
}

/* What has changed counts from now on anew. Of no effect but this one; where there is no memory, the next save writes all. */
static void ec_filtercut_take(ec_filtercut *c, ec_filter *f) {
    c->before = f->news;
    c->taken = 1;
    if (c->news) c->news = &c->before;
    memset(&f->news, 0, sizeof f->news);
    ec_news_begin(&f->news, f->sketch.width * EC_SKETCH_ROWS);
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

/* Reads of the next `most` bytes of the young generation the counters that have changed: their places and values. Returns how many. */
static int64_t ec_filtercut_read_raised(ec_filtercut *c, int64_t most, uint32_t *places, char *values) {
    ec_filtercut_block *b = &c->young;
    const int64_t size = c->cell_bytes, first = b->read / size, all = c->block_bytes / size;
    const int64_t end = all - first > most / size ? first + most / size : all;
    const uint64_t *bits = (const uint64_t *)c->news->cells.data;
    int64_t n = 0;
    for (int64_t at = first; at < end; at++) {
        if (at % 64 == 0 && bits[at >> 6] == 0) {
            at += 63;
            continue;
        }
        if (!ec_bit(bits, at)) continue;
        memcpy(values + n * size, b->data ? b->data + at * size : b->copy + (at * size - b->copied), (size_t)size);
        places[n++] = (uint32_t)at;
    }
    b->read = end * size;
    return n;
}

static inline void ec_cell_put(void *cells, int64_t size, int64_t at, int64_t count) {
    if (size == 1) ((uint8_t *)cells)[at] = (uint8_t)count;
    else if (size == 2) ((uint16_t *)cells)[at] = (uint16_t)count;
    else ((uint32_t *)cells)[at] = (uint32_t)count;
}

/* The same as ec_filtercut_mend for the n counters that ec_filtercut_read_raised gave, in the order of their places. */
static void ec_filtercut_mend_raised(const ec_filtercut *c, const uint32_t *places, int64_t n, char *values) {
    for (int64_t i = 0; i < c->cells.size; i++) {
        const ec_cell_before *cell = &EC_AT(c->cells, ec_cell_before, i);
        int64_t low = 0, high = n;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (places[middle] < cell->at) low = middle + 1;
            else high = middle;
        }
        if (low < n && places[low] == cell->at) ec_cell_put(values, c->cell_bytes, low, cell->before);
    }
}

/* Reads the next bytes of a generation of the sketch, at most `most`, to where they belong in `whole`. Returns how many. */
static int64_t ec_filtercut_read_block(ec_filtercut *c, ec_filtercut_block *b, int64_t most, char *whole) {
    const int64_t n = c->block_bytes - b->read < most ? c->block_bytes - b->read : most;
    memcpy(whole + b->read, b->data ? b->data + b->read : b->copy + (b->read - b->copied), (size_t)n);
    b->read += n;
    return n;
}

/* Puts the counters of `whole`, the young generation, that had changed before they were read, back to what they were. */
static void ec_filtercut_mend(const ec_filtercut *c, char *whole) {
    for (int64_t i = 0; i < c->cells.size; i++) {
        const ec_cell_before *cell = &EC_AT(c->cells, ec_cell_before, i);
        ec_cell_put(whole, c->cell_bytes, cell->at, cell->before);
    }
}

#endif
