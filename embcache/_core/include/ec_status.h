/* Status codes of the core, and its assertion.
 *
 * Every nogil function returns one of these or a count; the Python doors turn them into exceptions. EC_ASSERT is for
 * our own mistakes only and is compiled in by EMBCACHE_CHECKED=1; a user's mistake is checked at the door.
 */
#ifndef EC_STATUS_H
#define EC_STATUS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    EC_OK = 0,
    EC_NOMEM = -1,    /* host memory could not be had; nothing changed */
    EC_LIMIT = -2,    /* a fixed limit of a structure was reached; nothing changed */
    EC_CAPACITY = -3, /* too few device slots; nothing changed */
    EC_CLOSED = -4,   /* the object was closed */
    EC_STATE = -5,    /* called out of order */
    EC_BROKEN = -6,   /* an invariant does not hold: our own mistake */
    EC_DISK = -7      /* the file system refused; nothing changed, and the backing knows why */
};

#ifdef EC_CHECKED
#define EC_ASSERT(condition)                                                                       \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "embcache: %s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                               \
        }                                                                                          \
    } while (0)
#else
#define EC_ASSERT(condition) ((void)0)
#endif

#define EC_LIKELY(condition) __builtin_expect((condition) != 0, 1)
#define EC_PREFETCH_READ(address) __builtin_prefetch((address), 0, 3)
#define EC_PREFETCH_WRITE(address) __builtin_prefetch((address), 1, 3)

#endif
