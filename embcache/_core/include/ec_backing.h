/* The backing: where arenas and indexes get zeroed blocks of memory; anonymous, or ranges of one growing file.
 *
 * A NULL backing means anonymous memory (ec_memory.h). Otherwise blocks are page-aligned ranges of a data file, mapped
 * shared and kept out of forked children. `ranges` lists those in use by their place in the file; what lies between two
 * of them is free and is given out again, the smallest that fits first. The file ends with the last range in use.
 *
 * A full disk must be an error and never a SIGBUS, so the blocks of the file exist before they are mapped: the file
 * grows by fallocate, or on file systems without it by writing zeros, and never has a hole.
 *
 * Crash safety is the header's business (ec_directory.h): while it says "dirty", whatever is in the file is worthless,
 * so nothing here is ordered or synced. A failed call leaves the file and the list as they were.
 *
 * Thread safety: ec_backing_alloc and ec_backing_free may be called by several threads (partitions grow in parallel).
 */
#ifndef EC_BACKING_H
#define EC_BACKING_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ec_memory.h"
#include "ec_status.h"

typedef struct ec_range {
    int64_t at, bytes; /* in the data file; whole pages */
    char *address;
} ec_range;

typedef struct ec_backing {
    int folder; /* descriptor of the directory, which also holds its lock; -1: none */
    int data;   /* descriptor of the data file */
    int64_t length;
    ec_range *ranges;
    int64_t range_count, range_slots;
    pthread_mutex_t mutex;

    /* What the header on disk says (ec_directory.h). */
    int clean;   /* nothing was stored since it was marked clean */
    int failed;  /* a sync failed, or the directory is gone: what is on disk is unknown, nothing may be changed any more */
    int gone;    /* a file of the directory was not there any more */
    int closing; /* the file keeps its ranges, whoever frees them; ec_backing_unmap ends the mappings */
    uint64_t sequence;
    int filter_torn; /* a store of the filter's state failed half way */
    uint64_t identity_bytes, identity_digest, metadata_bytes, metadata_digest, filter_bytes, filter_digest;
    pthread_mutex_t flushing;

    /* The last refusal of the file system. */
    int error;        /* errno */
    const char *file; /* name in the directory */
    int64_t need;     /* bytes that were asked for; 0: not a matter of space */

    /* For tests: after `fault_countdown` more calls of the system one fails with `fault_error`, or for
     * EC_FAULT_KILL the process dies there. -1: off. */
    int64_t fault_countdown;
    int fault_error;
} ec_backing;

enum { EC_FAULT_KILL = -9 };

static void ec_backing_init(ec_backing *b)
{
    memset(b, 0, sizeof *b);
    b->folder = b->data = -1;
    b->fault_countdown = -1;
    pthread_mutex_init(&b->mutex, NULL);
    pthread_mutex_init(&b->flushing, NULL);
}

/* Whether a test wants the call that comes now to fail: sets errno. */
static int ec_faulty(ec_backing *b)
{
    if (__builtin_expect(b->fault_countdown < 0, 1) || b->fault_countdown-- > 0)
        return 0;
    if (b->fault_error == EC_FAULT_KILL)
        kill(getpid(), SIGKILL);
    errno = b->fault_error;
    return 1;
}

/* Note why a call failed, for the exception. Returns EC_DISK. */
static int ec_refused(ec_backing *b, const char *file, int64_t need)
{
    b->error = errno;
    b->file = file;
    b->need = need;
    return EC_DISK;
}

/* Write all of `bytes`, or EC_DISK. */
static int ec_write_all(ec_backing *b, int fd, const char *file, const void *from, int64_t bytes, int64_t at)
{
    for (int64_t done = 0; done < bytes;) {
        ssize_t wrote = ec_faulty(b) ? -1 : pwrite(fd, (const char *)from + done, (size_t)(bytes - done), (off_t)(at + done));
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            errno = wrote == 0 ? ENOSPC : errno;
            return ec_refused(b, file, bytes - done);
        }
        done += wrote;
    }
    return EC_OK;
}

/* Have the file system allocate a part of the data file: 0, or an errno. */
static int ec_backing_blocks(ec_backing *b, int64_t at, int64_t bytes)
{
    int refused;
    do
        refused = ec_faulty(b) || fallocate(b->data, 0, (off_t)at, (off_t)bytes) != 0;
    while (refused && errno == EINTR);
    return refused ? errno : 0;
}

