/* Rows of plans on their way between host tables and the device buffer, for all tables of a collection at once.
 *
 * Where the device's memory is the host's, rows are copied between table rows and slots. Elsewhere they go through blocks of
 * staging memory, which the device copies from and to: per dim group one array of weights and one for each state array, behind
 * the slots of all rows, so that one copy and one scatter (or gather) an array serve all tables of the group.
 *
 * Rows that leave the device are under way until its copy into their block has ended and they have landed in the host table.
 * A batch that is planned meanwhile may want one of them: its host row is old. `ec_transit` knows them by table and row; who
 * gathers takes them from the block (promise I5). Where the device's copy has not ended they are noted, and served later.
 *
 * Tasks are spans of rows of one table. They touch disjoint rows and places, so nothing depends on threads.
 */
#ifndef EC_MOVES_H
#define EC_MOVES_H

#include "ec_rows.h"
#include "ec_vec.h"

#define EC_MOVE_SPAN 1024
#define EC_MOVE_PARTS 8
#define EC_MOVE_ALIGN 64

/* Tables of one dim and type, which share arrays. */
typedef struct ec_move_group {
    int64_t first, last;           /* tables */
    int64_t stride;                /* bytes of a row of weights */
    int64_t parts;                 /* state arrays */
    int64_t widths[EC_MOVE_PARTS]; /* floats of a row of each */
    void *weights;                 /* by slot, where the device's memory is the host's; else NULL */
    float *states[EC_MOVE_PARTS];
} ec_move_group;

/* Rows of a plan outside of the tables: row i of `rows` lies at slot `places[i]` of the group's arrays, or, where there are none,
 * in a block, in the order of the rows. */
typedef struct ec_move_list {
    const int64_t *rows;    /* of the host tables, table by table */
    const int64_t *places;  /* slots, or NULL: in `block` */
    const int64_t *offsets; /* table t's are offsets[t] .. offsets[t + 1] - 1 */
    char *block;
} ec_move_list;

/* A row that is wanted and under way: its place in the list of who wants it, and in the list of those under way. */
typedef struct ec_awaited {
    int64_t table, to, from;
} ec_awaited;

/* Rows that have left the device and not landed. */
typedef struct ec_transit {
    ec_move_list list;
    int64_t *index; /* places in the list by table and row: open addressing, -1 where empty */
    int64_t mask, room;
    ec_awaited *awaited; /* as many fit as rows are under way */
    int64_t awaited_room, awaited_count;
    int under_way; /* whether there are any */
    int arrived;   /* whether the block holds them, as the device's copy has ended */
} ec_transit;

typedef struct ec_moves {
    int64_t tables, groups;
    ec_table **table;
    int64_t *group_of; /* of each table */
    ec_move_group *group;
    int64_t *first_task; /* tables + 1, of the call under way */
    const ec_move_list *list;
    ec_transit *transit; /* to be looked into, or NULL */
} ec_moves;

static inline int64_t ec_move_aligned(int64_t bytes) { return (bytes + EC_MOVE_ALIGN - 1) & -(int64_t)EC_MOVE_ALIGN; }

/* Bytes of a block for rows cut into tables by `offsets`: the slots, then each group's arrays. `group` >= 0: bytes before its arrays;
 * with `part` > 0, before its state array number part - 1. */
static int64_t ec_move_bytes(const ec_moves *m, const int64_t *offsets, int64_t group, int64_t part)
{
    int64_t at = ec_move_aligned(offsets[m->tables] * 8);
    for (int64_t g = 0; g < m->groups; ++g) {
        const ec_move_group *of = &m->group[g];
        const int64_t rows = offsets[of->last] - offsets[of->first];
        for (int64_t p = 0; p <= of->parts; ++p) {
            if (g == group && p == part)
                return at;
            at += ec_move_aligned(rows * (p == 0 ? of->stride : of->widths[p - 1] * 4));
        }
    }
    return at;
}

/* Where rows `begin` .. of table t's part of the list lie, as element 0 .. of the buffer. */
static ec_rows_buffer ec_move_buffer(const ec_moves *m, const ec_move_list *list, int64_t t, int64_t begin, float **states)
{
    const ec_move_group *of = &m->group[m->group_of[t]];
    ec_rows_buffer buffer = {.stride = of->stride, .type = m->table[t]->type, .states = states, .widths = of->widths,
                             .parts = of->parts, .home = 1};
    if (list->places != NULL) {
        buffer.places = list->places + begin;
        buffer.weights = of->weights;
        for (int64_t p = 0; p < of->parts; ++p)
            states[p] = of->states[p];
        return buffer;
    }
    const int64_t before = begin - list->offsets[of->first];
    buffer.weights = list->block + ec_move_bytes(m, list->offsets, m->group_of[t], 0) + before * of->stride;
    for (int64_t p = 0; p < of->parts; ++p)
        states[p] = (float *)(list->block + ec_move_bytes(m, list->offsets, m->group_of[t], p + 1)) + before * of->widths[p];
    return buffer;
}

/* -------------------------------------------------------------------------------------------------------- under way */

static inline uint64_t ec_transit_hash(int64_t t, int64_t row)
{
    const uint64_t mixed = ((uint64_t)row + ((uint64_t)t << 40)) * 0x9E3779B97F4A7C15ull;
    return mixed ^ (mixed >> 32);
}

