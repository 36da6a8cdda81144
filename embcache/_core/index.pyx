"""The index on its own: int64 keys -> uint32 values in cache-line buckets.

Owns one `ec_index` (see ec_index.h for layout and invariants). The table and the planner embed that structure directly;
this class is for tests and tools.
"""

import numpy as np

from embcache.errors import HostMemoryError, ShapeError

from cython cimport final
from libc.stdint cimport int64_t, uint32_t, uint64_t

from embcache._core.arena cimport ec_promises_share, promises
from embcache._core.digest cimport ec_hash
from embcache._core.threads cimport process_mark

ec_promises_share(promises())

cdef enum:
    AHEAD = 16


@final
cdef class Index:
    """A map from any int64 key to a uint32 value.

    Parameters
    ----------
    seed : int
        64 bits stirred into the bucket choice.

    Notes
    -----
    Thread safety: none; one thread at a time.
    """

    cdef ec_index index
    cdef int64_t process

    def __cinit__(self, uint64_t seed=0):
        ec_index_init(&self.index, seed)
        self.process = process_mark()

    def __dealloc__(self):
        if self.process == process_mark():
            ec_index_free(&self.index)

    def __len__(self):
        return self.index.size

    @property
    def nbytes(self):
        """Memory held."""
        return self.index.bytes

    @property
    def bucket_count(self):
        """Buckets of 5 places."""
        return self.index.bucket_count

    @property
    def grow_at(self):
        """Keys that fit without growth."""
        return self.index.grow_at

    def reserve(self, int64_t extra):
        """Make room for `extra` more keys; `HostMemoryError` leaves the index as it was."""
        if extra < 0 or ec_index_reserve(&self.index, extra) != 0:
            raise HostMemoryError(f"Index: no host memory for {extra} keys beside {self.index.size}")

    def find(self, const int64_t[::1] keys not None):
        """Value of each key, -1 where absent: int64 (n,)."""
        cdef int64_t i, n = keys.shape[0]
        result = np.empty(n, dtype=np.int64)
        cdef int64_t[::1] out = result
        with nogil:
            for i in range(n):
                if i + AHEAD < n:
                    ec_index_prefetch(&self.index, ec_hash(keys[i + AHEAD]))
                out[i] = ec_index_find(&self.index, keys[i], ec_hash(keys[i]))
        return result

    def put(self, const int64_t[::1] keys not None, const uint32_t[::1] values not None):
        """Insert or overwrite, in order; growing as needed."""
        cdef int64_t i
        cdef uint64_t key_hash
        if keys.shape[0] != values.shape[0]:
            raise ShapeError(f"Index: {values.shape[0]} values for {keys.shape[0]} keys")
        for i in range(keys.shape[0]):
            key_hash = ec_hash(keys[i])
            if ec_index_set(&self.index, keys[i], key_hash, values[i]) != 0:
                self.reserve(1)
                ec_index_insert(&self.index, keys[i], key_hash, values[i])

    def erase(self, const int64_t[::1] keys not None):
        """Remove keys in order; the value each had, -1 where absent: int64 (n,)."""
        cdef int64_t i
        result = np.empty(keys.shape[0], dtype=np.int64)
        cdef int64_t[::1] out = result
        for i in range(keys.shape[0]):
            out[i] = ec_index_erase(&self.index, keys[i], ec_hash(keys[i]))
        return result

    def check(self):
        """Verify every invariant; returns the longest probe in buckets, or raises `AssertionError`."""
        cdef int64_t longest
        cdef int status = ec_index_check(&self.index, &longest)
        if status != 0:
            raise AssertionError(f"Index: broken invariant, or no memory to check (status {status})")
        return longest
