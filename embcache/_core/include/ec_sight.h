/* Policy "lookahead": the victim is the resident whose next use is farthest, as far as notices tell.
 *
 * Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966, seen through
 * the window of the batches that notice was given of. Residents that no notice names are as far as can be: they go first,
 * the least recently used in front. Of the others the one goes whose next use stands farthest back: in the last
 * notice, and there at the last place. Without notices this is "lru" exactly.
 *
 * A resident is outside (no notice names it: a list in order of versions) or inside (held by the place of its next use,
 * ec_coming.h). Which one, and where, follows from notices, residents and versions alone. So whatever changes
 * one of them takes the slot off (ec_sight_displace), makes its change, and puts it where it belongs (ec_sight_place); an undo needs
 * to know no more than the old version. All of it O(1), amortized, but for slots that fall out of sight (a notice was
 * withdrawn, or a batch did not use what its notice said): these are sorted and merged into the list.
 */
#ifndef EC_SIGHT_H
#define EC_SIGHT_H

#include <stdint.h>
#include <string.h>

#include "ec_coming.h"
#include "ec_queues.h"

enum { EC_OUTSIDE = 0, EC_INSIDE = 1, EC_NOWHERE = 2 }; /* in a seat's `list` */

typedef struct {
    ec_queues *queues; /* list EC_OUTSIDE */
    ec_coming *coming;
    ec_seat *seats;
} ec_sight;

/* Takes a slot that has a version from where it stands. Returns who was before it, a hint for ec_sight_place(). */
static inline uint32_t ec_sight_displace(const ec_sight s, uint32_t slot) {
    ec_standing *it = &s.seats[slot].standing;
    uint32_t prev = EC_NO_SLOT;
    if (it->list == EC_INSIDE) {
        ec_coming_let(s.coming, ec_coming_next(s.coming, slot));
    } else {
        prev = s.queues->links[slot].prev;
        ec_queues_unlink(s.queues, slot, EC_OUTSIDE);
    }
    it->list = EC_NOWHERE;
    return prev;
}

/* Takes a slot's standing. */
static inline ec_stood ec_sight_leave(const ec_sight s, uint32_t slot) {
    ec_stood record = {s.seats[slot].standing, slot, EC_NO_SLOT};
    record.prev = ec_sight_displace(s, slot);
    s.seats[slot].standing = (ec_standing){0};
    return record;
}

/* Puts a slot that has a version, and stands nowhere, inside if it belongs there. Whether it does. */
static inline int ec_sight_hold(const ec_sight s, uint32_t slot) {
    const ec_when next = ec_coming_next(s.coming, slot);
    if (next.notice == EC_NO_NOTICE) return 0;
    s.seats[slot].standing.list = EC_INSIDE;
    ec_coming_hold(s.coming, next);
    return 1;
}

static inline void ec_sight_place(const ec_sight s, uint32_t slot, uint32_t hint) {
    if (ec_sight_hold(s, slot)) return;
    s.seats[slot].standing.list = EC_OUTSIDE;
    ec_queues_restore(s.queues, s.seats, slot, hint);
}

/* The same where no slot has a higher version. */
static inline void ec_sight_place_newest(const ec_sight s, uint32_t slot) {
    if (ec_sight_hold(s, slot)) return;
    s.seats[slot].standing.list = EC_OUTSIDE;
    ec_queues_append(s.queues, slot, EC_OUTSIDE);
}

/* ------------------------------------------------------------------------------------------------------- out of sight */

/* Merges two chains of slots, linked by `next`, each from the highest version down. */
static uint32_t ec_sight_merge(const ec_sight s, uint32_t a, uint32_t b) {
    uint32_t head = EC_NO_SLOT, *tail = &head;
    while (a != EC_NO_SLOT && b != EC_NO_SLOT) {
        uint32_t *from = s.seats[a].standing.version > s.seats[b].standing.version ? &a : &b;
        *tail = *from;
        tail = &s.queues->links[*from].next;
        *from = *tail;
    }
    *tail = a != EC_NO_SLOT ? a : b;
    return head;
}

/* Puts a chain of slots, linked by `next`, into the list outside, by version. Merge sort, then one walk from the end. */
static void ec_sight_settle(const ec_sight s, uint32_t chain) {
    uint32_t sorted[32], head = EC_NO_SLOT; /* chain i has 2^i slots, or none */
    memset(sorted, 0xff, sizeof sorted);
    while (chain != EC_NO_SLOT) {
        uint32_t it = chain;
        int i = 0;
        chain = s.queues->links[it].next;
        s.queues->links[it].next = EC_NO_SLOT;
        for (; sorted[i] != EC_NO_SLOT; sorted[i++] = EC_NO_SLOT) it = ec_sight_merge(s, sorted[i], it);
        sorted[i] = it;
    }
    for (int i = 0; i < 32; i++) head = ec_sight_merge(s, head, sorted[i]);
    uint32_t prev = s.queues->tail[EC_OUTSIDE];
    while (head != EC_NO_SLOT) {
        const uint32_t slot = head;
        head = s.queues->links[slot].next;
        while (prev != EC_NO_SLOT && s.seats[prev].standing.version > s.seats[slot].standing.version) prev = s.queues->links[prev].prev;
        s.seats[slot].standing.list = EC_OUTSIDE;
        ec_queues_link(s.queues, slot, EC_OUTSIDE, prev);
    }
}

