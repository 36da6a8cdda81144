"""Arrays in foreign files, read from their beginning to their end some rows at a time; nothing is ever unpickled.

``.npy`` and ``.npz`` are NumPy's formats (``numpy.lib.format``), ``.safetensors`` is eight bytes of length, a JSON header and the
tensors' bytes. A file is taken for what it says only after its lengths have been compared with what is there.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ..errors import ConfigError, CorruptionError, EmbCacheError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BFLOAT16", "DESCRIPTION", "Stream", "open_npy", "open_npz", "open_safetensors"]

BFLOAT16 = "bfloat16"
DESCRIPTION = "embcache"  # a file that embcache wrote has its table's description under this name

_MOST_HEADER_BYTES = 16 << 20
_MOST_ROWS = 1 << 48
_OF_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": BFLOAT16,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
}
# What the standard library's readers raise over damaged bytes; ValueError covers names that are no text.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
)


@dataclass
class Stream:
    """One array of a file: its rows come out once, in order.

    Attributes
    ----------
    where : str
        File and array, for messages.
    dtype : str
        As NumPy has it, or ``"bfloat16"``, whose bits come out as int16.
    shape : tuple of int
    file : binary file
        Stands at the first byte of the array.
    """

    where: str
    dtype: str
    shape: tuple[int, ...]
    file: BinaryIO

    @property
    def rows(self) -> int:
        """Elements along the first axis."""
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.width * self._stored.itemsize

    @property
    def _stored(self) -> np.dtype[Any]:
        return np.dtype("<i2" if self.dtype == BFLOAT16 else self.dtype)

    def take(self, rows: int) -> npt.NDArray[Any]:
        """The next rows, (rows,) or (rows, width), in the machine's byte order; `CorruptionError` where the file ends before."""
        array: Any = np.empty((rows, *self.shape[1:]), self._stored)
        view = memoryview(array).cast("B") if array.size else memoryview(b"")
        at = 0
        with _reading(self.where):
            while at < len(view):
                got = self.file.readinto(view[at:])  # type: ignore[attr-defined]
                if not got:
                    raise CorruptionError(
                        f"{self.where}: the file ends in the array's bytes: it was cut short; get it anew"
                    )
                at += got
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def rewind(self) -> None:
        """After the last row: back to the first."""
        with _reading(self.where):
            self.file.seek(-self.rows * self.row_bytes, os.SEEK_CUR)

    def end(self) -> None:
        """After the last row: what a zip file says of the bytes must hold. `CorruptionError`."""
        with _reading(self.where):
            self.file.read(1)


def _broken(where: str, error: Exception) -> CorruptionError:
    return CorruptionError(f"{where}: cannot be read ({error or type(error).__name__}); get it anew")


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """What goes wrong in the block is said of the file; what only damaged bytes can bring about is `CorruptionError`."""
    try:
        yield
    except EmbCacheError:
        raise
    except _BROKEN as error:
        raise _broken(where, error) from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place before the first byte, by a length that is none
            raise _broken(where, error) from None
        raise OSError(error.errno, error.strerror, where) from None


def checked(where: str, dtype: str, shape: tuple[int, ...], file: BinaryIO) -> Stream:
    """A stream, if it is one of numbers in one or two dimensions."""
    if dtype != BFLOAT16 and np.dtype(dtype).kind not in "iuf":
        raise ConfigError(
            f"{where}: has dtype {np.dtype(dtype)}, which is no kind of number (objects are never unpickled); save it as numbers"
        )
    if any(size < 0 or size > _MOST_ROWS for size in shape):
        raise CorruptionError(f"{where}: says it has shape {shape}, which nothing has; get it anew")
    if len(shape) not in (1, 2):
        raise ConfigError(f"{where}: has shape {shape}; give one of one or two dimensions")
    return Stream(where, dtype, shape, file)


# ---------------------------------------------------------------------------------------------------------------- NumPy


