"""Saving managers: the cut at the last finished training batch, written as one generation of a checkpoint.

A save holds the doors of all its managers while it makes its cut, so what it writes is one state: rows that are in a slot with
their values there, everything else from the host tables, and nothing of batches that have been planned and have not trained
(promise I10). `embcache.savejob` says how it is written while training goes on. The generation is acknowledged once it is
durable; should that fail, nothing of the managers has changed, and what a delta is to hold neither.

What of it has which name: ``tables`` of a collection are ``<module path>/<table>``, of a manager alone ``<table>``; bytes are
``state.*`` (the caller's), ``optimizers.*``, ``model.*`` (the dense part), ``shards/*`` and ``parts/*`` (of it, what is spread over
ranks), ``filter/<table>/*`` (sketches). ``embcache.values`` says
how values are written, docs/format.md everything else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from ._core.cut import trained_step
from ._core.doors import Doors, Steps
from .checkpoint import Parent, TableDescription, number_to_keep, parent_at
from .checkpoint.names import next_generation
from .errors import ConfigError, CorruptionError, EmbCacheError, PlanError, StorageError, shown
from .savejob import LOOK_S, SaveJob
from .savepart import Part
from .table import initializer_spec
from .values import encode

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["SaveOptions", "Saving", "check_names", "describe", "path_of", "save_managers"]

LOG = logging.getLogger("embcache")


class SaveOptions(TypedDict, total=False):
    """What every ``save`` takes besides; `background`, which says what it returns, and `EmbCacheManager.save` what each means."""

    delta: bool
    state: Any
    keep: int | None


class Saving(Future[int]):
    """A save in the background, as ``save(..., background=True)`` returns it: a future whose result is the generation.

    ``result()`` waits, and raises what the save has failed with; a failure is logged besides. It cannot be cancelled.

    Attributes
    ----------
    generation : int
        Its number; there is no such generation before the save is done.
    progress : tuple of int
        Rows written, and rows in all.
    not_pruned : Exception or None
        Why older generations than `keep` said could not be removed, where that is so: it is logged besides, and no failure.
    """

    def __init__(self, job: SaveJob) -> None:
        super().__init__()
        self._job = job
        self._check_process = next(iter(job.managers.values())).door.check_process
        self.set_running_or_notify_cancel()

    @property
    def generation(self) -> int:
        """Number of the generation that is being written."""
        return self._job.generation

    @property
    def progress(self) -> tuple[int, int]:
        """Rows that have been written, and rows in all."""
        return self._job.rows_written, self._job.rows

    @property
    def not_pruned(self) -> Exception | None:
        """What went wrong when older generations were to go, after this one was saved; None where nothing did."""
        return self._job.not_pruned

    def result(self, timeout: float | None = None) -> int:
        """The generation, once it is durable. `ForkError` in a forked child, where nobody writes it."""
        self._check_process()
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save has failed with, once it is over; None where it is saved."""
        self._check_process()
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        """Until it is done, or so many seconds have passed. Ctrl-C ends the wait; a save whose thread has died has failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                return
            wait([self], left)
            if not self.done() and not self._job.thread.is_alive():
                self._job.look_after()
                with contextlib.suppress(InvalidStateError):  # another thread was faster
                    self.set_exception(self._job.failure or self._died())

    def _died(self) -> StorageError:
        return StorageError(
            errno.EIO,
            f"the thread that wrote generation {self.generation} has died when all was over: `embcache.generations` says whether it is saved",
            self._job.path,
        )

    def work(self) -> None:
        """Write it, unless whoever wanted it has been interrupted before this thread began."""
        if not self._job.unclaimed.acquire(blocking=False):
            return
        try:
            generation = self._job.run()
        except BaseException as error:
            try:
                self._job.end()
                LOG.error("generation %d at %s was not saved: %s", self.generation, self._job.path, error)
            finally:
                self.set_exception(error)
        else:
            self.set_result(generation)


class Dense(Protocol):
    """What a model has beside its collections."""

    def values(self, rank: int) -> dict[str, tuple[bytes, bytes]]:
        """What a rank writes of it, by name, as `embcache.values.encode` gives it; the first one also what all have.

        Raises `ConfigError` where something cannot be saved.
        """


def stored_name(module: str, table: str) -> str:
    """What a checkpoint calls a table of a collection at that path of a model; a manager alone has none."""
    return f"{module}/{table}" if module else table


def check_names(managers: Mapping[str, EmbCacheManager]) -> None:
    """`ConfigError` where tables of two collections would have one name in a checkpoint: module paths and tables may hold a ``/``."""
    owners: dict[str, str] = {}
    for module, manager in managers.items():
        for table in manager.layout.names:
            name = stored_name(module, table)
            if name in owners:
                raise ConfigError(
                    f"collections {owners[name]!r} and {module!r} have tables that a checkpoint both calls {name!r}; rename one"
                )
            owners[name] = module


def describe(manager: EmbCacheManager, t: int, module: str) -> TableDescription:
    """What a checkpoint says of table `t`."""
    config, host = manager.layout.tables[t], manager.host_tables[t]
    rule = config.admit_and_evict
    return TableDescription(
        stored_name(module, config.name),
        host.dim,
        host.state_dim,
        host.dtype,
        list(initializer_spec(config.initializer)),
        config.seed,
        host.with_filter,
        _plain({"kind": manager.spec.kind, **asdict(manager.spec)}),
        None if rule is None else _plain(asdict(rule)),
    )


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """As it will be read again: without tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(body))
    return plain


