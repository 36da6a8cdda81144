"""The catalogue of a rank: one LMDB environment that says what lies in its segments, generation by generation.

Keys are 16 bytes, big-endian: generation (8), kind (1), table (3), number (4). Values:

=====  ==========================================================================================================
kind   value
=====  ==========================================================================================================
1      the generation: JSON (parent, world, files with their lengths, the caller's metadata); table and number 0
2      a table: JSON (its description, whether it is whole, counts, its metadata); number 0
3      chunks of a table, up to 1,023 records of 64 bytes (`CHUNK_RECORD`), in the order in which they were written
4      chunks of a blob; table = place of the blob's name in the generation's list
=====  ==========================================================================================================

A generation's root digest is XXH3-128 over its records in the order of their keys: key, length of the value (8 bytes,
little-endian), value. The manifest holds it, so a record that was changed, or that LMDB silently misses because a flipped
bit made it open an older commit, is found.

LMDB returns flipped bits as they are, and damaged files can end the process. So it never touches a file that was not
verified before: writers verify the file under the rank's lock and open it for one transaction; readers copy it into
memory first, verify the copy, and open that without locks, so they neither see later changes nor hold anything up.
Flags are LMDB's defaults: never ``writemap``, never without sync.

A commit that failed leaves the file as the last commit did: LMDB writes new pages beside the old ones, and the next
commit writes all its pages anew, so that none is taken for durable which a failed sync has dropped. Not so the two head
pages, which LMDB lays out once, when it makes the file: a file whose first commit failed is removed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import lmdb
import numpy as np
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_structure

from ..errors import CorruptionError, DiskFullError, StorageError
from .files import FULL, Files, looks_full, refusals
from .names import CATALOGUE
from .sealed import digest128

__all__ = [
    "BLOB_CHUNKS",
    "CHUNKS",
    "CHUNK_RECORD",
    "GENERATION",
    "PAGE_RECORDS",
    "TABLE",
    "CatalogueReader",
    "key_of",
    "problems_of",
    "root_of",
    "write",
]

GENERATION, TABLE, CHUNKS, BLOB_CHUNKS = 1, 2, 3, 4
PAGE_RECORDS = 1023  # of 64 bytes: 16 pages of 4096 bytes less LMDB's header of 16
CHUNK_RECORD = np.dtype(
    [
        ("file", "<u4"),
        ("number", "<u4"),
        ("kind", "u1"),
        ("zero", "u1"),
        ("vshard_from", "<u2"),
        ("vshard_to", "<u2"),
        ("zeros", "<u2"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("rows", "<u8"),
        ("digest", "u1", 16),
        ("rest", "<u8"),
    ]
)

_GIB = 1 << 30
_LEAST_MAP_BYTES = 64 << 20
_TRANSACTION_BYTES = 32 << 20
_READERS = 512
_LOCK_BYTES = 64 * (_READERS + 64)  # a line of the cache for each reader, and for the head
_ENGINE = 0  # LMDB 0.9, data format 1
_TRIES = 3

Record = tuple[bytes, bytes]


def key_of(generation: int, kind: int, table: int = 0, number: int = 0) -> bytes:
    """The key of a record."""
    return generation.to_bytes(8, "big") + bytes([kind]) + table.to_bytes(3, "big") + number.to_bytes(4, "big")


def parts_of(key: bytes) -> tuple[int, int, int, int]:
    """(generation, kind, table, number) of a key."""
    return int.from_bytes(key[:8], "big"), key[8], int.from_bytes(key[9:12], "big"), int.from_bytes(key[12:], "big")


def root_of(records: Iterable[Record]) -> bytes:
    """The root digest of a generation's records, which must come in the order of their keys."""
    pieces: list[bytes] = []
    for key, value in records:
        pieces += (key, len(value).to_bytes(8, "little"), value)
    return digest128(*pieces)


def problems_of(path: str) -> list[str]:
    """What is wrong with the structure of an LMDB file; LMDB itself does not see it. Empty: it may be opened."""
    try:
        return list(verify_structure(path, subdir=False))
    except OSError as error:
        return [f"cannot be read ({error.strerror})"]
    except VerifyError as error:
        return [str(error)]
    except Exception as error:  # the verifier's own surprise at hostile bytes is a finding like any other
        return [f"cannot be verified ({type(error).__name__}: {error})"]


# -------------------------------------------------------------------------------------------------------------- writing


