"""`replace_embeddings` converts a whole model, bit for bit, or nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import kjt
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

import embcache as ec
from embcache.errors import ConfigError
from embcache.torchrec import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection, replace_embeddings

BAGS = [
    EmbeddingBagConfig(name="t", num_embeddings=30, embedding_dim=4, feature_names=["f"]),
    EmbeddingBagConfig(name="u", num_embeddings=20, embedding_dim=8, feature_names=["f", "g"]),
]
SEQUENCES = [EmbeddingConfig(name="s", num_embeddings=25, embedding_dim=4, feature_names=["g"])]
BATCHES = [kjt(["f", "g"], [[[n, n + 1], [3]], [[n], [5, 5]]]) for n in range(4)]


class Model(torch.nn.Module):
    """A pooled and a sequence collection, one of them at two paths, and a dense part."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.deep = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(BAGS, device=device)})
        self.same = self.deep["bags"]
        self.sequence = EmbeddingCollection(SEQUENCES, device=device)
        self.top = torch.nn.Linear(24, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        tail = self.sequence(batch)["g"].to_padded_dense(1).squeeze(1)
        return self.top(torch.cat([self.deep["bags"](batch).values(), tail], dim=1)).sum()


def rows(collection: Any, table: str, count: int) -> torch.Tensor:
    return torch.from_numpy(collection.tables()[table].lookup(range(count), insert=False))


def test_a_model_is_converted_in_one_call() -> None:
    model = Model()
    old = {name: value.detach().clone() for name, value in model.named_parameters()}
    apply_optimizer_in_backward(torch.optim.Adagrad, model.deep.parameters(), {"lr": 0.5})
    expected = model(BATCHES[0])
    report = replace_embeddings(model, hbm_bytes=6000, optimizer=ec.SGD(lr=0.25))
    assert report.model is model and [one.path for one in report.collections] == ["deep.bags", "sequence"]
    bags, sequence = model.deep["bags"], model.sequence
    assert isinstance(bags, EmbCacheEmbeddingBagCollection) and isinstance(sequence, EmbCacheEmbeddingCollection)
    assert model.same is bags
    assert torch.equal(rows(bags, "t", 30), old["deep.bags.embedding_bags.t.weight"])
    assert torch.equal(rows(bags, "u", 20), old["deep.bags.embedding_bags.u.weight"])
    assert torch.equal(rows(sequence, "s", 25), old["sequence.embeddings.s.weight"])
    assert bags.manager.spec == ec.Adagrad(lr=0.5) and sequence.manager.spec == ec.SGD(lr=0.25)
    assert sum(one.hbm_bytes for one in report.collections) <= 6000
    assert bags.manager.stats()["misses"] == 0  # copying is not training
    torch.testing.assert_close(model(BATCHES[0]), expected)
    assert "deep.bags: EmbeddingBagCollection" in str(report) and "t: 30, u: 20" in str(report)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.5, "initial_accumulator_value": 0.25}),
        (RowWiseAdagrad, {"lr": 0.5}),
    ],
)
def test_training_goes_on_from_where_it_was(kind: Any, options: dict[str, Any]) -> None:
    """With the optimizer's state, in a buffer that holds a fraction of the rows."""
    torch.manual_seed(0)
    going, model = Model(), Model()
    model.load_state_dict(going.state_dict())
    for one in (going, model):
        apply_optimizer_in_backward(kind, [*one.deep.parameters(), *one.sequence.parameters()], options)
        for batch in BATCHES[:2]:
            one(batch).backward()
    report = replace_embeddings(model, hbm_bytes={"deep.bags": 2048, "sequence": 1024})
    assert all(one.with_state is (kind is not torch.optim.SGD) for one in report.collections)
    for batch in BATCHES[2:]:
        for one in (going, model):
            one(batch).backward()
    for table, count in (("t", 30), ("u", 20)):
        expected = going.deep["bags"].embedding_bags[table].weight.detach()
        torch.testing.assert_close(rows(model.deep["bags"], table, count), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows(model.sequence, "s", 25), going.sequence.embeddings["s"].weight.detach())


