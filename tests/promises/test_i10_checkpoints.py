"""I10: a checkpoint is whole or absent, and holds exactly the effects of the batches that have trained.

Resume equivalence: a run that is saved in the middle and goes on in a new collection gives the same bits as one that was
never interrupted, whatever was planned ahead at the save, and wherever the rows were.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache import savejob
from embcache.checkpoint import Files, Writer
from promises import resuming
from promises.strategies import (
    World,
    examples,
    features_of,
    filters,
    make_batch,
    optimizers,
    pools,
    table_lists,
    worlds,
)
from promises.training import check, make_collection, model_state, train, train_window, whole_state


def test_i10_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Any tables, filters, optimizers, windows; saved after any window, with a forward of the next one open or not."""

    @examples(20)
    @given(world=worlds(steps=(6, 20)), data=st.data())
    def run(world: World, data: st.DataObject) -> None:
        windows = world.windows()
        cut = data.draw(st.integers(0, len(windows)))
        straight = make_collection(world, world.all_rows())
        outputs = train(straight, world)
        first = make_collection(world, data.draw(st.sampled_from([None, world.least_rows(), world.all_rows()])))
        begun = [train_window(first, window, world.joint) for window in windows[:cut]]
        _ahead = first(windows[cut][0]) if cut < len(windows) and data.draw(st.booleans()) else None
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            generation = first.save(folder, state={"window": cut})
            first.close()
            second = make_collection(world, data.draw(st.sampled_from([None, world.least_rows()])))
            report = second.restore(folder)
        assert (report.generation, report.state) == (generation, {"window": cut})
        assert second.optimizer.step_count == cut
        rest = [train_window(second, window, world.joint) for window in windows[report.state["window"] :]]
        assert [out for window in begun + rest for out in window] == outputs
        assert model_state(second.manager) == model_state(straight.manager)
        check(second.manager)
        straight.close()
        second.close()

    run()


@pytest.mark.parametrize("optimizer", resuming.OPTIMIZERS)
def test_i10_a_new_process_goes_on_with_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    straight = resuming.collection_of(optimizer)
    wanted = resuming.finish(straight, 0)
    assert all(straight.manager.stats()[name] for name in ("evicted", "rejected", "swap_out_rows"))
    straight.close()
    first = resuming.collection_of(optimizer)
    for number, batch in enumerate(resuming.batches()[:7]):
        train_window(first, [batch])
        first.save(tmp_path, state={"next": number + 1}, keep=2)
    assert [one.generation for one in ec.generations(tmp_path)] == [6, 7]
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(Path(ec.__file__).parents[1])])}
    command = [sys.executable, "-m", "promises.resuming", optimizer, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == wanted
    assert resuming.finish(first, 7) == wanted  # and saving has not changed the saver
    first.close()


# ------------------------------------------------------------------------------------------------------- plans ahead


def move(manager: ec.EmbCacheManager, info: Any, stage: int) -> None:
    """Take a plan to stage 1 (swapped out) or 2 (swapped in) from wherever it is."""
    if stage > 0 and info.state == "planned":
        manager.swap_out(info)
    if stage > 1 and info.state == "swapped_out":
        manager.swap_in(info)


def train_by_hand(manager: ec.EmbCacheManager, info: Any) -> None:
    """Change weights and state of the plan's rows, each step in another way; then finish it."""
    move(manager, info, 2)
    for t in range(len(info.tables)):
        part = slice(int(info.unique_offsets[t]), int(info.unique_offsets[t + 1]))
        slots = info.slots[part][info.admitted[part].astype(bool)]
        group = manager.buffer.group_of[t]
        for array in (manager.buffer.weights[group], *manager.buffer.states[group]):
            array[slots] = array[slots] * 0.5 + info.step
    manager.finish(info)


def trained_alone(tables: Sequence[ec.TableConfig], optimizer: ec.OptimizerSpec, batches: Sequence[Any]) -> Any:
    """What a manager holds that has trained these batches and planned nothing else."""
    with ec.EmbCacheManager(tables, optimizer=optimizer) as manager:
        for batch in batches:
            train_by_hand(manager, manager.plan(batch))
        return model_state(manager)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[ec.TableConfig], list[Any], int, list[int]]:
    """Tables, batches, how many of them train before the save, and how far each of the others has come."""
    tables = draw(table_lists(filtered=st.none() | filters(), most=2, dtypes=("float32", "bfloat16")))
    pool, rng = draw(pools(high=40)), np.random.default_rng(draw(st.integers(0, 2**32)))
    batches = [make_batch(rng, features_of(tables), pool, 3, now=10 * i) for i in range(draw(st.integers(5, 16)))]
    ahead = draw(st.integers(0, 4))
    moved = draw(st.integers(0, ahead))
    stages = [2] * moved + [draw(st.integers(0, 1))] * (moved < ahead) + [0] * (ahead - moved - 1)
    spare, room = draw(st.integers(0, 3)), [len(batches[i : i + 5]) for i in range(len(batches))]
    sized = [
        replace(
            table,
            hbm_rows=spare
            + max(
                len(
                    {
                        key
                        for batch in batches[i : i + n]
                        for name in table.feature_names
                        for key in batch[name].values().tolist()
                    }
                )
                for i, n in enumerate(room)
            )
            + 1,
        )
        for table in tables
    ]
    return sized, batches, len(batches) - ahead, stages


