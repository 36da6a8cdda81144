/* The row kernels: contexts that a door fills, task functions that threads run, checks that make bad indexes harmless.
 *
 * A task is a contiguous range of rows, bags or uniques, found from its number alone; tasks write disjoint memory, so
 * a result does not depend on who runs them (I9). Each kernel is one always-inlined body with a baseline and an AVX2
 * clone. Rows are prefetched a fixed distance ahead.
 */
#ifndef EC_KERNELS_H
#define EC_KERNELS_H

#include <stdlib.h>

#include "ec_rowmath.h"

typedef void (*ec_kernel_fn)(void *context, int64_t task);

/* Defines NAME_baseline, NAME_avx2 and NAME_pick(avx2) from NAME_body(CONTEXT *, int64_t task, const int avx2). */
#define EC_DEFINE_KERNEL(NAME, CONTEXT)                                                                               \
    static void NAME##_baseline(void *context, int64_t task) { NAME##_body((CONTEXT *)context, task, 0); }            \
    EC_TARGET_AVX2 static void NAME##_avx2(void *context, int64_t task) { NAME##_body((CONTEXT *)context, task, 1); } \
    static inline ec_kernel_fn NAME##_pick(int avx2) { return avx2 ? NAME##_avx2 : NAME##_baseline; }

/* ------------------------------------------------------------------------------------------------------- checks */

/* Place of the first value outside [low, high), or -1. Branch-free until something is wrong: about 0.3 ns a value. */
static inline int64_t ec_find_outside(const int64_t *values, int64_t count, int64_t low, int64_t high) {
    uint64_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t value = (uint64_t)values[i];
        /* With 0 <= low and high: a negative value shows in its own sign, the others in the two differences. */
        bad |= value | (value - (uint64_t)low) | ((uint64_t)high - 1 - value);
    }
    if (!(bad >> 63)) return -1;
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < low || values[i] >= high) return i;
    }
    return -1;
}

/* Place of the first offset that is negative, below its predecessor or above `limit`, or -1. */
static inline int64_t ec_find_unordered(const int64_t *offsets, int64_t count, int64_t limit) {
    uint64_t bad = 0, previous = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t value = (uint64_t)offsets[i];
        bad |= value | (value - previous) | ((uint64_t)limit - value);
        previous = value;
    }
    if (!(bad >> 63)) return -1;
    int64_t before = 0;
    for (int64_t i = 0; i < count; i++) {
        if (offsets[i] < before || offsets[i] > limit) return i;
        before = offsets[i];
    }
    return -1;
}

/* First of the `task_count` equal shares of `count` items that belongs to `task`. */
EC_ROW_FN int64_t ec_share(int64_t count, int64_t task, int64_t task_count) {
    return count / task_count * task + (count % task_count) * task / task_count;
}

