"""TrainPipeline against use that nobody meant: each ends in the right numbers or in an error that says what to do, never in a hang."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipelines import (
    Model,
    Pair,
    Towers,
    batches,
    features,
    no_thread_left,
    same,
    serial,
    sgd,
    tower_batches,
    train,
)

import embcache as ec

COUNTED = ec.AdmitAndEvictConfig(admit_threshold=3)


def at_rest(model: Model) -> bool:
    """Whether nothing of a pipeline is left in the model's planner."""
    manager = model.rows.manager
    manager.planner.check()
    return model.rows.feed is None and (manager.outstanding, manager.stats()["pinned"]) == (0, 0)


# ------------------------------------------------------------------------------------------------ memory that is used again


def test_an_iterator_that_fills_the_same_memory_again() -> None:
    """Its batches would be planned with their own ids, and trained with those of a later one."""

    def again(count: int) -> Iterator[Pair]:
        generator = torch.Generator().manual_seed(0)
        keys = features(torch.zeros(8, dtype=torch.int64))
        for _ in range(count):
            keys.values().copy_(torch.randint(0, 60, (8,), generator=generator))
            yield keys, (keys.values() % 2).float()

    one, other = Model(), Model()
    with ec.TrainPipeline(one, sgd(one), depth=4) as pipe, pytest.raises(ec.PlanError, match="memory of its own"):
        train(pipe, again(30))
    with ec.TrainPipeline(other, sgd(other), depth=4) as pipe:
        again_and_apart = ((features(keys.values().clone()), labels.clone()) for keys, labels in again(30))
        losses = train(pipe, again_and_apart)
    assert losses == serial(Model(), again(30)) and at_rest(one)


def test_a_forward_that_changes_ids_before_it_looks_them_up() -> None:
    class Folding(Model):
        def forward(self, batch: Any) -> Any:
            batch[0].values().remainder_(7)
            return super().forward(batch)

    class Scaling(Model):
        def forward(self, batch: Any) -> Any:
            out = super().forward(batch)
            batch[0].values().remainder_(7)  # too late to matter
            return out

    model = Folding()
    with ec.TrainPipeline(model, sgd(model)) as pipe, pytest.raises(ec.PlanError, match="into forward"):
        pipe.progress(batches(5))
    assert not any(state.any() for _, _, state, *_ in model.rows.tables()["item"].items()), "nothing has trained"
    after, plain = Scaling(), Model()
    with ec.TrainPipeline(after, sgd(after)) as pipe:
        assert train(pipe, batches(20)) == serial(plain, batches(20))


def test_tensors_whose_writes_are_not_counted() -> None:
    def of_inference() -> Iterator[Pair]:
        for keys, labels in batches(12):
            with torch.inference_mode():
                copied = keys.values().clone()
            yield features(copied), labels

    one, other = Model(), Model()
    with ec.TrainPipeline(one, sgd(one)) as pipe:
        assert train(pipe, of_inference()) == serial(other, batches(12)) and same(one, other)


# --------------------------------------------------------------------------------------------------- not the end of the data


@pytest.mark.parametrize("where", ["forward", "features", "evaluation"])
def test_a_stop_iteration_of_anybody_else_is_not_the_end(where: str) -> None:
    class Ending(Model):
        def forward(self, batch: Any) -> Any:
            calls.append(1)
            if where != "features" and len(calls) == 3:
                next(iter(()))
            return super().forward(batch)

    def choose(batch: Any) -> Any:
        chosen.append(1)
        if where == "features" and len(chosen) == 3:
            next(iter(()))
        return batch[0]

    calls: list[int] = []
    chosen: list[int] = []
    model = Ending()
    if where == "evaluation":
        model.eval()
    with ec.TrainPipeline(model, sgd(model), features=choose) as pipe:
        source, done = batches(9), 0
        with pytest.raises(RuntimeError, match="StopIteration"):
            for done in range(9):  # noqa: B007
                pipe.progress(source)
        assert done == 2
        for _ in range(6):
            pipe.progress(source)
        with pytest.raises(StopIteration):
            pipe.progress(source)


# ------------------------------------------------------------------------------------------------- plans that nobody uses


