"""The canonical hash: XXH3-64 of keys and of strings.

Owns nothing. `hash_keys` is what vshards and owner ranks derive from; `hash_strings` turns string features into keys.
"""

import os

import numpy as np

from embcache.errors import ShapeError

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport int64_t, uint64_t

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL


def hash_keys(const int64_t[::1] keys not None):
    """XXH3-64 (seed 0) of the 8 little-endian bytes of each key: uint64 (n,)."""
    cdef int64_t i, n = keys.shape[0]
    result = np.empty(n, dtype=np.uint64)
    cdef uint64_t[::1] out = result
    with nogil:
        for i in range(n):
            out[i] = ec_hash(keys[i])
    return result


def hash_strings(list values not None, uint64_t seed):
    """XXH3-64 with `seed` of the UTF-8 bytes of each str, or of the bytes of each bytes: int64 (n,).

    `ShapeError` names the first element that is neither, or that has no UTF-8 form.
    """
    cdef Py_ssize_t i, size, n = len(values)
    cdef const char *data
    result = np.empty(n, dtype=np.int64)
    cdef int64_t[::1] out = result
    for i in range(n):
        value = values[i]
        if PyUnicode_Check(value):
            try:
                data = PyUnicode_AsUTF8AndSize(value, &size)
            except UnicodeEncodeError:
                raise ShapeError(f"hash_strings: values[{i}] = {value!r} has no UTF-8 form (a lone surrogate); clean it first") from None
        elif PyBytes_Check(value):
            data = PyBytes_AS_STRING(value)
            size = PyBytes_GET_SIZE(value)
        else:
            raise ShapeError(f"hash_strings: values[{i}] = {value!r} is a {type(value).__name__}; give str or bytes")
        out[i] = <int64_t>ec_xxh3(data, size, seed)
    return result


def random_seed():
    """64 bits from the operating system, for hashes whose values nobody sees.

    (Not by way of ``secrets``: importing that takes longer than importing this package.)
    """
    return int.from_bytes(os.urandom(8), "little")
