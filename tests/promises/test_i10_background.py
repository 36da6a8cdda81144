"""I10: a save that goes on while batches are planned, train, evict and move rows writes the state at the call, bit for bit.

The writer is held up before every chunk, and let go by the test one chunk at a time, so that each example says what happened
between which chunks. Deltas follow, each compared with what was there when it was saved.
"""

from __future__ import annotations

import errno
import functools
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache import manager as manager_module
from embcache import savejob, savepart
from embcache._core.cut import FilterCut
from embcache._core.swap import SwapManager
from promises import resuming
from promises.gate import LIMIT_S, Gate, gates, held_up
from promises.strategies import examples, optimizers
from promises.test_i10_checkpoints import move, runs, train_by_hand
from promises.test_i12_fork import fork_and_wait
from promises.training import check, model_state, train_window


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    yield from gates(monkeypatch)


def restored(
    tables: list[ec.TableConfig], optimizer: ec.OptimizerSpec, path: str, generation: int | None = None
) -> Any:
    """What a new manager holds that has restored from `path`."""
    with ec.EmbCacheManager([replace(table, hbm_rows=None) for table in tables], optimizer=optimizer) as manager:
        assert manager.restore(path, generation).skipped == []
        check(manager)
        return model_state(manager)


def change_by_hand(manager: ec.EmbCacheManager, number: int, key: int) -> None:
    """Assign, insert or erase a key of each table, unless an unfinished plan uses it."""
    for name in manager.layout.names:
        view = manager.table(name)
        try:
            if number % 3 == 0:
                view.erase([key])
            elif number % 3 == 1:
                view.assign([key], np.full((1, view.dim), key, np.float32))
            else:
                view.insert([key])
        except ec.PinnedKeyError:
            pass


