"""The stages of a pipeline, and what passes between them.

Three threads take part, and each owns its part of a `Flow`: the loader pulls batches and prepares them, the coordinator plans
them in order and moves their rows, the caller of ``progress`` computes. What passes from one to the next is a `Batch`, which
has one owner at a time, in a queue with one writer and one reader. Each counter has one writer. Nobody holds a lock while
waiting: a `Bell` says that something may have changed, and who wakes up looks again.

Order is what makes it right. Plans are made and rows are moved in the order of the batches by one thread, so a row that is
read for a batch has the write-backs of all earlier ones (promise I5); victims are never slots of unfinished batches (I2).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from ._core.notice import Notice
from ._core.threads import this_process
from .batches import Chooser, features_of, to_device, wanted
from .errors import (
    ClosedError,
    ConfigError,
    EmbCacheError,
    HbmCapacityError,
    PlanError,
    RankError,
    RankRefusedError,
)
from .feed import Feed, changed
from .modules import CachedCollection
from .ranges import profiler_range
from .swapinfo import SwapInfo
from .timeline import Timeline
from .unchanged import Unchanged

__all__ = ["Batch", "Bell", "Flow", "Source", "not_the_end"]

LOG = logging.getLogger("embcache")
START_S = 2e-5  # between two looks at whether a thread runs

# What ranks tell each other of their next batch: it goes on; there is none; it has failed; and the iterator with it; the pipeline is closing.
GOES_ON, ENDED, FAILED, BROKEN, CLOSING = range(5)


Part = tuple[str, Any, Any, Notice | None]  # path, features object, prepared, notice


class Bell:
    """Wakes the one thread that waits for it; rung while nobody waits, it wakes the next wait at once.

    A lock that its owner takes to wait and anybody opens: an exception in a thread that waits (Ctrl-C) leaves nothing half
    done, which a condition variable does not promise.
    """

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def ring(self) -> None:
        """Wake who waits."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._closed.release()

    def wait(self) -> None:
        """Until it rings."""
        self._closed.acquire()


class Source:
    """One request to pull batches from an iterator: until it ends or raises, or another one is asked for."""

    __slots__ = ("iterator",)

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator: Any = iterator


class Batch:
    """One batch on its way, or the end of a source.

    Attributes
    ----------
    number : int
        From 1, in the order in which batches are pulled; the end of a source has that of the batch before it.
    source : Source
    last : bool
        Nothing more comes from its source: it has ended (and then this is no batch), or it has raised.
    data
        What the caller's model gets.
    parts : list of (path, features object, prepared, Notice or None)
        What is to be planned, in order, as the collection's `prepare` gave it; later, what was not planned since it is frozen.
    unchanged : dict of int to Unchanged
        By ``id`` of a features object of `parts`: whether it still holds what was prepared.
    goes_on : bool
        Whether its batch is to be planned, on all ranks where there are others.
    notices : list of (path, Notice or None)
        What the planners were told of these parts, where their policies look ahead.
    plans : list of (path, features object, SwapInfo)
        What has been planned, its rows moved.
    error : BaseException, optional
        What the caller gets instead.
    failed : list, optional
        Where planning has failed: the `parts` that are not planned.
    started : bool
        Set by the caller, who has taken it.
    """

    __slots__ = (
        "data",
        "error",
        "failed",
        "goes_on",
        "last",
        "notices",
        "number",
        "parts",
        "plans",
        "source",
        "started",
        "unchanged",
    )

    def __init__(self, number: int, source: Source) -> None:
        self.number, self.source = number, source
        self.last = self.started = self.goes_on = False
        self.data: Any = None
        self.parts: list[Part] = []
        self.unchanged: dict[int, Unchanged] = {}
        self.notices: list[tuple[str, Notice | None]] = []
        self.plans: list[tuple[str, Any, SwapInfo]] = []
        self.error: BaseException | None = None
        self.failed: list[Part] | None = None

    @property
    def is_end(self) -> bool:
        """Whether this says that its source has ended."""
        return self.last and self.error is None


