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

/* Groups the positions of table t by unique: a counting sort, with the ends of the groups as its cursors. */
static void ec_phase_group(void *context, int64_t t) {
    const ec_grouping *g = (const ec_grouping *)context;
    if (!g->parts[t].quick) return;
    const ec_arrays *o = g->out;
    const int64_t *restrict inverse = o->inverse;
    int64_t *restrict order = o->order, *restrict ends = o->segment_offsets + 1;
    const int64_t begin = o->table_offsets[t], stop = o->table_offsets[t + 1];
    const int64_t first = o->unique_offsets[t], last = o->unique_offsets[t + 1];
    const int64_t far = last - first >= EC_GROUP_FAR && stop - begin > EC_GROUP_AHEAD ? stop - EC_GROUP_AHEAD : begin;
    int64_t total = begin;
    memset(ends + first, 0, (size_t)(last - first) * sizeof *ends);
    for (int64_t i = begin; i < far; i++) {
        EC_PREFETCH_WRITE(&ends[inverse[i + EC_GROUP_AHEAD]]);
        ends[inverse[i]]++;
    }
    for (int64_t i = far; i < stop; i++) ends[inverse[i]]++;
    for (int64_t u = first; u < last; u++) {
        const int64_t count = ends[u];
        ends[u] = total;
        total += count;
    }
    for (int64_t i = begin; i < far; i++) {
        EC_PREFETCH_WRITE(&ends[inverse[i + EC_GROUP_AHEAD]]);
        order[ends[inverse[i]]++] = i;
    }
    for (int64_t i = far; i < stop; i++) order[ends[inverse[i]]++] = i;
}

#endif
