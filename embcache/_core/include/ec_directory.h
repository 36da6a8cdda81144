/* A table's directory on disk: its header, and the one order of writes that makes it safe.
 *
 * The first 512 bytes of the file `header` say whether the directory is clean, and for a clean one the length and digest
 * of everything else. They are overwritten in place: a device writes a sector whole or not at all, and should it not, the
 * digest of the header fails and the directory is refused; no file is renamed, so a full disk cannot keep a directory
 * from being marked. Two rules:
 *   - before the first store after an open or a flush the header says "dirty", synced;
 *   - "clean" is written only after everything that it vouches for has been synced.
 * So a crash at any instruction leaves "clean" with exactly the bytes of that flush, or "dirty". `metadata` and `filter`
 * are overwritten in place too, since that happens only while the header says "dirty".
 *
 * Syncing goes through descriptors: a file's fdatasync also writes what was stored through its mappings (msync would
 * start the same work once for each segment). After a sync that failed nobody knows what is on the disk, and asking again
 * would not tell: the directory stays dirty for good and refuses changes. So it does when one of its files is not there any
 * more: somebody deleted it.
 */
#ifndef EC_DIRECTORY_H
#define EC_DIRECTORY_H

#include "ec_backing.h"
#include "ec_hash.h"

#define EC_FORMAT_VERSION 1
#define EC_BYTE_ORDER 0x01020304u

enum { EC_CLEAN = 1, EC_DIRTY = 2 };

typedef struct ec_header {
    char magic[8];
    uint32_t format;
    uint32_t state;
    uint32_t byte_order;
    uint32_t page_bytes; /* segments are whole pages */
    uint64_t sequence;   /* goes up with every flush */
    uint64_t identity_bytes, identity_digest; /* JSON that follows this sector */
    uint64_t data_bytes;
    uint64_t metadata_bytes, metadata_digest;
    uint64_t filter_bytes, filter_digest;
    uint8_t zeros[416];
    uint64_t digest; /* XXH3-64 of what is before it; so are the others, of what they name */
} ec_header;

_Static_assert(sizeof(ec_header) == 512, "a header is one sector");

static void ec_header_fill(const ec_backing *b, uint32_t state, ec_header *h)
{
    memset(h, 0, sizeof *h);
    memcpy(h->magic, "EMBCTBL\n", 8);
    h->format = EC_FORMAT_VERSION;
    h->state = state;
    h->byte_order = EC_BYTE_ORDER;
    h->page_bytes = (uint32_t)sysconf(_SC_PAGESIZE);
    h->sequence = b->sequence;
    h->identity_bytes = b->identity_bytes;
    h->identity_digest = b->identity_digest;
    h->data_bytes = (uint64_t)b->length;
    h->metadata_bytes = b->metadata_bytes;
    h->metadata_digest = b->metadata_digest;
    h->filter_bytes = b->filter_bytes;
    h->filter_digest = b->filter_digest;
    h->digest = ec_xxh3(h, offsetof(ec_header, digest), 0);
}

static int ec_directory_sync(ec_backing *b, int fd, const char *file)
{
    int refused;
    do
        refused = ec_faulty(b) || fdatasync(fd) != 0;
    while (refused && errno == EINTR);
    if (!refused)
        return EC_OK;
    b->failed = 1;
    b->clean = 0;
    return ec_refused(b, file, 0);
}

/* Overwrite the first `bytes` of a file of the directory, cut it there if asked to, and sync it. */
static int ec_directory_store(ec_backing *b, const char *file, const void *from, int64_t bytes, int cut)
{
    int fd;
    do
        fd = ec_faulty(b) ? -1 : openat(b->folder, file, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    while (fd < 0 && errno == EINTR);
    if (fd < 0 && errno == ENOENT) {
        b->failed = b->gone = 1;
        b->clean = 0;
    }
    if (fd < 0)
        return ec_refused(b, file, 0);
    int status = ec_write_all(b, fd, file, from, bytes, 0);
    while (status == EC_OK && cut && (ec_faulty(b) || ftruncate(fd, (off_t)bytes) != 0))
        if (errno != EINTR)
            status = ec_refused(b, file, 0);
    if (status == EC_OK)
        status = ec_directory_sync(b, fd, file);
    close(fd);
    return status;
}

static int ec_directory_mark(ec_backing *b, uint32_t state)
{
    ec_header header;
    ec_header_fill(b, state, &header);
    const int status = ec_directory_store(b, "header", &header, sizeof header, 0);
    if (status == EC_OK)
        b->clean = state == EC_CLEAN;
    return status;
}

/* To be called with the table's write lock before anything of the table changes. EC_DISK: it must not change. */
static inline int ec_directory_before_store(ec_backing *b)
{
    if (b == NULL || (!b->clean && !b->failed))
        return EC_OK;
    return b->failed ? EC_DISK : ec_directory_mark(b, EC_DIRTY);
}

/* Make the table's present content durable and mark the directory clean. `filter` is NULL where it stays as it is. The
 * caller holds `flushing`, and keeps writers out. After EC_DISK the directory is as dirty as before. */
static int ec_directory_save(ec_backing *b, const void *metadata, int64_t metadata_bytes, const void *filter, int64_t filter_bytes)
{
    int status = ec_directory_before_store(b);
    if (status == EC_OK && filter == NULL && b->filter_torn) {
        b->failed = 1; /* half of another state is in the file: never call that clean */
        return EC_DISK;
    }
    if (status == EC_OK && filter != NULL) {
        b->filter_torn = 1;
        status = ec_directory_store(b, "filter", filter, filter_bytes, 1);
        if (status == EC_OK) { /* now, since a later flush may come without it */
            b->filter_torn = 0;
            b->filter_bytes = (uint64_t)filter_bytes;
            b->filter_digest = ec_xxh3(filter, (size_t)filter_bytes, 0);
        }
    }
    if (status == EC_OK)
        status = ec_directory_store(b, "metadata", metadata, metadata_bytes, 1);
    if (status == EC_OK)
        status = ec_directory_sync(b, b->data, "data");
    if (status != EC_OK)
        return status;
    b->sequence += 1;
    b->metadata_bytes = (uint64_t)metadata_bytes;
    b->metadata_digest = ec_xxh3(metadata, (size_t)metadata_bytes, 0);
    return ec_directory_mark(b, EC_CLEAN);
}

#endif