def open_npy(path: str, stack: ExitStack, name: str = "weights") -> dict[str, Stream]:
    """The one array of a ``.npy`` file, under `name`; its file is closed at the end of `stack`."""
    file = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack is the context
    stream = _npy(path, file)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if left != stream.rows * stream.row_bytes:
        raise CorruptionError(
            f"{path}: {left} bytes where its header says {stream.rows * stream.row_bytes}; get it anew"
        )
    return {name: stream}


def _npy(where: str, file: BinaryIO) -> Stream:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ConfigError(f"{where}: version {version} of NumPy's format, which no array of numbers needs")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ConfigError:
        raise
    except (*_BROKEN, TypeError, SyntaxError, MemoryError, tokenize.TokenError) as error:
        raise CorruptionError(f"{where}: is no array of NumPy's, or is damaged ({error}); get it anew") from None
    stream = checked(where, dtype.str if dtype.fields is None else "O", shape, file)
    if fortran and len(shape) == 2 and min(shape) > 1:
        raise ConfigError(f"{where}: lies in Fortran order, a column after the other; save np.ascontiguousarray of it")
    return stream


def open_npz(path: str, stack: ExitStack) -> tuple[dict[str, Stream], str | None]:
    """The arrays of a ``.npz`` file, and the description that embcache put into it."""
    with _reading(path):
        archive = stack.enter_context(zipfile.ZipFile(path))
        streams, about = {}, None
        for member in archive.namelist():
            if not member.endswith(".npy"):
                continue
            name = member.removesuffix(".npy")
            file = stack.enter_context(archive.open(member))
            if name == DESCRIPTION:
                text = _npy(f"{path}: {name}", file)  # type: ignore[arg-type]
                if np.dtype(text.dtype) != np.uint8 or text.rows > _MOST_HEADER_BYTES:
                    raise CorruptionError(f"{path}: its array {name!r} is no description of a table")
                about = text.take(text.rows).tobytes().decode("utf-8", "replace")
                continue
            try:
                streams[name] = _npy(f"{path}: {name}", file)  # type: ignore[arg-type]
            except ConfigError as error:
                streams[name] = _Refused(str(error))
    return streams, about


class _Refused(Stream):
    """An array that cannot be used: of no interest until somebody asks for it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattribute__(self, name: str) -> Any:
        if name in ("reason", "__class__"):
            return object.__getattribute__(self, name)
        raise ConfigError(object.__getattribute__(self, "reason"))


# ---------------------------------------------------------------------------------------------------------- safetensors


def open_safetensors(path: str, stack: ExitStack) -> tuple[dict[str, Stream], str | None]:
    """The tensors of a ``.safetensors`` file, and the description that embcache put into it."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise CorruptionError(f"{path}: is no safetensors file, or was cut short: {size} bytes; get it anew")
        text = file.read(length)
    try:
        header = json.loads(text)
        about = header.pop("__metadata__", {}).get(DESCRIPTION)
        found = {
            str(name): (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{path}: the header of the safetensors file is damaged ({error}); get it anew") from None
    streams: dict[str, Stream] = {}
    for name, (kind, shape, begin, end) in found.items():
        where = f"{path}: {name}"
        if (
            any(type(number) is not int for number in (*shape, begin, end))
            or not 0 <= begin <= end <= size - 8 - length
        ):
            raise CorruptionError(f"{where}: lies outside the file, which was cut short or damaged; get it anew")
        if kind not in _OF_SAFETENSORS or len(shape) not in (1, 2):
            streams[name] = _Refused(
                f"{where}: has dtype {kind} and shape {shape}; give numbers in one or two dimensions"
            )
            continue
        file = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack is the context
        file.seek(8 + length + begin)
        stream = checked(where, _OF_SAFETENSORS[kind], shape, file)
        if stream.rows * stream.row_bytes != end - begin:
            raise CorruptionError(f"{where}: {end - begin} bytes for shape {shape} of {kind}; get the file anew")
        streams[name] = stream
    return streams, about if isinstance(about, str) else None
