"""I10: rows are copied out ahead of what trains, each once: whatever slots they are in, and whoever had the slot before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache import savepart
from promises.gate import LIMIT_S, Gate, gates, held_up
from promises.test_i10_background import restored
from promises.test_i10_checkpoints import train_by_hand
from promises.training import model_state


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    yield from gates(monkeypatch)


def batch_of(*keys: int) -> ec.JaggedFeatures:
    return ec.JaggedFeatures(["f"], torch.tensor(keys, dtype=torch.int64), torch.tensor([1] * len(keys)))


def trained(tables: list[ec.TableConfig], *keys: int) -> ec.EmbCacheManager:
    manager = ec.EmbCacheManager(tables, optimizer=ec.Adagrad(lr=0.1))
    train_by_hand(manager, manager.plan(batch_of(*keys)))
    return manager


FIRST, SECOND = range(40), range(40, 80)  # so many that the writer, who is held up, has read few of them


@pytest.mark.parametrize("delta", [False, True])
def test_i10_a_slot_that_a_plan_gives_back_is_asked_for_again(tmp_path: Path, gate: type[Gate], delta: bool) -> None:
    """The plan's own row needed no copy, being new; the row that comes back into the slot does."""
    tables = [ec.TableConfig("a", 4, ["f"], hbm_rows=40)]
    with trained(tables, *FIRST) as manager:
        if delta:
            gate.permits = threading.Semaphore(10**6)
            manager.save(tmp_path)
            train_by_hand(manager, manager.plan(batch_of(*FIRST)))
        at_the_cut = model_state(manager)
        with held_up(gate):
            saving = manager.save(tmp_path, delta=delta, background=True)
            info = manager.plan(batch_of(*SECOND))
            manager.swap_out(info)
            manager.swap_in(info)
            manager.take_back(info)
            train_by_hand(manager, manager.plan(batch_of(*FIRST)))
        assert saving.result(LIMIT_S) == 1 + delta
        assert restored(tables, ec.Adagrad(lr=0.1), str(tmp_path)) == at_the_cut


def test_i10_a_slot_that_another_row_takes_is_asked_for_again(tmp_path: Path, gate: type[Gate]) -> None:
    tables = [ec.TableConfig("a", 4, ["f"], hbm_rows=40)]
    with trained(tables, *FIRST) as manager:
        train_by_hand(manager, manager.plan(batch_of(*SECOND)))
        at_the_cut = model_state(manager)
        with held_up(gate):
            saving = manager.save(tmp_path, background=True)
            for keys in (SECOND, FIRST, SECOND):
                train_by_hand(manager, manager.plan(batch_of(*keys)))
        assert saving.result(LIMIT_S) == 1
        assert restored(tables, ec.Adagrad(lr=0.1), str(tmp_path)) == at_the_cut


def test_i10_a_resident_is_copied_once_also_when_the_buffer_grows(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step costs beside a save is what it uses for the first time."""
    named: list[int] = []
    real = savepart.unread_rows

    def unread_rows(*given: Any) -> tuple[np.ndarray, int]:
        rows, listed = real(*given)
        named.append(len(rows))
        return rows, listed

    monkeypatch.setattr(savepart, "unread_rows", unread_rows)
    tables = [ec.TableConfig("a", 4, ["f"])]
    with trained(tables, *range(200)) as manager:
        at_the_cut, slots = model_state(manager), manager.stats()["capacity"]
        with held_up(gate):
            saving = manager.save(tmp_path, background=True)
            for keys in (range(100), range(100), range(50, 150), range(1000, 2000), range(200)):
                train_by_hand(manager, manager.plan(batch_of(*keys)))
            assert manager.stats()["capacity"] > slots
        assert saving.result(LIMIT_S) == 1
        assert (
            named[1] == named[3] == 0 and min(named[0], 2 * named[2], 2 * named[4]) > 90
        )  # the writer has read some itself
        assert restored(tables, ec.Adagrad(lr=0.1), str(tmp_path)) == at_the_cut
        train_by_hand(manager, manager.plan(batch_of(*range(200))))
        assert len(named) == 5  # nobody asks any more
