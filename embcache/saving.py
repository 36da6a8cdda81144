"""Saving managers: the cut at the last finished training batch, written as one generation of a checkpoint.

A save holds the doors of all its managers while it makes its cut, so what it writes is one state: rows that are in a slot with
their values there, everything else from the host tables, and nothing of batches that have been planned and have not trained
(promise I10). `embcache.savejob` says how it is written while training goes on. The generation is acknowledged once it is
durable; should that fail, nothing of the managers has changed, and what a delta is to hold neither.

What of it has which name: ``tables`` of a collection are ``<module path>/<table>``, of a manager alone ``<table>``; bytes are
``state.*`` (the caller's), ``optimizers.*``, ``model.*`` (the dense part), ``filter/<table>/*`` (sketches). ``embcache.values`` says
how values are written, docs/format.md everything else.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ._core.doors import Doors
from .checkpoint import Parent, TableDescription, number_to_keep, parent_at
from .errors import ConfigError, shown
from .savejob import Part, SaveJob
from .table import initializer_spec
from .values import encode

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["Saving", "check_names", "describe", "path_of", "save_managers"]

LOG = logging.getLogger("embcache")


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
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save has failed with, once it is over; None where it is saved."""
        self._check_process()
        return super().exception(timeout)

    def work(self) -> None:
        """Write it, unless whoever wanted it has been interrupted before this thread began."""
        if not self._job.unclaimed.acquire(blocking=False):
            return
        try:
            generation = self._job.run()
        except BaseException as error:
            self._job.end()
            LOG.error("generation %d at %s was not saved: %s", self.generation, self._job.path, error)
            self.set_exception(error)
        else:
            self.set_result(generation)


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
    model: dict[str, Any] | None = None,
    keep: int | None = None,
) -> int | Saving:
    """Write one generation of all `managers`, by module path; see `EmbCacheManager.save`. `model` is a dense state_dict."""
    where = path_of(path)
    check_names(managers)
    most = number_to_keep(keep)
    values = {"state": encode(state, "state")}
    if model is not None:
        values["model"] = encode(model, "the model's state_dict()")
    expected_last = _last(where, managers) if delta else None
    parent_there = None if expected_last is None else parent_at(where, expected_last[0], created=expected_last[1])
    parts: list[Part] = []
    job = SaveJob(where, managers, parts, most, background)
    try:
        with Doors(manager.door for manager in managers.values()):
            for manager in managers.values():
                manager.complete_abandoned()
            optimizers = {module: manager.optimizer_state() for module, manager in managers.items()}
            values["optimizers"] = encode(optimizers, "the state of the optimizers")
            parts += [
                Part(manager, module, t, describe(manager, t, module))
                for module, manager in managers.items()
                for t in range(len(manager.host_tables))
            ]
            delta_bytes = [part.note_changes() for part in parts]
            last = _last(where, managers) if delta else None
            if last != expected_last:  # another thread has saved meanwhile
                parent_there = None if last is None else parent_at(where, last[0], created=last[1])
            parent, partial = _base(last, parent_there, parts, delta_bytes)
            expected = sum(
                few if part.description.name in partial else part.full_bytes
                for part, few in zip(parts, delta_bytes, strict=True)
            )
            job.start(partial, values)
        job.begin(parent, expected)
        return _in_background(job) if background else job.run()
    except BaseException:
        if job.unclaimed.acquire(blocking=False):  # else a thread has it, and brings it to its end
            job.end()
        raise


def _in_background(job: SaveJob) -> Saving:
    """Have a thread write it."""
    saving = Saving(job)
    try:
        threading.Thread(target=saving.work, name=f"embcache save {job.generation}").start()
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
