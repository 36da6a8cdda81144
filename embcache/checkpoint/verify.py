"""`verify`: everything that is wrong in a checkpoint's directory. It never raises for what it finds, and changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import EmbCacheError
from .catalogue import CatalogueReader
from .chunk import ChunkBuffer
from .level import Catalogues, Level
from .manifest import stamp_of
from .names import CATALOGUE, LOCK, published, rank_name, ranks

__all__ = ["Finding", "verify"]

_PASSES = 100  # each but the last takes a pruning while it reads
_TOP = re.compile(r"(MANIFEST-\d{16}|rank-\d{4})")
_RANK = re.compile(rf"(segment-\d{{16}}-\d{{4}}|{re.escape(CATALOGUE)}(-lock)?|{LOCK})")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes
    ----------
    severity : str
        ``"damage"``: a generation cannot be restored. ``"note"``: something that does not belong here; the next writer
        removes what an interrupted one left.
    generation : int or None
    what : str
    """

    severity: str
    generation: int | None
    what: str


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> list[Finding]:
    """Read everything at `path`: names, manifests, catalogues, every chunk of every generation.

    Parameters
    ----------
    path : path
    progress : callable, optional
        Called as ``progress(bytes done, bytes in all)``.

    Returns
    -------
    list of Finding
        Empty: every generation can be restored, bit by bit as it was written.

    Notes
    -----
    It may run beside a writer: a generation that is pruned while it is read is left out, and those that have come since are
    looked at as well then.
    """
    path = os.path.abspath(os.fspath(path))
    findings = _strangers(path)
    held = published(path)
    if not held:
        findings.append(Finding("note", None, f"{path}: holds no published generation"))
    for rank in ranks(path):
        folder = os.path.join(path, rank_name(rank))
        if os.path.exists(os.path.join(folder, CATALOGUE)):
            problem = _catalogue_problem(folder)
            if problem:  # without a manifest it is what a writer left that never got to its first generation
                findings.append(Finding("damage" if held else "note", None, problem))
    reading = _Reading(path, progress)
    for _ in range(_PASSES):
        findings += reading.of(held)
        if not reading.moved:
            break
        held = [number for number in published(path) if number not in reading.done]
    return findings


class _Reading:
    """Generations of a directory, read one after the other, while others may prune them.

    Attributes
    ----------
    done : dict
        Generation -> what is wrong with its manifest, catalogue or lengths; empty where nothing is.
    moved : bool
        Whether one of the last pass was pruned or replaced before it was read.
    """

    def __init__(self, path: str, progress: Callable[[int, int], object] | None) -> None:
        self._path = path
        self._progress = progress
        self._bytes = 0
        self._buffer = ChunkBuffer()
        self.done: dict[int, str] = {}
        self.moved = False

    def of(self, held: list[int]) -> list[Finding]:
        """What is wrong with these generations."""
        findings: list[Finding] = []
        stamps = {generation: stamp_of(self._path, generation) for generation in held}
        self.moved = False
        levels: dict[int, Level] = {}
        catalogues = Catalogues(self._path)
        try:
            for generation in held:
                try:
                    levels[generation] = Level(self._path, generation, catalogues)
                except EmbCacheError as error:
                    if not self._has_moved(generation, stamps):
                        self.done[generation] = str(error)
                        findings.append(Finding("damage", generation, str(error)))
        finally:
            catalogues.close()
        total = self._bytes + sum(place.length for level in levels.values() for place in level.chunks())
        for generation, level in levels.items():
            try:
                found = self._of_parent(level) + self._of_chunks(level, stamps, total)
            finally:
                level.close()
            if not found or not self._has_moved(generation, stamps):
                self.done[generation] = ""
                findings += found
        return findings

    def _of_parent(self, level: Level) -> list[Finding]:
        parent = level.manifest.parent
        reason = "" if parent is None else self.done.get(parent, "it is missing")
        return [Finding("damage", level.generation, f"its parent {parent} cannot be used: {reason}")] if reason else []

    def _of_chunks(self, level: Level, stamps: dict[int, tuple[int, int, int] | None], total: int) -> list[Finding]:
        findings = []
        for place in level.chunks():
            try:
                level.read(place, self._buffer)
            except EmbCacheError as error:
                findings.append(Finding("damage", level.generation, str(error)))
                if self._has_moved(level.generation, stamps):
                    break
            self._bytes += place.length
            if self._progress is not None:
                self._progress(self._bytes, total)
        return findings

    def _has_moved(self, generation: int, stamps: dict[int, tuple[int, int, int] | None]) -> bool:
        """Whether what was found concerns a generation that is not there any more."""
        moved = stamps[generation] is None or stamp_of(self._path, generation) != stamps[generation]
        self.moved = self.moved or moved
        return moved


def _catalogue_problem(folder: str) -> str:
    """What is wrong with a catalogue as a file; empty where nothing is."""
    try:
        CatalogueReader(folder).close()
    except EmbCacheError as error:
        return str(error)
    return ""


def _strangers(path: str) -> list[Finding]:
    """Names that no version of this package gives, or that only an interrupted writer leaves."""
    findings = []
    try:
        folders = [("", _TOP), *((rank_name(rank), _RANK) for rank in ranks(path))]
        for folder, known in folders:
            for name in sorted(os.listdir(os.path.join(path, folder))):
                if not known.fullmatch(name):
                    findings.append(Finding("note", None, f"{os.path.join(path, folder, name)}: does not belong here"))
    except OSError as error:
        findings.append(Finding("damage", None, f"{path}: cannot be read ({error.strerror})"))
    return findings
