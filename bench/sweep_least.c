/* The least that a sweep takes, whatever the planner: a look at every row's flag and counters, and for each row that goes a read
 * of its key and count, a change of one index line, a record of 64 bytes that is written in the plan and read when it finishes, and
 * a link of the list of free rows in place of its key. All places are known beforehand; nothing is searched for, and no order kept. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ec_hash.h"
#include "ec_memory.h"

#define BLOCK 64  /* rows whose index lines are asked for at once */
#define SLICE 32768 /* rows that go in one plan */

/* CPU seconds of this thread. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
    const uint8_t *flags;
    const int64_t *last, *counts; /* counts NULL: not looked at */
    int64_t from, to, found;
    double seconds;
} look;

static void *look_at(void *context)
{
    look *l = (look *)context;
    const double begin = now();
    int64_t found = 0;
    for (int64_t i = l->from; i < l->to; i += 128) {
        uint8_t some = 0;
        int64_t old = 0;
        for (int64_t j = i; j < i + 128; ++j)
            some = (uint8_t)(some + (l->flags[j] & 1));
        for (int64_t j = i; j < i + 128; ++j)
            old += l->last[j] ^ (l->counts == NULL ? 0 : l->counts[j]);
        found += some + (old & 1);
    }
    l->found = found;
    l->seconds = now() - begin;
    return NULL;
}

/* Seconds of one look at `n` rows by `threads` threads: those of the slowest. */
static double looks(const uint8_t *flags, const int64_t *last, const int64_t *counts, int64_t n, int threads)
{
    look parts[2];
    pthread_t other;
    for (int i = 0; i < threads; ++i)
        parts[i] = (look){flags, last, counts, n / 128 * i / threads * 128, n / 128 * (i + 1) / threads * 128, 0, 0};
    if (threads == 2 && pthread_create(&other, NULL, look_at, &parts[1]) != 0)
        return -1;
    look_at(&parts[0]);
    if (threads == 2)
        pthread_join(other, NULL);
    return threads == 2 && parts[1].seconds > parts[0].seconds ? parts[1].seconds : parts[0].seconds;
}

static int64_t sink;

static double take(int64_t *keys, const int64_t *counts, char *index, const uint32_t *lines, const int64_t *rows, int64_t dead)
{
    int64_t(*journal)[8] = malloc(sizeof(int64_t[8]) * SLICE), head = -1, sum = 0;
    if (journal == NULL)
        return -1;
    memset(journal, 0, sizeof(int64_t[8]) * SLICE);
    const double begin = now();
    for (int64_t first = 0; first < dead; first += SLICE) {
        const int64_t size = dead - first < SLICE ? dead - first : SLICE;
        for (int64_t i = 0; i < size + BLOCK; i += BLOCK) {
            for (int64_t j = i; j < i + BLOCK && j < size; ++j)
                __builtin_prefetch(index + 64 * (int64_t)lines[first + j], 1);
            for (int64_t j = i - BLOCK; j >= 0 && j < i && j < size; ++j) {
                const int64_t row = rows[first + j], key = keys[row];
                sum += (int64_t)ec_hash(key) ^ counts[row];
                *(int64_t *)(index + 64 * (int64_t)lines[first + j]) += 1;
                journal[j][0] = key;
                journal[j][7] = row;
            }
        }
        for (int64_t j = 0; j < size; ++j) {
            const int64_t row = journal[j][7];
            keys[row] = head;
            head = row;
        }
    }
    const double seconds = now() - begin;
    sink = sum;
    free(journal);
    return seconds;
}

/* Seconds of: a look at flags and timestamps; at counts too; the latter by two threads; taking `dead` of the rows away, whose index has
 * `lines` lines. 0, or -1 where memory is refused. */
int sweep_least(int64_t n, int64_t dead, int64_t lines, double seconds[4])
{
    const size_t column = ec_page_round((size_t)n * 8);
    int64_t *keys = (int64_t *)ec_map(column), *last = (int64_t *)ec_map(column), *counts = (int64_t *)ec_map(column);
    uint8_t *flags = (uint8_t *)ec_map(ec_page_round((size_t)n));
    char *index = (char *)ec_map(ec_page_round((size_t)lines * 64));
    uint32_t *places = malloc((size_t)dead * sizeof *places);
    int64_t *rows = malloc((size_t)dead * sizeof *rows);
    if (keys == NULL || last == NULL || counts == NULL || flags == NULL || index == NULL || places == NULL || rows == NULL)
        return -1;
    for (int64_t i = 0; i < n; ++i)
        keys[i] = counts[i] = last[i] = (int64_t)ec_splitmix((uint64_t)i);
    memset(flags, 1, (size_t)n);
    memset(index, 1, (size_t)lines * 64);
    for (int64_t i = 0; i < dead; ++i) { /* in order, one in n / dead of them */
        rows[i] = n / dead * i + (int64_t)(ec_splitmix((uint64_t)i) % (uint64_t)(n / dead));
        places[i] = (uint32_t)(((unsigned __int128)ec_splitmix((uint64_t)~i) * (uint64_t)lines) >> 64);
    }
    seconds[0] = looks(flags, last, NULL, n, 1);
    seconds[1] = looks(flags, last, counts, n, 1);
    seconds[2] = looks(flags, last, counts, n, 2);
    seconds[3] = take(keys, counts, index, places, rows, dead);
    munmap(keys, column);
    munmap(last, column);
    munmap(counts, column);
    munmap(flags, ec_page_round((size_t)n));
    munmap(index, ec_page_round((size_t)lines * 64));
    free(places);
    free(rows);
    return seconds[2] < 0 || seconds[3] < 0 ? -1 : 0;
}