def test_adam_goes_on_with_its_moments_and_its_step() -> None:
    torch.manual_seed(0)
    stock = EmbeddingBagCollection(BAGS[:1])
    apply_optimizer_in_backward(torch.optim.Adam, stock.parameters(), {"lr": 0.1})
    touched = kjt(["f"], [[list(range(30))]])  # dense Adam moves every row, lazy Adam those of the batch
    for _ in range(3):
        (stock(touched).values() ** 2).sum().backward()
    ours = replace_embeddings(stock).model
    assert ours.optimizer.step_count == 3
    for module in (stock, ours):
        (module(touched).values() ** 2).sum().backward()
    torch.testing.assert_close(rows(ours, "t", 30), stock.embedding_bags["t"].weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_modules_are_converted_too(kind: Any) -> None:
    """On the CPU, FBGEMM has fused bags, and of optimizers these."""
    torch.manual_seed(0)
    stock = FusedEmbeddingBagCollection(BAGS, kind, {"lr": 0.1})

    def loss(module: Any, batch: Any) -> torch.Tensor:
        values = module(batch).values()
        return (values * values).sum()

    for batch in BATCHES[:2]:
        loss(stock, batch).backward()
    report = replace_embeddings(stock)
    ours = report.model
    assert report.collections[0].with_state is (kind is torch.optim.Adagrad)
    for batch in BATCHES[2:]:
        loss(stock, batch).backward()
        loss(ours, batch).backward()
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(rows(ours, name.split(".")[1], len(weight)), weight, rtol=1e-5, atol=1e-6)


def test_momentum_goes_to_the_table_of_that_very_name() -> None:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[feature])
        for name, feature in (("new_item", "f"), ("item", "g"))
    ]
    stock = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": 0.1})
    for batch in BATCHES[:2]:
        (stock(batch).values() ** 2).sum().backward()
    ours = replace_embeddings(stock).model
    for module in (stock, ours):
        for batch in BATCHES[:2]:
            (module(batch).values() ** 2).sum().backward()
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(rows(ours, name.split(".")[1], 8), weight, rtol=1e-5, atol=1e-6)


def test_half_precision_is_copied_bit_for_bit() -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=30, embedding_dim=4, feature_names=["f"], data_type=DataType.FP16
    )
    stock = EmbeddingBagCollection([config])
    weight = stock.embedding_bags["t"].weight.detach().clone()
    ours = replace_embeddings(stock, optimizer=ec.SGD()).model
    assert torch.equal(rows(ours, "t", 30), weight) and weight.dtype == torch.float16


def test_a_model_on_the_meta_device_has_nothing_to_copy() -> None:
    model = Model(device=torch.device("meta"))
    report = replace_embeddings(model, optimizer=ec.SGD())
    assert [one.rows for one in report.collections] == [{}, {}]
    model.to_empty(device="cpu")
    assert torch.isfinite(model.deep["bags"](BATCHES[0]).values()).all()


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = Model()
    modules = list(model.modules())
    apply_optimizer_in_backward(torch.optim.Adagrad, model.deep.parameters(), {"lr": 0.5})
    with pytest.raises(ConfigError, match="sequence: no optimizer was applied"):
        replace_embeddings(model)
    with pytest.raises(ConfigError, match="names \\['top'\\]"):
        replace_embeddings(model, hbm_bytes={"top": 5})
    with pytest.raises(ConfigError, match="hbm_bytes = 0"):
        replace_embeddings(model, hbm_bytes=0)
    with pytest.raises(ConfigError, match="need"):
        replace_embeddings(model, hbm_bytes=10, optimizer=ec.SGD())
    apply_optimizer_in_backward(torch.optim.RMSprop, model.sequence.parameters(), {"lr": 0.5})
    with pytest.raises(ConfigError, match="RMSprop"):
        replace_embeddings(model)
    assert list(model.modules()) == modules
    with pytest.raises(ConfigError, match="nothing to replace"):
        replace_embeddings(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="give a torch.nn.Module"):
        replace_embeddings("model")


def test_a_frozen_table_is_refused_as_it_would_be_trained() -> None:
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(BAGS)})
    model["bags"].embedding_bags["u"].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"bags: requires_grad is False for the tables \['u'\]"):
        replace_embeddings(model, optimizer=ec.SGD(lr=0.1))
    assert isinstance(model["bags"], EmbeddingBagCollection)
    model["bags"].embedding_bags["u"].weight.requires_grad_(True)
    replace_embeddings(model, optimizer=ec.SGD(lr=0.1)).model["bags"].close()
