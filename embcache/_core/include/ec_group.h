/* The occurrences of a plan's uniques (CSR), made from its inverse when somebody first asks for them. Tables that went the
 * long way (ec_phases.h) have theirs: there they come with the uniques.
 */
#ifndef EC_GROUP_H
#define EC_GROUP_H

#include <stdint.h>
#include <string.h>

#include "ec_work.h"

#define EC_GROUP_FAR 65536 /* uniques from which their ends are prefetched */
#define EC_GROUP_AHEAD 16

typedef struct {
    const ec_arrays *out;
    const ec_part *parts;
} ec_grouping;

/* Groups the positions of table t by unique: a counting sort. Its cursors lie in the lower half of where the groups' ends go. */
static void ec_phase_group(void *context, int64_t t) {
    const ec_grouping *g = (const ec_grouping *)context;
    if (!g->parts[t].quick) return;
    const ec_arrays *o = g->out;
    const int64_t begin = o->table_offsets[t], stop = o->table_offsets[t + 1];
    const int64_t first = o->unique_offsets[t], unique = o->unique_offsets[t + 1] - first;
    const int64_t *restrict inverse = o->inverse;
    int64_t *ends = o->segment_offsets + 1 + first;
    uint32_t *cursor = (uint32_t *)ends, total = 0;
    const int64_t far = unique >= EC_GROUP_FAR ? stop - EC_GROUP_AHEAD : begin;
    memset(cursor, 0, (size_t)unique * sizeof *cursor);
    for (int64_t i = begin; i < far; i++) {
        EC_PREFETCH_WRITE(&cursor[inverse[i + EC_GROUP_AHEAD] - first]);
        cursor[inverse[i] - first]++;
    }
    for (int64_t i = far; i < stop; i++) cursor[inverse[i] - first]++;
    for (int64_t u = 0; u < unique; u++) {
        const uint32_t count = cursor[u];
        cursor[u] = total;
        total += count;
    }
    int64_t *restrict order = o->order + begin;
    for (int64_t i = begin; i < far; i++) {
        EC_PREFETCH_WRITE(&cursor[inverse[i + EC_GROUP_AHEAD] - first]);
        order[cursor[inverse[i] - first]++] = i;
    }
    for (int64_t i = far; i < stop; i++) order[cursor[inverse[i] - first]++] = i;
    for (int64_t u = unique - 1; u >= 0; u--) { /* downwards, so that none is overwritten before it is read */
        uint32_t end;
        memcpy(&end, cursor + u, sizeof end);
        ends[u] = begin + end;
    }
}

#endif
