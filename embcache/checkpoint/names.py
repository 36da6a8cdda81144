"""What lies where in a checkpoint's directory, and which generation numbers are taken.

=======================================  ===========================================================================
name                                     content
=======================================  ===========================================================================
``MANIFEST-<generation>``                publishes a generation; without it nothing of the generation exists
``MANIFEST-<generation>.tmp``            left by a process that died while publishing
``rank-<rank>/catalogue.mdb``            LMDB: what is in the segments (``catalogue.mdb-lock`` beside it)
``rank-<rank>/segment-<generation>-<n>`` chunks of rows
``rank-<rank>/COMMIT-<generation>``      a rank's part, durable and waiting for its manifest
``rank-<rank>/LOCK``                     held by the rank's writer; its text is the process's number
=======================================  ===========================================================================

Generations are 16 decimal digits, ranks and file numbers 4: names sort as numbers do.
"""

from __future__ import annotations

import os
import re

from ..errors import ConfigError, shown, whole_number

__all__ = [
    "CATALOGUE",
    "MOST_GENERATION",
    "VSHARDS",
    "check_rank",
    "commit_name",
    "generations_in_rank",
    "manifest_name",
    "next_generation",
    "published",
    "rank_name",
    "ranks",
    "segment_name",
    "vshards_of",
]

VSHARDS = 4096
MOST_GENERATION = 10**16 - 1
MOST_WORLD = 4096
CATALOGUE = "catalogue.mdb"
LOCK = "LOCK"

_MANIFEST = re.compile(r"MANIFEST-(\d{16})(\.tmp)?")
_RANK = re.compile(r"rank-(\d{4})")
_OF_RANK = re.compile(r"(?:segment-(\d{16})-\d{4}|COMMIT-(\d{16})(?:\.tmp)?)")


def manifest_name(generation: int) -> str:
    return f"MANIFEST-{generation:016d}"


def rank_name(rank: int) -> str:
    return f"rank-{rank:04d}"


def segment_name(generation: int, number: int) -> str:
    return f"segment-{generation:016d}-{number:04d}"


def commit_name(generation: int) -> str:
    return f"COMMIT-{generation:016d}"


def _listing(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def published(path: str) -> list[int]:
    """Generations that have a manifest, in order."""
    matches = (_MANIFEST.fullmatch(name) for name in _listing(path))
    return [int(match[1]) for match in matches if match and not match[2]]


def abandoned_manifests(path: str) -> list[str]:
    """Names of manifests that were never given their final name."""
    return [name for name in _listing(path) if (match := _MANIFEST.fullmatch(name)) and match[2]]


def ranks(path: str) -> list[int]:
    """Ranks that have a folder, in order."""
    return [int(match[1]) for name in _listing(path) if (match := _RANK.fullmatch(name))]


def generations_in_rank(folder: str) -> dict[int, list[str]]:
    """Files of each generation in a rank's folder: segments, and commits that nobody has published."""
    found: dict[int, list[str]] = {}
    for name in _listing(folder):
        if match := _OF_RANK.fullmatch(name):
            found.setdefault(int(match[1] or match[2]), []).append(name)
    return found


def next_generation(path: str) -> int:
    """A number above every generation of which there is a trace at `path`; 1 for an empty directory."""
    most = max(published(path), default=0)
    for name in abandoned_manifests(path):
        most = max(most, int(name[9:25]))
    for rank in ranks(path):
        most = max(most, max(generations_in_rank(os.path.join(path, rank_name(rank))), default=0))
    return most + 1


def check_rank(owner: str, rank: object, world: object) -> tuple[int, int]:
    """`rank` and `world` as numbers; `ConfigError` unless 0 <= rank < world <= 4096."""
    of, number = whole_number(world), whole_number(rank)
    if of is None or not 1 <= of <= MOST_WORLD:
        raise ConfigError(f"{owner}: world = {shown(world)}; give an integer from 1 to {MOST_WORLD}")
    if number is None or not 0 <= number < of:
        raise ConfigError(f"{owner}: rank = {shown(rank)}; give an integer from 0 to {of - 1}")
    return number, of


def vshards_of(rank: int, world: int) -> tuple[int, int]:
    """The vshards that `rank` of `world` owns: (first, last + 1). Ranks own equal, contiguous shares, within one."""
    return -(-rank * VSHARDS // world), -(-(rank + 1) * VSHARDS // world)