def path_of(path: str | os.PathLike[str]) -> str:
    """The directory of a checkpoint, by its one name; `ConfigError` for what is no path."""
    try:
        given = os.fsdecode(path)
    except TypeError:
        given = ""
    if not given or "\0" in given:
        raise ConfigError(f"path = {shown(path)}; give the path of a directory")
    return os.path.realpath(given)


def save_managers(
    path: str | os.PathLike[str],
    managers: Mapping[str, EmbCacheManager],
    *,
    delta: bool = False,
    background: bool = False,
    state: Any = None,
    dense: Dense | None = None,
    keep: int | None = None,
) -> int | Saving:
    """Write one generation of all `managers`, by module path, and what a model has beside them; see `EmbCacheManager.save`."""
    where = path_of(path)
    check_names(managers)
    most = number_to_keep(keep)
    doors = [manager.door for manager in managers.values()]
    between_steps = Steps(doors, between_saves=True)
    if between_steps.held:
        raise PlanError(
            "save() was called inside a training step, by a hook or a signal's handler, say, where a part of the model has trained and "
            "another has not; call it between two calls of progress(), after the training_step() of a loop of your own, or in another thread"
        )
    others = shared_with(managers)
    values: dict[str, tuple[bytes, bytes]] = {}
    together: _Together | None = None
    if others is not None:  # whose steps end alike: each saves between them
        unsavable: Exception | None = None
        try:
            values = _values(state, dense, others.rank)
        except Exception as error:
            unsavable = error
        together = _agree(where, managers, delta, others, unsavable)
    expected_last = _last(where, managers) if delta and together is None else None
    parent_there = None if expected_last is None else parent_at(where, expected_last[0], created=expected_last[1])
    parts: list[Part] = []
    job = SaveJob(where, managers, parts, most, background, others, 0 if together is None else together.generation)
    try:
        # The caller's values first, outside of the doors: what makes them may wait for other threads, or ranks.
        with between_steps:
            if others is None:
                values = _values(state, dense, 0)
            with Doors(doors):
                for manager in managers.values():
                    manager.complete_abandoned()
                optimizers = {module: manager.optimizer_state() for module, manager in managers.items()}
                if others is None or others.rank == 0:
                    values["optimizers"] = encode(optimizers, "the state of the optimizers")
                parts += [
                    Part(manager, module, t, describe(manager, t, module))
                    for module, manager in managers.items()
                    for t in range(len(manager.host_tables))
                ]
                delta_bytes = [part.note_changes() for part in parts]
                last = _last(where, managers) if delta and together is None else None
                if last != expected_last:  # another thread has saved meanwhile
                    parent_there = None if last is None else parent_at(where, last[0], created=last[1])
                parent, partial = _base(last, parent_there, parts, delta_bytes)
                if together is not None:
                    parent = together.parent
                    partial = {
                        part.description.name
                        for part in parts
                        if part.tracked and part.description.name in together.partial
                    }
                expected = sum(
                    few if part.description.name in partial else part.full_bytes
                    for part, few in zip(parts, delta_bytes, strict=True)
                )
                job.start(partial, values)
        try:
            job.begin(parent, expected)
        except (ConfigError, CorruptionError):
            if parent is None or last is None or parent_at(where, parent, created=last[1]) is not None:
                raise
            job.end()  # somebody has pruned the parent since it was looked at: nothing is left that could be changed
            return save_managers(path, managers, background=background, state=state, dense=dense, keep=keep)
        return _in_background(job) if background else job.run()
    except BaseException as error:
        if others is not None and not job.begun:
            _tell(others, error)
        if job.unclaimed.acquire(blocking=False):  # else a thread has it, and brings it to its end
            job.end()
        raise


def _values(state: Any, dense: Dense | None, rank: int) -> dict[str, tuple[bytes, bytes]]:
    """What a rank writes of the caller's values and of the dense part, as they are now."""
    values: dict[str, tuple[bytes, bytes]] = {}
    if rank == 0:  # each has the same
        values["state"] = encode(state() if callable(state) else state, "state")
    if dense is not None:
        values |= dense.values(rank)
    return values


