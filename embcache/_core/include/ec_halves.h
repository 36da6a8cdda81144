/* The dedup of one table's large call by two threads: half of the positions each, with a probe table each.
 *
 * The second half's distinct keys are then looked for in the first half's table. Those that are not there get the next ids, in
 * the order of their first occurrence, which is that of the whole. This costs two threads a third less than cutting the call
 * into parts, which scatters every key; with more threads the merge would be what all wait for.
 */
#ifndef EC_HALVES_H
#define EC_HALVES_H

#include "ec_dedup.h"

#define EC_HALVES 2
#define EC_HALF_RING (2 * EC_DEDUP_AHEAD)

/* The phases, of one task a half unless said otherwise:
 * half_run -> half_match -> half_number (serial) -> half_inverse, and half_ends beside it (a third task) -> half_order
 */

static inline int64_t ec_half_begin(const ec_dedup_call *c, int half) { return half ? c->n / 2 : 0; }
static inline int64_t ec_half_end(const ec_dedup_call *c, int half) { return half ? c->n : c->n / 2; }

/* Numbers a half's keys by themselves. The first half's numbers are final. */
static int ec_dedup_half_run(ec_dedup_call *c, int half, ec_dedup_table *d) {
    const int64_t begin = ec_half_begin(c, half), n = ec_half_end(c, half) - begin;
    if (ec_dedup_begin(d, n, c->expected * 2 / 3) != EC_OK) return EC_NOMEM; /* half of a Zipf batch has 0.6 of its keys */
    c->half_unique[half] = ec_dedup_run(d, c->seed, 0, c->keys + begin, NULL, n, c->inverse + begin,
                                        half ? c->part_unique : c->unique_keys, NULL, c->counts + begin);
    return EC_OK;
}

/* Looks for one or the other half of the second half's ids in the first half's table: part_uid[] is the id there, or UINT32_MAX. */
static void ec_dedup_half_match(ec_dedup_call *c, int half, const ec_dedup_table *d) {
    const int64_t middle = c->half_unique[1] / 2, begin = half ? middle : 0, end = half ? c->half_unique[1] : middle;
    const ec_dedup_entry *entries = (const ec_dedup_entry *)d->block.data;
    const int64_t *keys = c->part_unique, *there = c->unique_keys;
    const uint32_t unique = (uint32_t)c->half_unique[0], base = d->base - unique;
    const int shift = 64 - d->log2;
    const uint64_t mask = ((uint64_t)1 << d->log2) - 1;
    uint64_t ring[EC_HALF_RING];
    for (int64_t i = begin; i < begin + EC_HALF_RING && i < end; i++) {
        const uint64_t later = ring[(i - begin) & (EC_HALF_RING - 1)] = ec_dedup_hash(keys[i], c->seed);
        EC_PREFETCH_READ(&entries[later >> shift]);
    }
    for (int64_t i = begin; i < end; i++) {
        const uint64_t hash = ring[(i - begin) & (EC_HALF_RING - 1)];
        if (i + EC_HALF_RING < end) {
            const uint64_t later = ec_dedup_hash(keys[i + EC_HALF_RING], c->seed);
            ring[(i - begin) & (EC_HALF_RING - 1)] = later;
            EC_PREFETCH_READ(&entries[later >> shift]);
        }
        if (i + EC_DEDUP_AHEAD < end) {
            const uint32_t soon = entries[ring[(i - begin + EC_DEDUP_AHEAD) & (EC_HALF_RING - 1)] >> shift].stamp - base;
            EC_PREFETCH_READ(&there[soon < unique ? soon : 0]);
        }
        uint32_t found = UINT32_MAX;
        for (uint64_t at = hash >> shift;; at = (at + 1) & mask) {
            const ec_dedup_entry entry = entries[at];
            const uint32_t id = entry.stamp - base;
            if (id >= unique) break;
            if (entry.tag == (uint32_t)hash && there[id] == keys[i]) {
                found = id;
                break;
            }
        }
        c->part_uid[i] = found;
    }
}

/* Keys that the first half does not have get the next ids. */
static void ec_dedup_half_number(ec_dedup_call *c) {
    int64_t unique = c->half_unique[0];
    for (int64_t id = 0; id < c->half_unique[1]; id++) { /* without a branch: half of them are new */
        const uint32_t found = c->part_uid[id], is_new = found == UINT32_MAX;
        c->part_uid[id] = is_new ? (uint32_t)unique : found;
        c->unique_keys[unique] = c->part_unique[id];
        unique += is_new;
    }
    c->unique = unique;
}

/* Where each id's group ends, and where each half's next position of it goes in `order`: counts[] by id for the first half, first[] for
 * the second. */
static void ec_dedup_half_ends(ec_dedup_call *c) {
    uint32_t *first = c->counts, *second = c->first, total = 0;
    const uint32_t *counts = c->counts + ec_half_begin(c, 1);
    const int64_t had = c->half_unique[0];
    memset(second, 0, (size_t)had * sizeof *second);
    for (int64_t id = 0; id < c->half_unique[1]; id++) second[c->part_uid[id]] = counts[id];
    for (int64_t uid = 0; uid < c->unique; uid++) {
        const uint32_t before = uid < had ? first[uid] : 0, after = second[uid];
        first[uid] = total;
        second[uid] = total += before;
        c->ends[uid] = c->position_base + (total += after);
    }
}

/* Final ids for one or the other half of the second half's positions. */
static void ec_dedup_half_inverse(ec_dedup_call *c, int half) {
    const int64_t begin = ec_half_begin(c, 1), middle = begin + (c->n - begin) / 2, end = half ? c->n : middle;
    for (int64_t i = half ? middle : begin; i < end; i++) c->inverse[i] = c->part_uid[c->inverse[i]];
}

/* Groups a half's positions by id. */
static void ec_dedup_half_order(ec_dedup_call *c, int half) {
    ec_dedup_group(half ? c->first : c->counts, c->inverse, c->order, c->position_base, ec_half_begin(c, half), ec_half_end(c, half));
}

#endif