def test_a_step_that_leaves_plans_unused_says_so() -> None:
    """Its keys were counted, which a loop without a pipeline would not have done."""

    class Skipping(Model):
        skipped = False

        def forward(self, batch: Any) -> Any:
            if self.skipped:
                loss = self.top(torch.ones(1, 4)).sum()
                return loss, loss
            return super().forward(batch)

    model = Skipping(table={"admit_and_evict": COUNTED})
    with ec.TrainPipeline(model, sgd(model), depth=2) as pipe:
        source = batches(9)
        pipe.progress(source)
        model.skipped = True
        with pytest.raises(ec.PlanError, match="used 1 plan.*'rows' fewer.*features="):
            pipe.progress(source)
        assert pipe.batches_done == 2  # it has trained
        model.skipped = False
        assert len(train(pipe, source)) == 7
    one, other = Skipping(table={"admit_and_evict": COUNTED}), Skipping(table={"admit_and_evict": COUNTED})
    one.skipped = other.skipped = True
    with ec.TrainPipeline(one, sgd(one), features=lambda batch: []) as pipe:
        losses = train(pipe, batches(5))
    assert losses == serial(other, batches(5)) and same(one, other)


def test_two_towers_of_which_one_is_only_read() -> None:
    class Reading(Towers):
        def forward(self, batch: Any) -> Any:
            keys, plain = batch
            with torch.no_grad():
                self.user(keys)
            score = self.item(keys)["item"].values().sum(1) + self.stock(plain).sum(1)
            return score.sum(), score

    model = Reading(40)
    with ec.TrainPipeline(model, sgd(model)) as pipe, pytest.raises(ec.PlanError, match="'user'"):
        pipe.progress(tower_batches(3))
    model.user.eval()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        assert len(train(pipe, tower_batches(3))) == 3


# ------------------------------------------------------------------------------------------------------- who calls, and when


def test_progress_inside_a_step_and_inside_the_iterator() -> None:
    class Nested(Model):
        def forward(self, batch: Any) -> Any:
            with pytest.raises(ec.PlanError, match="inside a step"):
                pipe.progress(source)
            return super().forward(batch)

    def nested() -> Iterator[Pair]:
        for batch in batches(6):
            with pytest.raises(ec.PlanError, match="by its iterator"):
                pipe.progress(source)
            yield batch

    model, plain = Nested(), Model()
    source: Iterator[Pair] = nested()
    with ec.TrainPipeline(model, sgd(model), depth=3) as pipe:
        assert train(pipe, source) == serial(plain, batches(6)) and same(model, plain)


def test_evaluation_inside_a_step() -> None:
    class Looking(ec.TrainPipeline):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            with torch.no_grad():
                self.progress(batches(1, seed=3))

    model, plain = Model(), Model()
    with Looking(model, sgd(model)) as pipe:
        assert train(pipe, batches(6)) == serial(plain, batches(6)) and same(model, plain)


def test_two_threads_that_train_at_once() -> None:
    """Whoever comes second is refused, and each batch is trained once, in order."""
    entered, go_on = threading.Event(), threading.Event()

    class Waiting(Model):
        def forward(self, batch: Any) -> Any:
            entered.set()
            assert go_on.wait(60)
            return super().forward(batch)

    model, plain, losses = Waiting(), Model(), []
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        source = batches(4)
        thread = threading.Thread(target=lambda: losses.append(pipe.progress(source)[0].item()))
        thread.start()
        assert entered.wait(60)
        with pytest.raises(ec.PlanError, match="two threads"):
            pipe.progress(source)
        go_on.set()
        thread.join()
        losses += train(pipe, source)
    assert losses == serial(plain, batches(4)) and same(model, plain)


def test_closing_while_another_thread_trains() -> None:
    """The step that is under way trains what was planned for it; nothing is planned a second time."""
    entered, go_on = threading.Event(), threading.Event()

    class Waiting(Model):
        def forward(self, batch: Any) -> Any:
            entered.set()
            assert go_on.wait(60)
            return super().forward(batch)

    model, plain = (kind(table={"admit_and_evict": COUNTED}) for kind in (Waiting, Model))
    pipe, losses = ec.TrainPipeline(model, sgd(model), depth=4), []
    thread = threading.Thread(target=lambda: losses.append(pipe.progress(batches(9))[0].item()))
    thread.start()
    assert entered.wait(60)
    pipe.close()
    go_on.set()
    thread.join()
    pipe.close()
    assert losses == serial(plain, batches(1)) and at_rest(model)
    assert model.rows.manager.planner.step == 1 and same(model, plain)


