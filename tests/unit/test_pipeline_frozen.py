"""TrainPipeline: collections that are frozen and trained again between steps, whatever is planned ahead."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipelines import threads_end

import embcache as ec
from embcache.stages import Flow

_threads_end = pytest.fixture(autouse=True)(threads_end)

COUNTED = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=6, evict_step_interval=4, time_source="step")
STEPS = 40


class Pair(torch.nn.Module):
    """Two collections, each of which trains or only reads; a dense part that trains always."""

    def __init__(self, rows: int | None, policy: str = "lru") -> None:
        super().__init__()
        torch.manual_seed(5)
        for name in ("one", "two"):
            table = ec.TableConfig(name, 4, hbm_rows=rows, admit_and_evict=COUNTED)
            setattr(self, name, ec.EmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=0.1), policy=policy))
        self.top = torch.nn.Linear(8, 1)

    def forward(self, batch: ec.JaggedFeatures) -> Any:
        out = self.top(torch.cat([self.one(batch).values(), self.two(batch).values()], 1))
        return out.square().mean() + out.mean(), out.detach()


def batches() -> Iterator[ec.JaggedFeatures]:
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        ones = torch.ones(6, dtype=torch.int64)
        yield ec.JaggedFeatures(
            ["one", "two"], torch.randint(0, 25, (12,), generator=generator), torch.cat([ones, ones])
        )


def switches(model: Pair, seed: int) -> Callable[[], None]:
    """What freezes and thaws collections between steps, by a seed; never both together."""
    draw = random.Random(seed)

    def switch() -> None:
        frozen = draw.choice(["", "", "one", "two", None, None, None])
        if frozen is not None:
            model.one.train(frozen != "one")
            model.two.train(frozen != "two")

    return switch


def all_of(model: Pair) -> Any:
    found: list[Any] = [p.tolist() for p in model.top.parameters()]
    for collection in (model.one, model.two):
        for name, table in collection.tables().items():
            rows = {}
            for keys, *columns in table.items():
                rows.update((key, [column[i].tolist() for column in columns]) for i, key in enumerate(keys.tolist()))
            found.append((name, rows))
            state = collection.manager.planner.filter_state(0)
            found.append({k: getattr(v, "tolist", lambda v=v: v)() for k, v in state.items()})
        found.append((collection.manager.planner.step, collection.optimizer.step_count))
    return found


def plain(seed: int) -> tuple[Any, list[Any]]:
    model = Pair(None)
    dense, switch, outputs = torch.optim.SGD(model.parameters(), lr=0.1), switches(model, seed), []
    for batch in batches():
        switch()
        outputs.append(train_alone(model, dense, batch))
    return all_of(model), outputs


def train_alone(model: Pair, dense: torch.optim.Optimizer, batch: ec.JaggedFeatures) -> Any:
    dense.zero_grad()
    loss, out = model(batch)
    loss.backward()
    dense.step()
    model.one.optimizer.step()
    model.two.optimizer.step()
    return out.tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("depth", "rows"), [(1, 8), (3, 12), (6, 9), (6, None)])
def test_collections_are_frozen_and_trained_again_as_without_a_pipeline(
    depth: int, rows: int | None, seed: int
) -> None:
    """Batches that were ready by then are planned for a collection that thaws, and not counted by one that freezes."""
    assert_as_without(depth, rows, seed)


def assert_as_without(depth: int, rows: int | None, seed: int) -> None:
    """Through a pipeline all rows, counters and outputs are what they are without one, and nothing is left under way."""
    model, outputs = Pair(rows), []
    switch, source = switches(model, seed), batches()
    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=depth) as pipe:
        for _ in range(STEPS):
            switch()
            outputs.append(pipe.progress(source)[1].tolist())
    assert_ended(model)
    found, wanted = (all_of(model), outputs), plain(seed)
    assert [k for k in range(STEPS) if outputs[k] != wanted[1][k]] == []
    assert found == wanted


def wait_until_full(pipe: ec.TrainPipeline, patience_s: float = 10.0) -> None:
    """Until all batches of its depth are planned, or for so long."""
    end = time.monotonic() + patience_s
    while len(pipe._flow.ready) < pipe._flow.depth and time.monotonic() < end:
        pipe._check_open()
        time.sleep(0.001)


def assert_ended(model: Pair) -> None:
    for collection in (model.one, model.two):
        assert (collection.manager.outstanding, collection.manager.stats()["pinned"]) == (0, 0)
        collection.manager.planner.check()


@pytest.fixture
def slow_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller comes back with the next change before what the last one has undone is planned again."""
    plan_part = Flow._plan_part

    def slowly(self: Flow, *args: Any) -> Any:
        time.sleep(0.004)
        return plan_part(self, *args)

    monkeypatch.setattr(Flow, "_plan_part", slowly)


