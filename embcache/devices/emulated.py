"""An emulated device: CPU tensors whose copies and steps take a stated time. For tests and benches of overlap, nothing else.

Figures that come from it are figures of an emulation, and are to be called that wherever they appear.

What it emulates. Rows lie in memory of the "device", which no host code may write: they get there through staging blocks, and a
copy of n bytes takes n over the stated bandwidth, in which the thread that copies sleeps. One training step takes
``compute_ms``: from the first look-up after an update to the end of the next update. The arithmetic is really done, by the
compiled kernels, since results must be right; what that and the dense model take counts towards the stated time, and the thread
sleeps for the rest. (Index arrays are not copied: the kernels read them where they are.) So compute and copies occupy threads, and no processor.
On the side stream nobody sleeps: a copy ends when its time has come, and who waits for its event sleeps until then. What a copy brings
to the host is not there before that: who does not wait reads what was there.

Two copies in one direction share the bandwidth: a copy begins when the one before it has ended. Copies of both directions and
compute go on at the same time, as on a device with a copy engine for each direction.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core.kernels import UpdateRule
from ..errors import ConfigError, shown
from ..hostmemory import DONE, Event, StagingBlock, StagingPool
from ..lookup import GroupLookup
from .backend import host_view
from .cpu import CpuBackend

__all__ = ["Emulated"]


class _Engine:
    """One copy engine: takes copies one after the other."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.bytes = 0
        self.seconds = 0.0

    def begin(self, nbytes: int) -> float:
        """When a copy of `nbytes` that is asked for now will have ended."""
        takes = nbytes / self._bytes_per_s
        with self._lock:
            end = max(self._free_at, self._clock()) + takes
            self._free_at = end
            self.bytes += nbytes
            self.seconds += takes
        return end

    def copy(self, nbytes: int) -> None:
        """Sleep until a copy of `nbytes` that is asked for now has ended."""
        rest = self.begin(nbytes) - self._clock()
        if rest > 0:
            self._sleep(rest)


