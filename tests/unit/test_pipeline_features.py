"""TrainPipeline: features in any batch, for one collection and for several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from pipelines import Model, Towers, batches, features, same, serial, sgd, threads_end, tower_batches, train

import embcache as ec

_threads_end = pytest.fixture(autouse=True)(threads_end)


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


def test_a_feature_that_is_missing_is_named() -> None:
    """What was not planned since it lacks a feature says so, as it does without a pipeline."""
    model = Model()
    for chosen in (None, lambda batch: batch[0], lambda batch: {"rows": batch[0]}):
        with ec.TrainPipeline(model, sgd(model), features=chosen) as pipe:
            with pytest.raises(ec.ShapeError, match="'item'"):
                pipe.progress(iter([(features([1, 2], "itme"), torch.zeros(2))]))
            pipe.progress(batches(1))


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