/* Spends the uses of a notice that are not spent yet. */
static void ec_sight_spend_rest(const ec_sight s, uint32_t id) {
    const int64_t count = EC_NOTICE(s.coming, id).count;
    uint32_t chain = EC_NO_SLOT;
    for (int64_t i = 0; i < count; i++) {
        const ec_when when = {id, (uint32_t)i};
        if (ec_coming_spent(s.coming, when)) continue;
        const ec_known *known = &EC_KNOWN(s.coming, EC_USE(s.coming, when).known);
        const uint32_t slot = known->slot;
        const int held = slot != EC_NO_SLOT && ec_when_same(known->first, when);
        if (held) ec_sight_displace(s, slot);
        ec_coming_spend(s.coming, when);
        if (!held || ec_sight_hold(s, slot)) continue;
        s.queues->links[slot].next = chain;
        chain = slot;
    }
    ec_sight_settle(s, chain);
}

/* Puts the uses of a notice back, all of which are spent. */
static void ec_sight_unspend(const ec_sight s, uint32_t id) {
    for (int64_t i = EC_NOTICE(s.coming, id).count - 1; i >= 0; i--) {
        const ec_when when = {id, (uint32_t)i};
        const ec_known *known = &EC_KNOWN(s.coming, EC_USE(s.coming, when).known);
        const uint32_t slot = known->slot;
        const int placed = slot != EC_NO_SLOT;
        if (placed) ec_sight_displace(s, slot);
        ec_coming_unspend(s.coming, when);
        if (placed) ec_sight_place(s, slot, EC_NO_SLOT); /* inside */
    }
}

/* Makes a notice count, whose uses ec_coming_note() has collected: each has in `next` the use of its key before it. */
static void ec_sight_link(const ec_sight s, uint32_t id) {
    const int64_t count = EC_NOTICE(s.coming, id).count;
    for (int64_t i = 0; i < count; i++) {
        const ec_when when = {id, (uint32_t)i};
        ec_use *use = &EC_USE(s.coming, when);
        if (i + 16 < count) EC_PREFETCH_WRITE(&EC_KNOWN(s.coming, use[16].known));
        ec_known *known = &EC_KNOWN(s.coming, use->known);
        const ec_when before = use->next;
        use->next = EC_NEVER_USED;
        if (before.notice != EC_NO_NOTICE) {
            EC_USE(s.coming, before).next = when;
            continue;
        }
        const int placed = known->slot != EC_NO_SLOT;
        if (placed) ec_sight_displace(s, known->slot);
        known->first = when;
        if (placed) ec_sight_hold(s, known->slot);
    }
}

/* ------------------------------------------------------------------------------------------------------ choosing victims */

/* Takes the standing of n slots that nobody pins; there are as many. `stood` has room for them. */
static void ec_sight_choose(const ec_sight s, int64_t n, uint32_t *victims, ec_vec *stood) {
    int64_t got = 0;
    for (uint32_t slot = s.queues->head[EC_OUTSIDE], next; got < n && slot != EC_NO_SLOT; slot = next) {
        next = s.queues->links[slot].next;
        if (next != EC_NO_SLOT) EC_PREFETCH_WRITE(&s.seats[next]);
        if (s.seats[slot].pins > 0) continue;
        EC_PUSH(*stood, ec_stood, ec_sight_leave(s, slot));
        victims[got++] = slot;
    }
    for (int64_t i = s.coming->order.size - 1; got < n; i--) {
        EC_ASSERT(i >= 0);
        ec_notice *notice = &EC_NOTICE(s.coming, EC_AT(s.coming->order, uint32_t, i));
        if (notice->held_count == 0) continue;
        while (notice->held[notice->top] == 0) notice->top--;
        for (int64_t word = notice->top; got < n && word >= 0; word--) {
            uint32_t slots[64];
            int found = 0;
            for (uint64_t rest = notice->held[word]; rest; rest &= ~((uint64_t)1 << (63 - __builtin_clzll(rest))))
                EC_PREFETCH_READ(&EC_KNOWN(s.coming, notice->uses[word << 6 | (63 - __builtin_clzll(rest))].known));
            for (uint64_t rest = notice->held[word]; rest; rest &= ~((uint64_t)1 << (63 - __builtin_clzll(rest)))) {
                slots[found] = EC_KNOWN(s.coming, notice->uses[word << 6 | (63 - __builtin_clzll(rest))].known).slot;
                EC_PREFETCH_WRITE(&s.coming->of_slot[slots[found]]);
                EC_PREFETCH_WRITE(&s.seats[slots[found++]]);
            }
            for (int k = 0; got < n && k < found; k++) {
                if (s.seats[slots[k]].pins > 0) continue;
                EC_PUSH(*stood, ec_stood, ec_sight_leave(s, slots[k]));
                victims[got++] = slots[k];
            }
        }
    }
}

/* The rank of a slot that has a standing: 0 outside, else the lower the farther its next use is: notices after that one
 * times 2^32, plus 2^32 - its place there. */
static inline int64_t ec_sight_rank(const ec_coming *c, uint32_t slot) {
    const ec_when next = ec_coming_next(c, slot);
    if (next.notice == EC_NO_NOTICE) return 0;
    int64_t after = 0;
    while (EC_AT(c->order, uint32_t, c->order.size - 1 - after) != next.notice) after++;
    return ((after + 1) << 32) - (int64_t)next.at;
}

static int ec_sight_check(const ec_queues *q, const ec_coming *c, const ec_seat *seats, int64_t capacity, int64_t placed) {
    int64_t inside = 0;
    if (ec_coming_check(c, capacity) != EC_OK) return EC_BROKEN;
    for (int64_t slot = 0; slot < capacity; slot++) {
        const ec_standing it = seats[slot].standing;
        if (it.version == 0) continue;
        if (it.list != (ec_coming_next(c, (uint32_t)slot).notice == EC_NO_NOTICE ? EC_OUTSIDE : EC_INSIDE)) return EC_BROKEN;
        inside += it.list == EC_INSIDE;
    }
    return ec_queues_check(q, seats, capacity) + inside == placed ? EC_OK : EC_BROKEN;
}

#endif
