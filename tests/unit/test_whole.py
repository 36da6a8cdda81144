"""A whole model in one generation: all collections, named by where they are, and the dense part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import embcache as ec
from embcache.checkpoint import Writer
from embcache.saving import describe


class Model(nn.Module):
    """Two collections with a table of the same name, and a dense part."""

    def __init__(self, hidden: int = 3, optimizer: ec.OptimizerSpec = ec.Adam(lr=0.1)) -> None:
        super().__init__()
        self.users = ec.EmbeddingBagCollection([ec.TableConfig("t", 4, ["u"])], optimizer=optimizer)
        self.items = ec.EmbeddingCollection([ec.TableConfig("t", 2, ["i"], hbm_rows=8)], optimizer=ec.SGD(lr=0.1))
        self.top = nn.Linear(6, hidden)

    def forward(self, users: list[int], items: list[int]) -> torch.Tensor:
        rows = self.items(one_each("i", items))["i"].values()
        return self.top(torch.cat([self.users(one_each("u", users)).values(), rows], dim=1)).sum()


def one_each(name: str, values: list[int]) -> ec.JaggedFeatures:
    return ec.JaggedFeatures([name], torch.tensor(values), torch.ones(len(values), dtype=torch.int64))


def train(model: Model, dense: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        dense.zero_grad()
        loss = model([step, step + 1, -step], [step % 5, step, 7])
        loss.backward()
        dense.step()
        model.users.optimizer.step()
        model.items.optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model: Model) -> Any:
    tables = {
        f"{where}/{name}": sorted(
            (key, *weights.tolist(), *state.tolist())
            for keys, all_weights, all_state, *_ in view.items()
            for key, weights, state in zip(keys.tolist(), all_weights, all_state, strict=True)
        )
        for where in ("users", "items")
        for name, view in getattr(model, where).tables().items()
    }
    return (
        tables,
        {name: value.tolist() for name, value in model.state_dict().items()},
        model.users.optimizer.step_count,
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_model_goes_on_where_it_was_saved(background: bool, tmp_path: Path) -> None:
    straight = Model()
    adam = torch.optim.Adam(straight.parameters())
    start = {name: value.clone() for name, value in straight.state_dict().items()}
    losses = train(straight, adam, range(12))

    first = Model()
    first.load_state_dict(start)
    dense = torch.optim.Adam(first.parameters())
    assert train(first, dense, range(5)) == losses[:5]
    ec.save(first, tmp_path, state={"dense": dense.state_dict()})
    train(first, dense, range(5, 7))
    saved = ec.save(first, tmp_path, delta=True, background=background, state={"dense": dense.state_dict(), "next": 7})
    train(first, dense, range(7, 9))  # lost
    assert (saved.result(60) if isinstance(saved, ec.Saving) else saved) == 2
    assert [one.kind for one in ec.generations(tmp_path)] == ["full", "delta"]

    second = Model()
    dense = torch.optim.Adam(second.parameters())
    report = ec.restore(second, tmp_path)
    dense.load_state_dict(report.state["dense"])
    assert (report.generation, report.matched) == (2, ["users/t", "items/t"])
    assert train(second, dense, range(report.state["next"], 12)) == losses[7:]
    assert everything(second) == everything(straight)


def test_another_dense_part_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    ec.save(model, tmp_path)
    other = Model(hidden=4)
    train(other, torch.optim.SGD(other.parameters(), 0.1), range(2))
    before = everything(other)
    with pytest.raises(
        ec.ConfigError, match=r"'top.weight' is torch.float32 \(4, 6\), in the checkpoint torch.float32 \(3, 6\)"
    ):
        ec.restore(other, tmp_path)
    other.bottom = nn.Linear(1, 1)
    with pytest.raises(ec.ConfigError, match="lacks \\['bottom.bias'"):
        ec.restore(other, tmp_path)
    del other.bottom
    assert everything(other) == before


def test_one_collection_of_several_that_does_not_fit_leaves_all_as_they_were(tmp_path: Path) -> None:
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    ec.save(model, tmp_path)
    other = Model(optimizer=ec.Adagrad())
    train(other, torch.optim.SGD(other.parameters(), 0.1), range(2))
    before = everything(other)
    with pytest.raises(ec.ConfigError, match="'users/t'.*optimizer 'adam', not 'adagrad'"):
        ec.restore(other, tmp_path)
    assert everything(other) == before


def test_a_model_without_a_collection_and_a_checkpoint_without_a_dense_part(tmp_path: Path) -> None:
    with pytest.raises(ec.ConfigError, match="holds no embedding collection"):
        ec.save(nn.Linear(1, 1), tmp_path)
    with pytest.raises(ec.ConfigError, match="give a torch.nn.Module"):
        ec.save({}, tmp_path)  # type: ignore[arg-type]
    alone = ec.EmbeddingBagCollection([ec.TableConfig("t", 4)])
    alone.save(tmp_path)
    assert ec.restore(alone, tmp_path).matched == ["t"]  # the model is the collection
    wrapped = _Wrapped(alone)
    with pytest.raises(ec.ConfigError, match="none of the tables"):
        ec.restore(wrapped, tmp_path)
    with Writer(tmp_path) as writer:  # as one that was made of other files
        writer.begin()
        writer.table(describe(alone.manager, 0, "rows"))
        writer.commit()
        writer.publish()
    with pytest.raises(ec.ConfigError, match="no dense part"):
        ec.restore(wrapped, tmp_path)


def test_two_tables_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "a": ec.EmbeddingBagCollection([ec.TableConfig("b/c", 4)]),
            "a/b": ec.EmbeddingBagCollection([ec.TableConfig("c", 4)]),
        }
    )
    with pytest.raises(ec.ConfigError, match="both calls 'a/b/c'"):
        ec.save(model, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ec.ConfigError, match="both calls 'a/b/c'"):
        ec.restore(model, tmp_path)


class _Wrapped(nn.Module):
    """A dense part beside a collection that was saved alone."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.rows, self.top = collection, nn.Linear(1, 1)


