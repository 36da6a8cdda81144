"""The exceptions of embcache.

Every error a user can cause derives from `EmbCacheError` and, where Python has a fitting built-in (`ValueError`,
`MemoryError`, `OSError`), from that as well, so both styles of ``except`` work. A message says what was wrong, where,
the number seen, the limit, and what to do. An error is raised before any state changes (promise I11).
"""

from __future__ import annotations

import operator
from typing import Any

__all__ = [
    "ChangedError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "DiskFullError",
    "EmbCacheError",
    "ForkError",
    "FormatVersionError",
    "HbmCapacityError",
    "HostMemoryError",
    "LockedError",
    "PinnedKeyError",
    "PlanError",
    "RankError",
    "RankRefusedError",
    "ShapeError",
    "StorageError",
    "UncleanDirectoryError",
    "whole_number",
]


def shown(value: Any) -> str:
    """`repr(value)` for a message, also for an integer of more digits than Python agrees to print."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} too long to print>"


def whole_number(value: Any) -> int | None:
    """`value` as int, or None where it is none: booleans, fractions, arrays and whatever else a caller may pass.

    For the checks at the doors: with it, no odd object can raise an error of its own instead of ours.
    """
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class EmbCacheError(Exception):
    """Base class of every error that embcache raises on purpose."""


class ConfigError(EmbCacheError, ValueError):
    """A configuration value is missing, out of range, or contradicts another."""


class ShapeError(EmbCacheError, ValueError):
    """An array has the wrong dtype, shape, or length."""


class ClosedError(EmbCacheError):
    """The object was closed."""


class ForkError(EmbCacheError):
    """The object was made in another process; a forked child may not use it (promise I12)."""


class PlanError(EmbCacheError):
    """A plan was used out of order: swapped in before out, finished twice, cancelled too late."""


class PinnedKeyError(EmbCacheError):
    """A change was asked for a key that a planned, unfinished batch uses."""


class RankError(EmbCacheError):
    """Another rank is gone, or its batch has failed, so that this one cannot go on as it was; or ranks do not fit together."""


class RankRefusedError(RankError):
    """Another rank could not do what all were to do together (plan a batch, save): no rank has done it, and all can go on."""


class HbmCapacityError(EmbCacheError):
    """The batch needs more slots than the device buffer can give.

    Attributes
    ----------
    table : str
        Name of the table that ran out.
    need : int
        Slots that the batch needs in that table.
    have : int
        Slots that could be given: free ones plus residents that no unfinished batch pins.
    never_fits : bool
        True when the batch alone exceeds the table's capacity, so that waiting for other batches cannot help.
    """

    def __init__(self, message: str, *, table: str, need: int, have: int, never_fits: bool) -> None:
        super().__init__(message)
        self.table = table
        self.need = need
        self.have = have
        self.never_fits = never_fits

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_capacity_error, (str(self), self.table, self.need, self.have, self.never_fits))


def _rebuild_capacity_error(message: str, table: str, need: int, have: int, never_fits: bool) -> HbmCapacityError:
    return HbmCapacityError(message, table=table, need=need, have=have, never_fits=never_fits)


class ChangedError(EmbCacheError, RuntimeError):
    """A table changed while an iterator over it was in use."""


class HostMemoryError(EmbCacheError, MemoryError):
    """Host memory could not be had; the table is as it was before the call."""


class StorageError(EmbCacheError, OSError):
    """The file system refused to read or write; ``errno`` and ``filename`` say what and where."""


class DiskFullError(StorageError):
    """The file system has no room; the previous generation or file is intact."""


class CorruptionError(EmbCacheError):
    """Stored bytes do not match their digest, or are not what was written.

    Attributes
    ----------
    generation : int or None
        Of the checkpoint that is damaged; None where it is none, or not known.
    table : str or None
        The table whose bytes these are.
    chunk : int or None
        Number of the chunk of that table.
    expected, found : str or None
        Digests in hexadecimal digits.
    """

    def __init__(
        self,
        message: str,
        *,
        generation: int | None = None,
        table: str | None = None,
        chunk: int | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.generation = generation
        self.table = table
        self.chunk = chunk
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_corruption_error,
            (str(self), self.generation, self.table, self.chunk, self.expected, self.found),
        )


def _rebuild_corruption_error(
    message: str,
    generation: int | None,
    table: str | None,
    chunk: int | None,
    expected: str | None,
    found: str | None,
) -> CorruptionError:
    return CorruptionError(message, generation=generation, table=table, chunk=chunk, expected=expected, found=found)


class FormatVersionError(EmbCacheError):
    """Stored data has a format that this version does not read."""


class LockedError(EmbCacheError):
    """Another process, or another object of this one, holds the directory.

    Attributes
    ----------
    pid : int or None
        The process that holds it, where that is known.
    """

    def __init__(self, message: str, *, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_locked_error, (str(self), self.pid))


def _rebuild_locked_error(message: str, pid: int | None) -> LockedError:
    return LockedError(message, pid=pid)


class UncleanDirectoryError(EmbCacheError):
    """A file-backed table's directory was changed after its last flush and never closed: its content is unknown.

    Attributes
    ----------
    directory : str
    checkpoint : str or None
        The last checkpoint that is known to hold the table's rows: restore it into a new directory.
    """

    def __init__(self, message: str, *, directory: str, checkpoint: str | None = None) -> None:
        super().__init__(message)
        self.directory = directory
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_unclean_error, (str(self), self.directory, self.checkpoint))


def _rebuild_unclean_error(message: str, directory: str, checkpoint: str | None) -> UncleanDirectoryError:
    return UncleanDirectoryError(message, directory=directory, checkpoint=checkpoint)
