"""What a disk may hold after the power was cut: a model of the medium, fed with a log of `recorder.c`.

What is assumed of the medium, and nothing else (docs/reliability.md): a sync that returned 0 made the file's bytes and its
length, or the folder's entries, durable; a write through a descriptor with O_DSYNC is durable when it returns; a write
changes nothing outside its range, and sectors of 512 bytes are written whole or not; renaming is one step, and so is exchanging two
names, within a folder or from one to another.

So after a cut every change that was not synced may be there or not, each sector of a write by itself, in any
combination: files may be shorter, of the right length with zeros or an older file's bytes in them, or absent; folders may
lack new names or keep removed ones. A file's sync does not make its name durable. A sync that failed has made nothing
durable, and nothing that comes later will: the system may take these pages for clean (they are "doubtful" for good). What has changed two folders in
one step is in both or in neither, and durable once both have been synced.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FAILED_SYNC", "MARK", "REFUSED", "Disk", "Event", "events_of", "mark"]

CREATE, MKDIR, RENAME, UNLINK, WRITE, DURABLE_WRITE, RESIZE, SYNC, FAILED_SYNC, REFUSED, EXCHANGE = range(1, 12)
MARK = 100
_HEAD = struct.Struct("<IIQqIIQ")
_MAGIC = 0x45434C47
PENDING, DURABLE, DOUBTFUL = "pending", "durable", "doubtful"


@dataclass(frozen=True)
class Event:
    """One record of the log."""

    kind: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def events_of(log: Path) -> list[Event]:
    """All records of a log."""
    content, at, found = log.read_bytes(), 0, []
    while at < len(content):
        magic, kind, inode, offset, path, other, data = _HEAD.unpack_from(content, at)
        assert magic == _MAGIC, f"{log}: no record at {at}"
        at += _HEAD.size
        texts = content[at : at + path].decode(), content[at + path : at + path + other].decode()
        at += path + other
        found.append(Event(kind, inode, offset, *texts, content[at : at + data]))
        at += data
    return found


def mark(log: Path, text: str) -> None:
    """Write a record of one's own: what was acknowledged, or is about to be done."""
    encoded = text.encode()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(descriptor, _HEAD.pack(_MAGIC, MARK, 0, 0, len(encoded), 0, 0) + encoded)
    os.close(descriptor)


@dataclass
class _Change:
    """Of a file: bytes at an offset, or (no bytes) a new length. Of a folder: names and what they mean from then on."""

    offset: int = 0
    data: bytes | None = None
    names: tuple[tuple[str, File | Folder | None], ...] = ()
    status: str = PENDING
    twin: _Change | None = None  # of another folder, made in the same step

    @property
    def durable(self) -> bool:
        """Whether no cut takes it back."""
        return self.status == DURABLE and (self.twin is None or self.twin.status == DURABLE)

    def kept(self, fates: dict[int, bool], rng: random.Random, share: float) -> bool:
        """Whether it is in an image whose changes in two folders have the `fates` that were drawn so far, by the twin's identity."""
        if self.durable or self.twin is None:
            return self.durable or rng.random() < share
        if id(self.twin) not in fates:
            fates[id(self)] = rng.random() < share
            return fates[id(self)]
        return fates[id(self.twin)]


@dataclass
class _Mood:
    """How a disk of this image treats what was not synced."""

    kept: float
    sector: int
    junk: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> _Mood:
        return cls(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]), rng.choice([512, 4096]), rng.random() < 0.3)


class _Node:
    def __init__(self) -> None:
        self.changes: list[_Change] = []

    def sync(self, status: str) -> None:
        for change in self.changes:
            if change.status == PENDING:
                change.status = status
        while self.changes and self.changes[0].durable:
            self._settle(self.changes.pop(0))

    def _settle(self, change: _Change) -> None:
        raise NotImplementedError


class File(_Node):
    """Bytes that are durable, and what happened since."""

    def __init__(self) -> None:
        super().__init__()
        self.base = bytearray()

    def _settle(self, change: _Change) -> None:
        _apply(self.base, change.offset, change.data)

    def image(self, rng: random.Random) -> bytes:
        """What may be read after a cut."""
        mood, found, durable = _Mood.drawn(rng), bytearray(self.base), len(self.base)
        for change in self.changes:
            if change.status == DURABLE:
                _apply(found, change.offset, change.data)
            elif change.data is None:
                if rng.random() < mood.kept:
                    _apply(found, change.offset, None)
            else:
                for offset, piece in _sectors(change.offset, change.data, mood.sector):
                    if rng.random() < mood.kept:
                        _apply(found, offset, piece)
                    elif mood.junk and durable <= offset < len(found):
                        _apply(found, offset, rng.randbytes(min(len(piece), len(found) - offset)))
        return bytes(found)


