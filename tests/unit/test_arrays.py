"""Arrays as the core's doors see them: the same by NumPy's array head and by the buffer protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from embcache._core import arrays, threads
from embcache._core.arrays import is_plain_keys
from embcache._core.table import Table
from embcache.errors import ShapeError

KEYS = np.array([5, -6, 7], dtype=np.int64)


class Sub(np.ndarray):
    """A subclass: an array all the same."""


@pytest.fixture(params=["heads", "buffers"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Either way of looking; the heads must fit the NumPy that is here, or the doors are slow without need."""
    assert arrays._read_heads(request.param == "heads") == (request.param == "heads")
    yield request.param
    assert arrays._read_heads(True)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def crooked(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, dtype=np.uint8)[1:]
    moved = memory.view(array.dtype)
    moved[:] = array
    return moved


FIT = {
    "plain": KEYS,
    "read-only": read_only(KEYS),
    "empty": KEYS[:0],
    "part": np.arange(9)[4:7],
    "one of a stride": np.arange(9)[::9],
}
UNFIT = {
    "list": [5, -6],
    "None": None,
    "strided": np.arange(9)[::2],
    "matrix": KEYS.reshape(1, 3),
    "no axis": np.array(5),
    "unaligned": crooked(KEYS),
    "swapped": KEYS.astype(">i8"),
    "uint64": KEYS.astype(np.uint64),
    "int32": KEYS.astype(np.int32),
    "float": KEYS.astype(np.float64),
    "objects": KEYS.astype(object),
    "memoryview": memoryview(KEYS),
    "structure": np.zeros(3, dtype=[("key", np.int64)]),
}


@pytest.mark.parametrize("name", FIT)
def test_keys_that_need_no_conversion(way: str, name: str) -> None:
    assert is_plain_keys(FIT[name])
    table = Table("t", 2)
    assert table.find(FIT[name]).tolist() == [-1] * len(FIT[name])
    assert table.insert(FIT[name]).tolist() == list(range(len(FIT[name]))) == table.find(FIT[name]).tolist()


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_plain_array_of_keys_is_refused_by_its_name(way: str, name: str) -> None:
    assert not is_plain_keys(UNFIT[name])
    table = Table("t", 2)
    for door in (table.find, table.insert):
        with pytest.raises(ShapeError, match=r"table 't': keys is .*; give an aligned, contiguous int64 array"):
            door(UNFIT[name])
    assert len(table) == 0


def test_a_dtype_that_equals_int64_and_a_subclass_are_keys_of_the_core(way: str) -> None:
    table = Table("t", 2)
    equal = KEYS.astype(np.longlong)
    assert equal.dtype == np.int64 and is_plain_keys(equal)
    assert not is_plain_keys(KEYS.view(Sub)), "NumPy may do anything with a subclass: it is converted first"
    assert table.insert(equal).tolist() == [0, 1, 2] == table.find(KEYS.view(Sub)).tolist()


def test_rows_are_refused_unless_they_can_be_written(way: str) -> None:
    table = Table("t", 2)
    for bad in (
        read_only(KEYS),
        KEYS[:2].copy(),
        KEYS.astype(np.int32),
        crooked(KEYS),
        np.zeros(6, dtype=np.int64)[::2],
    ):
        for door in (table.find, table.insert):
            with pytest.raises(ShapeError, match="rows"):
                door(KEYS, bad)
    assert len(table) == 0
    out = np.zeros(3, dtype=np.int64)
    assert table.insert(KEYS, out) is out and out.tolist() == [0, 1, 2]


def test_i12_a_child_knows_that_it_is_another_process_whatever_its_number() -> None:
    own = threads.this_process()
    assert threads.process_number_of(own) == os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(threads.this_process()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        mark = int(pipe.read())
    assert threads.process_number_of(mark) == child
    assert mark - child != own - os.getpid()  # a grandchild may get the number of an owner that died
    assert threads.this_process() == own
