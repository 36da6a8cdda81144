"""The manifest of a generation: the one file whose appearance publishes it, and what must hold for it to be restored.

A manifest is a sealed JSON object (sealed.py):

================  ==============================================================================================
field             content
================  ==============================================================================================
``generation``    its number
``kind``          ``"full"`` or ``"delta"``
``parent``        the generation that a delta changes; null for a full one
``world``         number of ranks that wrote it
``ranks``         for each rank: ``transaction`` (LMDB's number), ``catalogue_bytes``, ``root`` (digest, hexadecimal),
                  ``files`` (name and bytes of each segment), ``engine``, ``page_bytes``
``tables``        name -> ``rows`` and ``erased`` in this generation, ``bytes``, ``whole``
``created``       seconds since 1970
``byte_order``    ``"little"``
================  ==============================================================================================

Each rank leaves its part in a commit file of the same form; publishing gathers them, so no rank has to open another's
catalogue.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, CorruptionError, EmbCacheError
from .catalogue import CatalogueReader, root_of
from .files import Files, refusals
from .names import CATALOGUE, abandoned_manifests, check_rank, commit_name, manifest_name, published, rank_name
from .sealed import COMMIT, MANIFEST, read, seal

__all__ = ["Manifest", "RankPart", "names_rank", "publish", "read_manifest", "stamp_of", "write_commit"]


@dataclass(frozen=True)
class RankPart:
    """What a manifest says of one rank."""

    rank: int
    transaction: int
    catalogue_bytes: int
    root: str
    files: tuple[tuple[str, int], ...]
    engine: str
    page_bytes: int

    @property
    def bytes(self) -> int:
        """Of the segments."""
        return sum(length for _, length in self.files)

    def check_lengths(self, path: str, generation: int) -> None:
        """`CorruptionError` unless every file is there, as long as it was."""
        folder = os.path.join(path, rank_name(self.rank))
        for name, length in (*self.files, (CATALOGUE, self.catalogue_bytes)):
            place = os.path.join(folder, name)
            try:
                found = os.stat(place).st_size
            except OSError as error:
                raise CorruptionError(f"{place}: {error.strerror}", generation=generation) from None
            if found < length or (found > length and name != CATALOGUE):
                raise CorruptionError(f"{place}: {found} bytes long, not {length}", generation=generation)


@dataclass(frozen=True)
class Manifest:
    """A published generation, as its manifest describes it."""

    generation: int
    kind: str
    parent: int | None
    world: int
    ranks: tuple[RankPart, ...]
    tables: dict[str, dict[str, Any]]
    created: float

    @property
    def bytes(self) -> int:
        """Of all segments."""
        return sum(part.bytes for part in self.ranks)


def _part(rank: int, body: dict[str, Any]) -> RankPart:
    files = tuple((str(name), int(length)) for name, length in body["files"])
    if any(os.path.basename(name) != name or length < 0 for name, length in files):
        raise ValueError
    numbers = (int(body["transaction"]), int(body["catalogue_bytes"]))
    return RankPart(rank, *numbers, str(body["root"]), files, str(body["engine"]), int(body["page_bytes"]))


def read_manifest(path: str, generation: int) -> Manifest:
    """The manifest of `generation` at `path`.

    Raises
    ------
    ConfigError
        There is no such generation.
    CorruptionError, FormatVersionError
        It is not as it was written, or is another's.
    """
    place = os.path.join(path, manifest_name(generation))
    if not os.path.lexists(place):
        held = published(path)
        known = ", ".join(map(str, held[-8:])) if held else "none"
        raise ConfigError(f"{path}: no generation {generation}; published there: {known}")
    body = read(MANIFEST, place)
    try:
        parent = None if body["parent"] is None else int(body["parent"])
        manifest = Manifest(
            int(body["generation"]),
            str(body["kind"]),
            parent,
            int(body["world"]),
            tuple(_part(rank, part) for rank, part in enumerate(body["ranks"])),
            {str(name): dict(table) for name, table in body["tables"].items()},
            float(body["created"]),
        )
        if manifest.kind != ("full" if parent is None else "delta") or manifest.world != len(manifest.ranks):
            raise ValueError
        if parent is not None and not 0 < parent < generation:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptionError(f"{place}: not what a manifest says", generation=generation) from None
    if manifest.generation != generation:
        raise CorruptionError(f"{place}: the manifest of generation {manifest.generation}", generation=generation)
    return manifest


def stamp_of(path: str, generation: int) -> tuple[int, int, int] | None:
    """What tells the manifest at `path` from another one of its number; None where there is none.

    Pruning unlinks the manifest before anything else of a generation, and `embcache compact` puts another directory in the place of
    this one. So what fails while the stamp stays the same is damaged; else it was pruned or replaced meanwhile.
    """
    try:
        found = os.lstat(os.path.join(path, manifest_name(generation)))
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def names_rank(path: str, generation: int, rank: int) -> bool:
    """Whether a published generation has, or (its manifest cannot be read) may have a part of this rank."""
    try:
        return rank < read_manifest(path, generation).world
    except EmbCacheError:
        return True


def write_sealed(files: Files, folder: str, name: str, content: bytes, *, durable: bool = True) -> None:
    """Make a file appear whole: temporary name, sync, rename, sync of the folder. On failure nothing is left behind.

    Where the last sync fails the file goes as well: what that sync has lost stays lost, though the system goes on showing
    it, so nobody may build on it.
    """
    place = os.path.join(folder, name)
    with refusals(place, "publishing a checkpoint"):
        files.unlink(place + ".tmp")
        descriptor = files.create(place + ".tmp")
        try:
            try:
                files.write(descriptor, [content], 0, place)
                if durable:
                    files.sync(descriptor, place)
            finally:
                os.close(descriptor)
            files.rename(place + ".tmp", place)
        except OSError:
            _unlink_quietly(place + ".tmp")
            raise
        try:
            if durable:
                files.sync_folder(folder)
        except OSError:
            _unlink_quietly(place)
            raise


def _unlink_quietly(path: str) -> None:
    """Part of reporting a failure, which must not be hidden by another."""
    with suppress(OSError):
        os.unlink(path)


def write_commit(files: Files, folder: str, generation: int, body: dict[str, Any]) -> None:
    """Leave a rank's part for `publish`. That of a single rank need not outlive a power cut: its writer publishes it, or nobody."""
    write_sealed(
        files,
        folder,
        commit_name(generation),
        seal(COMMIT, body, features=body.get("features", 0)),
        durable=body["world"] > 1,
    )


