"""TrainPipeline: errors of each stage."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipelines import Model, Pair, batches, features, same, serial, sgd, threads_end, train

import embcache as ec
from embcache.timeline import Timeline

_threads_end = pytest.fixture(autouse=True)(threads_end)


def test_an_error_of_the_iterator_comes_after_the_batches_before_it() -> None:
    def failing() -> Iterator[Pair]:
        yield from batches(3)
        raise ZeroDivisionError("in the data set")

    one, other = Model(), Model()
    with ec.TrainPipeline(other, sgd(other)) as pipe:
        source = failing()
        assert len(train(pipe, source, 3)) == 3
        with pytest.raises(ZeroDivisionError, match="data set") as caught:
            pipe.progress(source)
        assert any(frame.name == "failing" for frame in traceback.extract_tb(caught.value.__traceback__))
        with pytest.raises(StopIteration):
            pipe.progress(source)
        more = train(pipe, batches(4, seed=4))
    serial(one, batches(3))
    assert serial(one, batches(4, seed=4)) == more and same(one, other)


def test_an_iterator_that_fails_now_and_then_loses_nothing_else() -> None:
    class Flaky:
        def __init__(self) -> None:
            self.inner, self.calls = batches(9), 0

        def __next__(self) -> Pair:
            self.calls += 1
            if self.calls % 4 == 0:
                raise OSError(f"call {self.calls}")
            return next(self.inner)

    one, other, flaky = Model(), Model(), Flaky()
    losses, failures = [], []
    with ec.TrainPipeline(other, sgd(other), depth=3) as pipe:
        while True:
            try:
                losses.append(pipe.progress(flaky)[0].item())  # type: ignore[arg-type]
            except OSError as error:
                failures.append(str(error))
            except StopIteration:
                break
    assert losses == serial(one, batches(9)) and failures == ["call 4", "call 8", "call 12"]
    assert same(one, other)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_iterator_may_raise_anything(kind: type[BaseException]) -> None:
    class Raising:
        def __next__(self) -> Pair:
            raise kind("from the data")

    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        with pytest.raises(kind):
            pipe.progress(Raising())  # type: ignore[arg-type]
        assert len(train(pipe, batches(2))) == 2


def test_errors_of_planning_reach_the_batch_they_belong_to() -> None:
    """A missing feature, a batch that never fits: passed over, with everything else as if it had not been there."""
    good = list(batches(8))
    stream = [
        *good[:3],
        (features(range(100)), torch.zeros(100)),
        *good[3:5],
        (features([1], "other"), torch.zeros(1)),
        *good[5:],
    ]
    one, other = Model(), Model()
    losses, errors = [], []
    with ec.TrainPipeline(other, sgd(other), depth=5) as pipe:
        source = iter(stream)
        for _ in stream:
            try:
                losses.append(pipe.progress(source)[0].item())
            except (ec.HbmCapacityError, ec.ShapeError) as error:
                errors.append(error)
        assert pipe.batches_done == 8
    assert isinstance(errors[0], ec.HbmCapacityError) and errors[0].never_fits and errors[0].need == 100
    assert isinstance(errors[1], ec.ShapeError) and "'item'" in str(
        errors[1]
    )  # nothing in that batch is for the collection
    assert losses == serial(one, iter(good)) and same(one, other)


def test_closing_ends_a_step_that_was_interrupted_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking a batch and training it: nobody else ends its plan where the pipeline is closed next."""
    model = Model()
    with ec.TrainPipeline(model, sgd(model), depth=3) as pipe:
        source = batches(8)
        pipe.progress(source)
        start = pipe.timeline.start

        def interrupted(stage: str, number: int) -> float:
            if stage == "compute":
                raise KeyboardInterrupt
            return start(stage, number)

        monkeypatch.setattr(pipe.timeline, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.progress(source)
    assert (model.rows.manager.outstanding, model.rows.manager.stats()["pinned"]) == (0, 0)


def test_an_error_in_the_step_ends_its_pins() -> None:
    class Failing(Model):
        calls = 0

        def forward(self, batch: Any) -> Any:
            self.calls += 1
            loss, logits = super().forward(batch)
            if self.calls == 3:
                raise ZeroDivisionError("in the loss")
            return loss, logits

    model = Failing(rows=16)
    with ec.TrainPipeline(model, sgd(model), depth=4) as pipe:
        source, kept = batches(12), []
        for _ in range(12):
            try:
                pipe.progress(source)
            except ZeroDivisionError as error:
                kept.append(error)  # whose traceback holds the graph
        assert len(kept) == 1 and pipe.batches_done == 11
        with pytest.raises(StopIteration):
            pipe.progress(source)
        assert model.rows.manager.stats()["pinned"] == 0


def test_a_thread_that_cannot_go_on_says_so() -> None:
    ended = threading.Event()

    class Broken(Timeline):
        def start(self, stage: str, number: int) -> float:
            if stage == "wait_loaded" and number > 1:
                ended.set()
                raise MemoryError("of the pipeline's own")
            return super().start(stage, number)

    def held_up() -> Iterator[Pair]:
        for number, batch in enumerate(batches(50)):
            if number == 3:
                ended.wait()  # the coordinator has nothing to do but to wait for this batch
            yield batch

    model = Model()
    pipe = ec.TrainPipeline(model, sgd(model))
    pipe._flow.timeline = Broken()
    with pytest.raises(MemoryError, match="pipeline's own"):
        train(pipe, held_up())
    with pytest.raises(MemoryError):
        pipe.progress(batches(1))
    pipe.close()
    model.rows.manager.close()
