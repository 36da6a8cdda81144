/* Which process this is, without a system call.
 *
 * The number is kept in a page that the kernel hands to a child wiped (MADV_WIPEONFORK): whatever way the child was forked, it
 * reads 0 there and asks again. Where such a page cannot be had, every call asks.
 *
 * Only threads.pyx includes this header, so that there is one page.
 */
#ifndef EC_PROCESS_H
#define EC_PROCESS_H

#include <stdint.h>
#include <sys/mman.h>
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

static int64_t ec_process_id(void)
{
    if (ec_process_page == NULL)
        return getpid();
    int64_t id = __atomic_load_n(ec_process_page, __ATOMIC_RELAXED);
    if (id == 0) {
        id = getpid();
        __atomic_store_n(ec_process_page, id, __ATOMIC_RELAXED);
    }
    return id;
}

#endif