def check(folder: str, named: bool) -> None:
    """Whether the catalogue in `folder`, if there is one, may be opened for writing. The caller holds the rank's lock.

    `named` says whether a manifest refers to it. One that no manifest does is left over from a process that died before
    its first commit: it may be replaced, and is here where it is damaged.

    Raises
    ------
    CorruptionError
    """
    path = os.path.join(folder, CATALOGUE)
    if not os.path.exists(path):
        if named:
            raise CorruptionError(
                f"{path}: missing, though manifests name it; save to another path, or restore the file"
            )
        return
    problems = problems_of(path) if os.path.isfile(path) else ["it is no file"]
    if problems and named:
        raise CorruptionError(
            f"{path}: damaged ({problems[0]}); nothing was written: save to another path, or move this one away first"
        )
    if problems:
        with refusals(path, "removing a damaged catalogue that no manifest names"):
            for name in (path, path + "-lock"):
                if os.path.lexists(name):
                    os.unlink(name)


def _open(path: str, map_bytes: int) -> lmdb.Environment:
    new = not os.path.exists(path)
    least = max(_LEAST_MAP_BYTES, 0 if new else 2 * os.path.getsize(path))
    tries = 0
    while True:
        options: dict[str, Any] = {"lib_version": _ENGINE} if new else {}
        try:
            return lmdb.open(
                path, map_size=map_bytes, subdir=False, max_readers=_READERS, max_dbs=0, mode=0o666, **options
            )
        except (lmdb.MemoryError, MemoryError):
            if map_bytes <= least:  # an address space limit below what the file needs
                raise
            map_bytes = max(map_bytes // 2, least)
        except lmdb.InvalidParameterError:
            tries += 1
            if tries == _TRIES:
                raise
            time.sleep(0.01 * tries)


def write(folder: str, records: list[Record], drop: set[int], keep: set[int], files: Files) -> dict[str, Any]:
    """Commit the records of a generation; forget the generations that nobody keeps.

    Parameters
    ----------
    folder : str
        Of the rank, whose lock the caller holds; `check` has passed.
    records : list of (key, value)
        In the order of their keys; may be empty.
    drop : set of int
        Generations to remove even where they are in `keep`.
    keep : set of int
        Generations whose records stay.
    files : Files

    Returns
    -------
    dict
        ``transaction``, ``bytes`` of the file, ``engine`` and ``page_bytes``.

    Raises
    ------
    DiskFullError, StorageError
        The catalogue is as it was.
    """
    path = os.path.join(folder, CATALOGUE)
    held = os.path.getsize(path) if os.path.exists(path) else 0
    more = sum(len(value) + 4096 for _, value in records)
    map_bytes = -(-4 * (held + 2 * more + _LEAST_MAP_BYTES) // _GIB) * _GIB
    with refusals(path, "writing a checkpoint's catalogue"):
        files.point("open_catalogue", path)
        _reserve_lock(path + "-lock", files)
    try:
        return _write(path, map_bytes, records, drop, keep, files, new=held == 0)
    except BaseException:
        if held == 0:
            for name in (path, path + "-lock"):
                with suppress(OSError):
                    os.unlink(name)
        raise


def _write(
    path: str, map_bytes: int, records: list[Record], drop: set[int], keep: set[int], files: Files, *, new: bool
) -> dict[str, Any]:
    try:
        environment = _open(path, map_bytes)
        try:
            environment.reader_check()
            try:
                _transact(environment, records, drop, keep, files, path)
            except lmdb.MapFullError:
                environment.set_mapsize(2 * map_bytes)
                _transact(environment, records, drop, keep, files, path)
            answer = {
                "transaction": environment.info()["last_txnid"],
                "engine": ".".join(map(str, environment.lib_version())),
                "page_bytes": environment.stat()["psize"],
            }
        finally:
            environment.close()
    except (lmdb.Error, OSError, MemoryError) as error:
        raise _refusal(error, path) from error
    if new:
        with refusals(path, "writing a checkpoint's catalogue"):
            files.sync_folder(os.path.dirname(path))
    return answer | {"bytes": os.path.getsize(path)}


def _reserve_lock(path: str, files: Files) -> None:
    """Have disk space for LMDB's table of readers: it maps the file and writes there, which on a full disk ends the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        files.allocate(descriptor, 0, _LOCK_BYTES, path)
    finally:
        os.close(descriptor)


def _transact(
    environment: lmdb.Environment, records: list[Record], drop: set[int], keep: set[int], files: Files, path: str
) -> None:
    """Transactions of bounded size; the generation's own record comes first by its key, yet only a manifest publishes it."""
    written = 0
    transaction = environment.begin(write=True)
    try:
        for generation in _generations(transaction):
            if generation in drop or generation not in keep:
                _drop(transaction, generation)
        for key, value in records:
            if written + len(value) > _TRANSACTION_BYTES:
                files.commit(transaction, path)
                transaction, written = environment.begin(write=True), 0
            transaction.put(key, value)
            written += len(value) + 4096
        files.commit(transaction, path)
    except BaseException:
        transaction.abort()
        raise


def _generations(transaction: Any) -> list[int]:
    """Numbers of the generations that have records, in order."""
    found: list[int] = []
    with transaction.cursor() as cursor:
        more = cursor.first()
        while more:
            found.append(int.from_bytes(cursor.key()[:8], "big"))
            more = cursor.set_range((found[-1] + 1).to_bytes(8, "big"))
    return found


def _drop(transaction: Any, generation: int) -> None:
    prefix = generation.to_bytes(8, "big")
    with transaction.cursor() as cursor:
        more = cursor.set_range(prefix)
        while more and cursor.key()[:8] == prefix:
            more = cursor.delete()


def _refusal(error: Exception, path: str) -> StorageError:
    """LMDB reports a full disk as any other error of input and output."""
    if isinstance(error, StorageError):
        return error
    number = getattr(error, "code", None) or getattr(error, "errno", None) or errno.EIO
    full = number in FULL or looks_full(path)
    kind = DiskFullError if full else StorageError
    remedy = "free some space, or give another path" if full else "see what the system's log says"
    return kind(
        errno.ENOSPC if full and number not in FULL else number if number > 0 else errno.EIO,
        f"writing a checkpoint's catalogue: {error}; what was published before is intact: {remedy}",
        path,
    )


# -------------------------------------------------------------------------------------------------------------- reading


class CatalogueReader:
    """A private, verified copy of a rank's catalogue, open for reading.

    Parameters
    ----------
    folder : str
        Of the rank.
    least_bytes, transaction : int
        What the manifest says of the file; it may have grown since.

    Raises
    ------
    CorruptionError
        The file is absent, shorter, damaged in its structure, or opens at an older commit.
    """

    def __init__(self, folder: str, least_bytes: int = 0, transaction: int = 0) -> None:
        self.path = os.path.join(folder, CATALOGUE)
        self._environment: lmdb.Environment | None = None
        problem = ""
        for attempt in range(_TRIES):  # a commit during the copy can tear it
            if attempt:
                time.sleep(0.02 * attempt)
            problem = self._copy(least_bytes, transaction)
            if not problem:
                return
        raise CorruptionError(f"{self.path}: {problem}")

    def _copy(self, least_bytes: int, transaction: int) -> str:
        """Copy, verify, open; what is wrong, or nothing."""
        try:
            source = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        copy = os.memfd_create("embcache-catalogue", os.MFD_CLOEXEC)
        try:
            length = os.fstat(source).st_size
            if length < least_bytes:
                return f"{length} bytes long, but was {least_bytes} when its generation was published"
            at = 0
            while at < length:
                got = os.sendfile(copy, source, at, length - at)
                if got == 0:
                    return f"ends at {at} while it is read"
                at += got
            place = f"/proc/self/fd/{copy}"
            problems = problems_of(place)
            if problems:
                return f"damaged: {problems[0]}"
            environment = lmdb.open(
                place, map_size=max(length, 1 << 20), subdir=False, readonly=True, lock=False, create=False, max_dbs=0
            )
            if environment.info()["last_txnid"] < transaction:
                found = environment.info()["last_txnid"]
                environment.close()
                return f"opens at transaction {found}, but was at {transaction} when its generation was published"
            self._environment = environment
        except (OSError, lmdb.Error, MemoryError) as error:
            return f"cannot be opened ({error})"
        finally:
            os.close(source)
            os.close(copy)
        return ""

    def generations(self) -> list[int]:
        """Numbers of the generations that have records, in order."""
        assert self._environment is not None
        with self._environment.begin() as transaction:
            return _generations(transaction)

    def records(self, generation: int) -> list[Record]:
        """The records of a generation, in the order of their keys. They are checked by their root digest only."""

        def found() -> Iterator[Record]:
            prefix = generation.to_bytes(8, "big")
            assert self._environment is not None
            with self._environment.begin() as transaction, transaction.cursor() as cursor:
                more = cursor.set_range(prefix)
                while more and cursor.key()[:8] == prefix:
                    yield cursor.key(), cursor.value()
                    more = cursor.next()

        return list(found())

    def close(self) -> None:
        """Free the copy; again does nothing."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def __enter__(self) -> CatalogueReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
