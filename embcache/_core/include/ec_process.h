/* Which process this is, without a system call.
 *
 * A mark of the process, its number and 31 random bits, is kept in a page that the kernel hands to a child wiped
 * (MADV_WIPEONFORK): whatever way the child was forked, it reads 0 there and makes its own. The number alone would not do: when
 * the owner of memory has died, a grandchild may get its number, and finds none of the memory at the addresses it knows.
 * Where such a page cannot be had, every call asks, and the mark is the number.
 *
 * Only threads.pyx includes this header, so that there is one page.
 */
#ifndef EC_PROCESS_H
#define EC_PROCESS_H

#include <stdint.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static int64_t *ec_process_page;

static void ec_process_install(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, (size_t)bytes, MADV_WIPEONFORK) == 0)
        ec_process_page = (int64_t *)page;
    else
        munmap(page, (size_t)bytes);
}

static int64_t ec_process_new_mark(void)
{
    uint32_t bits;
    if (getrandom(&bits, sizeof bits, GRND_NONBLOCK) != (ssize_t)sizeof bits) {
        struct timespec now = {0, 0};
        clock_gettime(CLOCK_MONOTONIC, &now);
        bits = (uint32_t)now.tv_nsec ^ (uint32_t)now.tv_sec << 20;
    }
    return (int64_t)(bits & 0x7FFFFFFFu) << 32 | (int64_t)getpid();
}

static int64_t ec_process_mark(void)
{
    if (ec_process_page == NULL)
        return getpid();
    int64_t mark = __atomic_load_n(ec_process_page, __ATOMIC_RELAXED);
    if (mark == 0) { /* the first of several threads decides */
        const int64_t made = ec_process_new_mark();
        if (__atomic_compare_exchange_n(ec_process_page, &mark, made, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            mark = made;
    }
    return mark;
}

/* The number in a mark, for people. */
static int64_t ec_process_number(int64_t mark) { return mark & 0xFFFFFFFF; }

#endif