/* First segment of a task when both the segments and what they hold are work: splits offsets[s] + s evenly. */
EC_ROW_FN int64_t ec_segment_share(const int64_t *offsets, int64_t count, int64_t task, int64_t task_count) {
    const int64_t target = ec_share(offsets[count] - offsets[0] + count, task, task_count);
    int64_t low = 0, high = count;
    if (task >= task_count) return count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (offsets[middle] - offsets[0] + middle < target) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* ------------------------------------------------------------------------------------------------ moving whole rows */

typedef struct {
    char *weights;
    const int64_t *slots;
    const int64_t *inverse;  /* item i uses slots[inverse[i]]; NULL: slots[i] */
    char *rows;              /* scatter, add: source; gather: destination */
    int64_t count;
    int64_t dim;
    int64_t weight_bytes;    /* of a row of `weights` */
    int64_t row_bytes;       /* of one of `rows` */
    int type;                /* of `weights` */
    int row_type;            /* of `rows`: the same, copied bit by bit, or EC_FLOAT32 */
    int64_t task_count;
} ec_move;

EC_ROW_FN char *ec_move_row(const ec_move *move, int64_t item) {
    return move->weights + (move->inverse ? move->slots[move->inverse[item]] : move->slots[item]) * move->weight_bytes;
}

/* Asks for the `burst` rows from item `from` on. */
EC_ROW_FN void ec_move_ask(const ec_move *move, int64_t from, int64_t burst, int64_t end) {
    for (int64_t i = from; i < from + burst && i < end; i++) ec_prefetch_row(ec_move_row(move, i), move->weight_bytes);
}

EC_ROW_FN void ec_gather_body(const ec_move *move, int64_t task, const int avx2) {
    const int64_t first = ec_share(move->count, task, move->task_count);
    const int64_t last = ec_share(move->count, task + 1, move->task_count);
    const int64_t bytes = move->weight_bytes, burst = ec_burst(bytes, 1);
    ec_move_ask(move, first, burst, last);
    for (int64_t i = first; i < last; i++) {
        if ((i - first) % burst == 0) ec_move_ask(move, i + burst, burst, last);
        char *out = move->rows + i * move->row_bytes;
        if (move->type == move->row_type) memcpy(out, ec_move_row(move, i), (size_t)bytes);
        else ec_widen((float *)out, ec_move_row(move, i), move->type, move->dim, avx2);
    }
}

EC_ROW_FN void ec_scatter_body(const ec_move *move, int64_t task, const int avx2) {
    const int64_t first = ec_share(move->count, task, move->task_count);
    const int64_t last = ec_share(move->count, task + 1, move->task_count);
    const int64_t bytes = move->weight_bytes, burst = ec_burst(bytes, 1);
    ec_move_ask(move, first, burst, last);
    for (int64_t i = first; i < last; i++) {
        if ((i - first) % burst == 0) ec_move_ask(move, i + burst, burst, last);
        const char *row = move->rows + i * move->row_bytes;
        if (move->type == move->row_type) memcpy(ec_move_row(move, i), row, (size_t)bytes);
        else ec_narrow(ec_move_row(move, i), (const float *)row, move->type, move->dim, avx2);
    }
}

/* float32 only: what is added to is a sum of gradients. */
EC_ROW_FN void ec_add_body(const ec_move *move, int64_t task, const int avx2) {
    const int64_t first = ec_share(move->count, task, move->task_count);
    const int64_t last = ec_share(move->count, task + 1, move->task_count);
    const int64_t bytes = move->weight_bytes, burst = ec_burst(bytes, 1);
    ec_move_ask(move, first, burst, last);
    for (int64_t i = first; i < last; i++) {
        if ((i - first) % burst == 0) ec_move_ask(move, i + burst, burst, last);
        ec_add_row((float *)ec_move_row(move, i), (const float *)(move->rows + i * move->row_bytes), move->dim);
    }
}

EC_DEFINE_KERNEL(ec_gather, const ec_move)
EC_DEFINE_KERNEL(ec_scatter, const ec_move)
EC_DEFINE_KERNEL(ec_add, const ec_move)

/* --------------------------------------------------------------------------------------------------------- bags */

typedef struct {
    const void *weights;
    int type;                    /* of `weights` */
    const int64_t *slots;
    const int64_t *inverse;
    const int64_t *bag_offsets;  /* bag f * batch_size + b holds positions bag_offsets[bag] .. bag_offsets[bag + 1] */
    const int64_t *out_cols;     /* first column of each feature */
    const uint8_t *feature_mean;
    const float *coefs;          /* per-sample weight of each position, or NULL */
    const float *grad;           /* per-sample-weight gradient: [batch_size, width] */
    float *out;                  /* forward: [batch_size, width]; per-sample-weight gradient: one a position */
    int64_t *sources;            /* of each position from bag_offsets[0] on: where its bag starts in [batch_size, width] */
    float *factors;              /* of each position: what its row is multiplied with, or NULL where that is 1 */
    int64_t batch_size;
    int64_t bag_count;
    int64_t width;
    int64_t dim;
    int64_t task_count;
} ec_bags;

/* The rows of positions, those before `end` to be looked at. */
EC_ROW_FN ec_items ec_bags_items(const ec_bags *bags, int64_t end) {
    const int64_t bytes = bags->dim * ec_type_bytes(bags->type);
    const ec_items items = {.base = bags->weights, .ids = bags->inverse, .places = bags->slots, .coefs = bags->coefs,
                            .stride = bytes, .dim = bags->dim, .row_bytes = bytes,
                            .ahead = ec_prefetch_distance(bytes, 1), .end = end};
    return items;
}

EC_ROW_FN void ec_pool_body(const ec_bags *bags, int64_t task, const int avx2) {
    const int64_t *offsets = bags->bag_offsets;
    const int64_t dim = bags->dim;
    const int64_t first = ec_segment_share(offsets, bags->bag_count, task, bags->task_count);
    const int64_t last = ec_segment_share(offsets, bags->bag_count, task + 1, bags->task_count);
    if (first >= last) return;
    const ec_items items = ec_bags_items(bags, offsets[last]);
    const int64_t burst = ec_burst(items.row_bytes, 1);
    int64_t asked = offsets[first]; /* positions before this were asked for */
    ec_prefetch_first(&items, asked);
    int64_t feature = first / bags->batch_size, sample = first % bags->batch_size;
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t start = offsets[bag], end = offsets[bag + 1];
        float *out = bags->out + sample * bags->width + bags->out_cols[feature];
        if (start == end) {
            memset(out, 0, (size_t)dim * 4);
        } else if (end - start == 1 && !items.coefs) {
            if (start + burst > asked) asked = ec_items_ask(&items, asked > start ? asked : start, start + 2 * burst);
            ec_give_row(out, ec_item_row(&items, start, 1), bags->type, dim, avx2);
        } else {
            if (end + items.ahead > asked) asked = end + items.ahead; /* the sum asks for them */
            /* By block, so that the columns of a long row find the item's place in the cache. */
            for (int64_t at = start; at < end; at += EC_SUM_BLOCK) {
                const int64_t stop = end - at < EC_SUM_BLOCK ? end : at + EC_SUM_BLOCK;
                ec_sum_rows(out, &items, bags->type, at, stop, at > start, avx2);
            }
        }
        if (bags->feature_mean[feature] && end - start > 1) ec_divide_row(out, (float)(end - start), dim);
        if (++sample == bags->batch_size) {
            sample = 0;
            feature++;
        }
    }
}

