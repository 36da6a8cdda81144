"""Segment files: chunks one behind the other, written once and never changed.

A segment begins with a sealed header (sealed.py) of 4096 bytes which says its generation, rank and number; chunks follow,
each at a multiple of 4096. A file ends where its last chunk does. No file exceeds 64 GiB, so that no file system's
limit is met.

Writes of more than a few chunks go past the page cache, in two threads, while the next chunk is filled and digested: the medium is
busy from the start, and nobody copies what is not going to be read. What the cache would have been used for, it keeps.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np

from ..errors import CorruptionError, StorageError
from .chunk import ALIGNMENT
from .files import FULL, Files, refusals
from .helper import Helper
from .names import segment_name
from .sealed import SEGMENT, seal, unseal

__all__ = ["MOST_SEGMENT_BYTES", "SegmentReader", "SegmentWriter"]

MOST_SEGMENT_BYTES = 64 << 30
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_AHEAD_BYTES = 256 << 20
_BEHIND_FROM = 16 << 20  # bytes of a file from which on it is written in threads
_THREADS = 2


class SegmentWriter:
    """Writes the segments of one generation of one rank.

    Space is allocated before bytes are written. After `finish` everything is durable, the folder's entries too. After an
    error, which may be that of an earlier `append`, only `discard` may be called. Thread safety: one thread.

    Attributes
    ----------
    behind : int
        So many of the last chunks that were appended may still be read by a thread: their memory must stay as it is.
    """

    def __init__(
        self, files: Files, folder: str, generation: int, rank: int, most_bytes: int = MOST_SEGMENT_BYTES
    ) -> None:
        self.files = files
        self.folder = folder
        self.generation = generation
        self.rank = rank
        self.most_bytes = most_bytes
        self.done: list[tuple[str, int]] = []
        self.behind = 0
        self._helpers: list[Helper] = []  # the next one is the first
        self._open: list[int] = []  # descriptors of all files: synced at the end
        self._path = ""
        self._at = 0
        self._allocated = 0

    @property
    def bytes(self) -> int:
        """Written so far."""
        return sum(length for _, length in self.done) + self._at

    def append(self, content: Any) -> tuple[int, int]:
        """Write a chunk, or begin to; return (number of the file, offset in it)."""
        with refusals(self._path or self.folder, "writing a checkpoint"):
            if not self._open or self._at + len(content) > self.most_bytes:
                self._begin()
            offset = self._at
            self._allocate(len(content))
            if offset < _BEHIND_FROM:
                self.files.write(self._open[-1], [content], offset, self._path)
            else:
                self._write_behind(content, offset)
            self._at += len(content)
        return len(self._open) - 1, offset

    def finish(self) -> list[tuple[str, int]]:
        """Make all files durable; return (name, bytes) of each."""
        with refusals(self._path or self.folder, "writing a checkpoint"):
            self._end()
            while self._open:
                self.files.sync(self._open[0], self._path)
                os.close(self._open.pop(0))
            if self.done:
                self.files.sync_folder(self.folder)
        return self.done

    def discard(self) -> None:
        """Close and remove what was written, as far as the system allows."""
        self._close_helpers()
        while self._open:
            os.close(self._open.pop())
        for name in sorted({name for name, _ in self.done} | ({os.path.basename(self._path)} if self._path else set())):
            self.files.unlink(os.path.join(self.folder, name))

    def _write_behind(self, content: Any, offset: int) -> None:
        if not self._helpers:
            self.files.bypass_cache(self._open[-1], self._path)
            self._helpers = [Helper() for _ in range(_THREADS)]
            self.behind = _THREADS
        helper = self._helpers[0]
        self._helpers = [*self._helpers[1:], helper]  # at no moment one less: each is to be ended
        if helper.busy:
            helper.result()
        helper.start(self.files.write, self._open[-1], [content], offset, self._path)

    def _wait(self) -> None:
        """Until everything is written that was appended; raises what went wrong."""
        for helper in self._helpers:
            if helper.busy:
                helper.result()
        self._close_helpers()

    def _close_helpers(self) -> None:
        for helper in self._helpers:
            helper.close()
        self._helpers, self.behind = [], 0

    def _begin(self) -> None:
        self._end()
        number = len(self._open)
        name = segment_name(self.generation, number)
        head = seal(
            SEGMENT, {"generation": self.generation, "rank": self.rank, "number": number}, total_bytes=ALIGNMENT
        )
        self._path = os.path.join(self.folder, name)
        self._at = self._allocated = 0
        self._open.append(self.files.create(self._path))
        self._allocate(len(head))
        self.files.write(self._open[-1], [head], 0, self._path)
        self._at = len(head)

    def _allocate(self, more: int) -> None:
        """Have room for `more` bytes at the end; more than that while there is plenty."""
        if self._at + more <= self._allocated:
            return
        ahead = min(max(more, self._at), _AHEAD_BYTES)
        try:
            self.files.allocate(self._open[-1], self._allocated, self._at + ahead - self._allocated, self._path)
            self._allocated = self._at + ahead
        except OSError as error:
            if ahead == more or error.errno not in FULL:
                raise
            self.files.allocate(self._open[-1], self._allocated, self._at + more - self._allocated, self._path)
            self._allocated = self._at + more

    def _end(self) -> None:
        self._wait()
        if self._path and len(self.done) < len(self._open):
            if self._allocated > self._at:
                self.files.truncate(self._open[-1], self._at, self._path)
            self.done.append((os.path.basename(self._path), self._at))
            self._at = 0


class SegmentReader:
    """One segment file, opened and its header checked.

    Raises
    ------
    CorruptionError
        Absent, of another length than the manifest says, or not the file that it should be.
    StorageError
        The process has no descriptor left.
    """

    def __init__(self, folder: str, name: str, length: int, generation: int, rank: int, number: int) -> None:
        self.path = os.path.join(folder, name)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:  # a long chain of several ranks: says nothing of the file
                remedy = "raise the limit of open files (ulimit -n)"
                raise StorageError(error.errno, f"{error.strerror}: {remedy}", self.path) from error
            raise CorruptionError(f"{self.path}: cannot be read ({error.strerror})", generation=generation) from error
        self.length = length
        try:
            found = os.fstat(self._descriptor).st_size
            if found != length:
                raise CorruptionError(f"{self.path}: {found} bytes long, not {length}", generation=generation)
            head = np.empty(ALIGNMENT, np.uint8)
            self.read_into(head, 0)
            body = unseal(SEGMENT, head.tobytes(), self.path)
            if body != {"generation": generation, "rank": rank, "number": number}:
                raise CorruptionError(f"{self.path}: its header says {body}", generation=generation)
        except BaseException:
            self.close()
            raise

    def read_into(self, content: Any, offset: int) -> None:
        """Fill `content` from `offset` on; `CorruptionError` where the file ends before, or the medium fails."""
        view = memoryview(content)
        while len(view):
            try:
                got = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                raise CorruptionError(f"{self.path}: cannot be read at {offset} ({error.strerror})") from error
            if got == 0:
                raise CorruptionError(f"{self.path}: ends at {offset}, before its length says")
            view = view[got:]
            offset += got

    def close(self) -> None:
        """Give the descriptor back; again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
