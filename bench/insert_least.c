/* The least that inserting new keys into an empty table takes, whatever the table: every new page is touched, every initial value
 * made and stored, every key hashed once, every key and flag stored, and one cache line of an index read and written for each
 * key. All places are known beforehand; nothing is searched for, and no order has to be kept. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ec_hash.h"
#include "ec_init.h"
#include "ec_memory.h"

#define AHEAD 16

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *fresh(int64_t bytes) { return (char *)ec_map(ec_page_round((size_t)bytes)); }

static uint64_t place_of(int64_t i, uint64_t lines) { return (uint64_t)(((unsigned __int128)ec_splitmix((uint64_t)i) * lines) >> 64); }

/* Seconds of: a memset of `held` fresh bytes; initial values into fresh rows; the same into one row again and again; keys and
 * flags; hashes; index lines, their pages included. 0, or -1 where memory is refused. */
int insert_least(int64_t n, int64_t dim, int64_t lines, int64_t held, double seconds[6])
{
    const ec_init init = {12345, -0.05f, 0.05f, EC_INIT_UNIFORM};
    double begin = now();
    char *all = fresh(held);
    if (all == NULL)
        return -1;
    memset(all, 1, (size_t)held);
    seconds[0] = now() - begin;
    munmap(all, ec_page_round((size_t)held));

    uint32_t *places = (uint32_t *)malloc((size_t)n * sizeof *places);
    float *rows = (float *)fresh(n * dim * 4), *one = (float *)aligned_alloc(64, (size_t)dim * 4 + 64);
    int64_t *keys = (int64_t *)fresh(n * 8);
    uint8_t *flags = (uint8_t *)fresh(n);
    char *index = fresh(lines * 64);
    if (places == NULL || rows == NULL || one == NULL || keys == NULL || flags == NULL || index == NULL)
        return -1;
    for (int64_t i = 0; i < n; ++i)
        places[i] = (uint32_t)place_of(i, (uint64_t)lines);

    begin = now();
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n)
            __builtin_prefetch(rows + (i + AHEAD) * dim, 1);
        ec_init_row(&init, (uint64_t)i, rows + i * dim, dim);
    }
    seconds[1] = now() - begin;
    begin = now();
    for (int64_t i = 0; i < n; ++i)
        ec_init_row(&init, (uint64_t)i, one, dim);
    seconds[2] = now() - begin;
    begin = now();
    for (int64_t i = 0; i < n; ++i) {
        keys[i] = i;
        flags[i] = 1;
    }
    seconds[3] = now() - begin;
    begin = now();
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i)
        sum += ec_hash(keys[i]);
    *(volatile uint64_t *)one = sum;
    seconds[4] = now() - begin;
    begin = now();
    for (int64_t i = 0; i < n; ++i) {
        int64_t *line = (int64_t *)(index + 64 * (int64_t)places[i]);
        if (i + AHEAD < n)
            __builtin_prefetch(index + 64 * (int64_t)places[i + AHEAD], 1);
        line[line[7] & 3] = keys[i];
        line[7] += 1;
    }
    seconds[5] = now() - begin;
    munmap(rows, ec_page_round((size_t)(n * dim * 4)));
    munmap(keys, ec_page_round((size_t)(n * 8)));
    munmap(flags, ec_page_round((size_t)n));
    munmap(index, ec_page_round((size_t)(lines * 64)));
    free(places);
    free(one);
    return 0;
}
