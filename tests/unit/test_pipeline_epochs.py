"""TrainPipeline: epochs, and evaluation between steps."""

from __future__ import annotations

import time

import pytest
import torch
from pipelines import Model, Pair, batches, same, serial, sgd, threads_end, train

import embcache as ec

_threads_end = pytest.fixture(autouse=True)(threads_end)


def test_epochs_on_new_iterators_and_on_one_that_starts_again() -> None:
    class Again:
        def __init__(self) -> None:
            self.left = iter(())
            self.begin()

        def begin(self) -> None:
            self.left = batches(7, seed=5)

        def __next__(self) -> Pair:
            try:
                return next(self.left)
            except StopIteration:
                self.begin()
                raise

    one, other, third = Model(), Model(), Model()
    losses = [serial(one, batches(7, seed=5)) for _ in range(3)]
    with ec.TrainPipeline(other, sgd(other)) as pipe:
        assert [train(pipe, batches(7, seed=5)) for _ in range(3)] == losses
        assert pipe.batches_done == 21
        assert train(pipe, iter(())) == []
    again = Again()
    with ec.TrainPipeline(third, sgd(third)) as pipe:
        assert [train(pipe, again) for _ in range(3)] == losses  # type: ignore[arg-type]
    assert same(one, other) and same(one, third)


def test_an_ended_iterator_goes_on_ending() -> None:
    model, source = Model(), batches(2)
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        train(pipe, source)
        for _ in range(5):
            with pytest.raises(StopIteration):
                pipe.progress(source)


def test_changing_the_iterator_loses_no_batch() -> None:
    one, other = Model(), Model()
    with ec.TrainPipeline(other, sgd(other), depth=4) as pipe:
        first, second = batches(6, seed=1), batches(6, seed=2)
        train(pipe, first, 2)
        while pipe._flow.pulled < 6:
            time.sleep(0.001)
        found = train(pipe, second)  # those that were pulled come first
        assert train(pipe, first) == [] and pipe.batches_done == 12
    expected = serial(one, batches(6, seed=1)) + serial(one, batches(6, seed=2))
    assert found == expected[2:] and same(one, other)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_leaves_parked_batches_where_they_are(mode: str) -> None:
    """The same numbers, mode and memory as evaluation in the serial run, though later batches are planned (CASES.md 36)."""
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=3, evict_step_interval=2, time_source="step")
    one, other = (Model(table={"admit_and_evict": rule}) for _ in range(2))
    reference, source, values, found = batches(20), batches(20), [], []
    optimizer = sgd(one)
    with ec.TrainPipeline(other, sgd(other), depth=5) as pipe:
        for step in range(20):
            optimizer.zero_grad()
            loss, _ = one(next(reference))
            loss.backward()
            optimizer.step()
            one.rows.optimizer.step()
            pipe.progress(source)
            if step % 3 == 0:
                for model in (one, other):
                    model.train(mode != "eval")
                with torch.set_grad_enabled(mode == "eval"):
                    found.append(
                        [pipe.progress(probes)[1].tolist() for probes in [batches(4, seed=9)] for _ in range(4)]
                    )
                with torch.no_grad():
                    values.append([one(batch)[1].tolist() for batch in batches(4, seed=9)])
                for model in (one, other):
                    model.train()
        assert found == values and pipe.batches_done == 20
        assert pipe.stats()["stage_s"]["evaluate"] > 0
        with pytest.raises(StopIteration):
            pipe.progress(source)
    assert same(one, other)


def test_evaluation_with_the_training_iterator_is_refused() -> None:
    model, source = Model(), batches(20)
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        pipe.progress(source)
        model.eval()
        with pytest.raises(ec.PlanError, match="of its own"):
            pipe.progress(source)
        model.train()
        assert len(train(pipe, source)) == 19