def test_i10_batches_that_are_planned_and_have_not_trained_are_in_it_with_nothing(tmp_path: Path) -> None:

    @examples(50)
    @given(drawn=runs(), optimizer=optimizers)
    def run(drawn: Any, optimizer: ec.OptimizerSpec) -> None:
        tables, batches, trained, stages = drawn
        first = ec.EmbCacheManager(tables, optimizer=optimizer)
        for batch in batches[:trained]:
            train_by_hand(first, first.plan(batch))
        plans = [first.plan(batch) for batch in batches[trained:]]
        for info, stage in zip(plans, stages, strict=True):
            move(first, info, stage)
        before = whole_state(first)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            first.save(folder)
            assert whole_state(first) == before
            second = ec.EmbCacheManager([replace(table, hbm_rows=None) for table in tables], optimizer=optimizer)
            second.restore(folder)
        assert model_state(second) == trained_alone(tables, optimizer, batches[:trained])
        check(second)
        for info, batch in zip(plans, batches[trained:], strict=True):
            train_by_hand(first, info)
            train_by_hand(second, second.plan(batch))
        assert model_state(second) == model_state(first)
        first.close()
        second.close()

    run()


# ---------------------------------------------------------------------------------------------------------- failures


class Refusing(Files):
    """The k-th call of the system fails."""

    def __init__(self, after: int, number: int) -> None:
        self.left, self.number = after, number

    def point(self, name: str, path: str) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(self.number, os.strerror(self.number), path)


def test_i10_a_save_that_fails_leaves_the_manager_and_the_last_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = resuming.collection_of("adam")
    for batch in resuming.batches()[:4]:
        train_window(collection, [batch])
    collection.save(tmp_path, state=0)
    kept = model_state(collection.manager)
    train_window(collection, [resuming.batches()[4]])
    before, failures = whole_state(collection.manager), 0
    for after in range(1000):
        files = Refusing(after, (errno.ENOSPC, errno.EIO)[after % 2])
        monkeypatch.setattr(savejob, "Writer", functools.partial(Writer, files=files))
        try:
            newest = collection.save(tmp_path, state=1)
        except (ec.DiskFullError, ec.StorageError):
            failures += 1
            newest = ec.generations(tmp_path)[-1].generation
        assert whole_state(collection.manager) == before
        if after % 5 == 0 or files.left >= 0:
            other = resuming.collection_of("adam")
            report = other.restore(tmp_path)
            assert report.generation == newest
            assert model_state(other.manager) == (before["model"] if report.state else kept)
            other.close()
        if files.left >= 0:
            break
    assert failures > 15 and files.left >= 0
    assert whole_state(collection.manager) == before
    collection.close()
