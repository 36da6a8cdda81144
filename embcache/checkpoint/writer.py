"""`Writer`: one rank's part of one generation, from `begin` to `commit`.

Owns the order that makes a generation whole or absent: chunks into new segment files, these synced, then one catalogue
commit, then the rank's commit file; `publish` does the rest. Nothing that was published before is touched on the way.
After any failure the writer is finished: what it wrote is removed, nothing is tried again, and the next writer takes a
new number and new files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.digest import hash_keys
from ..errors import ClosedError, ConfigError, DiskFullError, ForkError, ShapeError, StorageError, shown, whole_number
from . import catalogue, chunk
from .chunk import (
    BLOB,
    CHUNK_BYTES,
    ERASED,
    GONE,
    LATE,
    MOST_CHUNK_BYTES,
    NO_TABLE,
    ROWS,
    WAITING,
    ChunkBuffer,
    Column,
    Header,
)
from .description import TableDescription
from .files import Files, free_bytes, refusals
from .lock import RankLock, refuse_remote
from .manifest import Manifest, names_rank, publish, read_manifest, write_commit
from .names import (
    MOST_GENERATION,
    VSHARDS,
    check_rank,
    commit_name,
    generations_in_rank,
    next_generation,
    published,
    rank_name,
)
from .sealed import FILTER_CHANGES, SKETCH_BLOCKS
from .segment import MOST_SEGMENT_BYTES, SegmentWriter
from .written import Contents, WrittenTable

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Writer"]

_IDLE, _OPEN, _COMMITTED, _FAILED, _CLOSED = "idle", "open", "committed", "failed", "closed"


class Writer:
    """Writes one rank's part of a generation.

    Parameters
    ----------
    path : path
        The checkpoint's directory, made where it is absent.
    rank, world : int
        Which of how many writers this one is.
    force : bool
        Write to a network file system too, whose locks and syncs are then your promise.
    chunk_bytes : int
        What a full chunk comes to, 64 KiB to 64 MiB.
    files : Files, optional
        The system calls; for tests.
    clock : callable, optional
        Seconds since 1970; for tests.

    Raises
    ------
    DiskFullError, StorageError
        From any method: what was published before is intact, this generation will not be; `abort` is done already.
    ForkError, ClosedError
        Used in a forked child, or after `close`.

    Notes
    -----
    The order of calls: `begin`; any of `table`, `write_rows`, `write_erased`, `write_filter`, `write_state`; `commit`; then
    `publish`, by one rank, once all have committed. A writer holds the lock of its rank's folder from `begin` to `close`,
    so of several ranks none may close, or begin again, before the generation is published.

    Thread safety: one thread at a time.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from embcache.checkpoint import Reader, TableDescription, Writer
    >>> with tempfile.TemporaryDirectory() as folder, Writer(folder) as writer:
    ...     generation = writer.begin()
    ...     writer.write_rows(TableDescription("items", 4), np.arange(3), np.ones((3, 4), np.float32))
    ...     writer.commit()
    ...     writer.publish()
    ...     with Reader(folder) as reader:
    ...         reader.generation, sum(len(rows.keys) for rows in reader.rows("items"))
    (1, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        world: int = 1,
        *,
        force: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        most_segment_bytes: int = MOST_SEGMENT_BYTES,
    ) -> None:
        self.path = os.path.abspath(os.fsdecode(path))
        if self.path.encode("utf-8", "replace") != os.fsencode(self.path):
            raise ConfigError(
                f"Writer: path = {self.path!r} is not UTF-8, as LMDB wants it; give a directory of another name"
            )
        self.rank, self.world = check_rank("Writer", rank, world)
        size = whole_number(chunk_bytes)
        if size is None or not 1 << 16 <= size <= MOST_CHUNK_BYTES:
            raise ConfigError(
                f"Writer: chunk_bytes = {shown(chunk_bytes)}; give an integer from 65536 to {MOST_CHUNK_BYTES}"
            )
        self.chunk_bytes = size
        self.folder = os.path.join(self.path, rank_name(self.rank))
        self.files = files or Files()
        self.generation = 0
        self.parent: Manifest | None = None
        self._clock = clock
        self._force = force
        self._most_segment_bytes = most_segment_bytes
        self._pid = os.getpid()
        self._state = _IDLE
        self._lock: RankLock | None = None
        self._buffer = ChunkBuffer()
        self._behind: list[
            ChunkBuffer
        ] = []  # those of chunks that may still be on their way to the medium, the oldest first
        self._segments: SegmentWriter | None = None
        self._contents = Contents(0, self.rank, self.world, None, {})

    # ------------------------------------------------------------------------------------------------------- the order

    def begin(
        self,
        generation: int | None = None,
        parent: int | None = None,
        *,
        metadata: dict[str, Any] | None = None,
        expected_bytes: int = 0,
    ) -> int:
        """Start a generation.

        Parameters
        ----------
        generation : int, optional
            Its number, above every other on disk; default: the next one. Of several ranks all are given the same number
            (`next_generation`).
        parent : int, optional
            The generation that this one changes; default: this one is full.
        metadata : dict, optional
            The caller's own, as JSON: step counts and the like.
        expected_bytes : int
            What is going to be written, if known: a disk without room for it is refused before anything is.

        Returns
        -------
        int
            The generation.

        Raises
        ------
        LockedError
            Another writer is at work in this rank's folder.
        ConfigError
            The number is taken; several ranks without a number; no such parent; a network file system.
        CorruptionError
            The rank's catalogue, or the parent's manifest, is damaged.
        """
        self._check(_IDLE)
        if generation is None and self.world > 1:
            raise ConfigError(
                "Writer.begin: several ranks need one number; give all of them rank 0's next_generation(path)"
            )
        number = None if generation is None else whole_number(generation)
        if generation is not None and (number is None or not 1 <= number <= MOST_GENERATION):
            raise ConfigError(
                f"Writer.begin: generation = {shown(generation)}; give an integer from 1 to {MOST_GENERATION}"
            )
        checked = _json("metadata", metadata or {})
        self._make_folders()
        self._lock = RankLock(self.folder, self.files)
        try:
            self._lock.take()
            self._begin(number, parent, expected_bytes)
            self._contents = Contents(self.generation, self.rank, self.world, self.parent, checked)
            self._state = _OPEN
        except BaseException:
            self._release()
            raise
        return self.generation

    def _make_folders(self) -> None:
        with refusals(self.folder, "making a checkpoint's directory"):
            self.files.make_folder(self.path)
            if not self._force:
                refuse_remote(self.path)
            if not published(self.path):
                self.files.sync_above(self.path)
            self.files.make_folder(self.folder)

    def _begin(self, number: int | None, parent: int | None, expected_bytes: int) -> None:
        held = published(self.path)
        self.parent = None if parent is None else read_manifest(self.path, parent)
        if self.parent is not None and self.parent.world != self.world:
            raise ConfigError(
                f"Writer.begin: generation {parent} was written by {self.parent.world} ranks, this one by {self.world}; "
                "save a full generation first"
            )
        taken = max([*held, *generations_in_rank(self.folder), 0])
        self.generation = next_generation(self.path) if number is None else number
        if self.generation <= taken:
            raise ConfigError(
                f"Writer.begin: generation {self.generation} is not above {taken}, the newest at {self.path}"
            )
        free = free_bytes(self.path)
        if free < expected_bytes:
            raise DiskFullError(
                28,
                f"a generation of about {expected_bytes} bytes does not fit into {free} free ones; free some space, or give "
                "another path",
                self.path,
            )
        catalogue.check(self.folder, named=any(names_rank(self.path, one, self.rank) for one in held))
        self._remove_garbage(set(held))
        self._segments = SegmentWriter(self.files, self.folder, self.generation, self.rank, self._most_segment_bytes)

    def _remove_garbage(self, held: set[int]) -> None:
        """Files of generations that were never published, or are no longer: nobody can read them."""
        with refusals(self.folder, "removing what no manifest names"):
            in_rank = generations_in_rank(self.folder)
            if not held.issuperset(in_rank):
                self.files.sync_folder(self.path)  # a manifest that was removed may not come back without its files
            for generation, names in in_rank.items():
                for name in names:
                    if generation not in held or name.startswith("COMMIT"):
                        self.files.unlink(os.path.join(self.folder, name))

    def commit(self) -> None:
        """Make this rank's part durable. It is not visible before `publish`."""
        self._check(_OPEN)
        assert self._segments is not None
        try:
            files = self._segments.finish()
            records = self._contents.records(files)
            answer = catalogue.write(self.folder, records, {self.generation}, set(published(self.path)), self.files)
            body = {
                "generation": self.generation,
                "rank": self.rank,
                "world": self.world,
                "parent": self.parent.generation if self.parent else None,
                "transaction": answer["transaction"],
                "catalogue_bytes": answer["bytes"],
                "engine": answer["engine"],
                "page_bytes": answer["page_bytes"],
                "root": catalogue.root_of(records).hex(),
                "files": files,
                "created": float(self._clock()),
                "tables": {
                    name: {"rows": table.rows, "erased": table.erased, "bytes": table.bytes, "whole": table.whole}
                    for name, table in self._contents.tables.items()
                },
            }
            features = 0
            for table in self._contents.tables.values():
                features |= FILTER_CHANGES if table.filter_changes else 0
                features |= SKETCH_BLOCKS if (table.filter or {}).get("sketch_blocks") else 0
            if features:
                body["features"] = features
            write_commit(self.files, self.folder, self.generation, body)
        except BaseException:
            self._fail()
            raise
        self._state = _COMMITTED

    def publish(self) -> None:
        """`checkpoint.publish` of this generation; of several ranks, one calls it once all have committed."""
        self._check(_COMMITTED)
        try:
            publish(self.path, self.generation, self.world, files=self.files)
        except BaseException:
            if self.world == 1 and self.generation not in published(self.path):
                self._fail(withdrawn=True)
            raise

    def abort(self) -> None:
        """Give the generation up and remove what was written of it. Does nothing where there is none."""
        if self._pid == os.getpid() and self._state == _OPEN:
            self._fail()

    def close(self) -> None:
        """Release the rank's folder; an unfinished generation is aborted. Again does nothing."""
        if self._pid != os.getpid():
            return
        self.abort()
        self._release()
        self._state = _CLOSED

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, state: str) -> None:
        if self._pid != os.getpid():
            raise ForkError(
                f"Writer of {self.path}: made in process {self._pid}, used in its forked child {os.getpid()}"
            )
        if self._state == state:
            return
        if self._state == _CLOSED:
            raise ClosedError(f"Writer of {self.path} was closed")
        if self._state == _FAILED:
            raise StorageError(
                5, f"generation {self.generation} failed and is not tried again; make a new Writer", self.path
            )
        order = {
            _IDLE: "call begin first",
            _OPEN: "it is being written: commit or abort it",
            _COMMITTED: "it is committed",
        }
        raise ConfigError(f"Writer of {self.path}: generation {self.generation or None}: {order[self._state]}")

    def _fail(self, withdrawn: bool = False) -> None:
        """Nothing more is done with this generation. `withdrawn`: there may have been a manifest, which goes first."""
        self._state = _FAILED
        try:
            if withdrawn:
                self.files.sync_folder(self.path)
            if self._segments is not None:
                self._segments.discard()
                self.files.unlink(os.path.join(self.folder, commit_name(self.generation)))
        except OSError:
            pass  # the next writer removes it; the failure that led here is the one to report
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # --------------------------------------------------------------------------------------------------------- content

    def table(
        self,
        description: TableDescription,
        *,
        whole: bool | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Name a table, which is then in the generation even if it has no rows.

        Parameters
        ----------
        description : TableDescription
        whole : bool, optional
            Whether what is written of it is all it has. Default: in a full generation, and where the parent lacks the table.
            Only before its first rows.
        metadata : dict, optional
            The caller's own, as JSON.

        Raises
        ------
        ConfigError
            The name was given to another table of this generation.
        """
        self._check(_OPEN)
        one = self._contents.table(description, whole)
        if metadata is not None:
            one.metadata = _json("metadata", metadata)

    def rows_per_chunk(self, description: TableDescription) -> int:
        """Rows of a full chunk: pieces of a multiple of this size waste nothing."""
        return chunk.rows_per_chunk(chunk.columns_of(ROWS, description), self.chunk_bytes)

    def write_rows(
        self,
        description: TableDescription,
        keys: npt.NDArray[np.int64],
        weights: npt.NDArray[Any],
        state: npt.NDArray[np.float32] | None = None,
        frequencies: npt.NDArray[np.int64] | None = None,
        timestamps: npt.NDArray[np.int64] | None = None,
        vshards: tuple[int, int] | None = None,
    ) -> None:
        """Write rows of a table: any number, in any number of calls.

        Parameters
        ----------
        description : TableDescription
        keys : int64 (n,)
            Each key once in a generation. Best those of neighbouring vshards together: a reader rank reads a chunk where one
            of its keys may be in.
        weights : (n, dim)
            As the table keeps them: float32, float16, or for bfloat16 its bits as int16.
        state : float32 (n, state_dim), optional
            Must be there where the table has state.
        frequencies, timestamps : int64 (n,), optional
            Must be there where the table has a filter.
        vshards : (int, int), optional
            Range that the keys lie in, for a check; what is recorded is computed from the keys.

        Raises
        ------
        ShapeError
            An array has another shape or dtype, or a key lies outside `vshards`; nothing was written.
        """
        self._check(_OPEN)
        given = {
            "keys": keys,
            "frequencies": frequencies,
            "timestamps": timestamps,
            "weights": weights,
            "state": state,
        }
        columns = chunk.columns_of(ROWS, description)
        arrays = chunk.checked(description.name, columns, given, len(keys))
        if vshards is not None and len(keys):
            low, high = vshards_in(arrays["keys"])
            if low < vshards[0] or high > vshards[1]:
                raise ShapeError(f"table {description.name!r}: keys of vshards {low} to {high - 1} outside {vshards}")
        one = self._contents.table(description)
        self._write_pieces(one, ROWS, columns, arrays, len(keys))
        one.rows += len(keys)

    def rows_to_fill(self, description: TableDescription, count: int) -> dict[str, npt.NDArray[Any]]:
        """Arrays for `count` rows of a chunk, by name, for the caller to fill: `write_filled` writes them without a copy.

        Whatever else is written in between destroys them.
        """
        self._check(_OPEN)
        columns = chunk.columns_of(ROWS, description)
        return self._buffer.lay_out(columns, count)

    def write_filled(self, description: TableDescription, count: int) -> None:
        """Write the rows that `rows_to_fill` has given room for."""
        self._check(_OPEN)
        one = self._contents.table(description)
        self._write_chunk(one, ROWS, chunk.columns_of(ROWS, description), count)
        one.rows += count

    def write_erased(self, description: TableDescription, keys: npt.NDArray[np.int64]) -> None:
        """Write keys, int64 (n,), that the parent has and this generation has not. Only for a table that is not whole."""
        self._check(_OPEN)
        columns = chunk.columns_of(ERASED)
        arrays = chunk.checked(description.name, columns, {"keys": keys}, len(keys))
        one = self._contents.table(description)
        if one.whole:
            raise ConfigError(
                f"table {description.name!r}: is written whole, so keys that are not written are not in it"
            )
        self._write_pieces(one, ERASED, columns, arrays, len(keys))
        one.erased += len(keys)

    def write_filter(
        self,
        description: TableDescription,
        keys: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        late: npt.NDArray[np.int64] | None = None,
        numbers: dict[str, Any] | None = None,
        *,
        changes: bool = False,
        gone: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Write a filter's state: keys that wait for admission, and its numbers. It replaces the parent's, or with `changes` changes it.

        Parameters
        ----------
        description : TableDescription
        keys, counts, last : int64 (n,)
            Waiting keys; may come in several calls.
        late : int64 (m,), optional
            Keys that a sweep in progress has yet to look at.
        numbers : dict, optional
            Everything else, as JSON; the last one given counts. Large arrays go to `write_state`.
        changes : bool
            The keys are those whose counts or times are not the parent's, or that it lacks. Alike in all calls for a table, and only
            where the table is not written whole. Older versions refuse such a generation.
        gone : int64 (k,), optional
            With `changes`: keys that the parent may have and that do not wait any more, unless they are among those written.
        """
        self._check(_OPEN)
        columns = chunk.columns_of(WAITING)
        given = {"keys": keys, "frequencies": counts, "timestamps": last}
        arrays = chunk.checked(description.name, columns, given, len(keys))
        late_arrays = (
            None if late is None else chunk.checked(description.name, chunk.columns_of(LATE), {"keys": late}, len(late))
        )
        gone_arrays = (
            None if gone is None else chunk.checked(description.name, chunk.columns_of(GONE), {"keys": gone}, len(gone))
        )
        checked = _json("numbers", numbers or {})
        one = self._contents.table(description)
        if (one.filter is not None and one.filter_changes != changes) or (changes and one.whole):
            raise ConfigError(
                f"table {description.name!r}: its filter, or the table, is written whole, so no changes of it are"
            )
        if gone is not None and not changes:
            raise ConfigError(
                f"table {description.name!r}: its filter is written whole, so keys that are not written do not wait"
            )
        one.filter_changes = changes
        self._write_pieces(one, WAITING, columns, arrays, len(keys))
        if gone_arrays is not None:
            self._write_pieces(one, GONE, chunk.columns_of(GONE), gone_arrays, len(gone_arrays["keys"]))
        if late_arrays is not None:
            self._write_pieces(one, LATE, chunk.columns_of(LATE), late_arrays, len(late_arrays["keys"]))
        if one.filter is None or numbers is not None:
            one.filter = checked

    def write_state(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Write bytes of the caller's own, under a name that is new in this generation: a safetensors file, JSON ..."""
        self.write_state_pieces(name, [content])

    def write_state_pieces(self, name: str, pieces: Iterable[Any]) -> None:
        """The same of bytes that come in pieces, each a buffer."""
        self._check(_OPEN)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"write_state: name = {name!r}; give a non-empty string")
        if name in self._contents.blobs:
            raise ConfigError(f"write_state: {name!r} was written already; name them apart")
        records = self._contents.blobs.setdefault(name, [])
        columns = chunk.columns_of(BLOB)
        most = chunk.rows_per_chunk(columns, self.chunk_bytes)
        for content in pieces:
            array = np.frombuffer(content, np.uint8)
            for begin in range(0, len(array), most):
                part = array[begin : begin + most]
                self._buffer.lay_out(columns, len(part))["bytes"][:] = part
                self._append(NO_TABLE, 0, BLOB, columns, len(part), (0, 0), records)

    # --------------------------------------------------------------------------------------------------------- writing

    def _write_pieces(
        self, one: WrittenTable, kind: int, columns: tuple[Column, ...], arrays: dict[str, npt.NDArray[Any]], count: int
    ) -> None:
        most = chunk.rows_per_chunk(columns, self.chunk_bytes)
        for begin in range(0, count, most):
            rows = min(most, count - begin)
            for name, view in self._buffer.lay_out(columns, rows).items():
                view[:] = arrays[name][begin : begin + rows]
            self._write_chunk(one, kind, columns, rows)

    def _write_chunk(self, one: WrittenTable, kind: int, columns: tuple[Column, ...], rows: int) -> None:
        if rows == 0:
            return
        vshards = vshards_in(self._buffer.lay_out(columns, rows)["keys"])
        one.bytes += self._append(one.number, one.description.digest, kind, columns, rows, vshards, one.records)

    def _append(
        self,
        table: int,
        digest: int,
        kind: int,
        columns: tuple[Column, ...],
        rows: int,
        vshards: tuple[int, int],
        records: list[tuple[Any, ...]],
    ) -> int:
        """Seal what the buffer holds and write it; returns its bytes."""
        assert self._segments is not None
        header = Header(self.generation, self.rank, table, len(records), kind, *vshards, rows, digest, columns)
        content, sealed = self._buffer.seal(header)
        try:
            file, offset = self._segments.append(content)
        except BaseException:
            self._fail()
            raise
        place = (
            file,
            len(records),
            kind,
            0,
            *vshards,
            0,
            offset,
            len(content),
            rows,
            np.frombuffer(sealed, np.uint8),
            0,
        )
        records.append(place)
        self._behind.append(self._buffer)
        free = len(self._behind) > self._segments.behind
        self._buffer = self._behind.pop(0) if free else ChunkBuffer()
        return len(content)


def vshards_in(keys: npt.NDArray[np.int64]) -> tuple[int, int]:
    """First vshard of the keys, and last + 1."""
    hashes = hash_keys(keys)
    shift = 64 - VSHARDS.bit_length() + 1
    return int(hashes.min()) >> shift, (int(hashes.max()) >> shift) + 1


def _json(what: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` as it will be read again; `ConfigError` where it is no JSON object."""
    try:
        if not isinstance(body, dict):
            raise TypeError(f"a {type(body).__name__}")
        copy: dict[str, Any] = json.loads(json.dumps(body))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is no JSON object ({error}); give numbers, strings, lists and dicts of them"
        ) from None
    return copy