def test_a_delta_after_another_way_of_saving_is_a_full_one(tmp_path: Path) -> None:
    model = Model()
    dense = torch.optim.SGD(model.parameters(), 0.1)
    train(model, dense, range(2))
    ec.save(model, tmp_path / "a")
    model.users.save(tmp_path / "a")
    for path in ("a", "b", "a"):
        train(model, dense, range(2, 4))
        ec.save(model, tmp_path / path, delta=True)
        assert ec.generations(tmp_path / path)[-1].kind == "full"
    train(model, dense, range(2))
    ec.save(model, tmp_path / "a", delta=True)
    assert ec.generations(tmp_path / "a")[-1].kind == "delta"


def test_a_dense_part_that_refuses_its_values_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Names and shapes fit, yet the model's own hook raises, when half of it is loaded already."""
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    ec.save(model, tmp_path)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(3, 6))
    ec.save(model, tmp_path)
    before, saved = everything(model), model.users.manager.saved

    def refuse(module: nn.Module, keys: Any) -> None:
        raise ValueError("not this one")

    hook = model.top.register_load_state_dict_post_hook(refuse)
    with pytest.raises(ValueError, match="not this one"):
        ec.restore(model, tmp_path, 1)
    assert everything(model) == before and model.users.manager.saved == saved
    hook.remove()
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(6, 7))
    assert ec.save(model, tmp_path, delta=True) == 3
    assert ec.generations(tmp_path)[-1].kind == "delta"
    ec.restore(model, tmp_path, 1)
    assert everything(model) != before


def test_layers_that_have_no_shape_yet_take_the_saved_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({"rows": ec.EmbeddingBagCollection([ec.TableConfig("t", 4)]), "top": nn.Linear(4, 2)})
    ec.save(model, tmp_path)
    lazy = nn.ModuleDict({"rows": ec.EmbeddingBagCollection([ec.TableConfig("t", 4)]), "top": nn.LazyLinear(2)})
    ec.restore(lazy, tmp_path)
    assert torch.equal(lazy["top"].weight, model["top"].weight)
