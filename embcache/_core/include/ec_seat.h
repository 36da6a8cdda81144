/* What the planner keeps of a slot: what it holds, its standing with the policy, who pins it, and when it was used.
 *
 * The last three lie in one 16-byte record, a seat, since a hit needs both and nothing else: one cache line.
 */
#ifndef EC_SEAT_H
#define EC_SEAT_H

#include <stdint.h>

#include "ec_slotset.h"

enum { EC_SLOT_FREE = 0, EC_SLOT_LIVE = 1, EC_SLOT_LIMBO = 2 };

/* What a slot holds. Counters are authoritative while the key is LIVE; the host columns are stale then. */
typedef struct {
    int64_t key;
    int64_t row;
    int64_t freq;
    int64_t last;
} ec_slot;

/* A slot's standing with the policy. All 0: none, as the policy has no say over the slot. */
typedef struct {
    uint64_t version : 52; /* rises with every place given, so that it orders slots by (step, position in the batch) */
    uint64_t list : 6;     /* which of the policy's lists */
    uint64_t count : 6;    /* uses, as far as the policy counts them */
} ec_standing;

typedef struct {
    ec_standing standing;
    int32_t pins; /* unfinished plans that use the slot */
    uint32_t period; /* the cache's when a plan last used the slot: whether its row has changed since a save */
} ec_seat;

/* A slot's standing before a change, to put it back. */
typedef struct {
    ec_standing before;
    uint32_t slot;
    uint32_t prev; /* who was before it in its list (EC_NO_SLOT: it was first): a hint */
} ec_stood;

#endif
