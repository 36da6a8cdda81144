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
from .names import CATALOGUE, LOCK, published, rank_name, ranks

__all__ = ["Finding", "verify"]

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
    catalogues = Catalogues(path)
    levels: dict[int, Level] = {}
    broken: dict[int, str] = {}
    try:
        for generation in held:
            try:
                levels[generation] = Level(path, generation, catalogues)
            except EmbCacheError as error:
                broken[generation] = str(error)
                findings.append(Finding("damage", generation, str(error)))
    finally:
        catalogues.close()
    total = sum(place.length for level in levels.values() for place in level.chunks())
    done, buffer = 0, ChunkBuffer()
    for generation, level in levels.items():
        parent = level.manifest.parent
        if parent is not None and parent not in levels:
            reason = broken.get(parent, "it is missing")
            findings.append(Finding("damage", generation, f"its parent {parent} cannot be used: {reason}"))
        for place in level.chunks():
            try:
                level.read(place, buffer)
            except EmbCacheError as error:
                findings.append(Finding("damage", generation, str(error)))
            done += place.length
            if progress is not None:
                progress(done, total)
        level.close()
    return findings


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