EC_ROW_FN void ec_coef_grad_body(const ec_bags *bags, int64_t task, const int avx2) {
    const int64_t *offsets = bags->bag_offsets;
    const int64_t dim = bags->dim;
    const int64_t first = ec_segment_share(offsets, bags->bag_count, task, bags->task_count);
    const int64_t last = ec_segment_share(offsets, bags->bag_count, task + 1, bags->task_count);
    if (first >= last) return;
    const ec_items items = ec_bags_items(bags, offsets[last]);
    float wide[EC_MAX_DIM];
    ec_prefetch_first(&items, offsets[first]);
    int64_t feature = first / bags->batch_size, sample = first % bags->batch_size;
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t start = offsets[bag], end = offsets[bag + 1];
        const float *grad = bags->grad + sample * bags->width + bags->out_cols[feature];
        const float divisor = bags->feature_mean[feature] && end > start ? (float)(end - start) : 1.0f;
        for (int64_t at = start; at < end; at++) {
            const void *row = ec_lone_row(&items, at);
            if (bags->type != EC_FLOAT32) ec_widen(wide, row, bags->type, dim, avx2);
            bags->out[at - offsets[0]] = ec_dot(grad, bags->type == EC_FLOAT32 ? (const float *)row : wide, dim) / divisor;
        }
        if (++sample == bags->batch_size) {
            sample = 0;
            feature++;
        }
    }
}

/* Turns bags into a gradient source and a factor for each position: what the backward pass reads in key order. */
EC_ROW_FN void ec_sources_body(const ec_bags *bags, int64_t task, const int avx2) {
    const int64_t *offsets = bags->bag_offsets;
    const int64_t first = ec_segment_share(offsets, bags->bag_count, task, bags->task_count);
    const int64_t last = ec_segment_share(offsets, bags->bag_count, task + 1, bags->task_count);
    if (first >= last) return;
    int64_t feature = first / bags->batch_size, sample = first % bags->batch_size;
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t start = offsets[bag] - offsets[0], end = offsets[bag + 1] - offsets[0];
        const int64_t source = sample * bags->width + bags->out_cols[feature];
        for (int64_t at = start; at < end; at++) bags->sources[at] = source;
        if (bags->factors) {
            const float divisor = bags->feature_mean[feature] ? (float)(end - start) : 1.0f;
            for (int64_t at = start; at < end; at++) {
                bags->factors[at] = (bags->coefs ? bags->coefs[at + offsets[0]] : 1.0f) / divisor;
            }
        }
        if (++sample == bags->batch_size) {
            sample = 0;
            feature++;
        }
    }
}

EC_DEFINE_KERNEL(ec_pool, const ec_bags)
EC_DEFINE_KERNEL(ec_coef_grad, const ec_bags)
EC_DEFINE_KERNEL(ec_sources, const ec_bags)

/* --------------------------------------------------------------------------------- gradients of uniques, updates */

/* Uniques with more occurrences than this are added up by block in parallel; a matter of speed, never of value. */
#define EC_HOT_OCCURRENCES (4 * EC_SUM_BLOCK)
#define EC_HOT_BLOCKS_A_TASK 4

