/* Taking notice of a batch to come, for all tables: collect (tables) -> a block for the uses -> link (tables).
 *
 * Tasks touch disjoint data. Only the first phase and the block take memory; ec_look_undo() takes the first phase back.
 */
#ifndef EC_NOTICE_H
#define EC_NOTICE_H

#include <stdint.h>
#include <string.h>

#include "ec_find.h"
#include "ec_plan.h"

#define EC_LOOK_CHUNK 512 /* keys whose look-ups overlap */

/* One table's share of the work. */
typedef struct {
    int64_t count; /* distinct keys so far */
    int status;
} ec_look_part;

typedef struct {
    int64_t tables;
    const int64_t *keys;
    const int64_t *offsets;
    ec_side *sides;
    uint32_t id;     /* of the notice */
    uint64_t number;
    ec_look_part *parts;
    ec_vec uses;     /* of ec_use: scratch, table t's from offsets[t] on; stays for the next call */
    void *block;     /* of the notice */
    size_t bytes;
} ec_look;

static inline ec_coming *ec_look_coming(const ec_look *l, int64_t t) { return &l->sides[t].cache.policy.coming; }

/* Notes that the notice names a key, unless it does already. `known` is the key's record, or -1 where it had none a moment
 * ago; `slot` its slot then, or -1. */
static inline int ec_look_note(const ec_look *l, ec_coming *c, ec_look_part *part, ec_use *uses, int64_t key, uint64_t hash,
                               int64_t known, int64_t slot) {
    uint32_t id = known >= 0 ? (uint32_t)known : ec_coming_find(c, key, hash); /* it may have come in between */
    if (id == EC_UNKNOWN_KEY) {
        const int status = ec_coming_learn(c, key, hash, slot < 0 ? EC_NO_SLOT : (uint32_t)slot, &id);
        if (status != EC_OK) return status;
    }
    ec_known *it = &EC_KNOWN(c, id);
    if (it->last.notice == l->id) return EC_OK;
    uses[part->count] = (ec_use){id, it->last};
    it->last = (ec_when){l->id, (uint32_t)part->count++};
    it->holds++;
    return EC_OK;
}

/* Collects the distinct keys of table t, in order, into the scratch: each use has in `next` its key's use before it. */
static void ec_phase_look_collect(void *context, int64_t t) {
    ec_look *l = (ec_look *)context;
    ec_side *s = &l->sides[t];
    ec_coming *c = ec_look_coming(l, t);
    ec_look_part *part = &l->parts[t];
    ec_use *uses = (ec_use *)l->uses.data + l->offsets[t];
    uint64_t hashes[EC_LOOK_CHUNK], new_hashes[EC_LOOK_CHUNK];
    int64_t known[EC_LOOK_CHUNK], new_keys[EC_LOOK_CHUNK], slots[EC_LOOK_CHUNK];
    part->count = 0;
    part->status = ec_coming_reserve(c, l->id);
    for (int64_t begin = l->offsets[t]; part->status == EC_OK && begin < l->offsets[t + 1]; begin += EC_LOOK_CHUNK) {
        const int64_t *keys = l->keys + begin;
        const int64_t n = l->offsets[t + 1] - begin < EC_LOOK_CHUNK ? l->offsets[t + 1] - begin : EC_LOOK_CHUNK;
        for (int64_t i = 0; i < n; i++) hashes[i] = ec_hash(keys[i]);
        ec_find_values(&c->index, keys, hashes, n, known);
        int64_t fresh = 0;
        for (int64_t i = 0; i < n; i++) {
            if (known[i] >= 0) {
                EC_PREFETCH_WRITE(&EC_KNOWN(c, known[i]));
                continue;
            }
            if (fresh < c->unused.size) EC_PREFETCH_WRITE(&EC_KNOWN(c, EC_AT(c->unused, uint32_t, c->unused.size - 1 - fresh)));
            new_keys[fresh] = keys[i];
            new_hashes[fresh++] = hashes[i];
        }
        ec_find_values(&s->cache.index, new_keys, new_hashes, fresh, slots);
        fresh = 0;
        for (int64_t i = 0; part->status == EC_OK && i < n; i++)
            part->status = ec_look_note(l, c, part, uses, keys[i], hashes[i], known[i], known[i] < 0 ? slots[fresh++] : -1);
    }
}

