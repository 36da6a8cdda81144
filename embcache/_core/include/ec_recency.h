/* Policy "lru": the least recently used slots, found by their versions.
 *
 * The versions are all there is to the order, so a hit writes its own version and nothing else, and taking it back is as
 * cheap. When victims are wanted, the slots of the lowest versions are listed in order: all that were below a bound. A
 * version only rises, so until the list is used up it is complete; an entry whose slot has been used since, which its
 * version shows, is passed over. Listing scans all slots for an eighth of them or more: O(1) amortized over victims and
 * hits. (A list linked in order of use, which this replaced, moved three records at random a hit.)
 *
 * The list is a memory of the order, never the order itself: where a cancelled plan lowers versions below the bound of a
 * list that was made since, the list is forgotten, and made again when it is wanted.
 */
#ifndef EC_RECENCY_H
#define EC_RECENCY_H

#include <stdint.h>
#include <string.h>

#include "ec_seat.h"
#include "ec_vec.h"

#define EC_RECENCY_SMALL 1024 /* slots up to which all are listed */

typedef struct {
    uint64_t version;
    uint32_t slot;
} ec_dated;

typedef struct {
    ec_vec listed;     /* of uint32_t: slots by version */
    int64_t cursor;    /* where the next victim is looked for */
    uint64_t below;    /* every slot with a version below this is listed, from the cursor on */
    uint64_t edition;  /* of the list: changes when entries that a cancelled plan could want back are gone */
    ec_vec dated, spare; /* of ec_dated: to sort */
    int64_t looked;      /* slots and entries looked at, so far */
} ec_recency;

static inline void ec_recency_free(ec_recency *r) {
    ec_vec_free(&r->listed);
    ec_vec_free(&r->dated);
    ec_vec_free(&r->spare);
}

static inline void ec_recency_forget(ec_recency *r) {
    r->listed.size = r->cursor = 0;
    r->below = 0;
    r->edition++;
}

/* Sorts r->dated by version, least significant byte first; r->spare has its room. */
static void ec_recency_sort(ec_recency *r) {
    const int64_t n = r->dated.size;
    uint64_t lowest = UINT64_MAX, highest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t version = EC_AT(r->dated, ec_dated, i).version;
        if (version < lowest) lowest = version;
        if (version > highest) highest = version;
    }
    for (int shift = 0; n > 1 && shift < 64 && (highest - lowest) >> shift; shift += 8) {
        r->looked += n;
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < n; i++) starts[((EC_AT(r->dated, ec_dated, i).version - lowest) >> shift & 255) + 1]++;
        for (int digit = 0; digit < 256; digit++) starts[digit + 1] += starts[digit];
        for (int64_t i = 0; i < n; i++) {
            const ec_dated it = EC_AT(r->dated, ec_dated, i);
            EC_AT(r->spare, ec_dated, starts[(it.version - lowest) >> shift & 255]++) = it;
        }
        const ec_vec sorted = r->spare;
        r->spare = r->dated;
        r->dated = sorted;
        r->dated.size = n;
    }
}

/* Room for `extra` more in both arrays of the sort, which take turns. */
static inline int ec_recency_room(ec_recency *r, int64_t extra) {
    r->spare.size = r->dated.size;
    int status = ec_vec_reserve(&r->dated, extra, sizeof(ec_dated));
    if (status == EC_OK) status = ec_vec_reserve(&r->spare, extra, sizeof(ec_dated));
    return status;
}

/* Collects the slots of a version below `below`, every stride-th slot looked at. */
static int ec_recency_collect(ec_recency *r, const ec_seat *seats, int64_t capacity, int64_t stride, uint64_t below) {
    r->dated.size = 0;
    r->looked += (capacity + stride - 1) / stride;
    for (int64_t slot = 0, looked = 0; slot < capacity; slot += stride, looked++) {
        if (looked % 1024 == 0 && ec_recency_room(r, 1024) != EC_OK) return EC_NOMEM;
        const uint64_t version = seats[slot].standing.version;
        if (version != 0 && version < below) EC_PUSH(r->dated, ec_dated, {version, (uint32_t)slot});
    }
    return EC_OK;
}

/* Lists the `wanted` slots of the lowest versions or more, of `placed` that have one; `version` is the highest.
 * EC_NOMEM leaves no list. */
