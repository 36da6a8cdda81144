/* The keys of batches to come, for one table: which keys, and in which of those batches each is used next.
 *
 * A notice says what keys a batch will have, each once, in order of first occurrence. It stays until the batch has been
 * planned and its plan has finished, or until it is withdrawn. Each key that some notice names has one record, found by an
 * index, with a list of its coming uses, the nearest first: a use is a notice and a place in it. Planning the batch takes
 * its uses off the lists, whichever notices came before; a plan that is undone puts them back.
 *
 * A notice also holds a set of places: uses whose key has a slot and is used there next. It is how the policy
 * "lookahead" (ec_sight.h) finds the residents whose next use is farthest. What the set is for, and when a place belongs to it,
 * is the policy's business.
 *
 * Invariants: a key's uses are in the order of the notices; a key has a record as long as a notice names it, spent uses
 * included; records and slots of residents point to each other. Only ec_coming_note() takes memory.
 */
#ifndef EC_COMING_H
#define EC_COMING_H

#include <stdint.h>
#include <string.h>

#include "ec_index.h"
#include "ec_slotset.h"
#include "ec_vec.h"

#define EC_NO_NOTICE UINT32_MAX       /* a key is used in no notice */
#define EC_SPENT (UINT32_MAX - 1)     /* in place of the next use: this one is off its key's list */
#define EC_NOTICES_MAX (UINT32_MAX - 2)
#define EC_UNKNOWN_KEY UINT32_MAX     /* no notice names the key */

/* A use: the `at`-th key of a notice. */
typedef struct {
    uint32_t notice, at;
} ec_when;

typedef struct {
    int64_t key;
    uint32_t slot;       /* where the key lives, or EC_NO_SLOT */
    uint32_t holds;      /* uses, spent ones included; 0: this record is unused */
    ec_when first, last; /* coming uses, or EC_NO_NOTICE */
} ec_known;

typedef struct {
    uint32_t known; /* number of the key's record */
    ec_when next;   /* the key's next use after this one */
} ec_use;

typedef struct {
    uint64_t number; /* rises from notice to notice; 0: there is no such notice */
    ec_use *uses;    /* of the notice's own block, `held` too */
    uint64_t *held;  /* a bit a use */
    int64_t count;
    int64_t held_count;
    int64_t top; /* no word of `held` above this one has a bit */
} ec_notice;

typedef struct {
    ec_index index;    /* key -> record */
    ec_block known_block; /* in huge pages where it is large: records are met in no order */
    ec_known *known;   /* records in use, and below `known_count` some unused ones */
    int64_t known_count, known_room;
    ec_vec unused;     /* of uint32_t: records to use again, last in first out */
    ec_vec notices;    /* of ec_notice, by the number that the planner gives them */
    ec_vec order;      /* of uint32_t: notices that are there, in order of `number` */
    ec_block of_slot_block;
    uint32_t *of_slot; /* the record of the key in a slot, or EC_UNKNOWN_KEY */
    uint32_t expected; /* whose key may come into a slot next: a hint, to save a search */
    int64_t uses;      /* in all notices */
} ec_coming;

#define EC_KNOWN(c, i) ((c)->known[i])
#define EC_NOTICE(c, i) EC_AT((c)->notices, ec_notice, i)
#define EC_USE(c, when) (EC_NOTICE(c, (when).notice).uses[(when).at])

static const ec_when EC_NEVER_USED = {EC_NO_NOTICE, 0};

static inline int ec_when_same(ec_when a, ec_when b) { return a.notice == b.notice && a.at == b.at; }

/* ------------------------------------------------------------------------------------------------------------- lifetime */

static inline void ec_coming_free(ec_coming *c) {
    ec_index_free(&c->index);
    ec_block_drop(&c->known_block);
    c->known = NULL;
    c->known_count = c->known_room = 0;
    ec_vec_free(&c->unused);
    ec_vec_free(&c->notices);
    ec_vec_free(&c->order);
    ec_block_drop(&c->of_slot_block);
    c->of_slot = NULL;
    c->uses = 0;
}

