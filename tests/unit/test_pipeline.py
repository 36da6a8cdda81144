"""TrainPipeline: what it accepts, its window, custom steps, what it says of itself."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipelines import Model, Pair, batches, features, same, serial, sgd, threads_end, train

import embcache as ec

_threads_end = pytest.fixture(autouse=True)(threads_end)


@pytest.mark.parametrize("depth", [0, 17, -1, 1.5, "6", None, True])
def test_depth_is_refused(depth: Any) -> None:
    with pytest.raises(ec.ConfigError, match="depth"):
        ec.TrainPipeline(Model(), None, depth=depth)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lookahead": -1}, "lookahead"),
        ({"lookahead": 1.5}, "lookahead"),
        ({"device": "nowhere"}, "device"),
        ({"device": "meta"}, "collection 'rows' is on 'cpu'"),
        ({"features": 3}, "features"),
        ({"step": "step"}, "step"),
    ],
)
def test_options_are_refused(options: dict[str, Any], word: str) -> None:
    model = Model()
    with pytest.raises(ec.ConfigError, match=word):
        ec.TrainPipeline(model, None, **options)
    assert model.rows.feed is None


def test_models_and_optimizers_are_refused() -> None:
    with pytest.raises(ec.ConfigError, match="no embedding collection"):
        ec.TrainPipeline(torch.nn.Linear(2, 2), None)
    with pytest.raises(ec.ConfigError, match="model is a list"):
        ec.TrainPipeline([], None)  # type: ignore[arg-type]
    with pytest.raises(ec.ConfigError, match="dense_optimizer"):
        ec.TrainPipeline(Model(), "sgd")  # type: ignore[arg-type]


def test_one_pipeline_at_a_time_trains_a_collection() -> None:
    model = Model()
    with ec.TrainPipeline(model, None), pytest.raises(ec.ConfigError, match="another pipeline"):
        ec.TrainPipeline(model, None)
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        assert len(train(pipe, batches(3))) == 3


def test_what_is_no_iterator_is_refused() -> None:
    with ec.TrainPipeline(Model(), None) as pipe, pytest.raises(ec.ConfigError, match="iter"):
        pipe.progress([1, 2])  # type: ignore[arg-type]


def test_a_model_that_returns_no_pair() -> None:
    class Bare(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)[0]

    model = Bare()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        with pytest.raises(ec.ConfigError, match=r"\(loss, output\)"):
            pipe.progress(batches(2))
        assert pipe.batches_done == 0 and model.rows.manager.stats()["pinned"] <= 16


def test_a_full_buffer_shortens_the_window_and_counts_it() -> None:
    one, other = Model(rows=100), Model(rows=8)
    losses = serial(one, batches(40))
    with ec.TrainPipeline(other, sgd(other), depth=8) as pipe:
        assert train(pipe, batches(40)) == losses
        stats = pipe.stats()
    assert 0 < stats["shortened"] <= 40 and stats["hit_rate"] < 1
    assert same(one, other) and other.rows.manager.stats()["swap_out_rows"] > 0


def test_the_coordinator_ends_what_has_trained() -> None:
    """Not the caller, for whom the device waits; and without a batch to come, too."""
    model = Model()
    manager, update = model.rows.manager, model.rows._update
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        train(pipe, batches(6), 3)
        assert not update.settles
        train(pipe, batches(0))
        while manager.door.late:  # nobody else enters
            time.sleep(1e-3)
        assert not manager.planner.outstanding
    assert update.settles
    serial(model, batches(2))
    assert not manager.door.late


def test_pins_of_others_are_an_error_not_a_hang() -> None:
    model = Model(rows=10)
    with ec.TrainPipeline(model, sgd(model), depth=4) as pipe:
        held = model.rows.manager.plan(features(range(100, 105)))
        model.rows.manager.swap_out(held)
        model.rows.manager.swap_in(held)
        with pytest.raises(ec.HbmCapacityError) as caught:
            pipe.progress(batches(3))
        assert not caught.value.never_fits
        model.rows.manager.finish(held)


def test_never_more_batches_under_way_than_depth() -> None:
    for depth in (1, 2, 5):
        model, most = Model(rows=100), 0
        pulled = 0

        def counted() -> Iterator[Pair]:
            nonlocal pulled
            for batch in batches(20):
                pulled += 1
                yield batch

        with ec.TrainPipeline(model, sgd(model), depth=depth) as pipe:
            source = counted()
            for done in range(20):
                pipe.progress(source)
                most = max(most, model.rows.manager.outstanding)
                assert pulled <= done + 1 + depth
        assert most <= depth


def test_custom_steps_by_argument_and_by_overriding() -> None:
    def clipped(model: Model) -> Any:
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
        model.rows.grad_scale = scaler.get_scale

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss, logits = model(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.top.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            model.rows.optimizer.step()
            return loss, logits

        return step

    one, other = Model(), Model()
    step = clipped(one)
    losses = [step(batch)[0].item() for batch in batches(10)]
    with ec.TrainPipeline(other, None, step=clipped(other)) as pipe:
        assert train(pipe, batches(10)) == losses
    assert same(one, other)

    hooks: list[str] = []

    class Halving(ec.TrainPipeline):
        def zero_grad(self) -> None:
            hooks.append("zero_grad")
            super().zero_grad()

        def forward(self, batch: Any) -> Any:
            loss, logits = super().forward(batch)
            return loss / 2, logits

        def backward(self, loss: torch.Tensor) -> None:
            hooks.append("backward")
            super().backward(loss)

        def optimizer_step(self) -> None:
            hooks.append("optimizer_step")
            super().optimizer_step()

    third, fourth = Model(), Model()
    with Halving(third, sgd(third)) as pipe, ec.TrainPipeline(fourth, sgd(fourth)) as plain:
        half, whole = train(pipe, batches(1)), train(plain, batches(1))
    assert hooks == ["zero_grad", "backward", "optimizer_step"] and half == [whole[0] / 2]


def test_schedulers_and_vector_losses() -> None:
    class Several(Model):
        def forward(self, batch: Any) -> Any:
            loss, logits = super().forward(batch)
            return torch.stack([loss, loss]), logits

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Several()
        schedule = torch.optim.lr_scheduler.StepLR(model.rows.optimizer, 1, 0.5)
        with ec.TrainPipeline(model, sgd(model)) as pipe:
            source = batches(3)
            for _ in range(3):
                pipe.progress(source)
                schedule.step()
    assert model.rows.optimizer.step_count == 3 and model.rows.optimizer.param_groups[0]["lr"] == 0.1 / 8


class Half(Model):
    """Computes its dense part in 16 bits, by a forward of its own."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, labels = batch
        rows = self.rows(keys).values()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.top(rows).squeeze(1)
        assert logits.dtype == torch.bfloat16
        logits = logits.float()
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