def publish(path: str, generation: int, world: int = 1, *, files: Files | None = None) -> None:
    """Make a generation that all ranks have committed the newest one at `path`, durably. Rank 0 does it, after all have.

    Parameters
    ----------
    path : str
    generation : int
    world : int
        Number of ranks.

    Raises
    ------
    ConfigError
        A rank has not committed the generation, or ranks disagree about its parent; or it is not newer than what is there.
    CorruptionError
        A rank's part is not as it was committed.
    DiskFullError, StorageError
        The generation is not published. Where the very last sync failed it may still be found after a power cut, whole.
    """
    path = os.path.abspath(path)
    files = files or Files()
    _, world = check_rank("publish", 0, world)
    if generation <= max(published(path), default=0):
        raise ConfigError(f"publish: generation {generation} is not above {max(published(path))}, the newest at {path}")
    parts: list[dict[str, Any]] = []
    tables: dict[str, dict[str, Any]] = {}
    parents: set[int | None] = set()
    created, features = 0.0, 0
    for rank in range(world):
        place = os.path.join(path, rank_name(rank), commit_name(generation))
        if not os.path.exists(place):
            raise ConfigError(
                f"publish: rank {rank} has not committed generation {generation} at {path}; commit it first"
            )
        body = read(COMMIT, place)
        if (body.get("generation"), body.get("rank"), body.get("world")) != (generation, rank, world):
            raise ConfigError(
                f"publish: {place} is of rank {body.get('rank')} of {body.get('world')}; give world = {body.get('world')}"
            )
        part = _part(rank, body)
        part.check_lengths(path, generation)
        parts.append(body)
        parents.add(body["parent"])
        created = max(created, body["created"])
        features |= body.get("features", 0)
        for name, table in body["tables"].items():
            tables[name] = _merged(tables.get(name), table)
    if len(parents) > 1:
        raise ConfigError(
            f"publish: ranks disagree about the parent of generation {generation}: {sorted(map(str, parents))}"
        )
    parent = parents.pop()
    if parent is not None and parent not in published(path):
        raise ConfigError(
            f"publish: generation {parent}, the parent of {generation}, is no longer at {path}; save a full one"
        )
    wanted = ("transaction", "catalogue_bytes", "root", "files", "engine", "page_bytes")
    manifest = {
        "generation": generation,
        "kind": "full" if parent is None else "delta",
        "parent": parent,
        "world": world,
        "ranks": [{field: part[field] for field in wanted} for part in parts],
        "tables": tables,
        "created": created,
        "byte_order": "little",
    }
    with refusals(path, "removing what was never published"):
        for name in abandoned_manifests(path):
            files.unlink(os.path.join(path, name))
    write_sealed(files, path, manifest_name(generation), seal(MANIFEST, manifest, features=features))
    for rank in range(world):
        _unlink_quietly(os.path.join(path, rank_name(rank), commit_name(generation)))  # else the next writer does


def _merged(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """The sum of two ranks' parts of a table."""
    if one is None:
        return dict(other)
    summed = {what: one[what] + other[what] for what in ("rows", "erased", "bytes")}
    return one | summed | {"whole": one["whole"] and other["whole"]}


def records_of(manifest: Manifest, part: RankPart, catalogue: CatalogueReader) -> list[tuple[bytes, bytes]]:
    """A rank's records of a generation, checked by their root digest."""
    records = catalogue.records(manifest.generation)
    found = root_of(records).hex()
    if found != part.root:
        raise CorruptionError(
            f"{catalogue.path}: what it says of generation {manifest.generation} does not match its digest in the manifest",
            generation=manifest.generation,
            expected=part.root,
            found=found,
        )
    return records