def test_a_signal_that_closes_the_pipeline() -> None:
    """As a handler of SIGTERM would, wherever the caller's thread is: also where it holds a lock that the other threads want."""
    model, rng = Model(rows=24), random.Random(7)
    pipe: ec.TrainPipeline | None = None

    def handle(number: int, frame: Any) -> None:
        if pipe is not None:
            pipe.close()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for attempt in range(60):
            pipe = ec.TrainPipeline(model, sgd(model), depth=rng.choice([1, 3, 16]))
            source = batches(10**6, seed=attempt)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 8e-3))
            with pytest.raises(ec.ClosedError):
                while True:
                    pipe.progress(source)
                    model.rows.tables()["item"].lookup([1, 2, 3], insert=False)
            pipe.close()
            deadline = time.monotonic() + 60
            while not no_thread_left() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert at_rest(model), attempt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_closing_inside_a_lock_waits_for_nobody() -> None:
    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    train(pipe, batches(50), 3)
    with model.rows.manager.door:
        pipe.close()
    deadline = time.monotonic() + 60
    while not no_thread_left() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert at_rest(model)


def test_a_pipeline_that_was_not_made_takes_no_collection() -> None:
    model = Towers(40)
    model.item.close()
    with pytest.raises(ec.ClosedError) as kept:
        ec.TrainPipeline(model, None)
    assert model.user.feed is None, kept


def test_one_of_two_collections_is_closed() -> None:
    model = Towers(40)
    pipe = ec.TrainPipeline(model, sgd(model))
    source = tower_batches(30)
    pipe.progress(source)
    model.item.close()
    for _ in range(3):
        with pytest.raises(ec.ClosedError):
            for _ in range(30):
                pipe.progress(source)
    pipe.close()
    assert (model.user.manager.outstanding, model.user.manager.stats()["pinned"]) == (0, 0)
    model.user.manager.planner.check()


def test_a_thread_whose_start_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a handler raises, a data loader's of SIGCHLD say: Python has given up the thread, which dies before it runs."""
    died: list[str] = []

    class Dying(threading.Thread):
        def start(self) -> None:
            if self.name in died:
                return super().start()
            died.append(self.name)
            self._target = lambda *arguments: None
            super().start()
            self.join()
            raise ZeroDivisionError("in a handler")

    monkeypatch.setattr("embcache.stages.threading.Thread", Dying)
    model, plain = Model(), Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        source = batches(5)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                pipe.progress(source)
        assert train(pipe, source) == serial(plain, batches(5)) and same(model, plain)
    assert died == ["embcache load", "embcache plan"]


@pytest.mark.parametrize(("depth", "lookahead"), [(1, 0), (6, 0), (2, 3)])
def test_an_epoch_that_is_left_early_trains_the_same_batches_each_time(depth: int, lookahead: int) -> None:
    """As many of the old iterator's as may be under way come first, whichever thread is faster."""

    def slow(epoch: int) -> Iterator[Pair]:
        for batch in epochs[epoch]:
            if rng.random() < 0.3:
                time.sleep(rng.random() * 2e-3)
            yield batch

    epochs, rng = [list(batches(14, seed=epoch)) for epoch in range(4)], random.Random(5)
    left: list[Pair] = []
    order: list[Pair] = []
    for epoch in epochs:
        coming = left + epoch
        order += coming[:7]
        left = coming[7 : 7 + max(depth + lookahead, len(left) - 7)]
    expected = serial(Model(), iter(order))
    for _ in range(3):
        model, losses = Model(), []
        with ec.TrainPipeline(model, sgd(model), depth=depth, lookahead=lookahead) as pipe:
            for epoch in range(4):
                losses += train(pipe, slow(epoch), 7)
        assert losses == expected