class Compiled(Model):
    """Its dense part is compiled."""

    def __init__(self, rows: int | None = 40) -> None:
        super().__init__(rows)
        self.top.compile(backend="eager")


@pytest.mark.parametrize("kind", [Half, Compiled])
def test_dense_parts_under_autocast_and_compiled(kind: type[Model]) -> None:
    one, other = kind(rows=None), kind(rows=24)
    with ec.TrainPipeline(other, sgd(other), depth=4) as pipe:
        losses = train(pipe, batches(30))
    assert losses == serial(one, batches(30)) and same(one, other)


def test_stats() -> None:
    model = Model(rows=20)
    with ec.TrainPipeline(model, sgd(model), depth=3) as pipe:
        empty = pipe.stats()
        assert empty["batches_done"] == 0 and empty["device_busy"] == empty["overlap"] == empty["wall_s"] == 0
        train(pipe, batches(40))
        stats = pipe.stats()
    assert stats["batches_done"] == 40 and 0 < stats["device_busy"] <= 1 and 0 <= stats["overlap"] <= 1
    assert 0 < stats["hit_rate"] < 1 and stats["swap_mb_per_s"] > 0
    assert all(stats["stage_s"][stage] > 0 for stage in ("load", "prepare", "plan", "swap_out", "swap_in", "compute"))
    assert set(stats["wait_s"]) == {"wait_room", "wait_loaded", "wait_window", "wait_ready"}
