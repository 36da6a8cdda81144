/* Keys that lost their slot not long ago: those of the last `span` that were noted here, unless they are back.
 *
 * Every change has an exact inverse, to be called in reverse order; neither inverse can fail.
 */
#ifndef EC_GHOST_H
#define EC_GHOST_H

#include <stdint.h>
#include <string.h>

#include "ec_index.h"
#include "ec_vec.h"

typedef struct {
    ec_index index; /* key -> place in the ring of those that are not back */
    ec_block keys_block, known_block;
    int64_t *keys; /* a ring of `span` */
    uint8_t *known; /* whether the key there is in the index */
    int64_t span;
    int64_t at; /* where the next key goes */
} ec_ghost;

enum { EC_GHOST_NOTED = 0, EC_GHOST_BACK = 1 };

typedef struct {
    int64_t key; /* NOTED: the key that gave way; BACK: the one that came back */
    uint32_t at;
    uint8_t known; /* NOTED: whether it was still in the index */
    uint8_t kind;
} ec_ghost_change;

static inline void ec_ghost_free(ec_ghost *g) {
    ec_index_free(&g->index);
    ec_block_drop(&g->keys_block);
    ec_block_drop(&g->known_block);
    g->span = 0;
}

static inline int ec_ghost_init(ec_ghost *g, int64_t span, uint64_t seed) {
    memset(g, 0, sizeof *g);
    ec_index_init(&g->index, seed);
    if (ec_block_take(&g->keys_block, (size_t)span * sizeof(int64_t)) || ec_block_take(&g->known_block, (size_t)span)) {
        ec_ghost_free(g);
        return EC_NOMEM;
    }
    g->keys = (int64_t *)g->keys_block.data;
    g->known = (uint8_t *)g->known_block.data;
    g->span = span;
    return EC_OK;
}

/* Room to note n keys. */
static inline int ec_ghost_reserve(ec_ghost *g, int64_t n) {
    if (ec_take_refused()) return EC_NOMEM;
    const int64_t more = g->span - g->index.size; /* each one beyond that takes the place of another */
    return ec_index_reserve(&g->index, n < more ? n : more);
}

static inline ec_ghost_change ec_ghost_note(ec_ghost *g, int64_t key) {
    const uint32_t at = (uint32_t)g->at;
    const ec_ghost_change change = {g->keys[at], at, g->known[at], EC_GHOST_NOTED};
    if (change.known) ec_index_erase(&g->index, change.key, ec_hash(change.key));
    g->keys[at] = key;
    g->known[at] = 1;
    ec_index_insert(&g->index, key, ec_hash(key), at);
    g->at = g->at + 1 == g->span ? 0 : g->at + 1;
    return change;
}

/* Forgets a key that is back; whether it was here. */
static inline int ec_ghost_back(ec_ghost *g, int64_t key, uint64_t hash, ec_ghost_change *change) {
    const int64_t at = ec_index_erase(&g->index, key, hash);
    if (at < 0) return 0;
    g->known[at] = 0;
    *change = (ec_ghost_change){key, (uint32_t)at, 1, EC_GHOST_BACK};
    return 1;
}

static inline void ec_ghost_undo(ec_ghost *g, const ec_ghost_change *change) {
    const uint32_t at = change->at;
    if (change->kind == EC_GHOST_BACK) {
        g->known[at] = 1;
        ec_index_insert(&g->index, change->key, ec_hash(change->key), at);
        return;
    }
    ec_index_erase(&g->index, g->keys[at], ec_hash(g->keys[at]));
    g->keys[at] = change->key;
    g->known[at] = change->known;
    if (change->known) ec_index_insert(&g->index, change->key, ec_hash(change->key), at);
    g->at = at;
}

/* A wider one that knows the same keys in the same order, for `g` to be replaced by. EC_NOMEM: `wider` holds nothing. */
static inline int ec_ghost_widen(const ec_ghost *g, ec_ghost *wider, int64_t span) {
    if (ec_ghost_init(wider, span, g->index.seed) != EC_OK) return EC_NOMEM;
    if (ec_ghost_reserve(wider, g->index.size) != EC_OK) {
        ec_ghost_free(wider);
        return EC_NOMEM;
    }
    for (int64_t i = 0; i < g->span; i++) {
        const int64_t at = (g->at + i) % g->span;
        wider->keys[i] = g->keys[at];
        wider->known[i] = g->known[at];
        if (g->known[at]) ec_index_insert(&wider->index, g->keys[at], ec_hash(g->keys[at]), (uint32_t)i);
    }
    wider->at = g->span % span;
    return EC_OK;
}

static int ec_ghost_check(const ec_ghost *g) {
    int64_t known = 0, longest;
    const int status = ec_index_check(&g->index, &longest);
    if (status != EC_OK) return status;
    for (int64_t at = 0; at < g->span; at++) {
        if (!g->known[at]) continue;
        known++;
        if (ec_index_find(&g->index, g->keys[at], ec_hash(g->keys[at])) != at) return EC_BROKEN;
    }
    return known == g->index.size ? EC_OK : EC_BROKEN;
}

#endif
