"""A chunk: some rows of one table, column by column, under one digest.

A chunk begins and ends at a multiple of 4096 bytes of its segment file. All numbers are little-endian.

=======  ======  =====================================================================================================
offset   bytes   header
=======  ======  =====================================================================================================
0        8       magic ``EMBCHNK\\n``
8        2       format version
10       2       bytes of the header: 192
12       4       incompatible features
16       8       generation
24       4       number of the table in its generation and rank (0xFFFFFFFF: of no table)
28       4       number of the chunk, counted for each table, generation and rank
32       1       kind: 1 rows, 2 erased keys, 3 waiting keys of a filter, 4 late keys of a filter, 5 bytes, 6 keys that
                 wait no more
33       1       columns, at most 12
34       2       rank
36       2       first vshard of its keys
38       2       last vshard + 1
40       8       rows
48       8       bytes of the chunk, padding included
56       8       XXH3-64 of the table's name; 0: of no table
64       16      XXH3-128 of the whole chunk, taken with these 16 bytes zero
80       16      zeros
96       96      12 columns: role (1 byte), dtype (1), zeros (2), elements of a row (4); zeros where there is none
=======  ======  =====================================================================================================

Behind the header lie the columns in this order, each padded with zeros to 64 bytes, all together to 4096.

Roles: 1 key, 2 frequency, 3 timestamp, 4 weights, 5 state, 6 bytes. Dtypes: 1 int64, 2 float32, 3 float16, 4 bfloat16,
5 uint8.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..errors import CorruptionError, FormatVersionError, ShapeError
from .description import TableDescription
from .names import VSHARDS
from .sealed import FORMAT_VERSION, digest128

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "BLOB",
    "CHUNK_BYTES",
    "ERASED",
    "GONE",
    "LATE",
    "MOST_CHUNK_BYTES",
    "NO_TABLE",
    "ROWS",
    "WAITING",
    "ChunkBuffer",
    "Column",
    "Header",
    "checked",
    "columns_of",
    "open_chunk",
    "rows_per_chunk",
]

ROWS, ERASED, WAITING, LATE, BLOB, GONE = 1, 2, 3, 4, 5, 6
KEY, FREQUENCY, TIMESTAMP, WEIGHTS, STATE, BYTES = 1, 2, 3, 4, 5, 6
ROLE_NAMES = {
    KEY: "keys",
    FREQUENCY: "frequencies",
    TIMESTAMP: "timestamps",
    WEIGHTS: "weights",
    STATE: "state",
    BYTES: "bytes",
}
NO_TABLE = 0xFFFFFFFF
CHUNK_BYTES = 4 << 20  # what a full chunk comes to
MOST_CHUNK_BYTES = 64 << 20  # what one of more than one row comes to at most, whatever a writer was told
ALIGNMENT = 4096

_MAGIC = b"EMBCHNK\n"
_FIXED = struct.Struct("<8sHHIQIIBBHHHQQQ16s16x")
_COLUMN = struct.Struct("<BBHI")
_MOST_COLUMNS = 12
HEADER_BYTES = _FIXED.size + _MOST_COLUMNS * _COLUMN.size
_DIGEST = slice(64, 80)
_MOST_ROWS = 1 << 40
_PIECE_BYTES = 256 << 10  # what stays in a core's own cache between the copy and the digest

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i8"),
    2: np.dtype("<f4"),
    3: np.dtype("<f2"),
    4: np.dtype("<i2"),
    5: np.dtype("u1"),
}
_DTYPE_OF = {"float32": 2, "float16": 3, "bfloat16": 4}


@dataclass(frozen=True)
class Column:
    """One column of a chunk: what it is, of which type, and how many elements a row has."""

    role: int
    dtype: int
    width: int = 1

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` rows, without padding."""
        return rows * self.width * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Header:
    """What a chunk says of itself."""

    generation: int
    rank: int
    table: int
    number: int
    kind: int
    vshard_from: int
    vshard_to: int
    rows: int
    table_digest: int
    columns: tuple[Column, ...]
    length: int = 0
    digest: bytes = bytes(16)