class Flow:
    """What the three threads of a pipeline share, and the two that it starts.

    Parameters
    ----------
    collections : mapping of str to CachedCollection
        By path in the model.
    depth : int
        Batches that are planned and not done, the one that is computed among them.
    lookahead : int
        Batches that are pulled beyond those.
    choose : callable, optional
        ``TrainPipeline(features=...)``.
    device : torch.device
        Where batches are computed.

    Attributes
    ----------
    timeline : Timeline
    source : Source, optional
        Set by the caller: what to pull from.
    frozen : frozenset of str
        Collections in ``eval()`` while the model trains, for which nothing is planned.
    freeze : frozenset of str, optional
        Set by the caller, who takes no batch until the coordinator has made it `frozen`, also for batches that are ready, and this None.
    filling : bool
        Set by the caller, who waits for the loader until it is ahead.
    done : int
        Set by the caller: number of the last batch that is computed or given up.
    pulled : int
        Number of the last batch that was pulled.
    shortened : int
        Batches that had to wait for earlier ones since HBM was full.
    loaded, ready : deque of Batch
    feeds : dict of str to Feed
        Of the collections, by path.
    crash : BaseException, optional
        What ended a thread that should have gone on.
    """

    def __init__(
        self,
        collections: Mapping[str, CachedCollection],
        depth: int,
        lookahead: int,
        choose: Chooser | None,
        device: torch.device,
    ) -> None:
        self.collections, self.depth, self.lookahead = dict(collections), depth, lookahead
        self.choose, self.device = choose, device
        self.needs = {path: _needs_of(collection) for path, collection in collections.items()}
        self.timeline = Timeline(ranges=profiler_range)
        self.process = this_process()
        self.source: Source | None = None
        self.frozen: frozenset[str] = frozenset()
        self.freeze: frozenset[str] | None = None
        self.filling = False
        self.done = self.pulled = self.shortened = 0
        self.loaded: deque[Batch] = deque()
        self.ready: deque[Batch] = deque()
        self.crash: BaseException | None = None
        self.closing = False
        self.load_bell, self.plan_bell, self.ready_bell = Bell(), Bell(), Bell()
        self.others = _others_of(collections)
        self._parted = {"load": False, "plan": False}  # no more turns with the others
        self._parts_alike = True  # whether all ranks' last loaded batches go to the same collections
        self._frozen_somewhere: set[str] = set()  # at the planner's last turn
        self._ended: Source | None = None
        self._threads: list[threading.Thread] = []
        self._once = threading.Lock(), threading.Lock()
        self._running = False
        self.feeds = {path: Feed() for path in self.collections}

    # ------------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Start the threads, once. Daemons, so that none keeps the interpreter from ending: `stop` is called before it does."""
        if self._running:
            return
        for stage, (name, run) in enumerate((("embcache load", self._load), ("embcache plan", self._coordinate))):
            while not self._once[stage].locked():
                thread = self._threads[stage] if len(self._threads) > stage else None
                # Python gives up a thread whose start() an exception interrupts: that one may die before it runs.
                if thread is None or (thread.ident is not None and not thread.is_alive()):
                    thread = threading.Thread(
                        target=self._guarded, args=(run, self._once[stage]), name=name, daemon=True
                    )
                    self._threads[stage : stage + 1] = [thread]
                if thread.ident is None:
                    thread.start()
                else:
                    time.sleep(START_S)
        self._running = True

    def ring(self) -> None:
        """Wake all three."""
        self.load_bell.ring()
        self.plan_bell.ring()
        self.ready_bell.ring()

    def close(self) -> None:
        """Have the threads end; waits for nobody, takes no lock."""
        self.closing = True
        self.ring()

    def stop(self, patience_s: float | None = None) -> None:
        """`close`, and wait for the threads to end: the coordinator gives up what was planned and not started.

        The loader may be inside the user's iterator, which nobody can interrupt: it is waited for `patience_s` at most, and ends
        once that returns.
        """
        self.close()
        for thread in self._threads[::-1]:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(patience_s if thread is self._threads[0] else None)
                if thread.is_alive():
                    LOG.warning(
                        "the iterator of a pipeline has not returned for %s s; its thread ends when it does", patience_s
                    )

    def runs(self, thread: int) -> bool:
        """Whether the thread of this number is one of these."""
        return any(own.ident == thread for own in self._threads)

    @property
    def alive(self) -> bool:
        """Whether a thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def _guarded(self, run: Callable[[], None], once: threading.Lock) -> None:
        if not once.acquire(blocking=False):  # a start that was interrupted (Ctrl-C) was repeated
            return
        try:
            run()
        except BaseException as error:
            LOG.exception("a thread of a pipeline has ended")
            self.crash = error
            self.close()

    # --------------------------------------------------------------------------------------------------------- loading

    def _load(self) -> None:
        """The loader: pull, prepare, hand over, as far ahead as it may."""
        while not self.closing:
            source = self.source
            if source is None or self.is_ahead(source):
                if self.filling:
                    self.ready_bell.ring()
                start = self.timeline.start("wait_room", self.pulled + 1)
                self.load_bell.wait()
                self.timeline.stop("wait_room", self.pulled + 1, start)
                continue
            batch = self._pull(source)
            self._agree(batch)
            self._hand_over(batch)
            del source, batch
            if self.filling:
                self.ready_bell.ring()
        self._part("load")
        for batch in list(self.loaded):
            self._withdraw(batch)

    def is_ahead(self, source: Source) -> bool:
        """Whether all has been pulled from a source that may be for now."""
        return source is self._ended or self.pulled - self.done >= self.depth + self.lookahead

    # ------------------------------------------------------------------------------------------------ with other ranks

    def _turn(self, thread: str, state: int, parts: int = 0) -> list[int]:
        """Tell the other ranks how it stands, and hear how with them. Who closes its pipeline says so once, and nobody takes turns then."""
        assert self.others is not None
        if thread == "load":
            said = self.others.turn(thread, state, parts)
            self._parts_alike = len({one[1] for one in said if one[0] == GOES_ON}) <= 1
        else:
            said = self.others.turn(thread, state, *(path in self.frozen for path in self.collections))
            self._frozen_somewhere = {path for k, path in enumerate(self.collections, 1) if any(one[k] for one in said)}
        states: list[int] = [one[0] for one in said]
        if CLOSING in states:
            self._parted[thread] = True
            if not self.closing:
                self.crash = ClosedError(
                    f"rank {states.index(CLOSING)} has closed its pipeline; all ranks train as many batches, and close theirs"
                )
                self.close()
        return states

    def _part(self, thread: str) -> None:
        """Say that this rank's pipeline is closing, unless one has said so: others may wait for this thread."""
        if self.others is not None and not self._parted[thread]:
            with contextlib.suppress(RankError):
                self._turn(thread, CLOSING)

    def _agree(self, batch: Batch) -> None:
        """Go on with a batch that has been pulled if all ranks have one; stop together where one has none."""
        if self.others is None:
            batch.goes_on = not batch.last and batch.error is None
            return
        state = ENDED if batch.is_end else BROKEN if batch.last else GOES_ON if batch.error is None else FAILED
        states = self._turn("load", state, zlib.crc32("\n".join(path for path, *_ in batch.parts).encode()))
        if max(states) == GOES_ON and self._parts_alike:
            batch.goes_on = True
            return
        self._withdraw(batch)
        batch.parts, batch.notices, batch.data = [], [], None
        if batch.error is not None:
            batch.last = batch.last or ENDED in states or CLOSING in states
        elif ENDED in states or CLOSING in states:
            batch.number, batch.last = self.pulled, True
        elif max(states) == GOES_ON:
            batch.error = RankRefusedError(
                f"this batch goes to the collections {[path for path, *_ in batch.parts]!r} on rank {self.others.rank}, and to others on another "
                "rank; all ranks' batches have the same features, also empty ones"
            )
        else:
            rank = next(r for r, one in enumerate(states) if one in (FAILED, BROKEN))
            batch.error = RankRefusedError(
                f"rank {rank}: its batch has failed, see its log; this rank passes over its own, too"
            )
            batch.last = BROKEN in states

    def _withdraw(self, batch: Batch, paths: Container[str] | None = None) -> None:
        """What of a batch (for some collections) is not planned, or was undone: nobody shall expect its keys. Again is no harm."""
        for path, notice in batch.notices:
            if notice is not None and (paths is None or path in paths):
                with contextlib.suppress(EmbCacheError):  # planned and not undone; or the manager was closed
                    self.collections[path].manager.withdraw(notice)

    def _hand_over(self, batch: Batch) -> None:
        if batch.last:
            self._ended = batch.source
        self.pulled = batch.number
        self.loaded.append(batch)
        self.plan_bell.ring()

    def _pull(self, source: Source) -> Batch:
        batch = Batch(self.pulled + 1, source)
        start = self.timeline.start("load", batch.number)
        try:
            batch.data = next(source.iterator)
        except StopIteration:
            batch.number, batch.last = self.pulled, True
            return batch
        except BaseException as error:
            batch.error, batch.last = error, True
            return batch
        self.timeline.stop("load", batch.number, start)
        start = self.timeline.start("prepare", batch.number)
        try:
            self._prepare(batch)
        except BaseException as error:
            batch.error, batch.parts = not_the_end(error, "features(batch)"), []
            self._withdraw(batch)
        self.timeline.stop("prepare", batch.number, start)
        return batch

    def _prepare(self, batch: Batch) -> None:
        """Find the features, lay them out for planning, and move the rest to the device."""
        data = batch.data
        pairs = wanted(data, self.needs, self.choose)
        seen = {id(value): value for _, value in pairs}
        flats: dict[tuple[str, int], Any] = {}
        unchanged: dict[int, Unchanged] = {}
        for path, value in pairs:
            if (path, id(value)) not in flats:
                unchanged[id(value)] = Unchanged(value)
                flats[path, id(value)] = self.collections[path].prepare(value)
        batch.data = to_device(data, self.device)
        if batch.data is not data:
            before, after = features_of(data), features_of(batch.data)
            if len(before) != len(after):
                raise ConfigError(
                    f"the batch has {len(before)} features objects, on the device {len(after)}; its to() must keep them all"
                )
            seen.update((id(old), new) for old, new in zip(before, after, strict=True))
        for path, value in pairs:
            flat, manager = flats[path, id(value)], self.collections[path].manager
            ahead = self.lookahead > 0 and manager.policy == "lookahead" and self.others is None
            batch.notices.append((path, manager.look_ahead(flat) if ahead else None))
            batch.parts.append((path, seen[id(value)], flat, batch.notices[-1][1]))
            batch.unchanged[id(seen[id(value)])] = unchanged[id(value)]

    # -------------------------------------------------------------------------------------------------------- planning

    def _coordinate(self) -> None:
        """The coordinator: plan in order, move rows, hand over; in the end give up what nobody has started."""
        try:
            while not self.closing:
                self._coordinate_next()
        finally:
            self.give_up()
            self._part("plan")

    def _coordinate_next(self) -> None:
        """Plan the next batch, or wait for it, or for its turn."""
        if self.freeze is not None:
            self._freeze(self.freeze)
        if not self.loaded:
            for collection in self.collections.values():
                collection.settle()  # planning the next batch would, but there is none; and whoever trains does not
            start = self.timeline.start("wait_loaded", self.pulled)
            self.plan_bell.wait()
            self.timeline.stop("wait_loaded", self.pulled, start)
            return
        batch = self.loaded[0]
        if batch.parts and batch.number - self.done > self.depth:
            start = self.timeline.start("wait_window", batch.number)
            self.plan_bell.wait()
            self.timeline.stop("wait_window", batch.number, start)
            return
        if (
            batch.goes_on
            and self.others is not None
            and CLOSING in self._turn("plan", CLOSING if self.closing else GOES_ON)
        ):
            return
        if batch.parts and not self._plan(batch):
            return
        self.ready.append(batch)
        self.loaded.popleft()
        self.ready_bell.ring()

    def _plan(self, batch: Batch) -> bool:
        """Plan a batch and move its rows; False where the pipeline is closing."""
        # Over ranks as all have it at this batch: their callers may be at different steps when they freeze a collection.
        frozen = self.frozen if self.others is None else self._frozen_somewhere
        left = deque(batch.parts)
        skipped: list[Part] = []
        try:
            while left:
                path, value, flat, notice = left[0]
                if path in frozen:
                    if notice is not None:
                        self.collections[path].manager.withdraw(notice)
                    skipped.append((path, value, flat, None))
                else:
                    # Not of one rank alone, since all plan together; forward looks, too.
                    if self.others is None and not batch.unchanged[id(value)]:
                        raise changed(value)
                    info = self._plan_part(batch, self.collections[path], flat, notice)
                    batch.plans.append((path, value, info))
                left.popleft()
        except RankError as error:
            if not isinstance(error, RankRefusedError):
                raise
            self._fail(batch, error, skipped, left)
            return True
        except BaseException as error:
            if self._called_off and self.others is None and isinstance(error, HbmCapacityError):
                batch.parts = [*skipped, *left]
                return False  # it waited for room, and is given up with what was planned of it, or planned in another order
            self._fail(batch, error, skipped, left)
            return True
        batch.parts = skipped
        return True

    def _fail(self, batch: Batch, error: BaseException, skipped: Sequence[Part], left: Sequence[Part]) -> None:
        """As it would be without a pipeline: what was planned of a batch before the error counts when its turn comes, and trains nothing.

        What comes after the error may be planned already, where its collection was frozen before: that is undone, and what is built upon it.
        """
        order = [path for path, _ in batch.notices]
        later = set(order[order.index(left[0][0]) :]) - {left[0][0]}
        batch.parts = [*skipped, *left]
        if any(path in later for path, *_ in batch.plans):
            for waiting in [*self.loaded][::-1]:
                self._unplan(waiting, later)
        batch.error, batch.parts, batch.failed = error, [], batch.parts
        self._withdraw(batch)

    @property
    def _called_off(self) -> bool:
        """Whether a batch that waits for room is to wait no longer."""
        return self.closing or self.freeze is not None

    def _planned(self) -> list[Batch]:
        """The batches that may have plans, the oldest first: those that wait again, since a collection was frozen, have some, too."""
        return [*self.ready, *self.loaded]

    def _freeze(self, frozen: frozenset[str]) -> None:
        """From the batch on that the caller takes next nothing is planned for these collections, and for all others everything.

        A batch whose planning has failed may not fail now, or at another collection: it is planned anew, and all after it.
        """
        planned = self._planned()
        kept = next((k for k, batch in enumerate(planned) if batch.failed is not None), len(planned))
        for k, batch in list(enumerate(planned))[::-1]:
            if batch.failed is not None:
                batch.error, batch.parts, batch.failed = None, batch.failed, None
            self._unplan(batch, frozen if k < kept else self.collections)
        while self.ready:  # what is not planned of the first ones comes before the next ones
            self.loaded.appendleft(self.ready.pop())
        self.frozen, self.freeze = frozen, None
        self.ready_bell.ring()

    def _unplan(self, batch: Batch, paths: Container[str]) -> None:
        """Undo the plans of a batch for these collections, which are the newest of them: they are to be made again, all in the order given."""
        undone = [plan for plan in batch.plans if plan[0] in paths]
        if not undone:
            return
        batch.plans = [plan for plan in batch.plans if plan[0] not in paths]
        for path, _, info in undone[::-1]:
            self._undo(path, info)
        order = [path for path, _ in batch.notices]
        batch.parts = [*((path, value, info.flat, None) for path, value, info in undone), *batch.parts]
        batch.parts.sort(key=lambda part: order.index(part[0]))
        self._withdraw(batch, {path for path, *_ in undone})

    def _plan_part(self, batch: Batch, collection: CachedCollection, prepared: Any, notice: Notice | None) -> SwapInfo:
        """Plan for one collection. While earlier batches are under way, a full buffer only means to wait for one of them."""
        seen, waited = self.done, False

        def again(error: HbmCapacityError) -> bool:
            nonlocal seen, waited
            if error.never_fits or seen >= batch.number - 1 or self._called_off:
                return False
            self.shortened += not waited
            waited = True
            start = self.timeline.start("wait_window", batch.number)
            while not self._called_off and self.done == seen:
                self.plan_bell.wait()
            self.timeline.stop("wait_window", batch.number, start)
            seen = self.done
            return not self._called_off

        return collection.plan_ahead(prepared, self.timeline, batch.number, notice, again)

    def give_up(self) -> None:
        """Undo the plans that nobody has started, the newest first, and withdraw what was expected. Again is no harm."""
        for batch in self._planned()[::-1]:
            plans = [] if batch.started else batch.plans
            for path, _, info in plans[::-1]:
                self._undo(path, info)
        for batch in [*self.ready, *self.loaded]:
            self._withdraw(batch)

    def _undo(self, path: str, info: SwapInfo) -> None:
        """Undo a plan that nobody has started, the newest of its collection. Where that cannot be, its batch counts as seen."""
        manager = self.collections[path].manager
        try:
            try:
                manager.take_back(info)
            except (
                PlanError,
                MemoryError,
            ) as error:  # something has changed that it would undo; or no memory for the way back
                if isinstance(error, MemoryError):
                    LOG.warning("a plan of collection %r was not undone, its keys count: %s", path, error)
                manager.abandon(info)
        except ClosedError:  # before its pipeline, which has undone what has not trained
            pass
        except EmbCacheError as error:  # a disk that has failed
            LOG.warning("a plan of collection %r was not undone: %s", path, error)


def not_the_end(error: BaseException, where: str) -> BaseException:
    """`error`, or what to raise in its place where it would tell the caller that there are no more batches."""
    if not isinstance(error, StopIteration):
        return error
    other = RuntimeError(f"{where} raised StopIteration, which must not look like the end of the batches")
    other.__cause__ = error
    return other


def _needs_of(collection: CachedCollection) -> list[str]:
    """The features that a collection looks up."""
    return list(dict.fromkeys(collection.manager.layout.column_features))


def _others_of(collections: Mapping[str, CachedCollection]) -> Any:
    """The ranks that the collections are shared with, or None.

    Raises
    ------
    ConfigError
        They are not the same for all that are shared.
    """
    found = [collection.ranks for collection in collections.values()]
    groups = [ranks for ranks in found if ranks is not None and ranks.world > 1]
    if any(one is not groups[0] for one in groups):
        raise ConfigError(
            "the model's collections are shared by different process groups; give each group a pipeline of its own"
        )
    return groups[0] if groups else None
