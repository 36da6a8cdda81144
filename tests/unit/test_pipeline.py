"""TrainPipeline: what it accepts, and its life from the first batch to the end of the interpreter."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pairs import Pairs

import embcache as ec
from embcache.timeline import Timeline

SOAK = int(os.environ.get("EMBCACHE_SOAK") or 1)
Pair = tuple[ec.JaggedFeatures, torch.Tensor]


def features(keys: Any, name: str = "item") -> ec.JaggedFeatures:
    values = torch.as_tensor(keys, dtype=torch.int64)
    return ec.JaggedFeatures([name], values, torch.ones_like(values))


def batches(count: int, seed: int = 0, size: int = 8, keys: int = 60) -> Iterator[Pair]:
    """`count` batches of (features, labels)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        values = torch.randint(0, keys, (size,), generator=generator)
        yield features(values), (values % 2).float()


class Model(torch.nn.Module):
    """Logistic regression on one embedding."""

    def __init__(self, rows: int | None = 40, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        table = ec.TableConfig("item", 4, hbm_rows=rows, **options.pop("table", {}))
        self.rows = ec.EmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=0.1), **options)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, labels = batch
        logits = self.top(self.rows(keys).values()).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows_of(model: Model) -> dict[int, bytes]:
    found = {}
    for keys, weights, state, *counters in model.rows.tables()["item"].items():
        for i, key in enumerate(keys.tolist()):
            extra = [column[i].tobytes() for column in counters if column is not None]
            found[key] = b"".join([weights[i].tobytes(), state[i].tobytes(), *extra])
    return found


def serial(model: Model, source: Iterator[Pair]) -> list[float]:
    """The loop that a pipeline must equal."""
    optimizer, losses = sgd(model), []
    for batch in source:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        model.rows.optimizer.step()
        losses.append(loss.item())
    return losses


def train(pipe: ec.TrainPipeline, source: Iterator[Any], most: int = 10**9) -> list[float]:
    losses: list[float] = []
    while len(losses) < most:
        try:
            losses.append(pipe.progress(source)[0].item())
        except StopIteration:
            break
    return losses


def same(one: Model, other: Model) -> bool:
    dense = zip(one.top.parameters(), other.top.parameters(), strict=True)
    return rows_of(one) == rows_of(other) and all(torch.equal(a, b) for a, b in dense)


def no_thread_left() -> bool:
    """Whether the threads of pipelines have ended."""
    return not [t for t in threading.enumerate() if t.name in ("embcache load", "embcache plan")]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while not no_thread_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert no_thread_left()


# ----------------------------------------------------------------------------------------------------------- arguments


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


# ------------------------------------------------------------------------------------------------- features in a batch


@dataclass
class Record:
    labels: torch.Tensor
    keys: ec.JaggedFeatures


class Named(NamedTuple):
    keys: ec.JaggedFeatures
    labels: torch.Tensor


class Slotted:
    __slots__ = ("keys", "labels")

    def __init__(self, keys: ec.JaggedFeatures, labels: torch.Tensor) -> None:
        self.keys, self.labels = keys, labels


class Foreign:
    """As a KeyedJaggedTensor: known by its methods."""

    def __init__(self, inner: ec.JaggedFeatures) -> None:
        self.inner = inner

    def keys(self) -> list[str]:
        return self.inner.keys()

    def values(self) -> torch.Tensor:
        return self.inner.values()

    def lengths(self) -> torch.Tensor:
        return self.inner.lengths()

    def weights_or_none(self) -> None:
        return None


