"""Physical limits as peers: loops over known addresses, in huge pages."""

from __future__ import annotations

import ctypes

import numpy as np

from .native import address, build

__all__ = ["HugeMemory", "fresh_memset", "lines_and_seats", "lines_read", "rows_copy"]


def _library() -> ctypes.CDLL:
    library = build("limits.cpp")
    library.huge_new.restype = ctypes.c_void_p
    return library


class HugeMemory:
    """A float32 array [rows, dim] in huge pages, written once."""

    def __init__(self, rows: int, dim: int) -> None:
        self._library, self._bytes = _library(), max(rows * dim * 4, 4096)
        self._data = ctypes.c_void_p(self._library.huge_new(ctypes.c_int64(self._bytes)))
        if not self._data:
            raise MemoryError(f"{self._bytes} bytes refused")
        self.array = np.ctypeslib.as_array(ctypes.cast(self._data, ctypes.POINTER(ctypes.c_float)), (rows, dim))

    def close(self) -> None:
        """Unmap; `array` must not be used any more."""
        del self.array
        self._library.huge_delete(self._data, ctypes.c_int64(self._bytes))


def lines_read(lines: np.ndarray, at: np.ndarray, out: np.ndarray, threads: int = 1) -> None:
    """out[i] = first 8 bytes of the 64-byte line at[i]."""
    _library().lines_read(address(lines), address(at), ctypes.c_int64(len(at)), address(out), ctypes.c_int64(threads))


def lines_and_seats(lines: np.ndarray, at: np.ndarray, seats: np.ndarray, seat: np.ndarray) -> None:
    """Read the 64-byte line at[i] and write to the 16 bytes seat[i], for each i in turn."""
    _library().lines_and_seats(address(lines), address(at), address(seats), address(seat), ctypes.c_int64(len(at)))


def rows_copy(rows: np.ndarray, at: np.ndarray, out: np.ndarray, threads: int = 1) -> np.ndarray:
    """out[i] = rows[at[i]]; `out` aligned to 32 bytes, dim a multiple of 8."""
    n, dim = ctypes.c_int64(len(at)), ctypes.c_int64(rows.shape[1])
    assert out.ctypes.data % 32 == 0 and rows.shape[1] % 8 == 0
    _library().rows_copy(address(rows), address(at), n, dim, address(out), ctypes.c_int64(threads))
    return out


def fresh_memset(size: int) -> None:
    """Map `size` fresh bytes, set them, unmap them."""
    _library().fresh_memset(ctypes.c_int64(size))
