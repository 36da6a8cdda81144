"""Tables in a directory that RecSDK's embedding cache has saved.

``<table>/{key,embedding,momentum1,momentum2}/slice.data`` are raw little-endian numbers: int64 keys, float32 rows in the keys'
order. Beside each, ``slice.attribute`` has int64 words: bytes of an element, count, and of embeddings the dim. A save that was
not merged has the same below ``<table>/rank<r>/``.

Of its filter, ``admit_count/slice.data`` has an int64 for each key in the keys' order, -1 where it was not counted; and
``evict_timestamp/slice_evict_{key,ts}.data`` last times of keys in an order of their own, of keys without a row too, and of one
key several where several ranks met it. Their writer leaves the data out where there is just one (its attribute says 1 all the
same), so a single count or time is as good as unknown. No key is negative there: -1 stands for none, and may have got into a save.
"""

from __future__ import annotations

import io
import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, CorruptionError
from .streams import Stream

__all__ = ["COUNTS", "NO_KEY", "STATES", "TIMES", "Part", "is_recsdk", "left_out", "parts_of", "tables_of"]

STATES = ("momentum1", "momentum2")
COUNTS, TIMES = "admit_count", "evict_timestamp"
NO_KEY = -1
_DATA, _ATTRIBUTE = "slice.data", "slice.attribute"
_TIME_FILES = ("slice_evict_key.data", "slice_evict_ts.data")
_RANK = re.compile(r"rank(\d+)")


def _has_keys(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "key", _DATA))


def _rank_folders(folder: str) -> list[str]:
    """Of the ranks that have keys."""
    found = sorted((int(match[1]), name) for name in os.listdir(folder) if (match := _RANK.fullmatch(name)))
    folders = [os.path.join(folder, name) for _, name in found]
    return [one for one in folders if _has_keys(one)]


def _refuse_missing_keys(folder: str) -> None:
    """`ConfigError` where a rank has something and no keys: its rows would be passed over. An empty folder is a rank's that has none."""
    for name in sorted(os.listdir(folder)):
        part = os.path.join(folder, name)
        if _RANK.fullmatch(name) and os.path.isdir(part) and os.listdir(part) and not _has_keys(part):
            raise ConfigError(f"{os.path.join(part, 'key', _DATA)}: does not exist; give a whole save directory")


def _is_table(folder: str) -> bool:
    return os.path.isdir(folder) and (_has_keys(folder) or bool(_rank_folders(folder)))


def is_recsdk(path: str) -> bool:
    """Whether there is a table of such a save at `path`, or in it."""
    return os.path.isdir(path) and bool(tables_of(path))


def tables_of(path: str) -> dict[str, str]:
    """Name -> folder of each table: those in `path`, or `path` itself."""
    path = os.path.abspath(path)
    if _is_table(path):
        return {os.path.basename(path): path}
    return {name: os.path.join(path, name) for name in sorted(os.listdir(path)) if _is_table(os.path.join(path, name))}


@dataclass
class Part:
    """What a table's folder holds, or a rank's.

    Attributes
    ----------
    arrays : dict of str to Stream
        ``keys``, ``weights`` and the states.
    counts : Stream or None
        Of the keys, in their order.
    times : (Stream, Stream) or None
        Keys, and their last times.
    """

    arrays: dict[str, Stream]
    counts: Stream | None
    times: tuple[Stream, Stream] | None


def parts_of(folder: str, stack: ExitStack) -> list[Part]:
    """A table: one part, or one for each rank."""
    if not _has_keys(folder):
        _refuse_missing_keys(folder)
    return [_open(part, stack) for part in ([folder] if _has_keys(folder) else _rank_folders(folder))]


def left_out(folder: str) -> list[str]:
    """What a table's save holds besides what is read."""
    known = {"key", "embedding", *STATES, COUNTS, TIMES}
    names = {
        name
        for part in ([folder] if _has_keys(folder) else _rank_folders(folder))
        for name in os.listdir(part)
        if os.path.isdir(os.path.join(part, name)) and not _RANK.fullmatch(name)
    }
    return sorted(names - known)


def _open(folder: str, stack: ExitStack) -> Part:
    arrays = _arrays(folder, stack)
    return Part(arrays, _counts(folder, arrays["keys"].rows, stack), _times(folder, stack))