class _Arrival:
    """The event of a copy: from its time on what it brings is there."""

    def __init__(
        self,
        end: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        pieces: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.end, self._clock, self._sleep = end, clock, sleep
        self._pieces, self._lock = pieces, threading.Lock()

    def query(self) -> bool:
        if self._clock() < self.end:
            return False
        with self._lock:
            for piece, values in self._pieces:
                piece.copy_(values)
            self._pieces = ()
        return True

    def synchronize(self) -> None:
        while not self.query():
            self._sleep(max(self.end - self._clock(), 1e-9))


class Emulated(CpuBackend):
    """A device for tests and benches: give it as ``device=`` to a collection or a manager.

    Parameters
    ----------
    h2d_gbps, d2h_gbps : float
        Bandwidth of copies to the device and from it, in 10^9 bytes a second; ``inf`` takes no time.
    compute_ms : float
        What a training step takes; 0: as long as it takes.
    num_threads : int, optional
        Of the kernels.
    dry : bool
        For benches: look-ups and updates compute nothing, so a step takes its time and no processor at all. Rows still move.
    clock, sleep : callable
        Seconds; for tests.

    Attributes
    ----------
    steps : int
        Training steps so far.
    busy_s : float
        Seconds in which a step was computed.
    h2d, d2h
        The copy engines: ``bytes`` and ``seconds`` of each.

    Raises
    ------
    ConfigError

    Examples
    --------
    >>> import embcache as ec
    >>> from embcache.devices import Emulated
    >>> ebc = ec.EmbeddingBagCollection([ec.TableConfig("item", 8, hbm_rows=100)], device=Emulated(25, 25, compute_ms=2))
    """

    direct = False

    def __init__(
        self,
        h2d_gbps: float,
        d2h_gbps: float,
        compute_ms: float,
        num_threads: int | None = None,
        *,
        dry: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(num_threads)
        for name, value in (("h2d_gbps", h2d_gbps), ("d2h_gbps", d2h_gbps), ("compute_ms", compute_ms)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
            if (
                not number
                or value < 0
                or (value == 0 and name != "compute_ms")
                or (name == "compute_ms" and math.isinf(value))
            ):
                least = "a finite number >= 0" if name == "compute_ms" else "a number > 0"
                raise ConfigError(f"{name} = {shown(value)}; give {least}")
        self.compute_s, self._dry = compute_ms / 1e3, dry
        self._clock, self._sleep = clock, sleep
        self.h2d, self.d2h = _Engine(h2d_gbps * 1e9, clock, sleep), _Engine(d2h_gbps * 1e9, clock, sleep)
        self._staging = StagingPool(pin=False)
        self._began: float | None = None
        self._side = threading.local()  # `until`: when what the thread has asked of the side stream will be done
        self.steps = 0
        self.busy_s = 0.0

    # copies

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        raise ConfigError("rows of an emulated device have no NumPy view; use to_host, or staging and upload")

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        with self.fetched(tensor) as values:
            return values.copy()

    @contextlib.contextmanager
    def fetched(self, tensor: Tensor) -> Iterator[NDArray[Any]]:
        values = host_view(tensor)
        memory = self._staging.take(values.nbytes)
        try:
            staged = memory.numpy()[: values.nbytes].view(values.dtype).reshape(values.shape)
            staged[...] = values
            self.d2h.copy(values.nbytes)
            yield staged
        finally:
            self._staging.give(memory, DONE)

    @contextlib.contextmanager
    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> Iterator[StagingBlock]:
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        memory = self._staging.take(nbytes)
        array = memory.numpy()[:nbytes].view(kind).reshape(tuple(shape))
        block = StagingBlock(array, torch.from_numpy(array))
        try:
            yield block
        finally:
            self._staging.give(memory, block.pending)

    def upload(self, block: StagingBlock) -> Tensor:
        if self._until is None:
            self.h2d.copy(block.array.nbytes)
        else:
            self._side.until = max(self._until, self.h2d.begin(block.array.nbytes))
            block.pending = self.event()
        return block.tensor

    def download(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Event:
        values = [self.gather_rows(array, slots) for array, slots, _ in parts]
        end = self.d2h.begin(sum(rows.nbytes for rows in values))
        pieces = [(piece, rows) for (_, _, piece), rows in zip(parts, values, strict=True)]
        return _Arrival(end, self._clock, self._sleep, pieces)

    # streams

    @property
    def _until(self) -> float | None:
        until: float | None = getattr(self._side, "until", None)
        return until

    def side_stream(self) -> Any:
        return self._side

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self._until
        self._side.until = None if stream is None else self._clock()
        try:
            yield
        finally:
            self._side.until = before

    def event(self) -> Event:
        return DONE if self._until is None else _Arrival(self._until, self._clock, self._sleep)

    def wait(self, event: Event) -> None:
        if self._until is None:
            event.synchronize()
        elif isinstance(event, _Arrival):
            self._side.until = max(self._until, event.end)

    # steps

    def begin_step(self) -> None:
        """A step begins now, unless one has: at the first look-up after an update."""
        if self._began is None:
            self._began = self._clock()

    def end_step(self) -> None:
        """The update is done: sleep until the step has taken its time."""
        if self._began is None:
            return
        began, self._began = self._began, None
        rest = began + self.compute_s - self._clock()
        if rest > 0:
            self._sleep(rest)
        self.steps += 1
        self.busy_s += self._clock() - began

    def pooled_forward(
        self, weights: Tensor, lookup: GroupLookup, out: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if lookup.occurrence_order is not None:  # evaluation has no use for gradients
            self.begin_step()
            if self._dry:
                return out
        return super().pooled_forward(weights, lookup, out, per_sample_weights)

    def sequence_forward(self, weights: Tensor, lookup: GroupLookup, out: Tensor | None = None) -> Tensor:
        self.begin_step()
        if self._dry:
            return weights.new_empty((lookup.position_count, weights.shape[1])) if out is None else out
        return super().sequence_forward(weights, lookup, out)

    def segment_update_pooled(self, rule: UpdateRule, weights: Tensor, *arguments: Any) -> None:
        if not self._dry:
            super().segment_update_pooled(rule, weights, *arguments)

    def segment_update_sequence(self, rule: UpdateRule, weights: Tensor, *arguments: Any) -> None:
        if not self._dry:
            super().segment_update_sequence(rule, weights, *arguments)