/* Write zeros into a part of the data file. */
static int ec_backing_zero(ec_backing *b, int64_t from, int64_t to)
{
    static const char zeros[64 << 10];
    const int64_t most = (int64_t)sizeof zeros;
    int status = EC_OK;
    for (int64_t at = from; at < to && status == EC_OK; at += most)
        status = ec_write_all(b, b->data, "data", zeros, to - at < most ? to - at : most, at);
    return status;
}

/* Write zeros where the data file has holes. */
static int ec_backing_fill(ec_backing *b)
{
    int status = EC_OK;
    for (int64_t at = 0; at < b->length && status == EC_OK;) {
        const int64_t hole = (int64_t)lseek(b->data, (off_t)at, SEEK_HOLE);
        if (hole < 0)
            return ec_refused(b, "data", 0);
        if (hole >= b->length)
            break;
        at = (int64_t)lseek(b->data, (off_t)hole, SEEK_DATA);
        if (at < 0 && errno != ENXIO)
            return ec_refused(b, "data", 0);
        if (at < 0 || at > b->length)
            at = b->length;
        status = ec_backing_zero(b, hole, at);
    }
    return status;
}

/* Give the file blocks up to `length`, every one of them real. EC_DISK leaves it as it was. */
static int ec_backing_extend(ec_backing *b, int64_t length)
{
    const int refused = ec_backing_blocks(b, b->length, length - b->length);
    int status = EC_OK;
    if (refused == EOPNOTSUPP)
        status = ec_backing_zero(b, b->length, length);
    else if (refused)
        status = ec_refused(b, "data", length - b->length);
    if (status != EC_OK) {
        b->need = length - b->length;
        if (ftruncate(b->data, (off_t)b->length) == 0)
            return status;
        b->length = length; /* blocks without a range: the next call trims them */
        return status;
    }
    b->length = length;
    return EC_OK;
}

static char *ec_backing_mmap(ec_backing *b, int64_t at, int64_t bytes)
{
    char *address = ec_take_refused() || ec_faulty(b) ? MAP_FAILED : (char *)mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->data, (off_t)at);
    if (address == MAP_FAILED)
        return NULL;
    if (madvise(address, (size_t)bytes, MADV_DONTFORK) != 0) {
        munmap(address, (size_t)bytes);
        return NULL;
    }
    return address;
}

/* Let the file end with its last range. */
static void ec_backing_trim(ec_backing *b)
{
    const ec_range *last = b->ranges + b->range_count - 1;
    const int64_t end = b->range_count > 0 ? last->at + last->bytes : 0;
    if (end < b->length && ftruncate(b->data, (off_t)end) == 0)
        b->length = end;
}

static int ec_backing_take(ec_backing *b, int64_t bytes, void **at)
{
    if (b->range_count == b->range_slots) {
        const int64_t slots = b->range_slots ? b->range_slots * 2 : 32;
        ec_range *wider = (ec_range *)ec_take(b->ranges, (size_t)slots * sizeof *wider);
        if (wider == NULL)
            return EC_NOMEM;
        b->ranges = wider;
        b->range_slots = slots;
    }
    int64_t end = 0, smallest = INT64_MAX, found = 0, place = -1;
    for (int64_t i = 0; i < b->range_count; ++i) {
        const int64_t gap = b->ranges[i].at - end;
        if (gap >= bytes && gap < smallest) {
            smallest = gap;
            found = end;
            place = i;
        }
        end = b->ranges[i].at + b->ranges[i].bytes;
    }
    const int fresh = place < 0;
    if (fresh) {
        found = end;
        place = b->range_count;
        /* A file that could not be trimmed has blocks with old content beyond its last range. */
        const int64_t stale = b->length - end;
        if (stale > 0 && ftruncate(b->data, (off_t)end) != 0)
            return ec_refused(b, "data", 0);
        b->length = end;
        const int status = ec_backing_extend(b, end + bytes);
        if (status != EC_OK)
            return status;
    }
    char *address = ec_backing_mmap(b, found, bytes);
    if (address == NULL) {
        ec_backing_trim(b);
        return EC_NOMEM;
    }
    if (!fresh)
        memset(address, 0, (size_t)bytes);
    memmove(b->ranges + place + 1, b->ranges + place, (size_t)(b->range_count - place) * sizeof *b->ranges);
    b->ranges[place] = (ec_range){found, bytes, address};
    b->range_count += 1;
    *at = address;
    return EC_OK;
}