def test_a_second_change_comes_before_the_first_is_planned_again(slow_planner: None) -> None:
    """Batches that wait to be planned for one collection have plans of the other, which are undone in order, too."""

    def run(model: Pair, step: Callable[[int], Any]) -> None:
        for k in range(12):
            model.one.train(k % 6 != 3)
            model.two.train(k % 6 < 5)
            step(k)

    model, source = Pair(None), batches()
    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=6) as pipe:

        def piped(k: int) -> None:
            if k % 6 == 3:
                wait_until_full(pipe)
            pipe.progress(source)

        run(model, piped)
    assert_ended(model)
    other = Pair(None)
    dense, alone = torch.optim.SGD(other.parameters(), lr=0.1), batches()
    run(other, lambda k: train_alone(other, dense, next(alone)))
    assert all_of(model) == all_of(other)


def test_a_pipeline_is_closed_while_batches_wait_to_be_planned_again(slow_planner: None) -> None:
    """All that the batches behind the first had planned is undone: the next run sees no key that was not trained."""

    def run(switch_first: bool) -> Any:
        model, source = Pair(None), batches()
        with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=6) as pipe:
            for step in range(4):
                if step == 2:
                    wait_until_full(pipe)
                model.one.train(not switch_first or step != 2)
                pipe.progress(source)
        assert_ended(model)
        return all_of(model)[-2]  # the counters of the collection that was never frozen

    assert run(True) == run(False)


def too_large_ones() -> Iterator[ec.JaggedFeatures]:
    """Of the batches every fifth has too many keys for one collection, every seventh for the other."""
    generator = torch.Generator().manual_seed(7)
    for k in range(STEPS):
        counts = [70 if k % 5 == 3 else 6, 70 if k % 7 == 4 else 6]
        keys = [torch.randperm(90 if count == 70 else 25, generator=generator)[:count] for count in counts]
        lengths = torch.tensor([n for count in counts for n in (count - 5, 1, 1, 1, 1, 1)])
        yield ec.JaggedFeatures(["one", "two"], torch.cat(keys), lengths)


@pytest.mark.parametrize("seed", range(4))
def test_batches_that_do_not_fit_are_frozen_and_thawed(seed: int) -> None:
    """Who fails is who would without a pipeline, as the collections are when its turn comes; so is what was counted before it did."""

    def run(model: Pair, step: Callable[[], Any], ready: Callable[[], None]) -> Any:
        draw, found = random.Random(seed), []
        for _ in range(30):
            ready()
            model.one.train(draw.random() < 0.6)
            model.two.train(draw.random() < 0.6)
            try:
                found.append(step())
            except ec.HbmCapacityError as error:
                found.append(error.table)
        return found

    model, source = Pair(64), too_large_ones()
    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=5) as pipe:
        pipe.progress(source)

        found = run(model, lambda: pipe.progress(source)[1].tolist(), lambda: wait_until_full(pipe, 0.03))
    assert_ended(model)
    other, alone = Pair(64), too_large_ones()
    dense = torch.optim.SGD(other.parameters(), lr=0.1)
    train_alone(other, dense, next(alone))
    wanted = run(other, lambda: train_alone(other, dense, next(alone)), lambda: None)
    assert any(isinstance(one, str) for one in wanted)
    assert (found, all_of(model)) == (wanted, all_of(other))


def test_what_was_to_come_for_a_frozen_collection_is_not_expected_for_ever() -> None:
    """Its plans are undone, and their notices count again until they are taken back."""
    model, source = Pair(60, "lookahead"), batches()
    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=3, lookahead=2) as pipe:
        for step in range(STEPS):
            if step in (10, 20):
                wait_until_full(pipe)
            model.one.train(not 10 <= step < 12)
            model.two.train(not 20 <= step < 22)
            pipe.progress(source)
        for collection in (model.one, model.two):
            assert collection.manager.stats()["coming_keys"] == 0