def _up(count: int, to: int) -> int:
    return -(-count // to) * to


def places(columns: tuple[Column, ...], rows: int) -> tuple[list[int], int]:
    """Offset of each column in a chunk of `rows` rows, and the bytes of the chunk."""
    at, offsets = HEADER_BYTES, []
    for column in columns:
        offsets.append(at)
        at = _up(at + column.nbytes(rows), 64)
    return offsets, _up(at, ALIGNMENT)


def columns_of(kind: int, description: TableDescription | None = None) -> tuple[Column, ...]:
    """The columns of a chunk of `kind`."""
    if kind == BLOB:
        return (Column(BYTES, 5),)
    if kind == WAITING:
        return Column(KEY, 1), Column(FREQUENCY, 1), Column(TIMESTAMP, 1)
    if kind in (ERASED, LATE, GONE) or description is None:
        return (Column(KEY, 1),)
    columns = [Column(KEY, 1)]
    if description.with_filter:
        columns += [Column(FREQUENCY, 1), Column(TIMESTAMP, 1)]
    columns.append(Column(WEIGHTS, _DTYPE_OF[description.dtype], description.dim))
    if description.state_dim:
        columns.append(Column(STATE, 2, description.state_dim))
    return tuple(columns)


def rows_per_chunk(columns: tuple[Column, ...], most_bytes: int = CHUNK_BYTES) -> int:
    """Rows that a chunk of `most_bytes` holds, at least one."""
    room = most_bytes - HEADER_BYTES - 64 * len(columns)
    return max(room // sum(column.nbytes(1) for column in columns), 1)


def checked(name: str, columns: tuple[Column, ...], given: dict[str, Any], count: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays for `columns`, each of the right dtype and shape; `ShapeError` else, also for one too many."""
    arrays = {}
    for column in columns:
        what = ROLE_NAMES[column.role]
        wanted = DTYPES[column.dtype]
        shape = (count, column.width) if column.role in (WEIGHTS, STATE) else (count,)
        array = given[what]
        if not isinstance(array, np.ndarray) or array.dtype != wanted or array.shape != shape:
            found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ShapeError(f"table {name!r}: {what} is {found}; give {wanted} of shape {shape}")
        arrays[what] = array
    for what, array in given.items():
        if what not in arrays and array is not None and np.size(array):
            raise ShapeError(f"table {name!r}: has no {what}; leave them out")
    return arrays


class ChunkBuffer:
    """Page-aligned memory in which one chunk after the other is laid out, sealed or checked.

    Views into it are overwritten by the next chunk. Thread safety: one thread.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, CHUNK_BYTES)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)

    def room(self, length: int) -> npt.NDArray[np.uint8]:
        """The first `length` bytes."""
        if length > len(self.bytes):
            # The old memory goes when the last view of it does.
            self._memory = mmap.mmap(-1, _up(length + length // 4, ALIGNMENT))
            self.bytes = np.frombuffer(self._memory, np.uint8)
        return self.bytes[:length]

    def lay_out(self, columns: tuple[Column, ...], rows: int) -> dict[str, npt.NDArray[Any]]:
        """Views of the columns of a chunk of `rows` rows, by name, for the caller to fill."""
        offsets, length = places(columns, rows)
        content = self.room(length)
        return {ROLE_NAMES[c.role]: _view(content, c, at, rows) for c, at in zip(columns, offsets, strict=True)}

    def seal(self, header: Header) -> tuple[npt.NDArray[np.uint8], bytes]:
        """The chunk whose columns were filled, and its digest."""
        offsets, length = places(header.columns, header.rows)
        content = self.room(length)
        for i, (column, at) in enumerate(zip(header.columns, offsets, strict=True)):
            end = at + column.nbytes(header.rows)
            content[end : offsets[i + 1] if i + 1 < len(offsets) else length] = 0
        blank = _pack(header, length)
        content[:HEADER_BYTES] = np.frombuffer(blank, np.uint8)
        digest = digest128(content)
        content[_DIGEST] = np.frombuffer(digest, np.uint8)
        return content, digest


def _view(content: npt.NDArray[np.uint8], column: Column, at: int, rows: int) -> npt.NDArray[Any]:
    array = content[at : at + column.nbytes(rows)].view(DTYPES[column.dtype])
    return array.reshape(rows, column.width) if column.role in (WEIGHTS, STATE) else array


def _pack(header: Header, length: int) -> bytes:
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        0,
        header.generation,
        header.table,
        header.number,
        header.kind,
        len(header.columns),
        header.rank,
        header.vshard_from,
        header.vshard_to,
        header.rows,
        length,
        header.table_digest,
        bytes(16),
    )
    columns = b"".join(_COLUMN.pack(c.role, c.dtype, 0, c.width) for c in header.columns)
    return fixed + columns + bytes(HEADER_BYTES - len(fixed) - len(columns))


def read_header(content: npt.NDArray[np.uint8]) -> Header:
    """What the header of a chunk says; `CorruptionError` where it cannot be one. The digest is not checked here."""
    head = content[:HEADER_BYTES].tobytes()
    if len(head) < HEADER_BYTES or head[:8] != _MAGIC:
        raise CorruptionError("not a chunk, or its first bytes are damaged")
    (
        _,
        version,
        header_bytes,
        features,
        generation,
        table,
        number,
        kind,
        count,
        rank,
        low,
        high,
        rows,
        length,
        name,
        digest,
    ) = _FIXED.unpack_from(head)
    if version > FORMAT_VERSION or features:
        raise FormatVersionError(
            f"a chunk of format {version} (features {features:#x}); this version reads up to {FORMAT_VERSION}"
        )
    if header_bytes != HEADER_BYTES or count > _MOST_COLUMNS or rows > _MOST_ROWS or not low <= high <= VSHARDS:
        raise CorruptionError("the header of a chunk has impossible numbers")
    columns = []
    for i in range(count):
        role, dtype, _, width = _COLUMN.unpack_from(head, _FIXED.size + i * _COLUMN.size)
        if role not in ROLE_NAMES or dtype not in DTYPES or width < 1 or (role not in (WEIGHTS, STATE) and width != 1):
            raise CorruptionError("the header of a chunk has an impossible column")
        columns.append(Column(role, dtype, width))
    if places(tuple(columns), rows)[1] != length:
        raise CorruptionError("the header of a chunk contradicts its length")
    return Header(generation, rank, table, number, kind, low, high, rows, name, tuple(columns), length, digest)


def open_chunk(
    content: npt.NDArray[np.uint8],
    expected: bytes | None = None,
    read: Callable[[memoryview, int], object] | None = None,
) -> tuple[Header, dict[str, npt.NDArray[Any]]]:
    """Check every bit of a chunk; return its header, and views of its columns by name.

    Parameters
    ----------
    content : uint8 array
        Writeable: the digest is taken with its own bytes zero.
    expected : bytes, optional
        The digest in the catalogue.
    read : callable, optional
        Called as ``read(piece, offset)`` to fill the pieces of `content` one after the other: each is digested while it is in the
        processor's cache.

    Raises
    ------
    CorruptionError, FormatVersionError
    """
    state, stored = xxhash.xxh3_128(), b""
    for begin in range(0, len(content), _PIECE_BYTES):
        piece = content[begin : begin + _PIECE_BYTES]
        if read is not None:
            read(piece.data, begin)
        if begin == 0:
            stored = piece[_DIGEST].tobytes()
            piece[_DIGEST] = 0
        state.update(piece.data)
    found = state.digest()
    content[_DIGEST] = np.frombuffer(stored, np.uint8) if len(stored) == 16 else 0
    wanted = stored if expected is None else expected
    if found != wanted or stored != wanted:
        raise CorruptionError("does not match its digest", expected=wanted.hex(), found=found.hex())
    header = read_header(content)
    if header.length != len(content):
        raise CorruptionError("the header of a chunk contradicts its length")
    offsets, _ = places(header.columns, header.rows)
    views = {
        ROLE_NAMES[c.role]: _view(content, c, at, header.rows) for c, at in zip(header.columns, offsets, strict=True)
    }
    return header, views
