"""The planner's de-duplication by itself, compiled from the engine's own headers (see dedup_alone.c)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

import embcache._core
from peers.native import address, build

__all__ = ["Dedup"]

HEADERS = Path(embcache._core.__file__).parent / "include"
# As setup.py compiles the engine: no more than a wheel gets. Python.h defines _GNU_SOURCE there.
OPTIONS = (
    "-O3",
    "-D_GNU_SOURCE",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-Wno-unused-function",
)


class Dedup:
    """Unique keys by first occurrence, inverse, and on request the occurrence lists of one table's batch.

    Raises `peers.native.NotBuilt` where there is no compiler.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._library = build(str(Path(__file__).with_name("dedup_alone.c")), OPTIONS, include=str(HEADERS))
        for name in ("dedup_new", "dedup_unique", "dedup_inverse"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.dedup_run.restype = ctypes.c_int64
        self._work = ctypes.c_void_p(self._library.dedup_new(ctypes.c_int(threads)))

    def run(self, keys: np.ndarray, *, csr: bool) -> int:
        """De-duplicate; returns the number of unique keys. The results stay in place until the next run."""
        n = ctypes.c_int64(len(keys))
        count = self._library.dedup_run(self._work, address(keys), n, ctypes.c_int(csr), ctypes.c_int(self._threads))
        assert count >= 0, "out of memory, or too few keys"
        return count

    def result(self, count: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the unique keys and the inverse of the last run."""

        def copy(name: str, size: int) -> np.ndarray:
            at = ctypes.cast(getattr(self._library, name)(self._work), ctypes.POINTER(ctypes.c_int64))
            return np.ctypeslib.as_array(at, (size,)).copy()

        return copy("dedup_unique", count), copy("dedup_inverse", n)

    def close(self) -> None:
        """Free the workspace."""
        self._library.dedup_delete(self._work)