typedef struct {
    const float *grad;
    const int64_t *sources;      /* of each position from first_position on: offset into grad; NULL: row of its number */
    const float *factors;        /* of each position; NULL: 1 */
    const int64_t *order;        /* positions, unique by unique */
    const int64_t *offsets;      /* unique u has order[offsets[u]] .. order[offsets[u + 1]] */
    const int64_t *slots;        /* of each unique; updates only */
    const uint8_t *admitted;     /* of each unique, or NULL: all are */
    float *out;                  /* [stop - start, dim], or NULL: apply the rule at once */
    const float *rows;           /* two-step update: gradient of unique u at rows + (u - start) * dim */
    char *weights;
    int type;                    /* of `weights` */
    int64_t weight_bytes;        /* of a row of them */
    float *state0, *state1;      /* not NULL: `weights` where the rule has no such array */
    int64_t width0, width1;      /* floats a row in each state array, 0 where there is none */
    const ec_rule *rule;
    int64_t first_position;
    int64_t start, stop;         /* range of uniques */
    int64_t dim;
    int64_t task_count;
    int64_t hot_count;           /* uniques whose block partials are ready in `partials` */
    const int64_t *hot_uniques;  /* ascending */
    const int64_t *hot_blocks;   /* first partial of each; hot_count + 1 */
    float *partials;
} ec_segments;

/* Admitted uniques with many occurrences; fills `uniques` and `blocks` (may be NULL) and returns their number. */
static inline int64_t ec_hot_uniques(const ec_segments *seg, int64_t *uniques, int64_t *blocks) {
    int64_t count = 0, block = 0;
    for (int64_t u = seg->start; u < seg->stop; u++) {
        const int64_t occurrences = seg->offsets[u + 1] - seg->offsets[u];
        if (occurrences <= EC_HOT_OCCURRENCES || (seg->admitted && !seg->admitted[u])) continue;
        if (uniques) {
            uniques[count] = u;
            blocks[count] = block;
        }
        block += (occurrences + EC_SUM_BLOCK - 1) / EC_SUM_BLOCK;
        count++;
    }
    if (blocks) blocks[count] = block;
    return count;
}

/* The gradients of occurrences, those before `end` to be looked at. */
EC_ROW_FN ec_items ec_segments_items(const ec_segments *seg, int64_t end) {
    const int64_t bytes = seg->dim * 4;
    const ec_items items = {.base = (const char *)seg->grad, .ids = seg->order, .places = seg->sources,
                            .coefs = seg->factors, .id_base = seg->first_position, .stride = seg->sources ? 4 : bytes,
                            .dim = seg->dim, .row_bytes = bytes, .ahead = ec_prefetch_distance(bytes, 1), .end = end,
                            .coefs_by_id = seg->factors != NULL};
    return items;
}

/* Partial sums of the blocks of hot uniques; a task is EC_HOT_BLOCKS_A_TASK blocks. */
EC_ROW_FN void ec_hot_body(const ec_segments *seg, int64_t task, const int avx2) {
    const int64_t total = seg->hot_blocks[seg->hot_count];
    const int64_t first = task * EC_HOT_BLOCKS_A_TASK;
    const int64_t last = total - first < EC_HOT_BLOCKS_A_TASK ? total : first + EC_HOT_BLOCKS_A_TASK;
    int64_t hot = 0;
    while (seg->hot_blocks[hot + 1] <= first) hot++;
    for (int64_t block = first; block < last; block++) {
        while (seg->hot_blocks[hot + 1] <= block) hot++;
        const int64_t unique = seg->hot_uniques[hot], end = seg->offsets[unique + 1];
        const int64_t at = seg->offsets[unique] + (block - seg->hot_blocks[hot]) * EC_SUM_BLOCK;
        const int64_t stop = end - at < EC_SUM_BLOCK ? end : at + EC_SUM_BLOCK;
        const ec_items items = ec_segments_items(seg, end);
        EC_CLONE_OF(ec_sum_items, avx2)(seg->partials + block * seg->dim, &items, at, stop, 0);
    }
}

/* Asks for the rows that the updates of the `burst` uniques from `from` on change. */
EC_ROW_FN void ec_updated_ask(const ec_segments *seg, int64_t from, int64_t burst, int64_t end) {
    for (int64_t u = from; u < from + burst && u < end; u++) {
        if (seg->admitted && !seg->admitted[u]) continue;
        const int64_t slot = seg->slots[u];
        ec_prefetch_row(seg->weights + slot * seg->weight_bytes, seg->weight_bytes);
        if (seg->width0) ec_prefetch_row(seg->state0 + slot * seg->width0, seg->width0 * 4);
        if (seg->width1) ec_prefetch_row(seg->state1 + slot * seg->width1, seg->width1 * 4);
    }
}

