/* Records what a process does to the files below one folder, for tests that simulate a power cut. Loaded with LD_PRELOAD.
 *
 * The process calls `recorder_begin` when it wants to be recorded:
 *
 * under         absolute path of the folder; calls on files elsewhere are passed on unseen
 * to            the log, appended to; the process may write records of its own there ("marks")
 * sync_to_fail  n > 0: the n-th sync of a file or folder there fails with EIO, and makes nothing durable
 * call_to_fail  n > 0: the n-th call of any kind there fails with `error`, and does nothing; without an error, it is a
 *               write that writes the first half
 *
 * A record is a `struct head` followed by `path_bytes`, `other_bytes` and `data_bytes` bytes. Files are known by the number
 * of their inode, since names change. One lock is held around each call and its record, so the log's order is the order in
 * which things happened. LMDB writes by pwrite, pwritev and write, and its head pages through a descriptor of its own with
 * O_DSYNC: such writes are marked durable. What is stored through a shared mapping is noted as one write of the whole file when
 * the file is synced, so between these the log lacks it (and LMDB's table of readers, which is never synced).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, MKDIR, RENAME, UNLINK, WRITE, DURABLE_WRITE, RESIZE, SYNC, FAILED_SYNC, REFUSED, EXCHANGE };
enum { MOST_MAPPED = 256 };

struct head {
    uint32_t magic, kind;
    uint64_t inode;
    int64_t offset;
    uint32_t path_bytes, other_bytes;
    uint64_t data_bytes;
};

static char under[PATH_MAX], log_path[PATH_MAX];
static size_t under_length;
static long sync_to_fail, call_to_fail;
static int error_of_call;
static uint64_t mapped[MOST_MAPPED]; /* inodes of files that are written through mappings */
static int mapped_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((visibility("default"))) void recorder_begin(const char *folder, const char *to, long sync, long call, int error) {
    snprintf(under, sizeof under, "%s", folder);
    snprintf(log_path, sizeof log_path, "%s", to);
    under_length = strlen(under);
    sync_to_fail = sync;
    call_to_fail = call;
    error_of_call = error;
}

static int is_under(const char *path) {
    return under_length && strncmp(path, under, under_length) == 0 && (path[under_length] == '/' || !path[under_length]);
}

/* The absolute path of a name that is relative to a folder's descriptor. */
static const char *absolute(int folder, const char *path, char *to) {
    char link[64];
    if (path[0] == '/' || folder == AT_FDCWD) return path;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, to, PATH_MAX - 1);
    if (length < 0 || length + strlen(path) + 2 > PATH_MAX) return path;
    to[length] = '/';
    strcpy(to + length + 1, path);
    return to;
}

/* Whether the descriptor's file lies in the folder, and its inode. Unlinked files do too: their name has a suffix. */
static int seen(int descriptor, uint64_t *inode) {
    char link[64], path[PATH_MAX];
    struct stat about;
    if (!under_length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!is_under(path) || fstat(descriptor, &about)) return 0;
    *inode = about.st_ino;
    return 1;
}

static void note(uint32_t kind, uint64_t inode, int64_t offset, const char *path, const char *other,
                 const struct iovec *data, int pieces, uint64_t data_bytes) {
    int saved = errno;
    struct head head = {0x45434c47, kind, inode, offset, path ? (uint32_t)strlen(path) : 0,
                        other ? (uint32_t)strlen(other) : 0, data_bytes};
    struct iovec all[3 + IOV_MAX] = {{&head, sizeof head}, {(void *)path, head.path_bytes}, {(void *)other, head.other_bytes}};
    int used = 3;
    for (int i = 0; i < pieces && data_bytes; i++) {
        size_t take = data[i].iov_len < data_bytes ? data[i].iov_len : data_bytes;
        all[used++] = (struct iovec){data[i].iov_base, take};
        data_bytes -= take;
    }
    int to = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    size_t wanted = 0;
    for (int i = 0; i < used; i++) wanted += all[i].iov_len;
    if (to < 0 || syscall(SYS_writev, to, all, used < IOV_MAX ? used : IOV_MAX) != (ssize_t)wanted) {
        static const char text[] = "recorder: cannot write the log\n";
        syscall(SYS_write, 2, text, sizeof text - 1);
        _exit(99);
    }
    syscall(SYS_close, to);
    errno = saved;
}

/* Whether this call is the one to refuse; the lock is held. */
static int refused(void) {
    if (!error_of_call || call_to_fail <= 0 || --call_to_fail) return 0;
    note(REFUSED, 0, 0, NULL, NULL, NULL, 0, 0);
    errno = error_of_call;
    return 1;
}

