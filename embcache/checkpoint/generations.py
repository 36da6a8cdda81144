"""The generations of a directory: listing them, and pruning those that nobody needs.

Pruning unlinks manifests first, so that a generation is whole until it is absent; segments follow. A generation that a kept
delta needs is kept with it. Whatever cannot be removed now, since a writer is at work there, its next `begin` removes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ..errors import (
    ConfigError,
    CorruptionError,
    EmbCacheError,
    FormatVersionError,
    LockedError,
    shown,
    whole_number,
)
from . import catalogue
from .files import Files, refusals
from .lock import RankLock
from .manifest import Manifest, read_manifest, stamp_of
from .names import generations_in_rank, manifest_name, published, rank_name, ranks

__all__ = [
    "GenerationInfo",
    "Parent",
    "chain_of",
    "created_of",
    "delta_pays",
    "generations",
    "number_to_keep",
    "parent_at",
    "prune",
    "prune_after",
]

LOG = logging.getLogger("embcache")
_MOST_DELTAS = 256


@dataclass(frozen=True)
class GenerationInfo:
    """A published generation.

    Attributes
    ----------
    generation : int
    kind : str
        ``"full"``, ``"delta"``, or ``"unknown"`` where the manifest is damaged.
    parent : int or None
        What a delta changes.
    world : int
        Number of ranks that wrote it.
    bytes : int
        Of its own files, not its parents'.
    tables : dict
        Name -> rows in this generation.
    created : float
        Seconds since 1970.
    problem : str or None
        Why it cannot be restored, as far as manifests and lengths tell; `verify` reads everything.
    """

    generation: int
    kind: str
    parent: int | None
    world: int
    bytes: int
    tables: dict[str, int]
    created: float
    problem: str | None = None


def generations(path: str | os.PathLike[str]) -> list[GenerationInfo]:
    """The generations at `path`, the oldest first; empty where there is no checkpoint.

    Manifests and the lengths of files are looked at, chunks are not. One that is pruned meanwhile is left out.
    """
    path = os.path.abspath(os.fspath(path))
    found: dict[int, GenerationInfo] = {}
    for number in published(path):
        info = _info(path, number, found)
        if info is not None:
            found[number] = info
    return list(found.values())


def _info(path: str, number: int, older: dict[int, GenerationInfo]) -> GenerationInfo | None:
    """What there is to say of a generation; None where it is not there any more."""
    while True:
        stamp = stamp_of(path, number)
        try:
            manifest = read_manifest(path, number)
            problem = _problem(path, manifest, older)
            tables = {name: int(table["rows"]) for name, table in manifest.tables.items()}
            info = GenerationInfo(
                number,
                manifest.kind,
                manifest.parent,
                manifest.world,
                manifest.bytes,
                tables,
                manifest.created,
                problem,
            )
        except (CorruptionError, FormatVersionError) as error:
            info = GenerationInfo(number, "unknown", None, 0, 0, {}, 0.0, str(error))
        except ConfigError:
            return None
        now = stamp if info.problem is None else stamp_of(path, number)
        if now is None:
            return None  # what is missing was pruned
        if now == stamp:
            return info


def _problem(path: str, manifest: Manifest, older: dict[int, GenerationInfo]) -> str | None:
    try:
        for part in manifest.ranks:
            part.check_lengths(path, manifest.generation)
    except CorruptionError as error:
        return str(error)
    if manifest.parent is None:
        return None
    if manifest.parent not in older:
        return f"its parent {manifest.parent} is missing"
    above = older[manifest.parent].problem
    return None if above is None else f"its parent {manifest.parent}: {above}"


def chain_of(path: str, generation: int) -> list[Manifest]:
    """Manifests of a generation and its parents, the newest first. `CorruptionError`, `ConfigError` where one is not there."""
    chain = [read_manifest(path, generation)]
    while (parent := chain[-1].parent) is not None:
        chain.append(read_manifest(path, parent))
    return chain


def created_of(path: str, generation: int) -> float | None:
    """When a generation was made, which tells it from another one of its number; None where that cannot be read."""
    try:
        return read_manifest(path, generation).created
    except (CorruptionError, ConfigError, FormatVersionError):
        return None


@dataclass(frozen=True)
class Parent:
    """A generation that a delta may change.

    Attributes
    ----------
    tables : frozenset of str
        Names of those it has.
    deltas_bytes : int
        Of the deltas between it and the full generation that they go back to, itself included.
    """

    tables: frozenset[str]
    deltas_bytes: int

    def pays(self, delta_bytes: int, full_bytes: int) -> bool:
        """Whether a delta of `delta_bytes` is better than a new full generation of `full_bytes`.

        A chain is kept, and its rows are read by a restore, as a whole, so deltas pay until all of them come to as much as a full
        generation. What the save writes beside rows and filters (the caller's state, a dense part) it writes either way, so neither of
        the two arguments has it; that of earlier deltas takes its room on the disk until there is a full generation, so it counts.
        """
        return self.deltas_bytes + delta_bytes <= full_bytes


def parent_at(path: str, generation: int, *, created: float | None, world: int = 1) -> Parent | None:
    """What a delta on `generation` would be based on; None where none is possible.

    None depends on what is damaged or gone, on a generation that has taken the parent's number (it was made at another time than
    `created`), on one of another number of writers than `world`, or on too long a chain. `created` is what `created_of` said when the
    parent was saved or restored: where it said nothing, nobody knows whether the parent is still the same, and none depends on it either.
    """
    if created is None:
        return None
    try:
        chain = chain_of(path, generation)
        for manifest in chain:
            for part in manifest.ranks:
                part.check_lengths(path, manifest.generation)
    except (CorruptionError, ConfigError, FormatVersionError):
        return None
    deltas = chain[:-1]
    if chain[0].world != world or created != chain[0].created or len(deltas) >= _MOST_DELTAS:
        return None
    return Parent(frozenset(chain[0].tables), sum(manifest.bytes for manifest in deltas))


def delta_pays(
    path: str, parent: int, delta_bytes: int, full_bytes: int, *, created: float | None, world: int = 1
) -> bool:
    """Whether a delta of `delta_bytes` on `parent` is possible (`parent_at`), and better than a full generation of `full_bytes`."""
    found = parent_at(path, parent, created=created, world=world)
    return found is not None and found.pays(delta_bytes, full_bytes)


def number_to_keep(keep: object) -> int | None:
    """`keep` of a save: how many generations, None for all. `ConfigError` for anything else."""
    number = None if keep is None else whole_number(keep)
    if keep is not None and (number is None or number < 1):
        raise ConfigError(f"keep = {shown(keep)}; give the number of generations to keep, at least 1, or None for all")
    return number


def prune_after(path: str, keep: int | None, generation: int) -> Exception | None:
    """`prune` once `generation` is saved, where `keep` says how many shall stay; returns what has gone wrong.

    What was asked for is saved, so trouble with older ones is logged, not raised: it costs space, and the next save tries again.
    Damage is logged as an error: whoever restores an older generation would meet it.
    """
    if keep is None:
        return None
    try:
        prune(path, keep)
    except (EmbCacheError, OSError, MemoryError) as error:
        level = logging.ERROR if isinstance(error, CorruptionError) else logging.WARNING
        LOG.log(level, "generation %d is saved, but older ones at %s could not be pruned: %s", generation, path, error)
        return error
    return None


def prune(path: str | os.PathLike[str], keep: int, *, files: Files | None = None) -> list[int]:
    """Remove all but the `keep` newest generations, and those that these need.

    Parameters
    ----------
    path : path
    keep : int
        >= 1.

    Returns
    -------
    list of int
        The generations that were removed.

    Raises
    ------
    ConfigError
        `keep` is no integer >= 1.
    StorageError
        The system refused; what was removed is, the rest is whole.
    """
    path, files = os.path.abspath(os.fspath(path)), files or Files()
    number = whole_number(keep)
    if number is None or number < 1:
        raise ConfigError(f"prune: keep = {shown(keep)}; give an integer >= 1")
    with refusals(path, "pruning generations"):
        held = published(path)
        needed = set(held[-number:])
        for generation in held[-number:]:
            try:
                needed.update(manifest.generation for manifest in chain_of(path, generation))
            except (CorruptionError, ConfigError, FormatVersionError):
                needed.update(held)  # what a damaged generation needs is not known: nothing older goes
                break
        gone = [generation for generation in held if generation not in needed]
        for generation in reversed(gone):
            files.sync_folder(path)  # a delta is gone for good before its parent goes
            files.unlink(os.path.join(path, manifest_name(generation)))
        if gone:
            files.sync_folder(path)
            for rank in ranks(path):
                _unlink_files(os.path.join(path, rank_name(rank)), set(gone), files)
            for rank in ranks(path):
                _forget(os.path.join(path, rank_name(rank)), needed, files)
    return gone


def _unlink_files(folder: str, gone: set[int], files: Files) -> None:
    for generation, names in generations_in_rank(folder).items():
        for name in names if generation in gone else []:
            files.unlink(os.path.join(folder, name))


def _forget(folder: str, needed: set[int], files: Files) -> None:
    """Drop the records of pruned generations, unless a writer is at work, whose commit does it."""
    lock = RankLock(folder, files)
    try:
        lock.take()
        catalogue.check(folder, named=True)
        catalogue.write(folder, [], set(), needed, files)
    except (LockedError, CorruptionError):
        pass  # of damage `verify` and the next writer speak; the space in it is lost either way
    finally:
        lock.release()
