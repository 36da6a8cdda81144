"""Ctrl-C at any line of a save or a restore: everything is as before or as after, and whoever goes on may go on.

Python looks for signals between its instructions, so `KeyboardInterrupt` is raised at each line in turn, when it is reached for the
first time, and in loops over collections for the second. (It never looks where nothing is done, nor between the end of a ``with`` block and the call that leaves it.)
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from children import folder_in_memory
from torch import nn

import embcache as ec
from embcache import manager, restoring, savable, savejob, savepart, saving, whole
from embcache.checkpoint import emb_table, files, generations, lock, manifest, segment, snapshot, verify, writer
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))


@functools.cache
def never(code: CodeType) -> set[int]:
    """Offsets at which a line begins and no signal can come: nothing is done there (``try:``), or the block of a ``with`` has ended."""
    begins: dict[int, int] = {}
    line, found = 0, set()
    for one in dis.get_instructions(code):
        if one.starts_line is not None:
            line = one.starts_line
            if one.opname == "NOP" or one.offset > begins.get(line, one.offset):
                found.add(one.offset)
        if one.opname == "BEFORE_WITH":
            begins.setdefault(line, one.offset)
    return found


class Interrupts:
    """Runs something, and with `at` interrupts it when it reaches a line of these modules for the n-th time: (function, line, n)."""

    def __init__(self, *modules: Any) -> None:
        self._files = {one.__file__ for one in modules}
        self.seen: Counter[tuple[str, int]] = Counter()
        self._at: tuple[str, int, int] | None = None
        self._place = ""

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lasti not in never(frame.f_code):
            line = frame.f_code.co_qualname, frame.f_lineno
            self.seen[line] += 1
            if (*line, self.seen[line]) == self._at:
                self._place = "{} {}, time {}".format(*self._at)
                raise KeyboardInterrupt
        return self._line

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def run(self, act: Callable[[], object], at: tuple[str, int, int] | None = None) -> str:
        """Where it was interrupted; nothing where that line was not reached so often."""
        self.seen.clear()
        self._at, self._place = at, ""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            act()
        except KeyboardInterrupt:
            sys.settrace(before)
            assert self._place
            return self._place
        finally:
            sys.settrace(before)
        assert not self._place, f"{self._place}: the interrupt was swallowed"
        return ""

    def points(self, act: Callable[[], object], twice: tuple[str, ...] = ()) -> list[tuple[str, int, int]]:
        """All lines that `act` reaches: when it does first, and in functions of these names for the second time too."""
        self.run(act)
        return [
            (name, line, n)
            for (name, line), many in self.seen.items()
            for n in (1, 2)
            if n == 1 or (many > 1 and (SOAK > 1 or name.startswith(twice)))
        ]


@pytest.fixture
def place() -> Iterator[Path]:
    torch.set_num_threads(1)
    with folder_in_memory() as folder:
        yield folder


class Model(nn.Module):
    """Two collections, one with a filter, few slots for one, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=20, evict_step_interval=3, time_source="step")
        self.users = ec.EmbeddingBagCollection(
            [ec.TableConfig("u", 2, admit_and_evict=rule)], optimizer=ec.Adam(lr=0.1)
        )
        self.items = ec.EmbeddingBagCollection([ec.TableConfig("i", 2, hbm_rows=6)], optimizer=ec.SGD(lr=0.1))
        self.top = nn.Linear(4, 1)
        self.steps = 0

    def train_a_step(self) -> None:
        self.steps += 1
        values = torch.tensor([self.steps % 7, self.steps % 11, self.steps // 2])
        batch = ec.JaggedFeatures(["u", "i"], values.repeat(2), torch.ones(6, dtype=torch.int64))
        rows = torch.cat([self.users(batch).values(), self.items(batch).values()], dim=1)
        self.top(rows).sum().backward()
        for one in (self.users, self.items):
            one.optimizer.step()
        with torch.no_grad():
            self.top.weight += 0.01 * self.top.weight.grad

    def managers(self) -> list[Any]:
        return [self.users.manager, self.items.manager]

    def content(self) -> Any:
        """Everything that a checkpoint keeps, comparable."""
        tables = [
            sorted(
                (key, *w.tolist(), *s.tolist(), *(() if f is None else (int(f[i]), int(t[i]))))
                for keys, weights, states, f, t in one.tables()[name].items()
                for i, (key, w, s) in enumerate(zip(keys.tolist(), weights, states, strict=True))
            )
            for one, name in ((self.users, "u"), (self.items, "i"))
        ]
        kept = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in self.users.manager.planner.export_filter(0).items()
        }
        steps = [one.optimizer.step_count for one in (self.users, self.items)]
        return tables, kept, steps, self.users.manager.planner.step, self.top.weight.tolist()

    def check_free(self, where: str) -> None:
        """Nobody holds a door, and no save is under way once one that goes on has ended."""
        for one in self.managers():
            assert not one.door.lock._is_owned(), where
            one.door.wait_for_save()
            assert one.saving is None and not one.door.closed
            one.planner.check()


@pytest.mark.parametrize("background", [False, True])
def test_i10_a_save_interrupted_at_any_line(place: Path, background: bool) -> None:
    model, other, hits = Model(), Model(), 0
    for _ in range(8):
        model.train_a_step()
    futures: list[Any] = []

    def save() -> None:
        futures.append(ec.save(model, place, delta=True, background=background, state=hits, keep=3))

    ec.save(model, place)
    interrupts = Interrupts(manager, savable, savejob, savepart, saving, whole)
    for point in interrupts.points(save, () if background else ("SaveJob.", "save_managers")):
        model.train_a_step()
        model.check_free("before")
        held, at_cut = generations(place)[-1].generation, model.content()
        futures.clear()
        where = interrupts.run(save, point)
        model.check_free(where)
        if background and futures:
            futures[0].result()
        if generations(place)[-1].generation > held:
            ec.restore(other, place)
            assert other.content() == at_cut, where
        else:
            assert where
        model.train_a_step()
        ec.save(model, place, delta=True)
        report = ec.restore(other, place)
        assert other.content() == model.content() and report.skipped == [], where
        hits += bool(where)
    assert hits > 100
    assert [one for one in verify(place) if one.severity == "damage"] == []


def test_i10_a_batch_interrupted_at_any_line_beside_a_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is copied out before it changes is written once, or the save fails: none is missing, none comes twice."""
    model, other, failed = Model(), Model(), 0
    gate = threading.Event()
    original = savejob.SaveJob._write
    monkeypatch.setattr(savejob.SaveJob, "_write", lambda job: (gate.wait(), original(job)))
    for _ in range(8):
        model.train_a_step()

    def beside(act: Callable[[], str]) -> str:
        nonlocal failed
        gate.clear()
        at_cut = model.content()
        future = ec.save(model, place, delta=True, background=True, keep=2)
        try:
            where = act()
            assert not any(one.door.lock._is_owned() for one in model.managers()), where
        finally:
            gate.set()
        try:
            future.result()
        except ec.ChangedError as error:
            assert isinstance(error.__cause__, KeyboardInterrupt)
            failed += 1
        else:
            ec.restore(other, place)
            assert other.content() == at_cut, where
        return where

    interrupts, points = Interrupts(manager, savejob, savepart), []
    beside(lambda: str(points.extend(interrupts.points(model.train_a_step, ("SaveJob.", "Part.")))))
    moving = ("EmbCacheManager.plan_and_move", "EmbCacheManager._swap", "EmbCacheManager._plan", "SaveJob.", "Part.")
    for point in [one for one in points if one[0].startswith(moving)]:
        where = beside(functools.partial(interrupts.run, model.train_a_step, point))
        for one in (model.users, model.items):
            one.optimizer.step()
        model.check_free(where)
        model.train_a_step()
        ec.save(model, place, delta=True)
        ec.restore(other, place)
        assert other.content() == model.content(), where
    assert failed > 5


def test_i10_a_restore_interrupted_at_any_line(place: Path) -> None:
    """Tables, optimizers and the dense part are of one generation, whichever it is."""
    model, contents, seen = Model(), [], set()
    for _ in range(2):
        for _ in range(6):
            model.train_a_step()
        ec.save(model, place)
        contents.append(model.content())
    interrupts = Interrupts(manager, savable, saving, whole, restoring, snapshot)
    for point in interrupts.points(
        lambda: ec.restore(model, place, 2), ("restore_managers", "_Exchange.", "_Prepared.")
    ):
        ec.restore(model, place, 1)
        assert model.content() == contents[0]
        where = interrupts.run(lambda: ec.restore(model, place, 2), point)
        model.check_free(where)
        assert model.content() in contents, where
        number = contents.index(model.content())
        assert {one.saved[1] for one in model.managers()} == {number + 1}, where
        seen.add(number)
        model.train_a_step()
    assert seen == {0, 1}


def content_of(table: EmbTable) -> dict[int, float]:
    return {int(key): float(row[0]) for keys, rows, *_ in table.items() for key, row in zip(keys, rows, strict=True)}


MODULES = (emb_table, files, lock, manifest, segment, snapshot, writer, sys.modules[EmbTable.__module__])


def test_i10_a_table_interrupted_at_any_line_of_its_save(place: Path) -> None:
    table, other = EmbTable("t", 1), EmbTable("t", 1)
    table.insert(np.arange(40))
    table.save(place)
    interrupts = Interrupts(*MODULES)

    def save() -> None:
        table.save(place, delta=True, keep=3)

    for number, point in enumerate(interrupts.points(save)):
        table.assign([number % 9, number], np.full((2, 1), number, np.float32))
        table.erase([number - 5])
        where = interrupts.run(save, point)
        table.assign([number % 7], np.full((1, 1), -number, np.float32))
        table.save(place, delta=True, keep=3)
        assert other.restore(place).skipped == [] and content_of(other) == content_of(table), where
    assert number > 200 and [one for one in verify(place) if one.severity == "damage"] == []


def test_i10_a_table_interrupted_at_any_line_of_its_restore(place: Path) -> None:
    table, other = EmbTable("t", 1), EmbTable("t", 1)
    for value in (1, 2):
        table.assign(np.arange(5 * value), np.full((5 * value, 1), value, np.float32))
        table.save(place)
    contents = [{key: float(value) for key in range(5 * value)} for value in (1, 2)]
    interrupts, seen = Interrupts(emb_table, snapshot, sys.modules[EmbTable.__module__]), set()
    for point in interrupts.points(lambda: other.restore(place, 2)):
        other.restore(place, 1)
        where = interrupts.run(lambda: other.restore(place, 2), point)
        assert content_of(other) in contents, where
        seen.add(contents.index(content_of(other)))
        other.assign([3], np.full((1, 1), 7, np.float32))
        wanted = content_of(other)
        other.save(place, delta=True)
        table.restore(place)
        assert content_of(table) == wanted, where
    assert seen == {0, 1}
