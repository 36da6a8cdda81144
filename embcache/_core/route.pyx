"""Where the keys of a batch go: each distinct key of a table once, in the order in which ranks get them.

A key's owner is the rank whose vshards hold it: rank r of w has the vshards from ceil(r * 4096 / w) on, as checkpoints have it, so
owners follow from the canonical hash alone. Uniques are numbered by group of tables, owner, table, and first occurrence in the batch:
what one owner gets of one group lies together, and so do the rows that it answers with.

Owns a probe table that is reused. Thread safety: one batch at a time runs, the others wait; the GIL is released meanwhile.
"""

import threading

import numpy as np

from embcache._core.digest import random_seed
from embcache.errors import HostMemoryError, ShapeError

from cython cimport final
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free

__all__ = ["Router", "owners_of"]


cdef inline int64_t owner(int64_t key, int64_t world) noexcept nogil:
    return <int64_t>ec_vshard(ec_hash(key)) * world // EC_VSHARDS


def owners_of(const int64_t[::1] keys not None, int64_t world):
    """The rank that owns each key, int64 (n,), where `world` ranks share the vshards."""
    cdef int64_t i, n = keys.shape[0]
    result = np.empty(n, np.int64)
    cdef int64_t[::1] out = result
    with nogil:
        for i in range(n):
            out[i] = owner(keys[i], world)
    return result


@final
cdef class Router:
    """Finds the distinct keys of batches and their owners.

    Parameters
    ----------
    group_of : int64 (T,)
        Group of each table, from 0, not falling: the keys of a group travel side by side.
    world : int
        Number of ranks, 1 to 4096.
    """

    def __cinit__(self, const int64_t[::1] group_of not None, int64_t world):
        if not 1 <= world <= EC_VSHARDS:
            raise ShapeError(f"world = {world}; give a number of ranks from 1 to {EC_VSHARDS}")
        self.dedup = <ec_dedup_table *>calloc(1, sizeof(ec_dedup_table))
        if self.dedup == NULL:
            raise HostMemoryError("out of host memory while making a router")
        self.group_of = np.array(group_of, np.int64)
        self.world, self.tables = world, group_of.shape[0]
        self.groups = 1 + (group_of[self.tables - 1] if self.tables > 0 else -1)
        self.seed[0], self.seed[1] = random_seed(), random_seed() | 1
        self.lock = threading.Lock()

    def __dealloc__(self):
        if self.dedup != NULL:
            ec_dedup_table_free(self.dedup)
            free(self.dedup)

    def route(self, const int64_t[::1] keys not None, const int64_t[::1] table_offsets not None):
        """The distinct keys of a table-major batch.

        Parameters
        ----------
        keys : int64 (n,)
        table_offsets : int64 (T + 1,)

        Returns
        -------
        unique_keys : int64 (U,)
            By group, owner, table and first occurrence.
        counts : int64 (G, world, T)
            How many of them are of a group, an owner and a table (0 where the table is of another group).
        inverse : int64 (n,)
            Number of the unique at each position.
        occurrences : int64 (U,)
        order, segment_offsets : int64 (n,), (U + 1,)
            Positions by unique, rising within one.

        Raises
        ------
        ShapeError
            Offsets do not cut the keys, or a table has too many of them.
        HostMemoryError
        """
        cdef int64_t n = keys.shape[0], t, g, d, i, u, total = 0, at, base, position
        cdef int64_t[::1] inverse, number, found, first_unique, order, ends, unique_view, times_view
        cdef uint32_t[::1] counts_by_id
        cdef int64_t[:, :, ::1] blocks, starts
        cdef int status = 0
        if table_offsets.shape[0] != self.tables + 1 or table_offsets[0] != 0 or table_offsets[self.tables] != n:
            raise ShapeError(f"table_offsets: give {self.tables + 1} of them, from 0 to {n}")
        for t in range(self.tables):
            if not 0 <= table_offsets[t + 1] - table_offsets[t] <= EC_DEDUP_MAX_KEYS:
                raise ShapeError(f"table_offsets: table {t} has {table_offsets[t + 1] - table_offsets[t]} keys; 0 to {EC_DEDUP_MAX_KEYS} are possible")
        inverse_array, found_array = np.empty(n, np.int64), np.empty(n + 1, np.int64)
        number_array, count_array = np.empty(n + 1, np.int64), np.empty(n + 1, np.uint32)
        block_array = np.zeros((self.groups, self.world, self.tables), np.int64)
        inverse, found, number, counts_by_id, blocks = inverse_array, found_array, number_array, count_array, block_array
        first_array = np.zeros(self.tables + 1, np.int64)
        first_unique = first_array
        with self.lock, nogil:
            for t in range(self.tables):
                at = table_offsets[t]
                base = table_offsets[t + 1] - at
                first_unique[t] = total
                if base == 0:
                    continue
                if ec_dedup_begin(self.dedup, base, base // 2 + 1) != 0:
                    status = 1
                    break
                total += ec_dedup_run(self.dedup, self.seed, 0, &keys[at], NULL, base, &inverse[at], &found[total], NULL, &counts_by_id[total])
            first_unique[self.tables] = total
            if status == 0:
                for t in range(self.tables):
                    for u in range(first_unique[t], first_unique[t + 1]):
                        d = owner(found[u], self.world)
                        number[u] = d
                        blocks[self.group_of[t], d, t] += 1
        if status != 0:
            raise HostMemoryError("out of host memory while finding the distinct keys of a batch; use smaller batches")
        start_array = np.cumsum(block_array.reshape(-1)).reshape(block_array.shape) - block_array
        starts = start_array
        unique_array, times_array = np.empty(total, np.int64), np.empty(total, np.int64)
        end_array, order_array = np.zeros(total + 1, np.int64), np.empty(n, np.int64)
        unique_view, times_view, ends, order = unique_array, times_array, end_array, order_array
        with nogil:
            for t in range(self.tables):
                g = self.group_of[t]
                for u in range(first_unique[t], first_unique[t + 1]):
                    d = number[u]
                    at = starts[g, d, t]
                    starts[g, d, t] += 1
                    number[u] = at
                    unique_view[at] = found[u]
                    times_view[at] = counts_by_id[u]
                base = first_unique[t]
                for i in range(table_offsets[t], table_offsets[t + 1]):
                    inverse[i] = number[base + inverse[i]]
            position = 0
            for u in range(total):  # found is not needed any more: the cursors of a counting sort
                found[u] = position
                position += times_view[u]
                ends[u + 1] = position
            for i in range(n):
                order[found[inverse[i]]] = i
                found[inverse[i]] += 1
        return unique_array, block_array, inverse_array, times_array, order_array, end_array