SHAPES = {
    "tuple": (lambda k, y: (k, y), lambda b: b),
    "dict": (lambda k, y: {"deep": [{"keys": k}], "y": y}, lambda b: (b["deep"][0]["keys"], b["y"])),
    "dataclass": (lambda k, y: Record(y, k), lambda b: (b.keys, b.labels)),
    "named tuple": (Named, lambda b: b),
    "slots": (Slotted, lambda b: (b.keys, b.labels)),
    "foreign": (lambda k, y: (Foreign(k), y), lambda b: b),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_features_are_found_in_any_batch(shape: str) -> None:
    make, take = SHAPES[shape]

    class Taking(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward(take(batch))

    one, other = Model(), Taking()
    serial(one, batches(12))
    with ec.TrainPipeline(other, sgd(other)) as pipe:
        train(pipe, (make(*batch) for batch in batches(12)))
    assert same(one, other)


def test_an_unplanned_object_raises() -> None:
    class Rebuilding(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward((features(batch[0].values()), batch[1]))

    model = Rebuilding()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        source = batches(3)
        with pytest.raises(ec.PlanError, match="not planned.*features="):
            pipe.progress(source)
        with torch.no_grad():
            model(next(batches(1)))  # evaluation needs no plan
        model.eval()
        model(next(batches(1)))
        model.train()
    assert not any(state.any() for _, _, state, *_ in model.rows.tables()["item"].items()), "nothing has trained"
    loss, _ = model(next(batches(1)))  # and without the pipeline a collection plans for itself
    loss.backward()


def test_two_forwards_of_one_object_need_two_plans() -> None:
    class Twice(Model):
        def forward(self, batch: Any) -> Any:
            first, second = super().forward(batch), super().forward(batch)
            return first[0] + second[0], first[1]

    one, other, third = Twice(), Twice(), Twice()
    losses = serial(one, batches(10))
    with ec.TrainPipeline(other, sgd(other), features=lambda batch: [batch[0], batch[0]]) as pipe:
        assert train(pipe, batches(10)) == losses
    assert same(one, other)
    with ec.TrainPipeline(third, sgd(third)) as pipe, pytest.raises(ec.PlanError, match="more forwards"):
        pipe.progress(batches(2))


def test_several_objects_that_fit_are_ambiguous() -> None:
    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe, pytest.raises(ec.ConfigError, match="2 objects.*features="):
        pipe.progress(iter([(features([1]), features([2]))]))


class Towers(torch.nn.Module):
    """Two cached collections, one of sequences, beside a plain embedding (CASES.md 39, 40)."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        spec = ec.Adam(lr=0.01)
        self.user = ec.EmbeddingBagCollection([ec.TableConfig("user", 4, hbm_rows=rows)], optimizer=spec)
        self.item = ec.EmbeddingCollection([ec.TableConfig("item", 4, ["item", "both"], hbm_rows=rows)], optimizer=spec)
        self.stock = torch.nn.Embedding(10, 4)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, plain = batch
        user, item = self.user(keys)["user"], self.item(keys)
        score = (user * item["item"].values() * self.stock(plain)).sum(1) + item["both"].values().sum(1)
        return (score * score).mean(), score


def tower_batches(count: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        keys = torch.randint(0, 40, (18,), generator=generator)
        yield (
            ec.JaggedFeatures(["user", "item", "both", "unused"], torch.cat([keys, keys[:6]]), torch.ones(24).long()),
            keys[:6] % 10,
        )


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_several_collections_and_a_plain_embedding(depth: int) -> None:
    one, other = Towers(200), Towers(14)
    results = []
    optimizer = sgd(one)
    for batch in tower_batches(30):
        optimizer.zero_grad()
        loss, score = one(batch)
        loss.backward()
        optimizer.step()
        one.user.optimizer.step()
        one.item.optimizer.step()
        results.append(score.tolist())
    with ec.TrainPipeline(other, sgd(other), depth=depth) as pipe:
        source, found = tower_batches(30), []
        for _ in range(30):
            found.append(pipe.progress(source)[1].tolist())
        assert found == results
    for name in ("user", "item"):
        tables = [getattr(model, name).tables()[name] for model in (one, other)]
        a, b = (
            {k: (w.tobytes(), s.tobytes()) for ks, ws, ss, *_ in t.items() for k, w, s in zip(ks, ws, ss, strict=True)}
            for t in tables
        )
        assert a == b
    assert torch.equal(one.stock.weight, other.stock.weight)
    assert other.user.manager.stats()["swap_out_rows"] > 0 and other.item.manager.stats()["swap_out_rows"] > 0


def test_features_by_the_path_of_a_collection() -> None:
    one, other = Towers(100), Towers(100)
    with (
        ec.TrainPipeline(one, sgd(one)) as pipe,
        ec.TrainPipeline(other, sgd(other), features=lambda batch: {"user": batch[0], "item": [batch[0]]}) as named,
    ):
        assert train(pipe, tower_batches(6)) == train(named, tower_batches(6))
    with ec.TrainPipeline(other, None, features=lambda batch: {"users": batch[0]}) as pipe:
        with pytest.raises(ec.ConfigError, match="'users'"):
            pipe.progress(tower_batches(1))
    with ec.TrainPipeline(other, None, features=lambda batch: batch[1]) as pipe:
        with pytest.raises(ec.ShapeError, match="gave a Tensor"):
            pipe.progress(tower_batches(1))


# -------------------------------------------------------------------------------------------------- epochs and parking


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


# -------------------------------------------------------------------------------------------------------------- errors


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
            except (ec.HbmCapacityError, ec.PlanError) as error:
                errors.append(error)
        assert pipe.batches_done == 8
    assert isinstance(errors[0], ec.HbmCapacityError) and errors[0].never_fits and errors[0].need == 100
    assert isinstance(errors[1], ec.PlanError)  # nothing in that batch is for the collection
    assert losses == serial(one, iter(good)) and same(one, other)


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


# ---------------------------------------------------------------------------------------------------------- the window


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


# --------------------------------------------------------------------------------------------------------- custom steps


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


# ----------------------------------------------------------------------------------------------------------------- end


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


# ------------------------------------------------------------------------------------- Ctrl-C, processes, interpreter exit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a finalizer is lost
def test_interrupts_anywhere_leave_a_pipeline_that_goes_on() -> None:
    """KeyboardInterrupt at arbitrary moments of the caller's thread."""
    model = Model(rows=24)
    source = (batch for _ in range(10**6) for batch in batches(100))
    armed, stop = [False], threading.Event()

    def handle(number: int, frame: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        pause = 1e-4
        while not stop.wait(pause):
            pause = pause * 1.3 % 0.01 + 1e-4
            _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=interrupt)
    try:
        with ec.TrainPipeline(model, sgd(model), depth=4) as pipe:
            thread.start()
            interrupted = 0
            while interrupted < 200 * SOAK:
                try:
                    armed[0] = True
                    for _ in range(5):
                        pipe.progress(source)
                    armed[0] = False
                except KeyboardInterrupt:
                    interrupted += 1
            armed[0] = False
            done = pipe.batches_done
            for _ in range(5):
                pipe.progress(source)
            assert pipe.batches_done == done + 5
        for _ in range(20):  # interrupts while it starts and closes
            pipe = ec.TrainPipeline(model, sgd(model), depth=4)
            closed = False
            while not closed:
                try:
                    armed[0] = True
                    pipe.progress(source)
                    pipe.close()
                    armed[0] = False
                    closed = True
                except (KeyboardInterrupt, ec.ClosedError):
                    armed[0] = False
                    pipe.close()
                    closed = True
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert model.rows.manager.stats()["pinned"] == 0 and model.rows.manager.outstanding == 0
    model.rows.manager.planner.check()


def test_a_forked_child_is_refused_and_harms_nobody() -> None:
    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        source = batches(20)
        train(pipe, source, 3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pipe.progress(source)
            except ec.ForkError:
                pipe.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(train(pipe, source)) == 17


def run_child(body: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process of its own, behind this file's definitions."""
    path = [str(Path(ec.__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {path!r}\nfrom test_pipeline import *\n{body}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "del model",
        "pipe._flow.ready[0].started = True",
        "import atexit; atexit.register(lambda: pipe.close())",
    ],
)
def test_the_interpreter_ends_with_threads_alive(end: str) -> None:
    """CASES.md 43: no crash, no hang, whatever the threads were doing."""
    body = f"model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); source = batches(10**6)\ntrain(pipe, source, 5)\n{end}"
    ran = run_child(body)
    assert ran.returncode == 0 and ran.stderr == "", ran


def test_the_interpreter_ends_while_the_iterator_is_stuck() -> None:
    body = (
        "import itertools\ndef stuck():\n    yield from batches(2)\n    time.sleep(3600)\n"
        "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); train(pipe, stuck(), 2)"
    )
    ran = run_child(body)
    assert ran.returncode == 0, ran


def test_an_uncaught_error_ends_the_process() -> None:
    body = "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); train(pipe, batches(10**6), 5)\nraise ZeroDivisionError"
    ran = run_child(body)
    assert ran.returncode == 1 and "ZeroDivisionError" in ran.stderr, ran


def test_sigint_ends_a_training_process() -> None:
    body = (
        "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); source = batches(10**9)\n"
        "train(pipe, source, 5); print('ready', flush=True); train(pipe, source)"
    )
    path = [str(Path(ec.__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {path!r}\nfrom test_pipeline import *\n{body}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert child.returncode in (1, -signal.SIGINT, 130) and "KeyboardInterrupt" in errors


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_data_loader(method: str, persistent: bool) -> None:
    """CASES.md 61: workers that were forked beside the pipeline's threads, in two epochs."""
    if method == "spawn" and persistent:
        pytest.skip("the other three tell as much")
    one, other = Model(), Model()
    loader = torch.utils.data.DataLoader(
        Pairs(), batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    with ec.TrainPipeline(other, sgd(other)) as pipe:
        found = [train(pipe, iter(loader)) for _ in range(2)]
    plain = [Pairs()[place] for place in range(12)]
    assert found == [serial(one, iter(plain)) for _ in range(2)] and same(one, other)


# -------------------------------------------------------------------------------------------------------- many, and idle


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1800)
def test_memory_and_threads_stay_flat() -> None:
    """10,000 steps, evaluations between them."""
    model = Model(rows=32)
    one = list(batches(50, keys=50))
    with ec.TrainPipeline(model, sgd(model), depth=6) as pipe:
        source = (batch for _ in range(10**6) for batch in one)
        sizes, threads = [], set()
        for step in range(10_000):
            pipe.progress(source)
            if step % 500 == 499:
                model.eval()
                pipe.progress(iter(one[:1]))
                model.train()
            if step % 1000 == 999:
                gc.collect()
                sizes.append(resident_bytes())
                threads.add(threading.active_count())
    assert len(threads) == 1
    assert sizes[-1] - sizes[1] < 4 << 20, sizes


def test_idle_threads_take_no_cpu() -> None:
    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        train(pipe, batches(100), 3)
        time.sleep(0.2)  # until everything is ahead that may be
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(1.0)
        assert time.process_time() - cpu < 0.01 * (time.monotonic() - began)


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