def shared_with(managers: Mapping[str, EmbCacheManager]) -> Any:
    """The ranks that the managers' tables are shared with; None where there are none.

    Raises
    ------
    ConfigError
        Some tables are shared, and others are each rank's own; or they are shared by different ranks.
    """
    found = [manager.ranks for manager in managers.values()]
    shared = next((ranks for ranks in found if ranks is not None and ranks.world > 1), None)
    if shared is None:
        return None
    for module, ranks in zip(managers, found, strict=True):
        if ranks is not shared:
            raise ConfigError(
                f"collection {module!r} is {'this rank’s own' if ranks is None else 'shared by other ranks'}, others of the model are shared "
                "by all ranks: a checkpoint cannot hold both; make it of the same kind (embcache.distributed)"
            )
    return shared


@dataclass(frozen=True)
class _Together:
    """What all ranks of a save have agreed upon."""

    generation: int
    parent: int | None
    partial: frozenset[str]


def _agree(
    where: str, managers: Mapping[str, EmbCacheManager], delta: bool, others: Any, unsavable: Exception | None
) -> _Together:
    """The generation, its parent and the tables of which only changes are written, alike on all ranks: outside of the doors, as others
    may hold theirs. Sizes are as of now, and the decision stands though they may change a little."""
    mine: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        if unsavable is not None:
            raise unsavable
        last = _last(where, managers) if delta else None
        parent = None if last is None else parent_at(where, last[0], created=last[1], world=others.world)
        few: list[int] = []
        names: list[str] = []
        full = 0
        with Doors(manager.door for manager in managers.values()):
            now = _last(where, managers) if delta else None
            if now != last:  # a save in the background, for which these doors have waited, has ended meanwhile
                last = now
                parent = None if last is None else parent_at(where, last[0], created=last[1], world=others.world)
            for module, manager in managers.items():
                manager.complete_abandoned()
                for t in range(len(manager.host_tables)):
                    part = Part(manager, module, t, describe(manager, t, module))
                    size = part.note_changes()
                    partly = part.tracked and parent is not None and part.description.name in parent.tables
                    names += [part.description.name] * partly
                    few.append(size if partly else part.full_bytes)
                    full += part.full_bytes
        mine = {
            "last": None if parent is None else last,
            "few": sum(few),
            "full": full,
            "partial": names,
            "generation": next_generation(where) if others.rank == 0 else 0,
            "step": [trained_step(manager.planner) for manager in managers.values()],
        }
    except BaseException as error:
        failure = error
    others.settle("save", "a save", failure)
    said = [json.loads(one) for one in others.save.gather_bytes("a save", json.dumps(mine).encode())]
    for rank, one in enumerate(said):
        if one["step"] != said[0]["step"]:
            raise PlanError(
                f"a save: rank {rank} has trained up to step {one['step']}, rank 0 up to {said[0]['step']}; every rank saves after the same batch"
            )
    generation = int(said[0]["generation"])
    if parent is None or any(one["last"] != said[0]["last"] for one in said):
        return _Together(generation, None, frozenset())
    if not parent.pays(sum(one["few"] for one in said), sum(one["full"] for one in said)):
        return _Together(generation, None, frozenset())
    partial = frozenset(said[0]["partial"]).intersection(*(one["partial"] for one in said[1:]))
    return _Together(generation, int(said[0]["last"][0]), partial)


def _tell(others: Any, error: BaseException) -> None:
    """Have the ranks that wait to begin a save hear what has kept this one from it."""
    with contextlib.suppress(EmbCacheError):
        others.settle("save", "a save", error)


def _in_background(job: SaveJob) -> Saving:
    """Have a thread write it."""
    saving = Saving(job)
    thread = threading.Thread(target=saving.work, name=f"embcache save {job.generation}")
    try:
        thread.start()
        job.thread = thread
    except RuntimeError:  # the system has no thread left
        saving.work()
        failure = saving.exception()
        if failure is not None and not isinstance(failure, Exception):
            raise failure from None  # a signal, which was this thread's
    return saving


def _last(where: str, managers: Mapping[str, EmbCacheManager]) -> tuple[int, float] | None:
    """The generation that these managers, all of them and under these names, have last saved or restored at this path, and when that
    was made; None where there is none."""
    saved = [(module, manager.saved) for module, manager in managers.items()]
    if saved[0][1] is None:
        return None
    _, generation, created, _ = saved[0][1]
    if created is None or any(one != (where, generation, created, module) for module, one in saved):
        return None
    return generation, created


def _base(
    last: tuple[int, float] | None, parent: Parent | None, parts: list[Part], delta_bytes: list[int]
) -> tuple[int | None, set[str]]:
    """The generation that a delta changes, and the tables of which only changes are written; None where a full one is better.

    That is so where there is no `parent` (`last` is not there any more, is damaged, or was written by several), and where the deltas since
    the last full one have come to as much as a full one costs.
    """
    if last is None or parent is None:
        return None, set()
    partial = {part.description.name for part in parts if part.tracked and part.description.name in parent.tables}
    few = sum(
        size if part.description.name in partial else part.full_bytes
        for part, size in zip(parts, delta_bytes, strict=True)
    )
    pays = parent.pays(few, sum(part.full_bytes for part in parts))
    return (last[0], partial) if pays else (None, set())
