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
 * O_DSYNC: such writes are marked durable. Memory that is mapped and written is not seen (LMDB's table of readers).
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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, MKDIR, RENAME, UNLINK, WRITE, DURABLE_WRITE, RESIZE, SYNC, FAILED_SYNC, REFUSED };

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

static int opened(int (*real)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    if (!is_under(path) || !(flags & O_ACCMODE)) return real(path, flags, mode);
    struct stat about;
    pthread_mutex_lock(&lock);
    int absent = lstat(path, &about) != 0;
    int descriptor = refused() ? -1 : real(path, flags, mode);
    if (descriptor >= 0 && fstat(descriptor, &about) == 0) {
        if (absent) note(CREATE, about.st_ino, 0, path, NULL, NULL, 0, 0);
        else if (flags & O_TRUNC) note(RESIZE, about.st_ino, 0, NULL, NULL, NULL, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return descriptor;
}

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                     \
        return opened(REAL(name), path, flags, mode);                     \
    }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode) {
    if (!is_under(path)) return REAL(mkdir)(path, mode);
    struct stat about;
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : REAL(mkdir)(path, mode);
    if (answer == 0 && lstat(path, &about) == 0) note(MKDIR, about.st_ino, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int rename(const char *old, const char *new) {
    if (!is_under(old)) return REAL(rename)(old, new);
    struct stat about;
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : REAL(rename)(old, new);
    if (answer == 0 && lstat(new, &about) == 0) note(RENAME, about.st_ino, 0, old, new, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

static int removed(int (*real)(const char *), const char *path) {
    if (!is_under(path)) return real(path);
    pthread_mutex_lock(&lock);
    int answer = refused() ? -1 : real(path);
    if (answer == 0) note(UNLINK, 0, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int unlink(const char *path) { return removed(REAL(unlink), path); }
int rmdir(const char *path) { return removed(REAL(rmdir), path); }

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

static int synced(int descriptor, int (*real)(int)) {
    uint64_t inode;
    if (!seen(descriptor, &inode)) return real(descriptor);
    pthread_mutex_lock(&lock);
    int answer = sync_to_fail > 0 && --sync_to_fail == 0 ? (errno = EIO, -1) : refused() ? -1 : real(descriptor);
    note(answer ? FAILED_SYNC : SYNC, inode, 0, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return answer;
}

int fsync(int descriptor) { return synced(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, REAL(fdatasync)); }