static ec_range *ec_backing_range(const ec_backing *b, const void *address)
{
    for (int64_t i = 0; i < b->range_count; ++i)
        if (b->ranges[i].address == address)
            return b->ranges + i;
    return NULL;
}

static void ec_backing_give(ec_backing *b, void *at, size_t held)
{
    if (b->closing)
        return;
    munmap(at, held);
    ec_range *range = ec_backing_range(b, at);
    EC_ASSERT(range != NULL && range->bytes == (int64_t)held);
    memmove(range, range + 1, (size_t)(b->ranges + b->range_count - (range + 1)) * sizeof *range);
    b->range_count -= 1;
    ec_backing_trim(b);
}

/* Map the ranges listed in `ranges` (in order, inside the file). EC_OK, EC_NOMEM, or EC_DISK where the file's blocks
 * cannot be had: a copy may have holes, and a store into one on a full disk would be a SIGBUS. The number of a file's
 * blocks does not tell (some file systems count their own), so all of it is asked for; what is there is passed over. */
static int ec_backing_map(ec_backing *b)
{
    struct stat status;
    if (fstat(b->data, &status) != 0)
        return ec_refused(b, "data", 0);
    const int64_t missing = b->length - (int64_t)status.st_blocks * 512;
    const int refused = b->length > 0 ? ec_backing_blocks(b, 0, b->length) : 0;
    if (refused == EOPNOTSUPP) {
        const int filled = ec_backing_fill(b);
        if (filled != EC_OK)
            return filled;
    } else if (refused != 0) {
        return ec_refused(b, "data", missing > 0 ? missing : 0);
    }
    for (int64_t i = 0; i < b->range_count;) {
        int64_t next = i, bytes = 0;
        for (; next < b->range_count && b->ranges[next].at == b->ranges[i].at + bytes; ++next)
            bytes += b->ranges[next].bytes;
        char *address = ec_backing_mmap(b, b->ranges[i].at, bytes);
        if (address == NULL)
            return EC_NOMEM;
        for (const int64_t from = b->ranges[i].at; i < next; ++i)
            b->ranges[i].address = address + (b->ranges[i].at - from);
    }
    return EC_OK;
}

/* End all mappings; the file stays as it is. */
static void ec_backing_unmap(ec_backing *b)
{
    for (int64_t i = 0; i < b->range_count; ++i)
        if (b->ranges[i].address != NULL)
            munmap(b->ranges[i].address, (size_t)b->ranges[i].bytes);
    free(b->ranges);
    b->ranges = NULL;
    b->range_count = b->range_slots = 0;
}

/* Give back the memory of all mapped pages: the file keeps them, and whoever looks again reads them anew. */
static void ec_backing_release(ec_backing *b)
{
    pthread_mutex_lock(&b->mutex);
    for (int64_t i = 0; i < b->range_count; ++i)
        if (b->ranges[i].address != NULL)
            madvise(b->ranges[i].address, (size_t)b->ranges[i].bytes, MADV_DONTNEED); /* advice: a refusal does no harm */
    pthread_mutex_unlock(&b->mutex);
}

/* A zeroed block of at least `bytes`: EC_OK, EC_NOMEM or EC_DISK. *held receives what to pass to ec_backing_free, and before
 * to ec_backing_written. */
static int ec_backing_alloc(ec_backing *b, size_t bytes, void **at, size_t *held)
{
    if (b == NULL) {
        *at = ec_block_alloc(bytes, held);
        return *at == NULL ? EC_NOMEM : EC_OK;
    }
    const size_t rounded = ec_page_round(bytes);
    if (rounded < bytes || rounded > INT64_MAX)
        return EC_NOMEM;
    pthread_mutex_lock(&b->mutex);
    const int status = ec_backing_take(b, (int64_t)rounded, at);
    pthread_mutex_unlock(&b->mutex);
    if (status == EC_OK)
        *held = rounded;
    return status;
}

/* A block was written: see ec_block_written. The blocks of a file need no promise. */
static inline void ec_backing_written(const ec_backing *b, size_t held)
{
    if (b == NULL)
        ec_block_written(held);
}

static void ec_backing_free(ec_backing *b, void *at, size_t held)
{
    if (b == NULL) {
        ec_block_free(at, held);
    } else if (at != NULL) {
        pthread_mutex_lock(&b->mutex);
        ec_backing_give(b, at, held);
        pthread_mutex_unlock(&b->mutex);
    }
}

#endif
