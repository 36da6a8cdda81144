/* Growable array of plain items, and the one place where the planner takes memory.
 *
 * All planner memory comes through ec_take() or a block (ec_memory.h), so that a test can make the n-th request from now
 * fail and see that a plan which runs out of memory anywhere leaves no trace (promise I3).
 */
#ifndef EC_VEC_H
#define EC_VEC_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ec_memory.h"
#include "ec_status.h"

/* A zeroed, cache-line aligned block (in huge pages where it is big). */
typedef struct {
    void *data;
    size_t held; /* bytes, as ec_block_free wants them */
} ec_block;

static inline int ec_block_take(ec_block *block, size_t bytes) {
    size_t held = 0;
    void *data = ec_block_alloc(bytes ? bytes : 1, &held);
    if (!data) return EC_NOMEM;
    ec_block_written(held); /* as good as: what the planner asks for it fills at once, or as slots fill */
    block->data = data;
    block->held = held;
    return EC_OK;
}

static inline void ec_block_drop(ec_block *block) {
    ec_block_free(block->data, block->held);
    memset(block, 0, sizeof *block);
}

typedef struct {
    void *data;
    int64_t size; /* items in use */
    int64_t room; /* items that fit */
} ec_vec;

#define EC_AT(vec, type, i) (((type *)(vec).data)[i])

/* Makes room for `extra` more items, so that as many ec_vec_push() cannot fail. */
static inline int ec_vec_reserve(ec_vec *v, int64_t extra, size_t item_bytes) {
    if (v->room - v->size >= extra) return EC_OK;
    int64_t room = v->size + extra;
    const int64_t grown = v->room + v->room / 2;
    if (room < grown) room = grown;
    if (room > INT64_MAX / (int64_t)item_bytes) return EC_NOMEM;
    void *data = ec_take(v->data, (size_t)room * item_bytes);
    if (!data) return EC_NOMEM;
    v->data = data;
    v->room = room;
    return EC_OK;
}

/* Like ec_vec_reserve, one item at a time, with the growth that makes pushing linear. */
static inline int ec_vec_reserve_one(ec_vec *v, size_t item_bytes) {
    return v->size < v->room ? EC_OK : ec_vec_reserve(v, v->room < 16 ? 16 : 1, item_bytes);
}

#define EC_PUSH(vec, type, ...) (((type *)(vec).data)[(vec).size++] = (type)__VA_ARGS__)

static inline void ec_vec_free(ec_vec *v) {
    free(v->data);
    memset(v, 0, sizeof *v);
}

#endif