/* The pieces of a write that are written: all, or about half of them. Returns their number. */
static int allowed(struct iovec *some, const struct iovec *data, int pieces) {
    memcpy(some, data, pieces * sizeof *data);
    if (error_of_call || call_to_fail <= 0 || --call_to_fail) return pieces;
    note(REFUSED, 0, 0, NULL, NULL, NULL, 0, 0);
    if (pieces > 1) return pieces / 2;
    some->iov_len = (some->iov_len + 1) / 2;
    return 1;
}

/* ------------------------------------------------------------------------------------------------------ names */

static int opened(int (*real)(int, const char *, int, ...), int folder, const char *name, int flags, mode_t mode) {
    char place[PATH_MAX];
    const char *path = absolute(folder, name, place);
    if (!is_under(path) || !(flags & O_ACCMODE)) return real(folder, name, flags, mode);
    struct stat about;
    pthread_mutex_lock(&lock);
    int absent = lstat(path, &about) != 0;
    int descriptor = refused() ? -1 : real(folder, name, flags, mode);
    if (descriptor >= 0 && fstat(descriptor, &about) == 0) {
        if (absent) note(CREATE, about.st_ino, 0, path, NULL, NULL, 0, 0);
        else if (flags & O_TRUNC) note(RESIZE, about.st_ino, 0, NULL, NULL, NULL, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return descriptor;
}

#define MODE_OF(flags, mode)                                          \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);
#define OPEN(name)                                                    \
    int name(const char *path, int flags, ...) {                      \
        MODE_OF(flags, mode)                                          \
        return opened(REAL(openat), AT_FDCWD, path, flags, mode);     \
    }
#define OPENAT(name)                                                  \
    int name(int folder, const char *path, int flags, ...) {          \
        MODE_OF(flags, mode)                                          \
        return opened(REAL(openat), folder, path, flags, mode);       \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    if (!is_under(path)) return REAL(mkdir)(path, mode);
    struct stat about;
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : REAL(mkdir)(path, mode);
    if (answer == 0 && lstat(path, &about) == 0) note(MKDIR, about.st_ino, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

static int renamed(int from, const char *old_name, int to, const char *new_name, unsigned flags) {
    char places[2][PATH_MAX];
    const char *old = absolute(from, old_name, places[0]), *new = absolute(to, new_name, places[1]);
    if (!is_under(old)) return REAL(renameat2)(from, old_name, to, new_name, flags);
    struct stat about, other = {0};
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : REAL(renameat2)(from, old_name, to, new_name, flags);
    if (answer == 0 && lstat(new, &about) == 0 && (!(flags & RENAME_EXCHANGE) || lstat(old, &other) == 0))
        note(flags & RENAME_EXCHANGE ? EXCHANGE : RENAME, about.st_ino, (int64_t)other.st_ino, old, new, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }

static int removed(int folder, const char *name, int flags) {
    char place[PATH_MAX];
    const char *path = absolute(folder, name, place);
    if (!is_under(path)) return REAL(unlinkat)(folder, name, flags);
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : REAL(unlinkat)(folder, name, flags);
    if (answer == 0) note(UNLINK, 0, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

/* ---------------------------------------------------------------------------------------------------- content */

static uint32_t kind_of_write(int descriptor) {
    return fcntl(descriptor, F_GETFL) & O_DSYNC ? DURABLE_WRITE : WRITE;
}

/* One write, whichever function it was: all of them come here. */
static ssize_t written(int descriptor, uint64_t inode, const struct iovec *data, int pieces, off_t offset, int flags) {
    struct iovec some[IOV_MAX];
    pthread_mutex_lock(&lock);
    int64_t at = offset < 0 ? lseek(descriptor, 0, SEEK_CUR) : offset;
    int used = allowed(some, data, pieces);
    ssize_t done = refused() ? -1 : REAL(pwritev2)(descriptor, some, used, offset, flags);
    if (done > 0) note(kind_of_write(descriptor), inode, at, NULL, NULL, some, used, done);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int descriptor, const void *data, size_t size) {
    uint64_t inode;
    struct iovec one = {(void *)data, size};
    return seen(descriptor, &inode) ? written(descriptor, inode, &one, 1, -1, 0) : REAL(write)(descriptor, data, size);
}

ssize_t writev(int descriptor, const struct iovec *data, int pieces) {
    uint64_t inode;
    return seen(descriptor, &inode) ? written(descriptor, inode, data, pieces, -1, 0) : REAL(writev)(descriptor, data, pieces);
}

#define PWRITE(name)                                                                               \
    ssize_t name(int descriptor, const void *data, size_t size, off_t offset) {                    \
        uint64_t inode;                                                                            \
        struct iovec one = {(void *)data, size};                                                   \
        return seen(descriptor, &inode) ? written(descriptor, inode, &one, 1, offset, 0)           \
                                        : REAL(name)(descriptor, data, size, offset);              \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name)                                                                              \
    ssize_t name(int descriptor, const struct iovec *data, int pieces, off_t offset) {             \
        uint64_t inode;                                                                            \
        return seen(descriptor, &inode) ? written(descriptor, inode, data, pieces, offset, 0)      \
                                        : REAL(name)(descriptor, data, pieces, offset);            \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name)                                                                             \
    ssize_t name(int descriptor, const struct iovec *data, int pieces, off_t offset, int flags) {  \
        uint64_t inode;                                                                            \
        return seen(descriptor, &inode) ? written(descriptor, inode, data, pieces, offset, flags)  \
                                        : REAL(name)(descriptor, data, pieces, offset, flags);     \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

static int resized(int descriptor, int (*real)(int, off_t), off_t length) {
    uint64_t inode;
    if (!seen(descriptor, &inode)) return real(descriptor, length);
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : real(descriptor, length);
    if (answer == 0) note(RESIZE, inode, length, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int ftruncate(int descriptor, off_t length) { return resized(descriptor, REAL(ftruncate), length); }
int ftruncate64(int descriptor, off_t length) { return resized(descriptor, REAL(ftruncate64), length); }

static int allocated(int descriptor, int (*real)(int, off_t, off_t), off_t offset, off_t length) {
    uint64_t inode;
    struct stat about;
    if (!seen(descriptor, &inode)) return real(descriptor, offset, length);
    pthread_mutex_lock(&lock);
    int answer = refused() ? error_of_call : real(descriptor, offset, length);
    if (answer == 0 && fstat(descriptor, &about) == 0) note(RESIZE, inode, about.st_size, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int posix_fallocate(int d, off_t offset, off_t length) { return allocated(d, REAL(posix_fallocate), offset, length); }
int posix_fallocate64(int d, off_t offset, off_t length) { return allocated(d, REAL(posix_fallocate64), offset, length); }

/* fallocate says -1 and errno where posix_fallocate returns the error. */
#define FALLOCATE(name)                                                                            \
    int name(int descriptor, int mode, off_t offset, off_t length) {                               \
        uint64_t inode;                                                                            \
        struct stat about;                                                                         \
        if (!seen(descriptor, &inode)) return REAL(name)(descriptor, mode, offset, length);        \
        pthread_mutex_lock(&lock);                                                                 \
        int answer = refused() ? -1 : REAL(name)(descriptor, mode, offset, length);                \
        if (answer == 0 && fstat(descriptor, &about) == 0) note(RESIZE, inode, about.st_size, NULL, NULL, NULL, 0, 0); \
        pthread_mutex_unlock(&lock);                                                               \
        return answer;                                                                             \
    }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

#define MMAP(name)                                                                                 \
    void *name(void *address, size_t bytes, int protection, int flags, int descriptor, off_t offset) { \
        uint64_t inode;                                                                            \
        if (under_length && descriptor >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) && seen(descriptor, &inode)) { \
            pthread_mutex_lock(&lock);                                                             \
            mapped[mapped_count++ % MOST_MAPPED] = inode;                                          \
            pthread_mutex_unlock(&lock);                                                           \
        }                                                                                          \
        return REAL(name)(address, bytes, protection, flags, descriptor, offset);                  \
    }
MMAP(mmap)
MMAP(mmap64)

/* What mappings have stored in a file that is about to be synced; the lock is held. */
static void note_mapped(int descriptor, uint64_t inode) {
    struct stat about;
    int known = 0;
    for (int i = 0; i < mapped_count && i < MOST_MAPPED && !known; i++) known = mapped[i] == inode;
    if (!known || fstat(descriptor, &about) || about.st_size == 0) return;
    void *content = REAL(mmap)(NULL, about.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (content == MAP_FAILED) return;
    struct iovec one = {content, about.st_size};
    note(WRITE, inode, 0, NULL, NULL, &one, 1, about.st_size);
    munmap(content, about.st_size);
}

static int synced(int descriptor, int (*real)(int)) {
    uint64_t inode;
    if (!seen(descriptor, &inode)) return real(descriptor);
    pthread_mutex_lock(&lock);
    note_mapped(descriptor, inode);
    int answer = sync_to_fail > 0 && --sync_to_fail == 0 ? (errno = EIO, -1) : refused() ? -1 : real(descriptor);
    note(answer ? FAILED_SYNC : SYNC, inode, 0, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int fsync(int descriptor) { return synced(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, REAL(fdatasync)); }
