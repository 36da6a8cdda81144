/* Up to 64 lists of slots, each in order of version, for the policies that keep some.
 *
 * A slot joins a list at its end, with a version above all others, so each list rises. ec_queues_restore() relies on it
 * to put a slot back into its old place, by the neighbour it had as a hint, or by a walk where that one has gone since.
 */
#ifndef EC_QUEUES_H
#define EC_QUEUES_H

#include <stdint.h>
#include <string.h>

#include "ec_seat.h"
#include "ec_vec.h"

#define EC_QUEUES 64

typedef struct {
    uint32_t prev, next;
} ec_link;

typedef struct {
    ec_link *links; /* one a slot, in `block` */
    ec_block block;
    uint32_t head[EC_QUEUES], tail[EC_QUEUES];
    int64_t size[EC_QUEUES];
    uint64_t filled; /* bit i: list i has a slot */
} ec_queues;

static inline int ec_queues_init(ec_queues *q, int64_t capacity) {
    memset(q, 0, sizeof *q);
    memset(q->head, 0xff, sizeof q->head);
    memset(q->tail, 0xff, sizeof q->tail);
    if (ec_block_take(&q->block, (size_t)capacity * sizeof(ec_link)) != EC_OK) return EC_NOMEM;
    q->links = (ec_link *)q->block.data;
    return EC_OK;
}

static inline void ec_queues_free(ec_queues *q) {
    ec_block_drop(&q->block);
    q->links = NULL;
}

/* Puts `slot` after `prev` (EC_NO_SLOT: first). */
static inline void ec_queues_link(ec_queues *q, uint32_t slot, int list, uint32_t prev) {
    const uint32_t next = prev == EC_NO_SLOT ? q->head[list] : q->links[prev].next;
    q->links[slot] = (ec_link){prev, next};
    if (prev == EC_NO_SLOT) q->head[list] = slot;
    else q->links[prev].next = slot;
    if (next == EC_NO_SLOT) q->tail[list] = slot;
    else q->links[next].prev = slot;
    q->size[list]++;
    q->filled |= (uint64_t)1 << list;
}

static inline void ec_queues_append(ec_queues *q, uint32_t slot, int list) { ec_queues_link(q, slot, list, q->tail[list]); }

static inline void ec_queues_unlink(ec_queues *q, uint32_t slot, int list) {
    const ec_link link = q->links[slot];
    if (link.prev == EC_NO_SLOT) q->head[list] = link.next;
    else q->links[link.prev].next = link.next;
    if (link.next == EC_NO_SLOT) q->tail[list] = link.prev;
    else q->links[link.next].prev = link.prev;
    if (--q->size[list] == 0) q->filled &= ~((uint64_t)1 << list);
}

/* Puts `slot`, whose seat has its old standing again, back into its list; `hint` was before it. */
static inline void ec_queues_restore(ec_queues *q, const ec_seat *seats, uint32_t slot, uint32_t hint) {
    const ec_standing it = seats[slot].standing;
    uint32_t prev = EC_NO_SLOT;
    if (hint != EC_NO_SLOT) {
        const ec_standing other = seats[hint].standing;
        if (other.version != 0 && other.list == it.list && other.version < it.version) prev = hint;
    }
    uint32_t next = prev == EC_NO_SLOT ? q->head[it.list] : q->links[prev].next;
    while (next != EC_NO_SLOT && seats[next].standing.version < it.version) {
        prev = next;
        next = q->links[next].next;
    }
    ec_queues_link(q, slot, it.list, prev);
}

/* Slots in all lists, or -1 where one is not in order. */
static int64_t ec_queues_check(const ec_queues *q, const ec_seat *seats, int64_t capacity) {
    int64_t all = 0;
    for (int list = 0; list < EC_QUEUES; list++) {
        int64_t size = 0;
        uint32_t prev = EC_NO_SLOT;
        for (uint32_t slot = q->head[list]; slot != EC_NO_SLOT; prev = slot, slot = q->links[slot].next) {
            const ec_standing it = seats[slot].standing;
            if (size++ > capacity || q->links[slot].prev != prev || it.version == 0 || it.list != list) return -1;
            if (prev != EC_NO_SLOT && seats[prev].standing.version >= it.version) return -1;
        }
        if (size != q->size[list] || prev != q->tail[list] || (size > 0) != (q->filled >> list & 1)) return -1;
        all += size;
    }
    return all;
}

#endif
