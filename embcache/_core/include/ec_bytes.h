/* Numbers and arrays as bytes of a file, and back: int64 in the machine's byte order, arrays padded to 8 bytes. */
#ifndef EC_BYTES_H
#define EC_BYTES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ec_memory.h"

typedef struct ec_bytes {
    char *data; /* the caller frees it */
    int64_t size, room;
    int refused; /* no memory: what follows is dropped */
} ec_bytes;

static void ec_put(ec_bytes *out, const void *from, int64_t bytes)
{
    const int64_t padded = (bytes + 7) / 8 * 8;
    if (out->size + padded > out->room && !out->refused) {
        const int64_t room = out->size + padded + out->room / 2 + 4096;
        char *wider = (char *)ec_take(out->data, (size_t)room);
        out->refused = wider == NULL;
        if (wider != NULL) {
            out->data = wider;
            out->room = room;
        }
    }
    if (out->refused)
        return;
    if (bytes > 0)
        memcpy(out->data + out->size, from, (size_t)bytes);
    memset(out->data + out->size + bytes, 0, (size_t)(padded - bytes));
    out->size += padded;
}

static void ec_put_number(ec_bytes *out, int64_t number) { ec_put(out, &number, sizeof number); }

typedef struct ec_reader {
    const char *at, *end;
    int broken; /* a number or an array reached beyond the end, or was out of its range */
} ec_reader;

static const void *ec_get(ec_reader *in, int64_t bytes)
{
    const int64_t padded = (bytes + 7) / 8 * 8;
    if (in->broken || bytes < 0 || padded > in->end - in->at) {
        in->broken = 1;
        return NULL;
    }
    const char *here = in->at;
    in->at += padded;
    return here;
}

static int64_t ec_get_number(ec_reader *in, int64_t low, int64_t high)
{
    int64_t number = 0;
    const void *here = ec_get(in, sizeof number);
    if (here != NULL)
        memcpy(&number, here, sizeof number);
    if (number < low || number > high)
        in->broken = 1;
    return in->broken ? low : number;
}

#endif