EC_ROW_FN void ec_update_unique(const ec_segments *seg, int64_t unique, const float *grad, const int avx2) {
    const int64_t slot = seg->slots[unique];
    char *weights = seg->weights + slot * seg->weight_bytes;
    float *state0 = seg->state0 + slot * seg->width0, *state1 = seg->state1 + slot * seg->width1;
    if (seg->type == EC_FLOAT32) {
        EC_CLONE_OF(ec_update_row, avx2)(seg->rule, (float *)weights, state0, state1, grad, seg->dim);
    } else {
        EC_CLONE_OF(ec_update_narrow, avx2)(seg->rule, weights, seg->type, state0, state1, grad, seg->dim);
    }
}

EC_ROW_FN void ec_segment_body(const ec_segments *seg, int64_t task, const int avx2) {
    const int64_t *offsets = seg->offsets + seg->start;
    const int64_t unique_count = seg->stop - seg->start;
    const int64_t first = seg->start + ec_segment_share(offsets, unique_count, task, seg->task_count);
    const int64_t last = seg->start + ec_segment_share(offsets, unique_count, task + 1, seg->task_count);
    const int64_t dim = seg->dim;
    const int fused = seg->out == NULL;
    const int64_t burst = ec_burst(dim * 4, 1 + (seg->width0 == dim) + (seg->width1 == dim));
    float sum[EC_MAX_DIM], partial[EC_MAX_DIM];
    if (first >= last) return;
    const ec_items items = ec_segments_items(seg, seg->offsets[last]);
    int64_t hot = 0;
    ec_prefetch_first(&items, seg->offsets[first]);
    while (hot < seg->hot_count && seg->hot_uniques[hot] < first) hot++;
    if (fused) ec_updated_ask(seg, first, burst, last);
    for (int64_t u = first; u < last; u++) {
        const int64_t start = seg->offsets[u], end = seg->offsets[u + 1];
        float *total = fused ? sum : seg->out + (u - seg->start) * dim;
        const float *grad = total;
        if (fused && (u - first) % burst == 0) ec_updated_ask(seg, u + burst, burst, last);
        if (hot < seg->hot_count && seg->hot_uniques[hot] == u) {
            const float *ready = seg->partials + seg->hot_blocks[hot] * dim;
            const int64_t blocks = seg->hot_blocks[hot + 1] - seg->hot_blocks[hot];
            ec_copy_row(total, ready, dim);
            for (int64_t block = 1; block < blocks; block++) ec_add_row(total, ready + block * dim, dim);
            hot++;
        } else if (start == end || (seg->admitted && !seg->admitted[u])) {
            memset(total, 0, (size_t)dim * 4);
        } else if (end - start == 1 && !items.coefs) {
            grad = ec_lone_row(&items, start);
            if (!fused) ec_copy_row(total, grad, dim);
        } else {
            for (int64_t at = start; at < end; at += EC_SUM_BLOCK) {
                const int64_t stop = end - at < EC_SUM_BLOCK ? end : at + EC_SUM_BLOCK;
                EC_CLONE_OF(ec_sum_items, avx2)(at == start ? total : partial, &items, at, stop, 0);
                if (at > start) ec_add_row(total, partial, dim);
            }
        }
        if (fused && (!seg->admitted || seg->admitted[u])) ec_update_unique(seg, u, grad, avx2);
    }
}

/* Second step of the two-step path: gradients are there already. */
EC_ROW_FN void ec_update_body(const ec_segments *seg, int64_t task, const int avx2) {
    const int64_t count = seg->stop - seg->start;
    const int64_t first = seg->start + ec_share(count, task, seg->task_count);
    const int64_t last = seg->start + ec_share(count, task + 1, seg->task_count);
    const int64_t dim = seg->dim;
    const int64_t burst = ec_burst(dim * 4, 1 + (seg->width0 == dim) + (seg->width1 == dim));
    ec_updated_ask(seg, first, burst, last);
    for (int64_t u = first; u < last; u++) {
        if ((u - first) % burst == 0) ec_updated_ask(seg, u + burst, burst, last);
        if (!seg->admitted || seg->admitted[u]) ec_update_unique(seg, u, seg->rows + (u - seg->start) * dim, avx2);
    }
}

EC_DEFINE_KERNEL(ec_hot, const ec_segments)
EC_DEFINE_KERNEL(ec_segment, const ec_segments)
EC_DEFINE_KERNEL(ec_update, const ec_segments)

#endif