def _counts(folder: str, keys: int, stack: ExitStack) -> Stream | None:
    if not os.path.isdir(os.path.join(folder, COUNTS)):
        return None
    stream = _integers(folder, COUNTS, _DATA, stack)
    if stream is not None and stream.rows != keys:
        raise CorruptionError(
            f"{stream.where}: has {stream.rows} counts for {keys} keys; copy the save anew, or take {COUNTS!r} away to do without"
        )
    return stream


def _times(folder: str, stack: ExitStack) -> tuple[Stream, Stream] | None:
    if not os.path.isdir(os.path.join(folder, TIMES)):
        return None
    keys, times = (_integers(folder, TIMES, name, stack) for name in _TIME_FILES)
    if keys is None or times is None:
        if keys is not times:
            raise CorruptionError(
                f"{folder}/{TIMES}: has one of {' and '.join(_TIME_FILES)}; copy the save anew, or take {TIMES!r} away to do without"
            )
        empty = (Stream(f"{folder}/{TIMES}", "<i8", (0,), io.BytesIO()) for _ in range(2))
        return next(empty), next(empty)
    return keys, times


def _integers(folder: str, what: str, name: str, stack: ExitStack) -> Stream | None:
    """One array of a filter; None where their writer has left it out."""
    words = _words(folder, what, (16,))
    path = os.path.join(folder, what, name)
    size = _size(path) if os.path.lexists(path) else 0
    if words[0] != 8 or words[1] < 0 or size not in (8 * words[1], 0 if words[1] == 1 else -1):
        raise CorruptionError(
            f"{path}: {size} bytes, where its attribute says {words[1]} numbers of {words[0]} bytes; copy the save anew, or take {what!r} away to "
            "do without"
        )
    return Stream(path, "<i8", (words[1],), stack.enter_context(open(path, "rb"))) if size else None


def _arrays(folder: str, stack: ExitStack) -> dict[str, Stream]:
    words, size = _attribute(folder, "key")
    count = words[1]
    if words[0] != 8 or size != 8 * count:
        raise CorruptionError(
            f"{folder}/key: {size} bytes, where its attribute says {count} keys of {words[0]} bytes; copy the save anew"
        )
    streams = {"keys": _stream(folder, "key", "<i8", (count,), stack)}
    for what, name in (("embedding", "weights"), *((state, state) for state in STATES)):
        if what != "embedding" and not os.path.isdir(os.path.join(folder, what)):
            continue
        words, size = _attribute(folder, what)
        dim = words[2] if len(words) > 2 else size // (4 * count) if count else 1
        if words[0] != 4 or dim < 1 or size != 4 * count * dim or words[1] not in (count, count * dim):
            raise CorruptionError(
                f"{folder}/{what}: {size} bytes and attribute {words}, beside {count} keys; give float32 rows of one dim, a row for each key"
            )
        streams[name] = _stream(folder, what, "<f4", (count, dim), stack)
    return streams


def _size(path: str) -> int:
    """Bytes of a file; `ConfigError` where it is a pipe or the like, at which one would wait for ever."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: is no file; give a whole save directory")
    return found.st_size


def _attribute(folder: str, what: str) -> tuple[list[int], int]:
    """The words of an attribute, and the bytes of the data beside it."""
    try:
        size = _size(os.path.join(folder, what, _DATA))
    except FileNotFoundError as error:
        raise _missing(error) from None
    return _words(folder, what, (16, 24)), size


def _words(folder: str, what: str, sizes: tuple[int, ...]) -> list[int]:
    """The words of an attribute."""
    path = os.path.join(folder, what, _ATTRIBUTE)
    try:
        _size(path)
        with open(path, "rb") as file:
            content = file.read(64)
    except FileNotFoundError as error:
        raise _missing(error) from None
    if len(content) not in sizes:
        raise CorruptionError(
            f"{path}: {len(content)} bytes; an attribute has two words of 8 bytes, three of embeddings"
        )
    words: list[int] = np.frombuffer(content, "<i8").tolist()
    if words[1] < 0:
        raise CorruptionError(f"{path}: says there are {words[1]} elements")
    return words


def _missing(error: FileNotFoundError) -> ConfigError:
    return ConfigError(f"{error.filename}: does not exist; give a whole save directory")


def _stream(folder: str, what: str, dtype: str, shape: tuple[int, ...], stack: ExitStack) -> Stream:
    path = os.path.join(folder, what, _DATA)
    return Stream(path, dtype, shape, stack.enter_context(open(path, "rb")))
