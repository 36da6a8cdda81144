/* The arena: growable memory of fixed-size elements whose segments never move.
 *
 * Element r of an arena is found by shifts: segment sizes are log-linear, 8 segments for each doubling, so the last
 * segment is at most 1/8 of what lies before it (beyond the first few) and no table of sizes is needed. The first
 * segments are about 64 KiB, so a small table costs little; the largest are about 1 GiB. A segment is anonymous memory,
 * or a range of the backing's file.
 *
 * Thread safety: any number of readers of elements below `rows`, or one caller that grows.
 */
#ifndef EC_ARENA_H
#define EC_ARENA_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ec_backing.h"
#include "ec_memory.h"
#include "ec_status.h"

#define EC_SEGMENT_MIN ((int64_t)64 << 10)
#define EC_SEGMENT_MAX ((int64_t)1 << 30)

typedef struct ec_arena {
    char **segments;
    int64_t segment_count;
    int64_t segment_slots; /* length of `segments` */
    int64_t rows;          /* elements below this are mapped */
    int64_t stride;        /* bytes of an element */
    int shift;             /* the first segments hold 1 << shift elements */
    int growth;            /* the largest hold 1 << (shift + growth) */
    size_t bytes;          /* mapped */
    ec_backing *backing;   /* NULL: anonymous memory */
} ec_arena;

static void ec_arena_init(ec_arena *arena, int64_t stride)
{
    memset(arena, 0, sizeof *arena);
    arena->stride = stride;
    while (((int64_t)2 << arena->shift) * stride <= EC_SEGMENT_MIN)
        arena->shift += 1;
    while (((int64_t)2 << (arena->shift + arena->growth)) * stride <= EC_SEGMENT_MAX)
        arena->growth += 1;
}

/* Address of element `row`, which must be below arena->rows. */
static inline char *ec_arena_at(const ec_arena *arena, int64_t row)
{
    EC_ASSERT(row >= 0 && row < arena->rows);
    uint64_t unit = (uint64_t)row >> arena->shift;
    int doubling = 60 - __builtin_clzll(unit | 8);
    if (doubling > arena->growth)
        doubling = arena->growth;
    int64_t segment = ((int64_t)doubling << 3) + (int64_t)(unit >> doubling);
    int64_t within = row & (((int64_t)1 << (arena->shift + doubling)) - 1);
    return arena->segments[segment] + within * arena->stride;
}

/* Elements of segment `segment`. */
static inline int64_t ec_arena_segment_rows(const ec_arena *arena, int64_t segment)
{
    int64_t doubling = segment < 16 ? 0 : (segment >> 3) - 1;
    if (doubling > arena->growth)
        doubling = arena->growth;
    return (int64_t)1 << (arena->shift + doubling);
}

static inline size_t ec_arena_segment_bytes(const ec_arena *arena, int64_t segment)
{
    return ec_page_round((size_t)(ec_arena_segment_rows(arena, segment) * arena->stride));
}

/* Bytes that reserving `rows` elements would map. */
static size_t ec_arena_missing(const ec_arena *arena, int64_t rows)
{
    size_t missing = 0;
    int64_t covered = arena->rows;
    for (int64_t segment = arena->segment_count; covered < rows; ++segment) {
        missing += ec_arena_segment_bytes(arena, segment);
        covered += ec_arena_segment_rows(arena, segment);
    }
    return missing;
}

/* Bytes of the pages that lie wholly behind element rows - 1: of an arena that was used up to there they are address space
 * and no memory. Looks at the segments behind that element only, so that it may be asked at every step. */
static size_t ec_arena_unwritten(const ec_arena *arena, int64_t rows)
{
    size_t bytes = 0;
    int64_t end = arena->rows;
    for (int64_t segment = arena->segment_count - 1; segment >= 0 && end > rows; --segment) {
        const size_t whole = ec_arena_segment_bytes(arena, segment), page = whole >= EC_HUGE_BYTES ? EC_HUGE_BYTES : 4096;
        const int64_t begin = end - ec_arena_segment_rows(arena, segment);
        const size_t used = rows > begin ? ((size_t)(rows - begin) * (size_t)arena->stride + page - 1) / page * page : 0;
        bytes += used < whole ? whole - used : 0;
        end = begin;
    }
    return bytes;
}

/* Give segments back until `segment_count` are left. */
static void ec_arena_truncate(ec_arena *arena, int64_t segment_count)
{
    while (arena->segment_count > segment_count) {
        int64_t last = arena->segment_count - 1;
        size_t bytes = ec_arena_segment_bytes(arena, last);
        if (arena->backing == NULL)
            munmap(arena->segments[last], bytes);
        else
            ec_backing_free(arena->backing, arena->segments[last], bytes);
        arena->bytes -= bytes;
        arena->rows -= ec_arena_segment_rows(arena, last);
        arena->segment_count = last;
    }
}

/* A zeroed block for a segment: EC_OK, EC_NOMEM or EC_DISK. */
static int ec_arena_map(ec_arena *arena, size_t bytes, char **at)
{
    if (arena->backing == NULL) {
        *at = (char *)ec_map(bytes);
        return *at == NULL ? EC_NOMEM : EC_OK;
    }
    void *block = NULL;
    size_t held;
    const int status = ec_backing_alloc(arena->backing, bytes, &block, &held);
    *at = (char *)block;
    return status;
}

/* Map zeroed segments until `rows` elements are covered. EC_NOMEM and EC_DISK leave the arena as it was.
 * For anonymous memory the caller has claimed (ec_memory_claim) what is about to be mapped. */
static int ec_arena_reserve(ec_arena *arena, int64_t rows)
{
    int64_t before = arena->segment_count;
    while (arena->rows < rows) {
        int64_t segment = arena->segment_count;
        if (segment == arena->segment_slots) {
            int64_t slots = arena->segment_slots ? arena->segment_slots * 2 : 8;
            char **wider = (char **)ec_take(arena->segments, (size_t)slots * sizeof *wider);
            if (wider == NULL) {
                ec_arena_truncate(arena, before);
                return EC_NOMEM;
            }
            arena->segments = wider;
            arena->segment_slots = slots;
        }
        size_t bytes = ec_arena_segment_bytes(arena, segment);
        char *at;
        const int status = ec_arena_map(arena, bytes, &at);
        if (status != EC_OK) {
            ec_arena_truncate(arena, before);
            return status;
        }
        arena->segments[segment] = at;
        arena->segment_count = segment + 1;
        arena->rows += ec_arena_segment_rows(arena, segment);
        arena->bytes += bytes;
    }
    return EC_OK;
}

static void ec_arena_free(ec_arena *arena)
{
    ec_arena_truncate(arena, 0);
    free(arena->segments);
    arena->segments = NULL;
    arena->segment_slots = 0;
}

#endif