static inline int ec_coming_init(ec_coming *c, int64_t capacity, uint64_t seed) {
    memset(c, 0, sizeof *c);
    ec_index_init(&c->index, seed);
    if (ec_block_take(&c->of_slot_block, (size_t)capacity * sizeof(uint32_t)) != EC_OK) return EC_NOMEM;
    c->of_slot = (uint32_t *)c->of_slot_block.data;
    memset(c->of_slot, 0xFF, (size_t)capacity * sizeof(uint32_t));
    return EC_OK;
}

/* Moves everything into `wider`, which was made for more slots and is empty. */
static inline void ec_coming_move(ec_coming *c, ec_coming *wider, int64_t capacity) {
    const ec_block block = wider->of_slot_block;
    memcpy(block.data, c->of_slot, (size_t)capacity * sizeof(uint32_t));
    ec_block_drop(&c->of_slot_block);
    *wider = *c;
    wider->of_slot_block = block;
    wider->of_slot = (uint32_t *)block.data;
    memset(c, 0, sizeof *c);
}

/* Memory held, but for the notices' own blocks. */
static inline int64_t ec_coming_bytes(const ec_coming *c) {
    return (int64_t)(c->index.bytes + c->of_slot_block.held + c->known_block.held) +
           (c->unused.room + c->order.room) * (int64_t)sizeof(uint32_t) + c->notices.room * (int64_t)sizeof(ec_notice);
}

/* ------------------------------------------------------------------------------------------------------ keys and slots */

static inline uint32_t ec_coming_find(const ec_coming *c, int64_t key, uint64_t hash) {
    if (c->index.size == 0) return EC_UNKNOWN_KEY;
    return (uint32_t)ec_index_find(&c->index, key, hash); /* -1 is EC_UNKNOWN_KEY */
}

/* A slot has a key, whose record is `known` or EC_UNKNOWN_KEY. */
static inline void ec_coming_attach(ec_coming *c, uint32_t slot, uint32_t known) {
    c->of_slot[slot] = known;
    if (known != EC_UNKNOWN_KEY) EC_KNOWN(c, known).slot = slot;
}

static inline void ec_coming_detach(ec_coming *c, uint32_t slot) {
    if (c->of_slot[slot] != EC_UNKNOWN_KEY) EC_KNOWN(c, c->of_slot[slot]).slot = EC_NO_SLOT;
    c->of_slot[slot] = EC_UNKNOWN_KEY;
}

/* The record of a key that gets a slot. */
static inline uint32_t ec_coming_recall(const ec_coming *c, int64_t key, uint64_t hash) {
    if (c->expected < c->known_count && EC_KNOWN(c, c->expected).key == key && EC_KNOWN(c, c->expected).holds > 0) return c->expected;
    return ec_coming_find(c, key, hash);
}

/* When the key in a slot is used next. */
static inline ec_when ec_coming_next(const ec_coming *c, uint32_t slot) {
    return c->of_slot[slot] == EC_UNKNOWN_KEY ? EC_NEVER_USED : EC_KNOWN(c, c->of_slot[slot]).first;
}

/* --------------------------------------------------------------------------------------------------------- places held */

static inline void ec_coming_hold(ec_coming *c, ec_when when) {
    ec_notice *notice = &EC_NOTICE(c, when.notice);
    const int64_t word = when.at >> 6;
    EC_ASSERT(!(notice->held[word] >> (when.at & 63) & 1));
    notice->held[word] |= (uint64_t)1 << (when.at & 63);
    notice->held_count++;
    if (word > notice->top) notice->top = word;
}

static inline void ec_coming_let(ec_coming *c, ec_when when) {
    ec_notice *notice = &EC_NOTICE(c, when.notice);
    EC_ASSERT(notice->held[when.at >> 6] >> (when.at & 63) & 1);
    notice->held[when.at >> 6] &= ~((uint64_t)1 << (when.at & 63));
    notice->held_count--;
}

/* -------------------------------------------------------------------------------------------------------------- a key's uses */

