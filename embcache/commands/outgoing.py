"""Files of foreign formats, written from one pass over a table's rows: ``.npz``, ``.safetensors`` and dense ``.npy``.

Arrays grow at their final places, since the number of rows is known; a zip file's members cannot, so these are files of their
own first. bfloat16 is float32 where the format has no such type.
"""

from __future__ import annotations

import json
import os
import zipfile
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..checkpoint import Rows, TableDescription
from ..checkpoint.files import refusals
from ..rowtypes import ROW_TYPES
from .streams import BFLOAT16, DESCRIPTION

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DenseFile", "NpzWriter", "SafetensorsWriter", "Writer", "npy_header", "safetensors_header"]

_KINDS = {"float32": "F32", "float16": "F16", BFLOAT16: "BF16"}
_DOING = "exporting"


class Writer(Protocol):
    """What takes rows, and makes a file of them."""

    def add(self, rows: Rows) -> None:
        """Take rows; the arrays are the caller's."""

    def end(self) -> None:
        """All rows have come: make the file whole."""


def _columns(description: TableDescription) -> list[tuple[str, int | None]]:
    """Names of the arrays, and elements of a row where they have two dimensions."""
    columns: list[tuple[str, int | None]] = [("keys", None), ("weights", description.dim)]
    columns += [("state", description.state_dim)] if description.state_dim else []
    return columns + ([("frequencies", None), ("timestamps", None)] if description.with_filter else [])


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What a ``.npy`` file begins with: 128 bytes or a multiple of 64."""
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": shape})
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def safetensors_header(tensors: dict[str, tuple[str, tuple[int, ...], int]], about: str | None) -> bytes:
    """What a ``.safetensors`` file begins with; tensors are (dtype, shape, bytes), one behind the other."""
    body: dict[str, Any] = {"__metadata__": {DESCRIPTION: about}} if about else {}
    at = 0
    for name, (kind, shape, size) in tensors.items():
        body[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(body).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _allocate(descriptor: int, size: int) -> None:
    """Have disk space, so that a full disk is known now."""
    if size:
        os.posix_fallocate(descriptor, 0, size)


def _write(descriptor: int, array: Any, offset: int) -> None:
    content: Any = np.ascontiguousarray(array)
    view = memoryview(content).cast("B") if content.size else memoryview(b"")
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


class _Files:
    """Arrays at given places of files, each filled from its beginning."""

    def __init__(self, description: TableDescription) -> None:
        self._kind = ROW_TYPES[description.dtype]
        self._places: dict[str, list[int]] = {}  # descriptor, next offset

    def _add(self, rows: Rows, wide: bool) -> None:
        for name, place in self._places.items():
            array: Any = getattr(rows, name)
            if name == "weights" and wide:
                array = self._kind.from_storage(array)
            _write(place[0], array, place[1])
            place[1] += array.nbytes


class SafetensorsWriter(_Files):
    """A ``.safetensors`` file of `count` rows."""

    def __init__(self, path: str, description: TableDescription, about: str, count: int) -> None:
        super().__init__(description)
        self._path = path
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, width in _columns(description):
            kind = _KINDS[description.dtype] if name == "weights" else "F32" if name == "state" else "I64"
            element = description.storage.itemsize if name == "weights" else 4 if name == "state" else 8
            shape = (count,) if width is None else (count, width)
            tensors[name] = (kind, shape, count * (width or 1) * element)
        head = safetensors_header(tensors, about)
        with refusals(path, _DOING):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            at = len(head)
            _write(self._descriptor, np.frombuffer(head, np.uint8), 0)
            for name, (_, _, size) in tensors.items():
                self._places[name] = [self._descriptor, at]
                at += size
            _allocate(self._descriptor, at)

    def add(self, rows: Rows) -> None:
        with refusals(self._path, _DOING):
            self._add(rows, wide=False)

    def end(self) -> None:
        os.close(self._descriptor)


class NpzWriter(_Files):
    """A ``.npz`` file of `count` rows, not compressed; its members are files beside it first."""

    def __init__(self, path: str, description: TableDescription, about: str, count: int) -> None:
        super().__init__(description)
        self._path = path
        self._about = about
        self._members: dict[str, str] = {}
        for name, width in _columns(description):
            dtype = self._kind.door if name == "weights" else np.dtype(np.float32 if name == "state" else np.int64)
            shape = (count,) if width is None else (count, width)
            head = npy_header(dtype, shape)
            self._members[name] = f"{path}.{name}"
            with refusals(path, _DOING):
                descriptor = os.open(self._members[name], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                self._places[name] = [descriptor, len(head)]
                _write(descriptor, np.frombuffer(head, np.uint8), 0)
                _allocate(descriptor, len(head) + count * (width or 1) * dtype.itemsize)

    def add(self, rows: Rows) -> None:
        with refusals(self._path, _DOING):
            self._add(rows, wide=True)

    def end(self) -> None:
        text = np.frombuffer(self._about.encode(), np.uint8)
        with refusals(self._path, _DOING), zipfile.ZipFile(self._path, "x", zipfile.ZIP_STORED) as archive:
            for name, member in self._members.items():
                os.close(self._places[name][0])
                archive.write(member, f"{name}.npy")
                os.unlink(member)
            archive.writestr(f"{DESCRIPTION}.npy", npy_header(text.dtype, text.shape) + text.tobytes())


class DenseFile:
    """A dense tensor (count, dim) behind `head`: rows at any place."""

    def __init__(self, path: str, head: bytes, count: int, row_bytes: int) -> None:
        self._path = path
        self._begin = len(head)
        self._row_bytes = row_bytes
        with refusals(path, _DOING):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _allocate(self._descriptor, len(head) + count * row_bytes)
            _write(self._descriptor, np.frombuffer(head, np.uint8), 0)

    def put(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Rows at the places of their keys; neighbours in one call of the system."""
        order = np.argsort(keys)
        keys, rows = keys[order], rows[order]
        starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 2) != 1).tolist()
        with refusals(self._path, _DOING):
            for begin, end in pairwise([*starts, len(keys)]):
                _write(self._descriptor, rows[begin:end], self._begin + int(keys[begin]) * self._row_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