def test_i10_a_background_save_is_the_state_at_the_call(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything may happen between its chunks; and what a delta holds after it, or after its failure, is what has changed."""

    @examples(40)
    @given(drawn=runs(), optimizer=optimizers, data=st.data())
    def run(drawn: Any, optimizer: ec.OptimizerSpec, data: st.DataObject) -> None:
        tables, batches, trained, stages = drawn
        # With slices of one row what a sweep has killed stays where it is for many steps.
        slow = functools.partial(SwapManager, sweep_rows=data.draw(st.sampled_from([1, 1 << 20])))
        monkeypatch.setattr(manager_module, "SwapManager", slow)
        gate.rows, gate.refused, gate.permits = data.draw(st.integers(1, 4)), None, threading.Semaphore(10**6)
        manager = ec.EmbCacheManager(
            tables, optimizer=optimizer, policy=data.draw(st.sampled_from(["lru", "lfu", "s3fifo", "lookahead"]))
        )
        alone = ec.EmbCacheManager(tables, optimizer=optimizer)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            if data.draw(st.booleans()):
                manager.save(folder)
            for number, batch in enumerate(batches[:trained]):
                key = data.draw(st.none() | st.integers(-5, 40))
                for one in (manager, alone):  # the other one will have planned nothing more at the cut
                    train_by_hand(one, one.plan(batch))
                    if key is not None:
                        change_by_hand(one, number, key)
            plans = [manager.plan(batch) for batch in batches[trained:]]
            for info, stage in zip(plans, stages, strict=True):
                move(manager, info, stage)
            at_the_cut = model_state(alone)
            with held_up(gate):
                saving = manager.save(folder, delta=True, background=True)
                for number, info in enumerate(plans + [None] * data.draw(st.integers(0, 6))):
                    for _ in range(data.draw(st.integers(0, 3))):
                        gate.permits.release()
                    if info is None:
                        info = manager.plan(batches[number % len(batches)])
                    train_by_hand(manager, info)
                    if data.draw(st.integers(0, 2)) == 0:
                        change_by_hand(manager, number, data.draw(st.integers(-5, 40)))
                fails = data.draw(st.booleans())
                gate.refused = OSError(errno.ENOSPC, "full") if fails else None
            failure = saving.exception(LIMIT_S)
            assert fails or failure is None
            if failure is None:
                assert restored(tables, optimizer, folder, saving.generation) == at_the_cut
            else:
                assert isinstance(failure, ec.DiskFullError)
                assert saving.generation not in [one.generation for one in ec.generations(folder)]
            gate.refused = None
            generation = manager.save(folder, delta=True)
            assert restored(tables, optimizer, folder, generation) == model_state(manager)
            train_by_hand(manager, manager.plan(batches[0]))
            assert restored(tables, optimizer, folder, manager.save(folder, delta=True)) == model_state(manager)
        check(manager)
        manager.close()
        alone.close()

    run()


def test_i10_sweeps_and_swaps_between_all_chunks(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of every filter and row type, through a collection: each step lets one chunk go, and evicts and swaps."""
    # Filters come first, and there shall be rows among the chunks.
    monkeypatch.setattr(savejob, "PIECE_ENTRIES", 1 << 15)
    gate.rows, collection, batches = 7, resuming.collection_of("adam"), resuming.batches()
    for batch in batches[:5]:
        train_window(collection, [batch])
    wanted, before = model_state(collection.manager), collection.manager.stats()
    open_one = collection(batches[5])
    saving = collection.save(tmp_path, background=True, state={"next": 5})
    losses = open_one.values().sum()
    losses.backward()
    collection.optimizer.step()
    for batch in [*batches[6:], *batches[6:]]:
        gate.let_one()
        train_window(collection, [batch])
    during = collection.manager.stats()
    assert not saving.done() and 0 < saving.progress[0] < saving.progress[1]
    assert all(during[name] > before[name] for name in ("evicted", "swap_out_rows", "born"))
    gate.permits.release(10**6)
    assert saving.result(LIMIT_S) == saving.generation == 1 and saving.progress[0] == saving.progress[1]
    other = resuming.collection_of("adam")
    assert other.restore(tmp_path).state == {"next": 5}
    assert model_state(other.manager) == wanted and other.optimizer.step_count == 5
    collection.close()
    other.close()


def test_i10_a_second_save_and_close_wait(tmp_path: Path, gate: type[Gate]) -> None:
    collection = resuming.collection_of("sgd")
    train_window(collection, [resuming.batches()[0]])
    first = collection.save(tmp_path, background=True)
    opened = threading.Timer(0.2, gate.permits.release, [10**6])
    opened.start()
    assert collection.save(tmp_path) == 2 and first.result(LIMIT_S) == 1
    gate.permits = threading.Semaphore(0)
    third = collection.save(tmp_path, background=True, keep=1)
    threading.Timer(0.2, gate.permits.release, [10**6]).start()
    collection.close()
    assert third.result(LIMIT_S) == 3
    assert [one.generation for one in ec.generations(tmp_path)] == [3]
    opened.join()


def test_i10_copies_are_bounded(tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound the next batch waits until copies are written."""
    monkeypatch.setattr(savejob, "KEPT_BYTES", 64)
    collection = resuming.collection_of("adagrad")
    for batch in resuming.batches()[:4]:
        train_window(collection, [batch])
    wanted = model_state(collection.manager)
    saving = collection.save(tmp_path, background=True)
    train_window(collection, [resuming.batches()[4]])
    trained = threading.Event()

    def train() -> None:
        train_window(collection, [resuming.batches()[5]])
        trained.set()

    worker = threading.Thread(target=train)
    worker.start()
    assert not trained.wait(0.3)
    gate.permits.release(10**6)
    worker.join(LIMIT_S)
    assert trained.is_set() and saving.result(LIMIT_S) == 1
    other = resuming.collection_of("adagrad")
    other.restore(tmp_path)
    assert model_state(other.manager) == wanted
    collection.close()
    other.close()


def test_i10_a_failure_is_seen_and_the_next_save_is_whole(
    tmp_path: Path, gate: type[Gate], caplog: pytest.LogCaptureFixture
) -> None:
    collection = resuming.collection_of("sgd")
    train_window(collection, [resuming.batches()[0]])
    gate.refused = OSError(errno.ENOSPC, "full")
    saving = collection.save(tmp_path, background=True)
    gate.permits.release(10**6)
    with pytest.raises(ec.DiskFullError):
        saving.result(LIMIT_S)
    assert "generation 1" in caplog.text and isinstance(saving.exception(), ec.DiskFullError)
    gate.refused = None
    collection.save(tmp_path)
    other = resuming.collection_of("sgd")
    assert other.restore(tmp_path).skipped == []
    assert model_state(other.manager) == model_state(collection.manager)
    collection.close()
    other.close()


def test_i10_a_chain_of_deltas_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """A delta after each step, each small; the newest is the state, and a new base comes when deltas no longer pay."""
    straight = resuming.collection_of("adam")
    wanted = resuming.finish(straight, 0)
    straight.close()
    first = resuming.collection_of("adam")
    for number, batch in enumerate(resuming.batches()[:10]):
        train_window(first, [batch])
        first.save(tmp_path, delta=True, state=number + 1)
    kinds = [one.kind for one in ec.generations(tmp_path)]
    assert kinds[0] == "full" and "delta" in kinds and "full" in kinds[1:]
    first.close()
    second = resuming.collection_of("adam")
    report = second.restore(tmp_path)
    second.save(tmp_path, delta=True)
    newest = ec.generations(tmp_path)[-1]
    assert (newest.kind, sum(newest.tables.values())) in (("delta", 0), ("full", sum(report.rows.values())))
    assert resuming.finish(second, report.state) == wanted
    second.close()


def test_i10_a_delta_holds_what_has_changed_and_nothing_else(tmp_path: Path) -> None:
    tables = [ec.TableConfig("a", 4, ["f"], hbm_rows=64)]
    manager = ec.EmbCacheManager(tables, optimizer=ec.Adagrad(lr=0.1))

    def train(*keys: int) -> None:
        train_by_hand(manager, manager.plan(ec.JaggedFeatures(["f"], np_tensor(keys), np_tensor([1] * len(keys)))))

    def delta() -> tuple[str, int]:
        manager.save(tmp_path, delta=True)
        newest = ec.generations(tmp_path)[-1]
        return newest.kind, newest.tables["a"]

    for start in range(0, 4000, 40):
        train(*range(start, start + 40))  # most of them have left their slots
    assert delta() == ("full", 4000)
    assert delta() == ("delta", 0)
    train(3990, 3991)
    assert delta() == ("delta", 2)
    train(1, 2, 3)
    train(*range(100, 160))  # and 1 to 3 leave their slots, trained; others leave that have not
    assert delta() == ("delta", 63)
    train(*range(200, 260))
    assert delta() == ("delta", 60)
    manager.flush()
    assert delta() == ("delta", 0)
    train(*range(260, 320))  # what leaves has not changed
    manager.table("a").erase([7])
    manager.table("a").assign([8], np.zeros((1, 4), np.float32))
    assert delta() == ("delta", 61)
    assert restored(tables, ec.Adagrad(lr=0.1), str(tmp_path)) == model_state(manager)
    manager.close()


def np_tensor(values: Any) -> Any:
    import torch

    return torch.tensor(list(values), dtype=torch.int64)


def test_i10_a_child_does_not_wait_for_what_its_parent_writes(tmp_path: Path, gate: type[Gate]) -> None:
    collection = resuming.collection_of("sgd")
    train_window(collection, [resuming.batches()[0]])
    saving = collection.save(tmp_path, background=True)

    def child() -> None:
        for call in (saving.result, saving.exception, collection.close, lambda: collection.save(tmp_path)):
            with pytest.raises(ec.ForkError):
                call()

    assert fork_and_wait(child) == 0
    gate.permits.release(10**6)
    assert saving.result(LIMIT_S) == 1
    collection.close()


# ------------------------------------------------------------------------------------------------------------- filters

LATE_RULES = {
    "exact": ec.AdmitAndEvictConfig(admit_threshold=3),
    "sketch": ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 14),
    "sketch that turns in part": ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 13),
    "sketch that turns": ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 10),
    "sweeps": ec.AdmitAndEvictConfig(
        admit_threshold=3, evict_threshold=4, evict_step_interval=2, time_source="step", evict_keep_min=2
    ),
    "scores": ec.AdmitAndEvictConfig(
        admit_threshold=3.0, policy="show_click", show_click=ec.ShowClick(evict_percentage=0.2), evict_step_interval=2
    ),
}


def filtered_run(folder: Path, rule: ec.AdmitAndEvictConfig, monkeypatch: pytest.MonkeyPatch, delta: bool) -> None:
    """Keys wait, and are counted, admitted, forgotten, erased and born while a save reads its filter two at a time; the last plan at the
    cut has not trained. What is restored is the filter at the cut."""
    tables = [ec.TableConfig("t", 2, ["f"], hbm_rows=64, admit_and_evict=rule)]
    permits = threading.Semaphore(0)
    monkeypatch.setattr(savejob.SaveJob, "_rest", lambda self: permits.acquire(timeout=LIMIT_S))
    for piece in ("PIECE_ROWS", "PIECE_SLOTS", "PIECE_ENTRIES"):
        monkeypatch.setattr(savejob, piece, 2)
    monkeypatch.setattr(savejob, "PIECE_SKETCH", 40)
    manager = ec.EmbCacheManager(tables, optimizer=ec.SGD(lr=0.1))

    def batch(*keys: int) -> ec.JaggedFeatures:
        labels = np_tensor([key % 2 for key in keys]) if rule.policy == "show_click" else None
        return ec.JaggedFeatures(["f"], np_tensor(keys), np_tensor([1] * len(keys)), labels=labels)

    def train(*keys: int) -> None:
        train_by_hand(manager, manager.plan(batch(*keys)))

    if delta:
        permits.release(10**6)
        train(*range(1000, 1100), *range(15, 25))
        manager.save(folder)
        while permits.acquire(blocking=False):
            pass
    train(*range(40), *range(20), *range(10))
    if rule.sketch_bytes == 1 << 13:
        train(*range(2000, 2170))  # its blocks are full, nearly, and turn while they are read
    train(*range(5, 45))
    wanted, sketch = model_state(manager), sketch_of(manager)
    ahead = manager.plan(batch(*range(3, 30), 10, 11))
    saving = manager.save(folder, delta=delta, background=True)
    train_by_hand(manager, ahead)
    manager.table("t").erase([12, 44, 7, 1])
    cancelled = manager.plan(batch(*range(200, 240), 13, 14, 15))
    permits.release(2)
    manager.cancel(cancelled)
    for step in range(6):
        train(*range(step, 60 + 10 * step, 2))
        permits.release(2)
        manager.table("t").erase([20 + step, 60 + step])
        manager.table("t").insert([30 + step])
    permits.release(10**6)
    generation = saving.result(LIMIT_S)
    features = (folder / f"MANIFEST-{generation:016d}").read_bytes()[12]
    assert features == (delta and rule.sketch_bytes != 1 << 10) + 2 * bool(
        rule.sketch_bytes
    )  # most of that one has turned
    with ec.EmbCacheManager(tables, optimizer=ec.SGD(lr=0.1)) as other:
        other.restore(folder, generation)
        same = model_state(other) == wanted and sketch_of(other) == sketch
        assert same  # pytest would list the differences of some thousand counters, for minutes
    check(manager)
    manager.close()


def sketch_of(manager: ec.EmbCacheManager) -> dict[str, Any]:
    """Counters and numbers of the sketch of the first table."""
    state = manager.planner.export_filter(0)
    return {
        name: value if isinstance(value, int) else value.tolist() for name, value in state.items() if "sketch" in name
    }


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("rule", LATE_RULES)
def test_i10_a_filter_that_changes_while_it_is_read_is_saved_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, delta: bool
) -> None:
    filtered_run(tmp_path, LATE_RULES[rule], monkeypatch, delta)


class _Blind:
    """A filter's cut that does not see what comes in, or what is changed by hand."""

    blind = ""

    def __init__(self, *given: Any) -> None:
        self._cut = FilterCut(*given)

    def __getattr__(self, name: str) -> Any:
        return (lambda *given: None) if name == self.blind else getattr(self._cut, name)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("blind", "rule"),
    [
        ("look", "exact"),
        ("look", "sketch"),
        ("look", "sketch that turns in part"),
        ("look", "sketch that turns"),
        ("look", "sweeps"),
        ("keep", "exact"),
    ],
)
def test_i10_a_bug_planted_in_the_reading_of_filters_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: str, rule: str, delta: bool
) -> None:
    monkeypatch.setattr(_Blind, "blind", blind)
    monkeypatch.setattr(savepart, "FilterCut", _Blind)
    for run in range(
        5
    ):  # one in a hundred meets nothing that changes: the threads' order decides what the reader is late for
        try:
            filtered_run(tmp_path / str(run), LATE_RULES[rule], monkeypatch, delta)
        except (AssertionError, ec.ConfigError):  # the latter: a key came twice
            return
    pytest.fail("five runs have not found it")