static int ec_recency_list(ec_recency *r, const ec_seat *seats, int64_t capacity, uint64_t version, int64_t placed, int64_t wanted) {
    const uint64_t all = version + 1;
    uint64_t below = all;
    ec_recency_forget(r);
    if (wanted < placed / 8) wanted = placed / 8;
    if (capacity > EC_RECENCY_SMALL && wanted < placed / 2) { /* a sample says where the bound may be */
        const int64_t stride = capacity / (capacity / 16 < 1024 ? capacity / 16 : 1024);
        if (ec_recency_collect(r, seats, capacity, stride, all) != EC_OK) return EC_NOMEM;
        ec_recency_sort(r);
        const int64_t at = (int64_t)((double)wanted / (double)placed * 1.2 * (double)r->dated.size) + 4;
        if (at < r->dated.size) below = EC_AT(r->dated, ec_dated, at).version;
    }
    if (ec_recency_collect(r, seats, capacity, 1, below) != EC_OK) return EC_NOMEM;
    if (r->dated.size < wanted && below != all) { /* the sample was odd */
        below = all;
        if (ec_recency_collect(r, seats, capacity, 1, below) != EC_OK) return EC_NOMEM;
    }
    ec_recency_sort(r);
    const int64_t n = r->dated.size;
    if (ec_vec_reserve(&r->listed, n, sizeof(uint32_t)) != EC_OK) return EC_NOMEM;
    for (int64_t i = 0; i < n; i++) EC_AT(r->listed, uint32_t, i) = EC_AT(r->dated, ec_dated, i).slot;
    r->listed.size = n;
    r->below = below;
    return EC_OK;
}

/* Takes the standing of the n least recently used slots that nobody pins, in order; there are as many. `stood` has room
 * for n more and tells what was taken, on EC_NOMEM too. */
static int ec_recency_choose(ec_recency *r, ec_seat *seats, int64_t capacity, uint64_t version, int64_t placed, int64_t pinned,
                             int64_t n, uint32_t *victims, ec_vec *stood) {
    int64_t got = 0, kept = 0, at = r->cursor;
    uint32_t *listed = (uint32_t *)r->listed.data;
    while (got < n) {
        if (at == r->listed.size) { /* the new list has those kept, too */
            if (ec_recency_list(r, seats, capacity, version, placed - got, n - got + pinned) != EC_OK) return EC_NOMEM;
            EC_ASSERT(r->listed.size > 0);
            listed = (uint32_t *)r->listed.data;
            at = kept = 0;
        }
        if (at + 16 < r->listed.size) EC_PREFETCH_WRITE(&seats[listed[at + 16]]);
        const uint32_t slot = listed[at++];
        r->looked++;
        ec_seat *seat = &seats[slot];
        if (seat->standing.version == 0 || seat->standing.version >= r->below) continue;
        if (seat->pins > 0) {
            listed[r->cursor + kept++] = slot;
            continue;
        }
        victims[got++] = slot;
        EC_PUSH(*stood, ec_stood, {seat->standing, slot, EC_NO_SLOT});
        seat->standing = (ec_standing){0};
    }
    if (kept > 0) { /* pinned ones stay next to be looked at */
        memmove(listed + at - kept, listed + r->cursor, (size_t)kept * sizeof(uint32_t));
        r->edition++;
    }
    r->cursor = at - kept;
    return EC_OK;
}

/* EC_OK, or EC_BROKEN where the list is not what it says. */
static int ec_recency_check(const ec_recency *r, const ec_seat *seats, int64_t capacity) {
    int64_t below = 0, listed = 0;
    uint64_t last = 0;
    for (int64_t slot = 0; slot < capacity; slot++) below += seats[slot].standing.version != 0 && seats[slot].standing.version < r->below;
    for (int64_t i = r->cursor; i < r->listed.size; i++) {
        const ec_standing standing = seats[EC_AT(r->listed, uint32_t, i)].standing;
        if (standing.version == 0 || standing.version >= r->below) continue;
        if (standing.version <= last) return EC_BROKEN;
        last = standing.version;
        listed++;
    }
    return below == listed ? EC_OK : EC_BROKEN;
}

#endif