/* Place in the list of a row that is under way, or -1. */
static inline int64_t ec_transit_find(const ec_transit *w, int64_t t, int64_t row)
{
    for (uint64_t at = ec_transit_hash(t, row);; ++at) {
        const int64_t i = w->index[at & (uint64_t)w->mask];
        if (i < 0)
            return -1;
        if (w->list.rows[i] == row && i >= w->list.offsets[t] && i < w->list.offsets[t + 1])
            return i;
    }
}

/* Room for `count` rows under way. */
static int ec_transit_reserve(ec_transit *w, int64_t count)
{
    if (count > w->awaited_room) {
        ec_awaited *awaited = ec_take(w->awaited, (size_t)(2 * count) * sizeof *awaited);
        if (awaited == NULL)
            return EC_NOMEM;
        w->awaited = awaited;
        w->awaited_room = 2 * count;
    }
    int64_t slots = 64;
    while (slots < 2 * count)
        slots *= 2;
    if (slots > w->room) {
        int64_t *index = ec_take(w->index, (size_t)slots * sizeof *index);
        if (index == NULL)
            return EC_NOMEM;
        w->index = index;
        w->room = slots;
    }
    w->mask = slots - 1;
    return EC_OK;
}

/* The rows of a list set out, into its block; there is room. */
static void ec_transit_begin(ec_transit *w, const ec_moves *m, const ec_move_list *list)
{
    w->list = *list;
    memset(w->index, 0xFF, (size_t)(w->mask + 1) * sizeof *w->index);
    for (int64_t t = 0; t < m->tables; ++t) {
        for (int64_t i = list->offsets[t]; i < list->offsets[t + 1]; ++i) {
            uint64_t at = ec_transit_hash(t, list->rows[i]);
            while (w->index[at & (uint64_t)w->mask] >= 0)
                ++at;
            w->index[at & (uint64_t)w->mask] = i;
        }
    }
    w->awaited_count = 0;
    w->arrived = 0;
    w->under_way = 1;
}

/* Copy one row from where it is under way into a list's block. */
static void ec_transit_serve(const ec_transit *w, const ec_moves *m, const ec_move_list *list, const ec_awaited *one)
{
    float *from_states[EC_MOVE_PARTS], *to_states[EC_MOVE_PARTS];
    const ec_rows_buffer from = ec_move_buffer(m, &w->list, one->table, one->from, from_states);
    const ec_rows_buffer to = ec_move_buffer(m, list, one->table, one->to, to_states);
    memcpy(to.weights, from.weights, (size_t)to.stride);
    for (int64_t p = 0; p < to.parts; ++p)
        memcpy(to_states[p], from_states[p], (size_t)to.widths[p] * sizeof(float));
}

/* --------------------------------------------------------------------------------------------------------------- tasks */

/* Cut a list into tasks; returns their number. */
static int64_t ec_moves_begin(ec_moves *m, const ec_move_list *list, ec_transit *transit)
{
    m->list = list;
    m->transit = transit;
    m->first_task[0] = 0;
    for (int64_t t = 0; t < m->tables; ++t) {
        const int64_t rows = list->offsets[t + 1] - list->offsets[t];
        m->first_task[t + 1] = m->first_task[t] + (rows + EC_MOVE_SPAN - 1) / EC_MOVE_SPAN;
    }
    return m->first_task[m->tables];
}

/* The table of a task, and its span of the list. */
static int64_t ec_moves_span(const ec_moves *m, int64_t task, int64_t *begin, int64_t *count)
{
    int64_t low = 0, high = m->tables;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (m->first_task[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    *begin = m->list->offsets[low] + (task - m->first_task[low]) * EC_MOVE_SPAN;
    const int64_t rest = m->list->offsets[low + 1] - *begin;
    *count = rest < EC_MOVE_SPAN ? rest : EC_MOVE_SPAN;
    return low;
}

/* Into the tables. */
static void ec_moves_home_task(void *context, int64_t task)
{
    const ec_moves *m = context;
    float *states[EC_MOVE_PARTS];
    int64_t begin, count;
    const int64_t t = ec_moves_span(m, task, &begin, &count);
    const ec_rows_buffer buffer = ec_move_buffer(m, m->list, t, begin, states);
    ec_write_share(m->table[t], m->list->rows + begin, count, &buffer, 0, 1);
}

/* Out of the tables; rows that are under way from where they are, or noted as awaited. */
static void ec_moves_fetch_task(void *context, int64_t task)
{
    const ec_moves *m = context;
    ec_transit *w = m->transit;
    float *states[EC_MOVE_PARTS];
    int64_t begin, count, host[EC_MOVE_SPAN];
    const int64_t t = ec_moves_span(m, task, &begin, &count);
    const int64_t *rows = m->list->rows + begin;
    const ec_rows_buffer buffer = ec_move_buffer(m, m->list, t, begin, states);
    if (w != NULL && w->list.offsets[t + 1] > w->list.offsets[t]) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t from = ec_transit_find(w, t, rows[i]);
            host[i] = from < 0 ? rows[i] : -1; /* negative ones are passed over */
            if (from < 0)
                continue;
            const ec_awaited one = {t, begin + i, from};
            if (w->arrived)
                ec_transit_serve(w, m, m->list, &one);
            else
                w->awaited[__atomic_fetch_add(&w->awaited_count, 1, __ATOMIC_RELAXED)] = one;
        }
        rows = host;
    }
    ec_read_span(m->table[t], rows, 0, count, &buffer, 0);
}

#endif
