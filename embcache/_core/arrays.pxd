"""C contract: a NumPy array as a door sees it. One look at it, no buffer acquired and none to release.

Whoever opens an array holds the object while it uses the memory; that is what keeps the memory. A resize under way in
another thread is the caller's mistake, here as in NumPy.
"""

from libc.stdint cimport int64_t

cdef enum:  # element types, one bit each
    INT64 = 1
    FLOAT32 = 2
    UINT8 = 4
    BOOLEAN = 8
    FLOAT16 = 16
    INT16 = 32

cdef struct Array:
    void *at         # NULL where there is no element
    int64_t rows     # length of the first axis
    int64_t columns  # of the second; 1 where there is one axis
    int kind         # the element type's bit

# Fill `array` and say True where `value` is an aligned, C-contiguous NumPy array of `axes` (1 or 2) axes, of one of `kinds`
# (and writeable, for `write`); else say False.
cdef bint array_open(object value, int axes, int kinds, bint write, Array *array) except -1

cdef object new_int64(int64_t count)  # an uninitialized int64 array of (count,)
