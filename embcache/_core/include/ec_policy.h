/* The policies: whose slot is taken when room is needed.
 *
 *   "lru"     the least recently used (ec_recency.h).
 *   "lfu"     the least often used, aged: least frequently used with dynamic aging, after Arlitt, Cherkasova, Dilley,
 *             Friedrich and Jin, "Evaluating content management techniques for Web proxy caches", 1999. A slot's priority
 *             is its uses while resident (63 at most) plus the age at its last use; the age is the lowest priority that
 *             any slot had when the last victim was chosen. So who is not used any more is overtaken by newcomers after as
 *             many rounds as it had uses. Ties: the least recently used. Priorities span 64 values, a list each.
 *   "s3fifo"  Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023. New keys
 *             queue in the small list (a tenth of the slots), and move on to the main list if they are used twice before
 *             their turn comes; others go, and their keys are noted. A noted key that returns joins the main list at
 *             once. There, a slot that was used (three times count at most) queues again instead, with one use less. As
 *             many keys are noted as the main list has slots; a slot enters the main list without uses.
 *   "lookahead" the one whose next use is farthest, as far as the planner was given notice of batches to come (ec_sight.h).
 *
 * A policy sees slots by their seats. It is told of a new key (welcome), of each use (touch) and of slots that leave
 * (leave); it chooses victims, many at once, and never a pinned slot: those are passed over and stay where they are.
 * Everything costs O(1) amortized; a choice passes over each pinned slot once. Every change has an exact inverse, to be
 * called in reverse order, which cannot fail. Slots may leave for good in between, as long as they are not pinned, and
 * notices may come and go.
 */
#ifndef EC_POLICY_H
#define EC_POLICY_H

#include <stdint.h>
#include <string.h>

#include "ec_ghost.h"
#include "ec_queues.h"
#include "ec_recency.h"
#include "ec_sight.h"

enum { EC_LRU = 0, EC_LFU = 1, EC_S3FIFO = 2, EC_LOOKAHEAD = 3 };
enum { EC_SMALL = 0, EC_MAIN = 1 }; /* lists of "s3fifo" */
#define EC_LFU_MOST 63
#define EC_S3FIFO_MOST 3
#define EC_S3FIFO_STAYS 2 /* uses that carry a slot from the small list to the main one */

typedef struct {
    int kind;
    int64_t capacity;
    int64_t placed;   /* slots that have a standing */
    uint64_t version; /* given last */
    uint64_t age;     /* "lfu" */
    int64_t small;    /* "s3fifo": slots that the small list is to have */
    ec_recency recency;
    ec_queues queues;
    ec_ghost ghost;
    ec_coming coming; /* "lookahead" */
    int64_t looked;   /* slots and lists looked at to find victims, so far: that it is O(1) amortized can be counted */
} ec_policy;

/* What a batch changed besides uses: enough to take back a choice of victims and the welcomes. */
typedef struct {
    ec_vec stood;  /* of ec_stood: slots that were chosen, or moved on while victims were looked for */
    ec_vec ghosts; /* of ec_ghost_change */
    int marked;    /* whether what follows was noted */
    uint64_t version, age, edition;
    int64_t cursor;
} ec_choice;

static inline void ec_choice_free(ec_choice *choice) {
    ec_vec_free(&choice->stood);
    ec_vec_free(&choice->ghosts);
}

static inline void ec_policy_free(ec_policy *p) {
    ec_recency_free(&p->recency);
    ec_queues_free(&p->queues);
    ec_ghost_free(&p->ghost);
    ec_coming_free(&p->coming);
}

static inline ec_sight ec_policy_sight(ec_policy *p, ec_seat *seats) { return (ec_sight){&p->queues, &p->coming, seats}; }

static inline int ec_policy_init(ec_policy *p, int kind, int64_t capacity, uint64_t seed) {
    memset(p, 0, sizeof *p);
    p->kind = kind;
    p->capacity = capacity;
    p->small = capacity < 20 ? 1 : capacity / 10;
    if (kind != EC_LRU && ec_queues_init(&p->queues, capacity) != EC_OK) return EC_NOMEM;
    if (kind == EC_S3FIFO && ec_ghost_init(&p->ghost, capacity > p->small ? capacity - p->small : 1, seed) != EC_OK) {
        ec_policy_free(p);
        return EC_NOMEM;
    }
    if (kind == EC_LOOKAHEAD && ec_coming_init(&p->coming, capacity, seed) != EC_OK) {
        ec_policy_free(p);
        return EC_NOMEM;
    }
    return EC_OK;
}

