/* The planner's de-duplication by itself: what swap.pyx runs of ec_dedup.h for one large table, with and
 * without the occurrence lists (CSR), so that they can be told apart from the rest of a plan. */
#include <stdlib.h>
#include <string.h>

#include "ec_phases.h"
#include "ec_threads.h"

/* A workspace for batches of one table, or NULL. */
void *dedup_new(int threads)
{
    ec_work *w = (ec_work *)calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->tables = 1;
    w->dedup_count = threads;
    w->seed[0] = 0x9E3779B97F4A7C15u;
    w->seed[1] = 0xD1B54A32D192ED03u;
    w->calls = (ec_dedup_call *)calloc(1, sizeof *w->calls);
    w->sides = (ec_side *)calloc(1, sizeof *w->sides); /* a cache that holds nothing: no short way */
    w->parts = (ec_part *)calloc(1, sizeof *w->parts);
    return w;
}

void dedup_delete(void *work)
{
    ec_work *w = (ec_work *)work;
    free(w->out.front);
    ec_work_free(w);
    free(w->sides);
    free(w->parts);
    free(w);
}

/* One thread: the plain way, as ec_dedup_plain(), which cannot leave the occurrence lists out. */
static int64_t dedup_plain(ec_work *w, int csr)
{
    ec_dedup_call *c = w->calls;
    if (csr)
        return ec_dedup_plain(c, w->dedup) == EC_OK ? c->unique : -1;
    if (ec_dedup_begin(w->dedup, c->n, c->expected) != EC_OK)
        return -1;
    return c->unique =
               ec_dedup_run(w->dedup, c->seed, 0, c->keys, NULL, c->n, c->inverse, c->unique_keys, NULL, c->counts);
}

/* Number of unique keys, or -1: out of memory, or a batch so small that the engine would not cut it. */
int64_t dedup_run(void *work, const int64_t *keys, int64_t n, int csr, int threads)
{
    ec_work *w = (ec_work *)work;
    const int64_t offsets[2] = {0, n};
    if (w->out.front != NULL && w->out.front_bytes >= ec_arrays_front_bytes(1, n)) {
        w->spare = w->out.front; /* as plans do with the arrays of those that have ended */
    } else {
        free(w->out.front);
    }
    w->out.front = NULL;
    if (n < EC_DEDUP_LARGE || ec_work_begin(w, keys, offsets, NULL, 1, threads) != EC_OK)
        return -1;
    if (w->plain.size > 0)
        return dedup_plain(w, csr);
    ec_dedup_call *call = w->cut = w->calls;
    w->dedup_status = EC_OK;
    if (threads == EC_HALVES) {
        ec_parallel_for(ec_phase_half_run, w, EC_HALVES, threads);
        if (w->dedup_status != EC_OK)
            return -1;
        ec_parallel_for(ec_phase_half_match, w, EC_HALVES, threads);
        ec_dedup_half_number(call);
        if (!csr) {
            ec_parallel_for(ec_phase_half_inverse, w, EC_HALVES, threads);
            return call->unique;
        }
        ec_parallel_for(ec_phase_half_inverse_and_ends, w, EC_HALVES + 1, threads);
        ec_parallel_for(ec_phase_half_order, w, EC_HALVES, threads);
        return call->unique;
    }
    ec_parallel_for(ec_phase_block_count_parts, w, call->blocks, threads);
    ec_dedup_layout(call);
    ec_parallel_for(ec_phase_block_scatter, w, call->blocks, threads);
    ec_parallel_for(ec_phase_part_run, w, EC_PARTS, threads);
    if (w->dedup_status != EC_OK)
        return -1;
    ec_dedup_number(call);
    ec_parallel_for(ec_phase_block_number, w, call->blocks, threads);
    ec_dedup_sum(call);
    ec_parallel_for(ec_phase_block_inverse, w, call->blocks, threads);
    if (csr)
        ec_parallel_for(ec_phase_part_order, w, EC_PARTS, threads);
    return call->unique;
}

/* The arrays of the last run; they live until the next one. */
const int64_t *dedup_unique(void *work) { return ((ec_work *)work)->key; }
const int64_t *dedup_inverse(void *work) { return ((ec_work *)work)->out.inverse; }
