/* Host memory of the arenas and indexes: private anonymous mappings, and the question whether more may be had.
 *
 * Blocks below EC_MAP_MIN come from the C heap. Larger ones are mapped, zeroed, kept out of forked children
 * (MADV_DONTFORK: a DataLoader worker neither copies nor pins them) and, from 2 MiB, aligned to and advised for huge
 * pages. mmap itself obeys RLIMIT_AS, but a cgroup or a machine without free memory kills instead of refusing, so
 * ec_memory_room is asked before a mapping grows by EC_ROOM_MIN or more.
 */
#ifndef EC_MEMORY_H
#define EC_MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define EC_HUGE_BYTES ((size_t)2 << 20)
#define EC_MAP_MIN ((size_t)64 << 10)
#define EC_ROOM_MIN ((size_t)1 << 20)

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
        if (wide == MAP_FAILED)
            return NULL;
        size_t head = (EC_HUGE_BYTES - ((uintptr_t)wide & (EC_HUGE_BYTES - 1))) & (EC_HUGE_BYTES - 1);
        at = wide + head;
        if (head)
            munmap(wide, head);
        if (head < EC_HUGE_BYTES)
            munmap(at + bytes, EC_HUGE_BYTES - head);
        madvise(at, bytes, MADV_HUGEPAGE); /* advice: a kernel without huge pages may refuse it */
    }
    if (madvise(at, bytes, MADV_DONTFORK) != 0) {
        munmap(at, bytes);
        return NULL;
    }
    return at;
}

static uint64_t ec_read_number(const char *path, uint64_t otherwise)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return otherwise;
    unsigned long long value;
    int fields = fscanf(file, "%llu", &value);
    fclose(file);
    return fields == 1 ? (uint64_t)value : otherwise; /* memory.max holds the word "max" where there is no limit */
}

/* The number after `label` in a file of "label number" lines, or `otherwise`. */
static uint64_t ec_read_field(const char *path, const char *label, uint64_t otherwise)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return otherwise;
    char line[256];
    size_t length = strlen(label);
    uint64_t found = otherwise;
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long long value;
        if (strncmp(line, label, length) == 0 && sscanf(line + length, " %llu", &value) == 1) {
            found = (uint64_t)value;
            break;
        }
    }
    fclose(file);
    return found;
}

/* What one cgroup directory still allows: its limit less what it uses beyond droppable file pages. */
static uint64_t ec_cgroup_dir_room(const char *dir)
{
    static const char *const names[2][3] = {
        {"memory.max", "memory.current", "inactive_file "},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "},
    };
    char path[4400];
    for (int version = 0; version < 2; ++version) {
        snprintf(path, sizeof path, "%s/%s", dir, names[version][0]);
        uint64_t limit = ec_read_number(path, UINT64_MAX);
        if (limit == UINT64_MAX)
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, names[version][1]);
        uint64_t used = ec_read_number(path, 0);
        snprintf(path, sizeof path, "%s/memory.stat", dir);
        uint64_t droppable = ec_read_field(path, names[version][2], 0);
        used -= droppable < used ? droppable : used;
        return limit > used ? limit - used : 0;
    }
    return UINT64_MAX;
}

/* The least room of this process's cgroup and its ancestors below `root` (normally /sys/fs/cgroup). */
static uint64_t ec_cgroup_room(const char *root, const char *membership)
{
    char line[4096], dir[4352];
    uint64_t room = ec_cgroup_dir_room(root);
    FILE *file = fopen(membership, "re");
    if (file == NULL)
        return room;
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (path == NULL)
            continue;
        *path++ = '\0';
        int unified = controllers[1] == '\0';
        if (!unified && strstr(controllers + 1, "memory") == NULL)
            continue;
        for (;;) {
            snprintf(dir, sizeof dir, "%s%s%s", root, unified ? "" : "/memory", path);
            uint64_t here = ec_cgroup_dir_room(dir);
            room = here < room ? here : room;
            char *slash = strrchr(path, '/');
            if (slash == NULL)
                break;
            *slash = '\0';
        }
    }
    fclose(file);
    return room;
}

/* Bytes that this process may still map and touch, by RLIMIT_AS, its cgroup and the machine's available memory. */
static uint64_t ec_memory_room(void)
{
    uint64_t room = ec_cgroup_room("/sys/fs/cgroup", "/proc/self/cgroup");
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        uint64_t pages = ec_read_number("/proc/self/statm", 0);
        uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
        uint64_t here = limit.rlim_cur > used ? limit.rlim_cur - used : 0;
        room = here < room ? here : room;
    }
    uint64_t available = ec_read_field("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 11);
    uint64_t swap = ec_read_field("/proc/meminfo", "SwapFree:", 0);
    uint64_t machine = (available + swap) * 1024;
    return machine < room ? machine : room;
}

/* Whether `bytes` more may be mapped; small steps are left to mmap's own refusal. */
static int ec_memory_allows(size_t bytes) { return bytes < EC_ROOM_MIN || bytes <= ec_memory_room(); }

/* Zeroed block aligned to a cache line; *held receives what to pass to ec_block_free. */
static void *ec_block_alloc(size_t bytes, size_t *held)
{
    if (bytes < EC_MAP_MIN) {
        size_t rounded = (bytes + 63) / 64 * 64;
        void *at = ec_take_refused() ? NULL : aligned_alloc(64, rounded);
        if (at == NULL)
            return NULL;
        memset(at, 0, rounded);
        *held = rounded;
        return at;
    }
    size_t rounded = ec_page_round(bytes);
    if (rounded < bytes || !ec_memory_allows(rounded))
        return NULL;
    void *at = ec_map(rounded);
    if (at != NULL)
        *held = rounded;
    return at;
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