class Folder(_Node):
    """Names that are durable, and what happened since."""

    def __init__(self) -> None:
        super().__init__()
        self.base: dict[str, File | Folder] = {}

    def _settle(self, change: _Change) -> None:
        _rename(self.base, change)

    def write_image(self, place: Path, rng: random.Random, fates: dict[int, bool]) -> None:
        """Make the folder at `place` as it may be found after a cut."""
        mood, found = _Mood.drawn(rng), dict(self.base)
        for change in self.changes:
            if change.kept(fates, rng, mood.kept):
                _rename(found, change)
        for name, node in found.items():
            if isinstance(node, File):
                (place / name).write_bytes(node.image(rng))
            else:
                (place / name).mkdir()
                node.write_image(place / name, rng, fates)


def _sectors(offset: int, data: bytes, sector: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        end = min(len(data), at + sector - (offset + at) % sector)
        yield offset + at, data[at:end]
        at = end


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(offset - len(content), 0)))
        content[offset : offset + len(data)] = data


def _rename(names: dict[str, File | Folder], change: _Change) -> None:
    for name, node in change.names:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass
class Disk:
    """The files below `under`, fed event by event; it may be imaged at any point.

    Attributes
    ----------
    marks : list of str
        The marks so far.
    """

    under: str
    inode: int
    marks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Folder()
        self._nodes: dict[int, File | Folder] = {self.inode: self.root}
        self._folders: dict[str, Folder] = {self.under: self.root}

    def feed(self, event: Event) -> None:
        """Take note of what happened."""
        if event.kind == MARK:
            self.marks.append(event.path)
        elif event.kind in (CREATE, MKDIR):
            node = self._nodes[event.inode] = File() if event.kind == CREATE else Folder()
            if isinstance(node, Folder):
                self._folders[event.path] = node
            self._named(event.path, (os.path.basename(event.path), node))
        elif event.kind == UNLINK:
            self._named(event.path, (os.path.basename(event.path), None))
        elif event.kind in (RENAME, EXCHANGE):
            self._moved(event)
        elif event.kind in (SYNC, FAILED_SYNC):
            self._nodes[event.inode].sync(DURABLE if event.kind == SYNC else DOUBTFUL)
        elif event.kind != REFUSED:
            data = None if event.kind == RESIZE else event.data
            status = DURABLE if event.kind == DURABLE_WRITE else PENDING
            self._nodes[event.inode].changes.append(_Change(event.offset, data, (), status))

    def _moved(self, event: Event) -> None:
        """A name has moved, or two have changed places."""
        node, other = self._nodes[event.inode], None
        moved = {event.path: event.other}
        if event.kind == EXCHANGE:
            other = self._nodes[event.offset]
            moved[event.other] = event.path
        old, new = (os.path.basename(event.path), other), (os.path.basename(event.other), node)
        if os.path.dirname(event.path) == os.path.dirname(event.other):
            self._named(event.path, old, new)
        else:
            one, two = self._named(event.path, old), self._named(event.other, new)
            one.twin, two.twin = two, one
        folders = {}
        for path, folder in self._folders.items():
            if event.kind == RENAME and path == event.other:
                continue  # an empty one, which has gone
            for before, after in moved.items():
                if path == before or path.startswith(before + "/"):
                    path = after + path[len(before) :]
                    break
            folders[path] = folder
        self._folders = folders

    def _named(self, path: str, *names: tuple[str, File | Folder | None]) -> _Change:
        change = _Change(names=names)
        self._folders[os.path.dirname(path)].changes.append(change)
        return change

    def write_image(self, place: Path, rng: random.Random, in_flight: Event | None = None) -> None:
        """Make what may be found after a cut now, in the empty folder `place`; `in_flight` is the event that it interrupts."""
        node = None
        if in_flight is not None and in_flight.kind in (WRITE, DURABLE_WRITE):
            node = self._nodes[in_flight.inode]
            node.changes.append(_Change(in_flight.offset, in_flight.data))
        self.root.write_image(place, rng, {})
        if node is not None:
            node.changes.pop()
