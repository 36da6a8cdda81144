/* Memory that indexes will soon move to, made ready ahead of the call that needs it.
 *
 * A partition that splits or grows copies its index into fresh memory, and the kernel's (and below it a hypervisor's) work for
 * those pages took two thirds of the longest insert calls. So the calls before it touch one huge page each of the blocks to come.
 * What is ready is bounded by a third of the memory of all indexes, and belongs to the table: its stats count it, its end frees it.
 *
 * Nothing depends on it: a block that is not there, too small or much too large for what is asked for leaves the caller to map one.
 *
 * Thread safety: threads of one insert may take blocks at the same time; all else needs the table's write lock.
 */
#ifndef EC_SPARE_H
#define EC_SPARE_H

#include "ec_memory.h"

#define EC_SPARES 4

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct ec_spare {
    char *at; /* NULL: no block, whatever the rest says */
    size_t bytes;
    size_t ready; /* bytes from the start whose pages are there */
} ec_spare;

static inline int ec_spare_fits(size_t held, size_t bytes) { return held >= bytes && held - bytes <= bytes / 8; }

/* A zeroed block of at least `bytes`, as ec_block_alloc gives it; or NULL. */
static void *ec_spare_take(ec_spare *spares, size_t bytes, size_t *held)
{
    for (int i = 0; i < EC_SPARES; ++i) {
        char *at = __atomic_load_n(&spares[i].at, __ATOMIC_ACQUIRE);
        *held = spares[i].bytes;
        if (at != NULL && ec_spare_fits(*held, bytes) &&
            __atomic_compare_exchange_n(&spares[i].at, &at, NULL, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            ec_promise((int64_t)spares[i].ready); /* ec_block_written, which follows, takes back the whole */
            return at;
        }
    }
    return NULL;
}

static inline int ec_spare_there(const ec_spare *spare) { return __atomic_load_n(&spare->at, __ATOMIC_RELAXED) != NULL; }

/* Bytes mapped and not taken. */
static inline size_t ec_spare_held(const ec_spare *spares)
{
    size_t bytes = 0;
    for (int i = 0; i < EC_SPARES; ++i)
        bytes += ec_spare_there(spares + i) ? spares[i].bytes : 0;
    return bytes;
}

/* Bytes made ready and not taken. */
static inline size_t ec_spare_ready(const ec_spare *spares)
{
    size_t bytes = 0;
    for (int i = 0; i < EC_SPARES; ++i)
        bytes += ec_spare_there(spares + i) ? spares[i].ready : 0;
    return bytes;
}

static void ec_spare_drop(ec_spare *spare)
{
    if (spare->at == NULL)
        return;
    ec_promise((int64_t)spare->ready);
    ec_block_written(spare->bytes);
    ec_block_free(spare->at, spare->bytes);
    spare->at = NULL;
}

static void ec_spare_drop_all(ec_spare *spares)
{
    for (int i = 0; i < EC_SPARES; ++i)
        ec_spare_drop(spares + i);
}

/* Touch the next huge page of a block. */
static void ec_spare_touch(ec_spare *spare)
{
    const size_t rest = spare->bytes - spare->ready, slice = rest < EC_HUGE_BYTES ? rest : EC_HUGE_BYTES;
    char *at = spare->at + spare->ready;
    if (madvise(at, slice, MADV_POPULATE_WRITE) != 0) /* a kernel before 5.14 */
        for (size_t i = 0; i < slice; i += 4096)
            ((volatile char *)at)[i] = 0;
    spare->ready += slice;
    ec_promise(-(int64_t)slice);
}

#endif