/* Takes a use off its key's list. O(1) where no notice before this one names the key. */
static inline void ec_coming_spend(ec_coming *c, ec_when when) {
    ec_use *use = &EC_USE(c, when);
    ec_known *known = &EC_KNOWN(c, use->known);
    ec_when before = EC_NEVER_USED;
    for (ec_when it = known->first; !ec_when_same(it, when); it = EC_USE(c, it).next) before = it;
    if (before.notice == EC_NO_NOTICE) known->first = use->next;
    else EC_USE(c, before).next = use->next;
    if (use->next.notice == EC_NO_NOTICE) known->last = before;
    use->next = (ec_when){EC_SPENT, 0};
}

static inline int ec_coming_spent(const ec_coming *c, ec_when when) { return EC_USE(c, when).next.notice == EC_SPENT; }

/* Puts a spent use back. */
static inline void ec_coming_unspend(ec_coming *c, ec_when when) {
    ec_use *use = &EC_USE(c, when);
    ec_known *known = &EC_KNOWN(c, use->known);
    const uint64_t number = EC_NOTICE(c, when.notice).number;
    ec_when before = EC_NEVER_USED, after = known->first;
    while (after.notice != EC_NO_NOTICE && EC_NOTICE(c, after.notice).number < number) {
        before = after;
        after = EC_USE(c, after).next;
    }
    use->next = after;
    if (before.notice == EC_NO_NOTICE) known->first = when;
    else EC_USE(c, before).next = when;
    if (after.notice == EC_NO_NOTICE) known->last = when;
}

/* ------------------------------------------------------------------------------------------------------ notices come and go */

/* Room for notice number `id`, besides its keys. */
static inline int ec_coming_reserve(ec_coming *c, uint32_t id) {
    const int64_t more = (int64_t)id + 1 - c->notices.size;
    if (more > 0) {
        if (ec_vec_reserve(&c->notices, more, sizeof(ec_notice)) != EC_OK) return EC_NOMEM;
        memset(&EC_NOTICE(c, c->notices.size), 0, (size_t)more * sizeof(ec_notice));
        c->notices.size += more;
    }
    return ec_vec_reserve_one(&c->order, sizeof(uint32_t));
}

/* Room for more records, and for giving every one of them back. */
static int ec_coming_widen(ec_coming *c) {
    const int64_t room = c->known_room < 32 ? 32 : c->known_room + c->known_room / 2;
    ec_block wider;
    if (ec_vec_reserve(&c->unused, room - c->unused.size, sizeof(uint32_t)) != EC_OK) return EC_NOMEM;
    if (ec_block_take(&wider, (size_t)room * sizeof(ec_known)) != EC_OK) return EC_NOMEM;
    if (c->known_count > 0) memcpy(wider.data, c->known, (size_t)c->known_count * sizeof(ec_known));
    ec_block_drop(&c->known_block);
    c->known_block = wider;
    c->known = (ec_known *)wider.data;
    c->known_room = room;
    return EC_OK;
}

/* A record for a key that has none. EC_NOMEM and EC_LIMIT change nothing. */
static inline int ec_coming_learn(ec_coming *c, int64_t key, uint64_t hash, uint32_t slot, uint32_t *known) {
    if (c->unused.size == 0) {
        if (c->known_count >= (int64_t)EC_UNKNOWN_KEY) return EC_LIMIT;
        if (c->known_count == c->known_room && ec_coming_widen(c) != EC_OK) return EC_NOMEM;
    }
    if (c->index.size == c->index.grow_at && (ec_take_refused() || ec_index_reserve(&c->index, 1) != EC_OK)) return EC_NOMEM;
    *known = c->unused.size > 0 ? EC_AT(c->unused, uint32_t, --c->unused.size) : (uint32_t)c->known_count++;
    EC_KNOWN(c, *known) = (ec_known){key, slot, 0, EC_NEVER_USED, EC_NEVER_USED};
    ec_index_insert(&c->index, key, hash, *known);
    if (slot != EC_NO_SLOT) c->of_slot[slot] = *known;
    return EC_OK;
}

static inline void ec_coming_unlearn(ec_coming *c, uint32_t known) {
    const ec_known *it = &EC_KNOWN(c, known);
    if (it->slot != EC_NO_SLOT) c->of_slot[it->slot] = EC_UNKNOWN_KEY;
    ec_index_erase(&c->index, it->key, ec_hash(it->key));
    EC_PUSH(c->unused, uint32_t, known);
}