/* Takes back what was collected. */
static void ec_look_undo(ec_look *l) {
    for (int64_t t = 0; t < l->tables; t++) {
        ec_coming *c = ec_look_coming(l, t);
        const ec_use *uses = (ec_use *)l->uses.data + l->offsets[t];
        for (int64_t i = l->parts[t].count - 1; i >= 0; i--) {
            ec_known *it = &EC_KNOWN(c, uses[i].known);
            it->last = uses[i].next;
            if (--it->holds == 0) ec_coming_unlearn(c, uses[i].known);
        }
        l->parts[t].count = 0;
    }
}

/* Scratch for all keys of the batch. */
static int ec_look_scratch(ec_look *l) {
    l->uses.size = 0;
    return ec_vec_reserve(&l->uses, l->offsets[l->tables], sizeof(ec_use));
}

static inline void ec_look_free(ec_look *l) {
    ec_vec_free(&l->uses);
    free(l->parts);
    l->parts = NULL;
}

static inline size_t ec_look_words(int64_t count) { return (size_t)(count + 63) / 64; }

/* Takes the notice's block. */
static int ec_look_reserve(ec_look *l) {
    l->bytes = 0;
    for (int64_t t = 0; t < l->tables; t++)
        l->bytes += ec_look_words(l->parts[t].count) * sizeof(uint64_t) + (size_t)l->parts[t].count * sizeof(ec_use);
    l->block = ec_take(NULL, l->bytes);
    if (!l->block) return EC_NOMEM;
    char *at = (char *)l->block; /* all bitmaps first, since those are of larger words */
    for (int64_t t = 0; t < l->tables; t++) {
        ec_notice *notice = &EC_NOTICE(ec_look_coming(l, t), l->id);
        notice->held = (uint64_t *)(void *)at;
        at += ec_look_words(l->parts[t].count) * sizeof(uint64_t);
    }
    for (int64_t t = 0; t < l->tables; t++) {
        ec_notice *notice = &EC_NOTICE(ec_look_coming(l, t), l->id);
        notice->uses = (ec_use *)(void *)at;
        at += (size_t)l->parts[t].count * sizeof(ec_use);
    }
    return EC_OK;
}

static void ec_phase_look_link(void *context, int64_t t) {
    ec_look *l = (ec_look *)context;
    ec_side *s = &l->sides[t];
    ec_coming *c = ec_look_coming(l, t);
    const int64_t count = l->parts[t].count;
    ec_notice *notice = &EC_NOTICE(c, l->id);
    notice->number = l->number;
    notice->count = count;
    notice->held_count = notice->top = 0;
    memset(notice->held, 0, ec_look_words(count) * sizeof(uint64_t));
    if (count > 0) /* else there may be no block at all, and memcpy wants one */
        memcpy(notice->uses, (ec_use *)l->uses.data + l->offsets[t], (size_t)count * sizeof(ec_use));
    EC_PUSH(c->order, uint32_t, l->id);
    c->uses += count;
    ec_sight_link(ec_policy_sight(&s->cache.policy, s->cache.seats), l->id);
}

/* The batch will not be planned, or not under this notice. */
static void ec_side_withdraw(ec_side *s, uint32_t id) {
    ec_cache *c = &s->cache;
    ec_sight_spend_rest(ec_policy_sight(&c->policy, c->seats), id);
    ec_coming_forget(&c->policy.coming, id);
}

/* Distinct keys of a notice in a table. */
static int64_t ec_side_noticed_count(const ec_side *s, uint32_t id) { return EC_NOTICE(&s->cache.policy.coming, id).count; }

static void ec_side_noticed(const ec_side *s, uint32_t id, int64_t *keys) {
    const ec_coming *c = &s->cache.policy.coming;
    for (int64_t i = 0; i < EC_NOTICE(c, id).count; i++) keys[i] = EC_KNOWN(c, EC_NOTICE(c, id).uses[i].known).key;
}

/* Memory held for batches to come, 0 where the policy is another one. */
static int64_t ec_side_coming_bytes(const ec_side *s) {
    const ec_coming *c = &s->cache.policy.coming;
    int64_t bytes = ec_coming_bytes(c);
    for (int64_t i = 0; i < c->order.size; i++) {
        const int64_t count = EC_NOTICE(c, EC_AT(c->order, uint32_t, i)).count;
        bytes += count * (int64_t)sizeof(ec_use) + (int64_t)(ec_look_words(count) * sizeof(uint64_t));
    }
    return bytes;
}

#endif
