"""NumPy arrays at the doors of the core: what they are, in tens of nanoseconds instead of a microsecond each.

A typed memoryview costs about 0.7 us, and a training step of four bags opened forty; so an array is looked at in place. NumPy
keeps the head of its array object fixed for extensions compiled against its headers, which read it without a call. The core is
built without those headers, so at import the head is compared with what NumPy says about some arrays; should it ever differ,
and for arrays of an element type that merely equals one of ours, the buffer protocol says the same, slower.

Owns nothing. Thread safety: the GIL is held; an array's memory is its caller's to keep.
"""

import numpy as np

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t

cdef extern from *:
    """
    /* Head of NumPy's array object, by its documented C API (PyArrayObject_fields). */
    typedef struct {
        PyObject_HEAD
        char *data;
        int axes;
        Py_ssize_t *shape;
        Py_ssize_t *strides;
        PyObject *base;
        PyObject *dtype;
        int flags;
    } ec_array_head;
    """
    ctypedef struct ec_array_head:
        char *data
        int axes
        Py_ssize_t *shape
        Py_ssize_t *strides
        PyObject *dtype
        int flags
    size_t HEAD_BYTES "sizeof(ec_array_head)"

cdef enum:  # NumPy's flags
    CONTIGUOUS = 0x1
    ALIGNED = 0x100
    WRITEABLE = 0x400

cdef object ndarray = np.ndarray, empty = np.empty
# The element types' one descriptor each; an array of another, equal one goes the slow way.
cdef object DTYPES = tuple(np.dtype(name) for name in ("int64", "float32", "uint8", "bool", "float16", "int16"))
cdef object DTYPE_INT64 = DTYPES[0]
cdef const char *FORMATS = b"lfB?eh"

cdef bint heads_known = False


cdef bint _head_is(object array):
    """Whether the head of `array` says what NumPy says."""
    cdef ec_array_head *head = <ec_array_head *><PyObject *>array
    cdef int axis
    if head.axes != array.ndim or head.dtype != <PyObject *>array.dtype:
        return False
    if <uintptr_t>head.data != <uintptr_t>array.__array_interface__["data"][0]:
        return False
    for axis in range(array.ndim):
        if head.shape[axis] != array.shape[axis] or head.strides[axis] != array.strides[axis]:
            return False
    flags = array.flags
    return (((head.flags & CONTIGUOUS) != 0) == flags.c_contiguous and ((head.flags & ALIGNED) != 0) == flags.aligned
            and ((head.flags & WRITEABLE) != 0) == flags.writeable)


cdef bint _heads_fit():
    """Whether arrays of this NumPy begin as `ec_array_head` says, seen at arrays that differ in everything it holds."""
    if <size_t>ndarray.__basicsize__ < HEAD_BYTES:
        return False
    whole = np.arange(12, dtype=np.int64).reshape(3, 4)
    frozen = whole[1:]
    frozen.flags.writeable = False
    crooked = np.zeros(33, dtype=np.uint8)[1:].view(np.float32)
    samples = [whole, whole[:, 1:], frozen, whole.T, crooked, np.empty((0, 5), dtype=np.float16), np.zeros(3, dtype=bool)]
    return all([_head_is(sample) for sample in samples])


def _read_heads(bint wanted):
    """Whether to look at heads, for tests; never where they do not fit. Returns what holds from now on."""
    global heads_known
    heads_known = wanted and _heads_fit()
    return heads_known


cdef bint _open_buffer(object value, int axes, int kinds, bint write, Array *array) except -1:
    """`array_open` by the buffer protocol."""
    cdef Py_buffer buffer
    cdef int kind
    cdef bint fits = False
    try:
        PyObject_GetBuffer(value, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if write else 0))
    except (TypeError, ValueError, BufferError):
        return False
    if buffer.ndim == axes and buffer.format != NULL and buffer.format[0] != 0 and buffer.format[1] == 0:
        for kind in range(6):
            if kinds >> kind & 1 and (buffer.format[0] == FORMATS[kind] or (kind == 0 and buffer.format[0] == b"q")):
                fits = True
                array.kind = 1 << kind
        array.rows = buffer.shape[0]
        array.columns = buffer.shape[1] if axes == 2 else 1
        array.at = buffer.buf if array.rows > 0 and array.columns > 0 else NULL
    PyBuffer_Release(&buffer)
    return fits


cdef bint array_open(object value, int axes, int kinds, bint write, Array *array) except -1:
    cdef ec_array_head *head = <ec_array_head *><PyObject *>value
    cdef int needed = CONTIGUOUS | ALIGNED | (WRITEABLE if write else 0)
    cdef int kind
    if type(value) is not ndarray and not isinstance(value, ndarray):
        return False
    if heads_known:
        for kind in range(6):
            if kinds >> kind & 1 and head.dtype == <PyObject *>(<tuple>DTYPES)[kind]:
                if head.axes != axes or head.flags & needed != needed:
                    return False
                array.kind = 1 << kind
                array.rows = head.shape[0]
                array.columns = head.shape[1] if axes == 2 else 1
                array.at = head.data if array.rows > 0 and array.columns > 0 else NULL
                return True
    return _open_buffer(value, axes, kinds, write, array)


cdef object new_int64(int64_t count):
    return empty(count, DTYPE_INT64)


def is_plain_keys(value):
    """Whether `value` is what the core takes as keys: an int64 ndarray (no subclass) of one axis, contiguous and aligned."""
    cdef Array array
    return type(value) is ndarray and array_open(value, 1, INT64, False, &array)


heads_known = _heads_fit()
