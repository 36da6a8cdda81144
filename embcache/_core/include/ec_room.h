/* Room: how much more memory this process may write to, and how much of that is promised already.
 *
 * A mapping costs nothing until it is written, and no limit counts it before. So two tables that grow at once could both be
 * told that the same room is theirs, and a cgroup (or a machine without free memory) kills who then writes too much. The
 * promises of a process are therefore counted in one place: bytes that are mapped, or about to be, and not written yet. Who
 * wants more gets it if it fits beside them (ec_memory_claim in ec_memory.h). What was written is in the system's own figures
 * and leaves the count; so does what is given back.
 *
 * Every extension module has its own copy of what a header defines. One module owns the count (arena.pyx); the others are
 * pointed to it when they are imported.
 *
 * Thread safety: everything here may be called by any thread.
 */
#ifndef EC_ROOM_H
#define EC_ROOM_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* -------------------------------------------------------------------------------------------------------- the promises */

typedef struct ec_promises {
    int64_t bytes;           /* changed atomically */
    uint64_t pretended;      /* for tests: there is no more room than this; UINT64_MAX: what the system says */
    pthread_mutex_t claiming; /* one claim at a time: of two that do not fit together one is served */
} ec_promises;

static ec_promises ec_promises_alone = {0, UINT64_MAX, PTHREAD_MUTEX_INITIALIZER};
static ec_promises *ec_promised = &ec_promises_alone;

static inline void ec_promises_share(ec_promises *of_the_process) { ec_promised = of_the_process; }

static inline int64_t ec_promised_bytes(void) { return __atomic_load_n(&ec_promised->bytes, __ATOMIC_SEQ_CST); }

/* Promise more, or, where `bytes` is negative, take back what was written or is not wanted any more. */
static inline void ec_promise(int64_t bytes) { __atomic_fetch_add(&ec_promised->bytes, bytes, __ATOMIC_SEQ_CST); }

/* A forked child has none of the mappings (MADV_DONTFORK), and the lock in whatever state a thread of the parent left it. */
static void ec_promises_after_fork(void)
{
    const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    ec_promised->claiming = mutex;
    ec_promised->bytes = 0;
}

static int ec_promises_install(void) { return pthread_atfork(NULL, NULL, ec_promises_after_fork); }

/* ---------------------------------------------------------------------------------------- what the system says of itself */

/* The number in a file, or `otherwise`: where there is none (memory.max holds the word "max" where nothing limits), and where
 * the file cannot be opened, as with no descriptor left. What cannot be known refuses nothing. */
static uint64_t ec_read_number(const char *path, uint64_t otherwise)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return otherwise;
    unsigned long long value;
    int fields = fscanf(file, "%llu", &value);
    fclose(file);
    return fields == 1 ? (uint64_t)value : otherwise;
}

/* The numbers after each of `count` labels in a file of "label number" lines; a value whose label is not there stays. */
static void ec_read_fields(const char *path, int count, const char *const labels[], uint64_t values[])
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return;
    char line[256];
    while (fgets(line, sizeof line, file) != NULL)
        for (int i = 0; i < count; ++i) {
            const size_t length = strlen(labels[i]);
            unsigned long long value;
            if (strncmp(line, labels[i], length) == 0 && sscanf(line + length, " %llu", &value) == 1)
                values[i] = (uint64_t)value;
        }
    fclose(file);
}

static inline uint64_t ec_less(uint64_t from, uint64_t what) { return from > what ? from - what : 0; }

enum { EC_CGROUP_FIELDS = 5 };

/* What one cgroup directory still allows: its limit less what it uses and could not give up, and the swap it may use.
 *
 * Given up before anybody is killed: clean pages of files, read lately ("active", as those of a file-backed table in use) or
 * not, and half of the kernel's reclaimable objects, as the machine's own MemAvailable has it. Not counted: pages that must be
 * written to disk first, which takes its time. */
static uint64_t ec_cgroup_dir_room(const char *dir, uint64_t swap_free)
{
    static const char *const names[2][4] = {
        {"memory.max", "memory.current", "memory.swap.max", "memory.swap.current"},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"},
    };
    static const char *const fields[2][EC_CGROUP_FIELDS] = {
        {"inactive_file ", "active_file ", "file_dirty ", "file_writeback ", "slab_reclaimable "},
        {"total_inactive_file ", "total_active_file ", "total_dirty ", "total_writeback ", "total_slab_reclaimable "},
    };
    char path[4400];
    for (int version = 0; version < 2; ++version) {
        uint64_t numbers[4] = {UINT64_MAX, 0, UINT64_MAX, 0}, field[EC_CGROUP_FIELDS] = {0};
        for (int i = 0; i < 4; ++i) {
            snprintf(path, sizeof path, "%s/%s", dir, names[version][i]);
            numbers[i] = ec_read_number(path, numbers[i]);
            if (i == 0 && numbers[0] == UINT64_MAX)
                break;
        }
        if (numbers[0] == UINT64_MAX)
            continue;
        snprintf(path, sizeof path, "%s/memory.stat", dir);
        ec_read_fields(path, EC_CGROUP_FIELDS, fields[version], field);
        const uint64_t droppable = ec_less(field[0] + field[1], field[2] + field[3]) + field[4] / 2;
        const uint64_t room = ec_less(numbers[0], ec_less(numbers[1], droppable));
        uint64_t swap = UINT64_MAX;
        if (numbers[2] != UINT64_MAX && version == 0)
            swap = ec_less(numbers[2], numbers[3]);
        else if (numbers[2] != UINT64_MAX) /* a limit of memory and swap together */
            swap = ec_less(ec_less(numbers[2], ec_less(numbers[3], droppable)), room);
        return room + (swap < swap_free ? swap : swap_free);
    }
    return UINT64_MAX;
}

/* The least room of this process's cgroup and its ancestors below `root` (normally /sys/fs/cgroup). */
static uint64_t ec_cgroup_room(const char *root, const char *membership, uint64_t swap_free)
{
    char line[4096], dir[4352];
    uint64_t room = ec_cgroup_dir_room(root, swap_free);
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
            uint64_t here = ec_cgroup_dir_room(dir, swap_free);
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

/* Bytes that this process may map: RLIMIT_AS counts what is mapped, written or not. */
static uint64_t ec_room_to_map(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return ec_less(limit.rlim_cur, ec_read_number("/proc/self/statm", 0) * (uint64_t)sysconf(_SC_PAGESIZE));
}

/* Bytes that this process may write to beyond what it has written, by its cgroup and the machine's available memory. */
static uint64_t ec_room_to_write(void)
{
    static const char *const labels[2] = {"MemAvailable:", "SwapFree:"};
    uint64_t kib[2] = {UINT64_MAX >> 11, 0};
    ec_read_fields("/proc/meminfo", 2, labels, kib);
    const uint64_t machine = (kib[0] + kib[1]) * 1024, cgroup = ec_cgroup_room("/sys/fs/cgroup", "/proc/self/cgroup", kib[1] * 1024);
    const uint64_t room = machine < cgroup ? machine : cgroup;
    return room < ec_promised->pretended ? room : ec_promised->pretended;
}

/* Bytes that this process may still map and write to, beside what is promised. */
static uint64_t ec_memory_room(void)
{
    const uint64_t map = ec_room_to_map(), write = ec_room_to_write();
    const int64_t promised = ec_promised_bytes();
    const uint64_t left = ec_less(write, promised > 0 ? (uint64_t)promised : 0);
    return map < left ? map : left;
}

#endif