/* Moves to more slots, while no plan can be taken back; seats go by the caller. EC_NOMEM changes nothing. */
static inline int ec_policy_grow(ec_policy *p, int64_t capacity) {
    ec_policy wider;
    if (ec_policy_init(&wider, p->kind, capacity, p->ghost.index.seed) != EC_OK) return EC_NOMEM;
    if (p->kind == EC_S3FIFO) {
        const int64_t span = wider.ghost.span;
        ec_ghost_free(&wider.ghost);
        if (ec_ghost_widen(&p->ghost, &wider.ghost, span) != EC_OK) {
            ec_policy_free(&wider);
            return EC_NOMEM;
        }
    }
    if (p->kind != EC_LRU) {
        memcpy(wider.queues.links, p->queues.links, (size_t)p->capacity * sizeof(ec_link));
        memcpy(wider.queues.head, p->queues.head, sizeof p->queues.head);
        memcpy(wider.queues.tail, p->queues.tail, sizeof p->queues.tail);
        memcpy(wider.queues.size, p->queues.size, sizeof p->queues.size);
        wider.queues.filled = p->queues.filled;
    }
    if (p->kind == EC_LOOKAHEAD) ec_coming_move(&p->coming, &wider.coming, p->capacity);
    wider.placed = p->placed;
    wider.version = p->version;
    wider.age = p->age;
    wider.looked = p->looked;
    wider.recency.looked = p->recency.looked;
    ec_policy_free(p);
    *p = wider;
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------------------ one slot's life */

/* A slot gets a key, which it keeps until ec_policy_depart(). It has no standing then. */
static inline void ec_policy_arrive(ec_policy *p, uint32_t slot, int64_t key, uint64_t hash) {
    if (p->kind == EC_LOOKAHEAD) ec_coming_attach(&p->coming, slot, ec_coming_recall(&p->coming, key, hash));
}

static inline void ec_policy_depart(ec_policy *p, uint32_t slot) {
    if (p->kind == EC_LOOKAHEAD) ec_coming_detach(&p->coming, slot);
}

/* The slot's seat is a new key's: says where it will stand once it is touched. Needs the room that ec_policy_choose()
 * has made. */
static inline void ec_policy_welcome(ec_policy *p, ec_seat *seat, int64_t key, uint64_t hash, ec_choice *choice) {
    ec_ghost_change change;
    if (p->kind != EC_S3FIFO || !ec_ghost_back(&p->ghost, key, hash, &change)) return;
    EC_PUSH(choice->ghosts, ec_ghost_change, change);
    seat->standing.list = EC_MAIN;
}

/* The same under "lookahead". `use` is the one that the batch's notice told of; it is spent now, unless that has been done. */
static inline ec_stood ec_policy_touch_seen(ec_policy *p, ec_seat *seats, uint32_t slot, ec_when use) {
    const ec_sight sight = ec_policy_sight(p, seats);
    ec_standing *it = &seats[slot].standing;
    ec_stood record = {*it, slot, EC_NO_SLOT};
    if (it->version != 0) record.prev = ec_sight_displace(sight, slot);
    else p->placed++;
    if (use.notice != EC_NO_NOTICE) ec_coming_spend(&p->coming, use);
    it->version = ++p->version;
    ec_sight_place_newest(sight, slot);
    return record;
}

/* A batch uses the slot. */
static inline ec_stood ec_policy_touch(ec_policy *p, ec_seat *seats, uint32_t slot) {
    ec_standing *it = &seats[slot].standing;
    const ec_stood record = {*it, slot, p->kind == EC_LFU && it->version != 0 ? p->queues.links[slot].prev : EC_NO_SLOT};
    const int is_new = it->version == 0;
    if (p->kind == EC_LOOKAHEAD) return ec_policy_touch_seen(p, seats, slot, EC_NEVER_USED);
    p->placed += is_new;
    if (p->kind == EC_LRU) {
        it->version = ++p->version;
    } else if (p->kind == EC_LFU) {
        if (!is_new) ec_queues_unlink(&p->queues, slot, it->list);
        it->count += it->count < EC_LFU_MOST;
        it->list = (p->age + it->count) % EC_QUEUES;
        it->version = ++p->version;
        ec_queues_append(&p->queues, slot, it->list);
    } else if (!is_new) {
        it->count += it->count < EC_S3FIFO_MOST;
    } else {
        it->version = ++p->version;
        ec_queues_append(&p->queues, slot, it->list);
    }
    return record;
}

/* The same under "lru" of a slot new to the policy, with a version that was kept for it. */
static inline void ec_policy_date(ec_policy *p, ec_seat *seat, uint64_t version) {
    EC_ASSERT(p->kind == EC_LRU && seat->standing.version == 0);
    seat->standing.version = version;
    p->placed++;
}

/* Gives a slot its old standing back. */
static inline void ec_policy_restore(ec_policy *p, ec_seat *seats, const ec_stood *stood) {
    ec_standing *it = &seats[stood->slot].standing;
    const ec_standing now = *it;
    if (p->kind == EC_LOOKAHEAD) {
        const ec_sight sight = ec_policy_sight(p, seats);
        if (now.version != 0) ec_sight_displace(sight, stood->slot);
        *it = stood->before;
        p->placed += (it->version != 0) - (now.version != 0);
        if (it->version != 0) ec_sight_place(sight, stood->slot, stood->prev);
        return;
    }
    *it = stood->before;
    p->placed += (it->version != 0) - (now.version != 0);
    if (p->kind == EC_LRU || now.version == it->version) return;
    if (now.version != 0) ec_queues_unlink(&p->queues, stood->slot, now.list);
    if (it->version != 0) ec_queues_restore(&p->queues, seats, stood->slot, stood->prev);
}

/* The slot's key is gone. */
static inline ec_stood ec_policy_leave(ec_policy *p, ec_seat *seats, uint32_t slot) {
    ec_stood record = {seats[slot].standing, slot, EC_NO_SLOT};
    if (p->kind == EC_LOOKAHEAD) {
        p->placed--;
        return ec_sight_leave(ec_policy_sight(p, seats), slot);
    }
    if (p->kind != EC_LRU) {
        record.prev = p->queues.links[slot].prev;
        ec_queues_unlink(&p->queues, slot, record.before.list);
    }
    seats[slot].standing = (ec_standing){0};
    p->placed--;
    return record;
}

/* ----------------------------------------------------------------------------------------------------- choosing victims */

/* Moves a slot to the end of another list, or of its own. */
static inline void ec_policy_move(ec_policy *p, ec_seat *seats, uint32_t slot, int list, int count, ec_vec *stood) {
    ec_standing *it = &seats[slot].standing;
    EC_PUSH(*stood, ec_stood, {*it, slot, p->queues.links[slot].prev});
    ec_queues_unlink(&p->queues, slot, it->list);
    *it = (ec_standing){++p->version, (uint64_t)list, (uint64_t)count};
    ec_queues_append(&p->queues, slot, list);
}

/* Passes over the pinned slots of each list once, as what is moved joins at the end. */
static int ec_policy_choose_s3fifo(ec_policy *p, ec_seat *seats, const ec_slot *slots, int64_t n, uint32_t *victims, ec_choice *choice) {
    ec_queues *q = &p->queues;
    uint32_t next[2] = {q->head[EC_SMALL], q->head[EC_MAIN]};
    for (int64_t got = 0; got < n;) {
        p->looked++;
        const int list = next[EC_MAIN] == EC_NO_SLOT || (q->size[EC_SMALL] >= p->small && next[EC_SMALL] != EC_NO_SLOT) ? EC_SMALL : EC_MAIN;
        const uint32_t slot = next[list];
        EC_ASSERT(slot != EC_NO_SLOT);
        next[list] = q->links[slot].next;
        if (next[list] != EC_NO_SLOT) EC_PREFETCH_WRITE(&seats[next[list]]);
        if (seats[slot].pins > 0) continue;
        const int count = (int)seats[slot].standing.count;
        if (ec_vec_reserve_one(&choice->stood, sizeof(ec_stood)) != EC_OK) return EC_NOMEM;
        if (list == EC_SMALL && count >= EC_S3FIFO_STAYS) {
            ec_policy_move(p, seats, slot, EC_MAIN, 0, &choice->stood);
        } else if (list == EC_MAIN && count > 0) {
            ec_policy_move(p, seats, slot, EC_MAIN, count - 1, &choice->stood);
        } else {
            if (list == EC_SMALL) EC_PUSH(choice->ghosts, ec_ghost_change, ec_ghost_note(&p->ghost, slots[slot].key));
            EC_PUSH(choice->stood, ec_stood, ec_policy_leave(p, seats, slot));
            victims[got++] = slot;
            continue;
        }
        if (next[EC_MAIN] == EC_NO_SLOT) next[EC_MAIN] = slot;
    }
    return EC_OK;
}

/* From the lowest priority upwards. */
static void ec_policy_choose_lfu(ec_policy *p, ec_seat *seats, int64_t n, uint32_t *victims, ec_choice *choice) {
    ec_queues *q = &p->queues;
    uint64_t priority = p->age, oldest = UINT64_MAX; /* priority of the first pinned slot that was passed over */
    uint32_t slot = q->head[priority % EC_QUEUES];
    for (int64_t got = 0; got < n;) {
        p->looked++;
        if (slot == EC_NO_SLOT) {
            priority++;
            EC_ASSERT(priority < p->age + EC_QUEUES);
            slot = q->head[priority % EC_QUEUES];
            continue;
        }
        const uint32_t next = q->links[slot].next;
        if (next != EC_NO_SLOT) EC_PREFETCH_WRITE(&seats[next]);
        if (seats[slot].pins == 0) {
            EC_PUSH(choice->stood, ec_stood, ec_policy_leave(p, seats, slot));
            victims[got++] = slot;
        } else if (oldest > priority) {
            oldest = priority;
        }
        slot = next;
    }
    p->age = oldest < priority ? oldest : priority;
}

/* Before a batch places its keys: what ec_policy_undo() needs to know. */
static inline void ec_policy_mark(const ec_policy *p, ec_choice *choice) {
    choice->marked = 1;
    choice->version = p->version;
    choice->age = p->age;
    choice->edition = p->recency.edition;
    choice->cursor = p->recency.cursor;
}

/* Takes the standing of n slots that nobody pins, in the policy's order; there are as many, and `pinned` are pinned.
 * Makes room for `welcomes`. On EC_NOMEM some may be gone already: ec_policy_undo() brings them back. */
static int ec_policy_choose(ec_policy *p, ec_seat *seats, const ec_slot *slots, int64_t pinned, int64_t n, int64_t welcomes,
                            uint32_t *victims, ec_choice *choice) {
    if (ec_vec_reserve(&choice->stood, n, sizeof(ec_stood)) != EC_OK) return EC_NOMEM;
    if (p->kind == EC_LRU) {
        if (n == 0) return EC_OK;
        /* The batch's own uses, where it has some already (ec_resident.h), are not part of the order: its misses will stand
         * among them. */
        const uint64_t version = choice->marked ? choice->version : p->version;
        const int status = ec_recency_choose(&p->recency, seats, p->capacity, version, p->placed, pinned, n, victims, &choice->stood);
        p->placed -= choice->stood.size;
        return status;
    }
    if (p->kind == EC_LFU) {
        if (n > 0) ec_policy_choose_lfu(p, seats, n, victims, choice);
        return EC_OK;
    }
    if (p->kind == EC_LOOKAHEAD) {
        if (n > 0) ec_sight_choose(ec_policy_sight(p, seats), n, victims, &choice->stood);
        p->placed -= n;
        return EC_OK;
    }
    if (ec_vec_reserve(&choice->ghosts, n + welcomes, sizeof(ec_ghost_change)) || ec_ghost_reserve(&p->ghost, n)) return EC_NOMEM;
    return n ? ec_policy_choose_s3fifo(p, seats, slots, n, victims, choice) : EC_OK;
}

/* Takes back welcomes and choice. The slots of victims are LIVE again; of those that were moved on some may be FREE. */
static void ec_policy_undo(ec_policy *p, ec_seat *seats, const uint8_t *state, ec_choice *choice) {
    if (!choice->marked) return;
    for (int64_t i = choice->ghosts.size - 1; i >= 0; i--) ec_ghost_undo(&p->ghost, &EC_AT(choice->ghosts, ec_ghost_change, i));
    for (int64_t i = choice->stood.size - 1; i >= 0; i--) {
        const ec_stood *stood = &EC_AT(choice->stood, ec_stood, i);
        if (state[stood->slot] != EC_SLOT_FREE) ec_policy_restore(p, seats, stood);
    }
    p->version = choice->version;
    p->age = choice->age;
    if (p->recency.edition == choice->edition) p->recency.cursor = choice->cursor;
    else ec_recency_forget(&p->recency);
}

/* ------------------------------------------------------------------------------------------------------------- looking */

/* The rank of a slot that has a standing: slots of a lower rank go before, in equal ranks those of a lower version, if
 * nothing is used any more and "s3fifo" is taken list by list. */
static inline int64_t ec_policy_rank(const ec_policy *p, uint32_t slot, ec_standing standing) {
    if (p->kind == EC_LOOKAHEAD) return ec_sight_rank(&p->coming, slot);
    if (p->kind != EC_LFU) return standing.list;
    return (int64_t)(p->age + (standing.list - p->age) % EC_QUEUES);
}

static int ec_policy_check(const ec_policy *p, const ec_seat *seats) {
    int64_t placed = 0;
    for (int64_t slot = 0; slot < p->capacity; slot++) {
        placed += seats[slot].standing.version != 0;
        if (seats[slot].standing.version > p->version) return EC_BROKEN;
    }
    if (placed != p->placed) return EC_BROKEN;
    if (p->kind == EC_LRU) return ec_recency_check(&p->recency, seats, p->capacity);
    if (p->kind == EC_LOOKAHEAD) return ec_sight_check(&p->queues, &p->coming, seats, p->capacity, placed);
    if (ec_queues_check(&p->queues, seats, p->capacity) != placed) return EC_BROKEN;
    return p->kind == EC_S3FIFO ? ec_ghost_check(&p->ghost) : EC_OK;
}

#endif
