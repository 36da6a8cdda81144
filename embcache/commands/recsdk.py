"""Tables in a directory that RecSDK's embedding cache has saved.

``<table>/{key,embedding,momentum1,momentum2}/slice.data`` are raw little-endian numbers: int64 keys, float32 rows in the keys'
order. Beside each, ``slice.attribute`` has int64 words: bytes of an element, count, and of embeddings the dim. A save that was
not merged has the same below ``<table>/rank<r>/``. Counters of its filter (``admit_count``, ``evict_timestamp``) are left
out: keys that wait for admission have none there, and times stand in an order of their own. Rows without them stay until they
are used again.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack

import numpy as np

from ..errors import ConfigError, CorruptionError
from .streams import Stream

__all__ = ["STATES", "is_recsdk", "left_out", "parts_of", "tables_of"]

STATES = ("momentum1", "momentum2")
_DATA, _ATTRIBUTE = "slice.data", "slice.attribute"
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


def parts_of(folder: str, stack: ExitStack) -> list[dict[str, Stream]]:
    """The arrays of a table, ``keys``, ``weights`` and the states: one dict, or one for each rank."""
    if not _has_keys(folder):
        _refuse_missing_keys(folder)
    return [_open(part, stack) for part in ([folder] if _has_keys(folder) else _rank_folders(folder))]


def left_out(folder: str) -> list[str]:
    """What a table's save holds besides what is read."""
    known = {"key", "embedding", *STATES}
    names = {
        name
        for part in ([folder] if _has_keys(folder) else _rank_folders(folder))
        for name in os.listdir(part)
        if os.path.isdir(os.path.join(part, name)) and not _RANK.fullmatch(name)
    }
    return sorted(names - known)


def _open(folder: str, stack: ExitStack) -> dict[str, Stream]:
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
    path = os.path.join(folder, what, _ATTRIBUTE)
    try:
        size = _size(os.path.join(folder, what, _DATA))
        _size(path)
        with open(path, "rb") as file:
            content = file.read(64)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: does not exist; give a whole save directory") from None
    if len(content) not in (16, 24):
        raise CorruptionError(
            f"{path}: {len(content)} bytes; an attribute has two words of 8 bytes, three of embeddings"
        )
    words = np.frombuffer(content, "<i8").tolist()
    if words[1] < 0:
        raise CorruptionError(f"{path}: says there are {words[1]} elements")
    return words, size


def _stream(folder: str, what: str, dtype: str, shape: tuple[int, ...], stack: ExitStack) -> Stream:
    path = os.path.join(folder, what, _DATA)
    return Stream(path, dtype, shape, stack.enter_context(open(path, "rb")))
