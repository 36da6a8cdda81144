/* A filter as of the last finished training batch, read piece by piece while training goes on.
 *
 * At the cut nothing is copied. What unfinished plans have changed is in their journals, with what was there before; so whoever
 * reads looks through these first (ec_filtercut_look): of each waiting key's entry, and of each counter of the sketch, that was not read
 * yet, what was there before its first change is kept. A plan must be looked through before it finishes, and a save is told when one
 * comes in. Keys that are removed by hand have to be kept before (ec_filtercut_keep). Entries keep their numbers while they live, and a
 * number that is given to another key is a change like any other. What a cancelled plan had changed is as it was before, kept or not.
 *
 * A sketch turns its generations seldom: then what is left of the block that will be freed is copied at once.
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
} ec_filtercut;

static inline int ec_bit(const uint64_t *bits, int64_t at) { return (int)(bits[at >> 6] >> (at & 63) & 1); }
static inline void ec_bit_set(uint64_t *bits, int64_t at) { bits[at >> 6] |= (uint64_t)1 << (at & 63); }

static void ec_filtercut_free(ec_filtercut *c) {
    free(c->seen);
    free(c->seen_cells);
    free(c->young.copy);
    free(c->old.copy);
    ec_vec_free(&c->kept);
    ec_vec_free(&c->cells);
    memset(c, 0, sizeof *c);
}

static inline int ec_filtercut_entries_read(const ec_filtercut *c) { return c->read >= c->size; }
static inline int ec_filtercut_block_read(const ec_filtercut *c, const ec_filtercut_block *b) { return b->read >= c->block_bytes; }

/* Keeps what an entry was, unless it has been read, or was not there at the cut. */
static inline int ec_filtercut_keep_entry(ec_filtercut *c, int64_t id, const ec_filter_entry *before) {
    if (id < c->read || id >= c->size || ec_bit(c->seen, id)) return EC_OK;
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

/* Starts one. EC_NOMEM: nothing is held. */
static int ec_filtercut_make(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    memset(c, 0, sizeof *c);
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
        if (ec_filtercut_look(c, f, t, plans, plan_count) == EC_OK) return EC_OK;
    }
    ec_filtercut_free(c);
    return EC_NOMEM;
}

/* Reads of the next `most` entries those that nothing has happened to; `entries` has room for them. Returns how many. */
static int64_t ec_filtercut_read(ec_filtercut *c, const ec_filter *f, int64_t most, ec_filter_entry *entries) {
    const int64_t end = c->size - c->read > most ? c->read + most : c->size;
    int64_t n = 0;
    for (int64_t id = c->read; id < end; id++) {
        entries[n] = EC_ENTRY(f, id);
        n += entries[n].count > 0 && !ec_bit(c->seen, id);
    }
    c->read = end;
    return n;
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
        if (c->cell_bytes == 1) ((uint8_t *)whole)[cell->at] = (uint8_t)cell->before;
        else if (c->cell_bytes == 2) ((uint16_t *)whole)[cell->at] = (uint16_t)cell->before;
        else ((uint32_t *)whole)[cell->at] = (uint32_t)cell->before;
    }
}

#endif
