"""Host memory that devices use: buffers in huge pages, pinned staging blocks, and how much is free."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ._core.arena import cgroup_room, memory_promised

__all__ = ["DONE", "Event", "StagingBlock", "StagingPool", "host_free_bytes", "map_rows", "unpromised_bytes"]

HUGE_PAGE_BYTES = 2 << 20
# From linux/mman.h; Python's mmap module has no name for it.
MADV_WIPEONFORK = 18


def map_rows(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A zeroed (rows, dim) of `dtype` in its own mapping: huge pages, given by the kernel at first touch.

    A forked child sees zeros instead: it neither copies nor pins the parent's rows. The tensor's storage holds the
    mapping, which is unmapped with the last tensor on it.

    Raises
    ------
    OSError, OverflowError, ValueError
        Where the mapping is refused.
    """
    memory = mmap.mmap(-1, rows * dim * dtype.itemsize + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Both are advice: a kernel without huge pages, or before 4.14, says no, and the buffer works as well.
    for advice in (mmap.MADV_HUGEPAGE, MADV_WIPEONFORK):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=rows * dim, offset=start).view(rows, dim)


def host_free_bytes(root: Path = Path("/")) -> int:
    """Least of the machine's available memory and what each cgroup above this process still allows.

    Sources: ``proc(5)`` MemAvailable; for the cgroups see `embcache._core.arena.cgroup_room`. Memory that is mapped and not
    written yet is not subtracted: see `unpromised_bytes`.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
                break
    return min(free, cgroup_room(str(root / "sys/fs/cgroup"), str(root / "proc/self/cgroup")))


def unpromised_bytes() -> int:
    """`host_free_bytes` less what the tables of this process have mapped and not written yet."""
    return max(0, host_free_bytes() - memory_promised())


class Event(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""

    def synchronize(self) -> None:
        """Block until everything before it is done."""


class _DoneEvent:
    """The event of a device that computes at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


DONE = _DoneEvent()


@dataclass
class StagingBlock:
    """Host memory from which a device copies.

    Attributes
    ----------
    array : ndarray
        To be filled; uninitialised. Valid inside the ``with`` block of `Backend.staging`.
    tensor : Tensor
        The same memory.
    """

    array: NDArray[Any]
    tensor: Tensor
    pending: Event = field(default=DONE)


class StagingPool:
    """Reused pinned blocks in powers of two; a block is handed out again once its copies are done.

    At most `BLOCKS_A_SIZE` blocks of a size exist; when all have copies under way, the oldest is waited for. Blocks in
    use by callers are not counted.
    """

    BLOCKS_A_SIZE = 4
    LEAST_BYTES = 64 << 10

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._idle: dict[int, list[tuple[Tensor, Event]]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """A block of at least `nbytes` whose former copies are done."""
        size = max(self.LEAST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            idle = self._idle.setdefault(size, [])
            for place, (memory, event) in enumerate(idle):
                if event.query():
                    del idle[place]
                    return memory
            oldest = idle.pop(0) if len(idle) >= self.BLOCKS_A_SIZE else None
        if oldest is not None:
            oldest[1].synchronize()
            return oldest[0]
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def give(self, memory: Tensor, event: Event) -> None:
        """Take a block back; `event` marks the end of its copies."""
        with self._lock:
            idle = self._idle.setdefault(memory.numel(), [])
            if len(idle) < self.BLOCKS_A_SIZE:
                idle.append((memory, event))
                return
        event.synchronize()
