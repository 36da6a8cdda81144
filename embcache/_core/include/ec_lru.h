/* Exact least-recently-used order of slots: a list in order of version = (step, position), oldest first.
 *
 * This is the whole of policy "lru". The planner and `simulate` see a policy only through the functions here
 * (append, unlink, restore, victim), so another one takes their place without a change to planning.
 *
 * Invariant: versions rise strictly along the list. ec_lru_restore() relies on it to put a slot back into its old
 * place, by the neighbour it had as a hint, or by a walk where that neighbour has gone since.
 */
#ifndef EC_LRU_H
#define EC_LRU_H

#include <stdint.h>
#include <string.h>

#include "ec_slotset.h"

typedef struct {
    int64_t step;   /* version, high part; 0: not in the list */
    uint32_t place; /* version, low part: position among the admitted unique keys of that step's batch */
    uint32_t prev, next;
} ec_lru_node;

typedef struct {
    ec_lru_node *nodes; /* one a slot, in `block` */
    ec_block block;
    uint32_t head, tail;
    int64_t size;
} ec_lru;

static inline int ec_lru_init(ec_lru *l, int64_t capacity) {
    memset(l, 0, sizeof *l);
    l->head = l->tail = EC_NO_SLOT;
    if (ec_block_take(&l->block, (size_t)capacity * sizeof(ec_lru_node)) != EC_OK) return EC_NOMEM;
    l->nodes = (ec_lru_node *)l->block.data;
    return EC_OK;
}

static inline void ec_lru_free(ec_lru *l) {
    ec_block_drop(&l->block);
    memset(l, 0, sizeof *l);
}

static inline int ec_lru_before(const ec_lru_node *node, int64_t step, uint32_t place) {
    return node->step < step || (node->step == step && node->place < place);
}

/* Puts `slot` after `prev` (EC_NO_SLOT: first). */
static inline void ec_lru_link(ec_lru *l, uint32_t slot, uint32_t prev) {
    const uint32_t next = prev == EC_NO_SLOT ? l->head : l->nodes[prev].next;
    l->nodes[slot].prev = prev;
    l->nodes[slot].next = next;
    if (prev == EC_NO_SLOT) l->head = slot;
    else l->nodes[prev].next = slot;
    if (next == EC_NO_SLOT) l->tail = slot;
    else l->nodes[next].prev = slot;
    l->size++;
}

/* Appends `slot`, which is not in the list, as the most recently used; its version must exceed every other. */
static inline void ec_lru_append(ec_lru *l, uint32_t slot, int64_t step, uint32_t place) {
    l->nodes[slot].step = step;
    l->nodes[slot].place = place;
    ec_lru_link(l, slot, l->tail);
}

/* Takes `slot` out of the list. */
static inline void ec_lru_unlink(ec_lru *l, uint32_t slot) {
    ec_lru_node *node = &l->nodes[slot];
    if (node->prev == EC_NO_SLOT) l->head = node->next;
    else l->nodes[node->prev].next = node->next;
    if (node->next == EC_NO_SLOT) l->tail = node->prev;
    else l->nodes[node->next].prev = node->prev;
    node->step = 0;
    node->place = 0;
    node->prev = node->next = EC_NO_SLOT;
    l->size--;
}

/* Puts `slot` back where its old version belongs; `hint` is the slot that was before it (EC_NO_SLOT: it was first). */
static inline void ec_lru_restore(ec_lru *l, uint32_t slot, uint32_t hint, int64_t step, uint32_t place) {
    const int known = hint == EC_NO_SLOT || (l->nodes[hint].step != 0 && ec_lru_before(&l->nodes[hint], step, place));
    uint32_t prev = known ? hint : EC_NO_SLOT;
    uint32_t next = prev == EC_NO_SLOT ? l->head : l->nodes[prev].next;
    while (next != EC_NO_SLOT && ec_lru_before(&l->nodes[next], step, place)) {
        prev = next;
        next = l->nodes[next].next;
    }
    l->nodes[slot].step = step;
    l->nodes[slot].place = place;
    ec_lru_link(l, slot, prev);
}

/* The least recently used slot that no batch pins, at or after `from` (EC_NO_SLOT: from the oldest); or EC_NO_SLOT. */
static inline uint32_t ec_lru_victim(const ec_lru *l, const int32_t *pins, uint32_t from) {
    uint32_t slot = from == EC_NO_SLOT ? l->head : from;
    while (slot != EC_NO_SLOT && pins[slot] != 0) slot = l->nodes[slot].next;
    return slot;
}

#endif