/* Gives up a notice whose uses are all spent. */
static inline void ec_coming_forget(ec_coming *c, uint32_t id) {
    ec_notice *notice = &EC_NOTICE(c, id);
    int64_t at = 0;
    while (EC_AT(c->order, uint32_t, at) != id) at++;
    c->order.size--;
    for (; at < c->order.size; at++) EC_AT(c->order, uint32_t, at) = EC_AT(c->order, uint32_t, at + 1);
    for (int64_t i = 0; i < notice->count; i++) {
        if (i + 32 < notice->count) EC_PREFETCH_WRITE(&EC_KNOWN(c, notice->uses[i + 32].known));
        if (i + 16 < notice->count) {
            const ec_known *soon = &EC_KNOWN(c, notice->uses[i + 16].known);
            if (soon->holds == 1) ec_index_prefetch(&c->index, ec_hash(soon->key));
        }
        if (--EC_KNOWN(c, notice->uses[i].known).holds == 0) ec_coming_unlearn(c, notice->uses[i].known);
    }
    c->uses -= notice->count;
    memset(notice, 0, sizeof *notice);
}

/* ---------------------------------------------------------------------------------------------------------------- looking */

/* EC_OK, or EC_BROKEN where records, lists and notices do not agree. O(records + uses). */
static int ec_coming_check(const ec_coming *c, int64_t capacity) {
    int64_t records = 0, longest, uses = 0, holds = 0, listed = 0, spent = 0;
    if (ec_index_check(&c->index, &longest) != EC_OK) return EC_BROKEN;
    for (int64_t i = 0; i < c->known_count; i++) {
        const ec_known *it = &EC_KNOWN(c, i);
        if (it->holds == 0) continue;
        records++;
        holds += it->holds;
        if (ec_index_find(&c->index, it->key, ec_hash(it->key)) != i) return EC_BROKEN;
        if (it->slot != EC_NO_SLOT && ((int64_t)it->slot >= capacity || c->of_slot[it->slot] != i)) return EC_BROKEN;
        uint64_t number = 0;
        ec_when last = EC_NEVER_USED;
        for (ec_when use = it->first; use.notice != EC_NO_NOTICE; use = EC_USE(c, use).next) {
            if (EC_USE(c, use).known != i || EC_NOTICE(c, use.notice).number <= number) return EC_BROKEN;
            number = EC_NOTICE(c, use.notice).number;
            last = use;
            listed++;
        }
        if (last.notice != it->last.notice || (last.notice != EC_NO_NOTICE && last.at != it->last.at)) return EC_BROKEN;
    }
    if (records != c->index.size || records + c->unused.size != c->known_count) return EC_BROKEN;
    uint64_t number = 0;
    for (int64_t i = 0; i < c->order.size; i++) {
        const ec_notice *notice = &EC_NOTICE(c, EC_AT(c->order, uint32_t, i));
        int64_t held = 0;
        if (notice->number <= number) return EC_BROKEN;
        number = notice->number;
        uses += notice->count;
        for (int64_t at = 0; at < notice->count; at++) {
            const ec_when when = {EC_AT(c->order, uint32_t, i), (uint32_t)at};
            const ec_known *it = &EC_KNOWN(c, notice->uses[at].known);
            const int is_held = (int)(notice->held[at >> 6] >> (at & 63) & 1);
            spent += ec_coming_spent(c, when);
            held += is_held;
            if (is_held != (it->slot != EC_NO_SLOT && ec_when_same(it->first, when))) return EC_BROKEN;
            if (is_held && at >> 6 > notice->top) return EC_BROKEN;
        }
        if (held != notice->held_count) return EC_BROKEN;
    }
    for (int64_t slot = 0; slot < capacity; slot++)
        if (c->of_slot[slot] != EC_UNKNOWN_KEY && EC_KNOWN(c, c->of_slot[slot]).slot != (uint32_t)slot) return EC_BROKEN;
    return uses == c->uses && uses == holds && listed + spent == uses ? EC_OK : EC_BROKEN;
}

#endif
