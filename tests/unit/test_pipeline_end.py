"""TrainPipeline: close, and being dropped."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import Model, Pair, batches, no_thread_left, rows_of, same, serial, sgd, threads_end, train

import embcache as ec

_threads_end = pytest.fixture(autouse=True)(threads_end)


def test_close_undoes_what_has_not_trained() -> None:
    """Filters count only batches that trained: a run goes on by hand, or in another pipeline, as if none had been ahead."""
    rule = ec.AdmitAndEvictConfig(admit_threshold=3, evict_threshold=4, evict_step_interval=2, time_source="step")
    for depth, trained in ((1, 3), (3, 4), (8, 5), (8, 0)):
        one, other = (Model(table={"admit_and_evict": rule}) for _ in range(2))
        stream = list(batches(30, keys=30))
        serial(one, iter(stream[:trained]))
        with ec.TrainPipeline(other, sgd(other), depth=depth) as pipe:
            source = iter(stream)
            train(pipe, source, trained)
            if trained:
                while len(pipe._flow.ready) + 1 < depth:
                    time.sleep(0.001)
            assert pipe.batches_done == trained
        manager = other.rows.manager
        assert (manager.outstanding, manager.stats()["pinned"], manager.planner.step) == (0, 0, trained)
        manager.planner.check()
        states = [{k: str(v) for k, v in m.rows.manager.planner.filter_state(0).items()} for m in (one, other)]
        assert states[0] == states[1] and same(one, other)
        with ec.TrainPipeline(other, sgd(other), depth=depth) as pipe:
            train(pipe, iter(stream[trained:]))
        serial(one, iter(stream[trained:]))
        assert same(one, other)


def test_look_ahead_is_fed_and_withdrawn() -> None:
    """Keys of batches to come save swaps; what was expected and never comes is expected by nobody (CASES.md 41)."""
    swapped = {}
    for lookahead in (0, 20):
        model = Model(rows=24, policy="lookahead")
        with ec.TrainPipeline(model, sgd(model), depth=2, lookahead=lookahead) as pipe:
            source = batches(200)
            train(pipe, source, 150)
            expected = model.rows.manager.stats()["coming_keys"]
            assert (expected > 0) == (lookahead > 0)
            swapped[lookahead] = model.rows.manager.stats()["swap_in_rows"]
        assert model.rows.manager.stats()["coming_keys"] == 0
    assert swapped[20] < swapped[0]


def test_close_is_idempotent_and_final() -> None:
    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    pipe.close()  # before anything
    pipe.close()
    with pytest.raises(ec.ClosedError):
        pipe.progress(batches(1))
    pipe = ec.TrainPipeline(model, sgd(model))
    train(pipe, batches(20), 3)
    pipe.close()
    pipe.close()
    assert no_thread_left()
    with pytest.raises(ec.ClosedError):
        pipe.progress(batches(1))
    assert model.rows.feed is None


def test_a_pipeline_that_is_dropped_ends_by_itself() -> None:
    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    train(pipe, batches(20), 3)
    seen = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert seen() is None
    deadline = time.monotonic() + 20
    while not no_thread_left() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert no_thread_left() and model.rows.manager.outstanding == 0
    serial(model, batches(2))


def test_closing_the_collections_first() -> None:
    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    source = batches(20)
    train(pipe, source, 3)
    model.rows.close()
    with pytest.raises(ec.ClosedError):
        for _ in range(20):
            pipe.progress(source)
    pipe.close()


def ahead(pipe: ec.TrainPipeline) -> None:
    """Wait until all batches are ready that may be, but for the one that trains."""
    deadline = time.monotonic() + 600
    while len(pipe._flow.ready) + 1 < pipe._flow.depth and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("error", [ec.HostMemoryError("no memory"), MemoryError("none")])
@pytest.mark.parametrize("often", [1, 10])
def test_plans_that_cannot_be_undone_pin_nothing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, often: int
) -> None:
    """For want of memory: rows of victims have no way back, and their batch counts as seen."""
    model = Model(rows=24)
    manager, left = model.rows.manager, [often]
    back = manager._mover.back

    def fails(*given: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise error
        back(*given)

    with ec.TrainPipeline(model, sgd(model), depth=3) as pipe:
        train(pipe, batches(20), 5)
        ahead(pipe)
        monkeypatch.setattr(manager._mover, "back", fails)
    assert left[0] < often and (manager.outstanding, manager.stats()["pinned"]) == (0, 0)
    manager.planner.check()
    serial(model, batches(10))


@pytest.mark.parametrize("depth", [1, 6])
def test_closing_collections_in_files_first(tmp_path: Path, depth: int) -> None:
    """What was planned and has not trained is not in their directories."""
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=9, evict_step_interval=2, time_source="step")

    def made(name: str) -> Model:
        return Model(rows=24, table={"directory": tmp_path / name, "admit_and_evict": rule})

    one, other, stream = made("one"), made("other"), list(batches(40, keys=30))
    serial(one, iter(stream[:20]))
    pipe = ec.TrainPipeline(other, sgd(other), depth=depth)
    train(pipe, iter(stream), 20)
    ahead(pipe)
    for model in (one, other):
        model.rows.close()
    pipe.close()
    again = [made("one"), made("other")]
    assert again[0].rows.manager.planner.step == again[1].rows.manager.planner.step == 20
    states = [{k: str(v) for k, v in m.rows.manager.planner.filter_state(0).items()} for m in again]
    assert states[0] == states[1] and rows_of(again[0]) == rows_of(again[1])
    assert serial(again[0], iter(stream[20:])) == serial(again[1], iter(stream[20:])) and same(*again)
    for model in again:
        model.rows.close()


def test_a_batch_that_has_failed_counts_when_its_turn_comes() -> None:
    """One collection has planned it, and another one cannot: before its turn, it is as if nobody had seen it."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rule = ec.AdmitAndEvictConfig(admit_threshold=9)
            tables = [ec.TableConfig("one", 4, admit_and_evict=rule, hbm_rows=50), ec.TableConfig("two", 4, hbm_rows=4)]
            self.one, self.two = (ec.EmbeddingBagCollection([table]) for table in tables)

        def forward(self, batch: Any) -> Any:
            out = self.one(batch).values() + self.two(batch).values()
            return out.sum(), out

    def batch(keys: list[int]) -> ec.JaggedFeatures:
        ones = torch.ones(len(keys), dtype=torch.int64)
        return ec.JaggedFeatures(["one", "two"], torch.tensor(keys * 2), torch.cat([ones, ones]))

    stream = [batch([1, 2]), batch([1, 3]), batch([1, 2, 3, 4, 5]), batch([1, 2])]

    def counts(model: Both) -> str:
        return str(model.one.manager.planner.filter_state(0))

    seen = []
    for trained in (1, 2, 4):
        model = Both()
        with ec.TrainPipeline(model, None, depth=4) as pipe:
            source = iter(stream)
            for number in range(trained):
                if number == 2:
                    with pytest.raises(ec.HbmCapacityError):
                        pipe.progress(source)
                else:
                    pipe.progress(source)
            if trained < len(stream):
                ahead(pipe)
        seen.append(counts(model))
        plain = Both()
        for number, one in enumerate(stream[:trained]):
            if number == 2:
                with pytest.raises(ec.HbmCapacityError):
                    plain(one)
            else:
                plain(one)[0].backward()
        assert seen[-1] == counts(plain), trained
    assert len(set(seen)) == 3


