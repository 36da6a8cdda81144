/* Host memory of the arenas and indexes: private anonymous mappings, had after the question whether more may be.
 *
 * Blocks below EC_MAP_MIN come from the C heap. Larger ones are mapped, zeroed, kept out of forked children
 * (MADV_DONTFORK: a DataLoader worker neither copies nor pins them) and, from 2 MiB, aligned to and advised for huge
 * pages. mmap itself obeys RLIMIT_AS, but a cgroup or a machine without free memory kills instead of refusing, so memory
 * is claimed before it is mapped (ec_room.h).
 */
#ifndef EC_MEMORY_H
#define EC_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ec_room.h"

#define EC_HUGE_BYTES ((size_t)2 << 20)
#define EC_MAP_MIN ((size_t)64 << 10)
#define EC_ROOM_MIN ((size_t)1 << 20)   /* the system is not asked about less */
#define EC_ROOM_SPARE ((size_t)8 << 20) /* kept for what is asked for in smaller steps, page tables and the like */

/* For tests: all memory of the core is asked for through ec_take_refused(), so that the n-th request from now can be made
 * to fail, anywhere, and what was promised then (I3, I11) can be seen to hold. */
static int64_t ec_take_countdown = -1; /* -1: off; n >= 0: n more requests are served, the next one is refused, once */

static inline int ec_take_refused(void)
{
    return __builtin_expect(ec_take_countdown >= 0, 0) && ec_take_countdown-- == 0;
}

/* realloc() that can be made to fail; on NULL the old block is still there. */
static inline void *ec_take(void *old, size_t bytes) { return ec_take_refused() ? NULL : realloc(old, bytes ? bytes : 1); }

static inline size_t ec_page_round(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* Zeroed, private mapping of `bytes` (rounded up to pages by the caller), or NULL. */
static void *ec_map(size_t bytes)
{
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *at;
    if (ec_take_refused())
        return NULL;
    if (bytes < EC_HUGE_BYTES) {
        at = (char *)mmap(NULL, bytes, protection, flags, -1, 0);
        if (at == MAP_FAILED)
            return NULL;
    } else {
        if (bytes > SIZE_MAX - EC_HUGE_BYTES)
            return NULL;
        char *wide = (char *)mmap(NULL, bytes + EC_HUGE_BYTES, protection, flags, -1, 0);
        if (wide == MAP_FAILED) { /* RLIMIT_AS may leave room for the block without its margin */
            at = (char *)mmap(NULL, bytes, protection, flags, -1, 0);
            if (at == MAP_FAILED)
                return NULL;
        } else {
            size_t head = (EC_HUGE_BYTES - ((uintptr_t)wide & (EC_HUGE_BYTES - 1))) & (EC_HUGE_BYTES - 1);
            at = wide + head;
            if (head)
                munmap(wide, head);
            if (head < EC_HUGE_BYTES)
                munmap(at + bytes, EC_HUGE_BYTES - head);
        }
        madvise(at, bytes, MADV_HUGEPAGE); /* advice: a kernel without huge pages may refuse it */
    }
    if (madvise(at, bytes, MADV_DONTFORK) != 0) {
        munmap(at, bytes);
        return NULL;
    }
    return at;
}

/* Promise `bytes` more: 1, or 0 where they do not fit beside what is promised already, and nothing has changed. They stay
 * promised until ec_memory_written. Small steps are left to mmap's own refusal. */
static int ec_memory_claim(size_t bytes)
{
    if (ec_take_refused() || bytes > INT64_MAX / 4)
        return 0;
    if (bytes < EC_ROOM_MIN) {
        ec_promise((int64_t)bytes);
        return 1;
    }
    pthread_mutex_lock(&ec_promised->claiming);
    int allowed;
    for (int64_t before = ec_promised_bytes(), now;; before = now) {
        /* The count first: what is written between the two looks is then in both, and never in neither. */
        const uint64_t room = ec_room_to_write();
        allowed = bytes <= ec_room_to_map() && bytes + EC_ROOM_SPARE + (before > 0 ? (uint64_t)before : 0) <= room;
        now = ec_promised_bytes();
        if (allowed || now >= before)
            break; /* else some of it was written meanwhile, or given back */
    }
    if (allowed)
        ec_promise((int64_t)bytes);
    pthread_mutex_unlock(&ec_promised->claiming);
    return allowed;
}

/* `bytes` that were claimed have been written, or are not wanted any more. */
static inline void ec_memory_written(size_t bytes) { ec_promise(-(int64_t)bytes); }

/* Zeroed block aligned to a cache line; *held receives what to pass to ec_block_free, and to ec_block_written, which must
 * follow: until then the block is promised memory. */
static void *ec_block_alloc(size_t bytes, size_t *held)
{
    if (bytes <= EC_MAP_MIN - 64) { /* rounded up it must stay below EC_MAP_MIN, by which ec_block_free tells heap from map */
        size_t rounded = (bytes + 63) / 64 * 64;
        void *at = ec_take_refused() ? NULL : aligned_alloc(64, rounded);
        if (at == NULL)
            return NULL;
        memset(at, 0, rounded);
        *held = rounded;
        return at;
    }
    size_t rounded = ec_page_round(bytes);
    if (rounded < bytes || !ec_memory_claim(rounded))
        return NULL;
    void *at = ec_map(rounded);
    if (at != NULL)
        *held = rounded;
    else
        ec_memory_written(rounded);
    return at;
}

/* The content of a block is written, or soon will be: from now on the system's figures count it. */
static inline void ec_block_written(size_t held)
{
    if (held >= EC_MAP_MIN)
        ec_memory_written(held);
}

static void ec_block_free(void *at, size_t held)
{
    if (at == NULL)
        return;
    if (held < EC_MAP_MIN)
        free(at);
    else
        munmap(at, held);
}

#endif