def test_an_iterator_that_never_returns_does_not_keep_close() -> None:
    held = threading.Event()

    class Stuck:
        def __init__(self) -> None:
            self.inner = batches(2)

        def __next__(self) -> Pair:
            try:
                return next(self.inner)
            except StopIteration:
                held.wait()
                raise

    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    train(pipe, Stuck(), 2)  # type: ignore[arg-type]
    import embcache.pipeline as module

    patience, module.PATIENCE_S = module.PATIENCE_S, 0.05
    try:
        pipe.close()
    finally:
        module.PATIENCE_S = patience
        held.set()
    assert model.rows.manager.outstanding == 0


def test_close_from_another_thread_wakes_who_waits() -> None:
    held = threading.Event()

    def slow() -> Iterator[Pair]:
        held.wait()
        yield from batches(1)

    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    closer = threading.Timer(0.05, lambda: (held.set, pipe._flow.close()))
    closer.start()
    with pytest.raises(ec.ClosedError):
        pipe.progress(slow())
    held.set()
    pipe.close()


def test_closing_inside_a_step() -> None:
    class Closing(ec.TrainPipeline):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.close()

    model = Model()
    pipe = Closing(model, sgd(model))
    pipe.progress(batches(5))
    with pytest.raises(ec.ClosedError):
        pipe.progress(batches(5))
    assert model.rows.manager.outstanding == 0


def test_a_pipeline_cannot_be_copied() -> None:
    import copy
    import pickle

    with ec.TrainPipeline(Model(), None) as pipe:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ec.ConfigError, match="cannot be copied"):
                attempt(pipe)
        assert "depth=6" in repr(pipe)
