"""What users do to a collection besides training it: compile, freeze, copy, pickle; odd names, odd batches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from batches import kjt
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import embcache as ec
from embcache.errors import ConfigError, ShapeError
from embcache.torchrec import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection


def bags(name: str = "t") -> EmbCacheEmbeddingBagCollection:
    table = EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=["f"])
    return EmbCacheEmbeddingBagCollection([table], optimizer=ec.SGD(lr=0.5))


class Model(torch.nn.Module):
    """Both collections of this package's own or TorchRec's face, and dense operations before and behind."""

    def __init__(self, face: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if face:
            self.bags: Any = bags()
            config = EmbeddingConfig(name="s", num_embeddings=20, embedding_dim=4, feature_names=["f"])
            self.sequence: Any = EmbCacheEmbeddingCollection([config], optimizer=ec.SGD(lr=0.5))
        else:
            self.bags = ec.EmbeddingBagCollection([ec.TableConfig("t", 4, ["f"])], optimizer=ec.SGD(lr=0.5))
            self.sequence = ec.EmbeddingCollection([ec.TableConfig("s", 4, ["f"])], optimizer=ec.SGD(lr=0.5))
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: Any, scale: torch.Tensor) -> torch.Tensor:
        factor = scale.sin() + 1
        pooled = self.bags(batch).values() * factor
        return self.top(pooled).sum() + (self.sequence(batch)["f"].values() * factor).sum()


@pytest.mark.parametrize("face", [True, False])
def test_a_compiled_model_trains_as_it_does_without(face: bool) -> None:
    """With dense parts compiled, and the collections called between them as they are."""
    batch, scale = kjt(["f"], [[[1, 2], [3]]]), torch.tensor(0.5)
    plain, model = Model(face), Model(face)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        expected, found = plain(batch, scale), compiled(batch, scale)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
    for mine, other in ((model.bags, plain.bags), (model.sequence, plain.sequence)):
        for name, view in mine.tables().items():
            rows = view.lookup([1, 2, 3], insert=False)
            assert (rows == other.tables()[name].lookup([1, 2, 3], insert=False)).all() and len(view) == 3
    torch.testing.assert_close(model.top.weight.grad, plain.top.weight.grad)


def test_a_compiled_model_is_saved_under_the_names_that_it_has_without(tmp_path: Any) -> None:
    model = Model(True)
    ec.save(torch.compile(model, backend="eager"), tmp_path)
    assert sorted(ec.restore(model, tmp_path).matched) == ["bags/t", "sequence/s"]


def test_a_parameter_cannot_be_frozen_and_the_collection_can() -> None:
    ebc = bags()
    model = torch.nn.ModuleDict({"rows": ebc, "top": torch.nn.Linear(4, 1)})
    for freeze in (
        lambda: model.requires_grad_(False),
        lambda: setattr(next(ebc.parameters()), "requires_grad", False),
    ):
        with pytest.raises(ConfigError, match=r"keep the collection in eval\(\)"):
            freeze()
    assert next(ebc.parameters()).requires_grad
    next(ebc.parameters()).requires_grad_()
    ebc.eval()
    model["top"](ebc(kjt(["f"], [[[1]]])).values()).sum().backward()
    assert not len(ebc.tables()["t"])


def test_parameters_can_be_copied_and_pickled_and_collections_cannot() -> None:
    ebc = bags()
    for made in (pickle.loads(pickle.dumps(next(ebc.parameters()))), copy.deepcopy(next(ebc.parameters()))):
        assert made.is_meta and made.shape == (20, 4)
    for wrong in (copy.deepcopy, copy.copy, pickle.dumps):
        for one in (ebc, torch.nn.ModuleDict({"rows": ebc})) if wrong is not copy.copy else (ebc,):
            with pytest.raises(ConfigError, match="cannot be copied or pickled"):
                wrong(one)


@pytest.mark.parametrize("name", ["a.b", "keys"])
def test_a_name_that_no_module_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="that no module can have"):
        bags(name)


def test_a_state_dict_goes_to_torchrecs_and_back() -> None:
    """Ours has no weight for it, which TorchRec names; TorchRec's is taken, also by assignment."""
    torch.manual_seed(0)
    stock, ours = EmbeddingBagCollection([bags().embedding_bag_configs()[0]]), bags()
    batch = kjt(["f"], [[[1, 2], [19]]])
    ours.load_state_dict(stock.state_dict(), assign=True)
    assert torch.equal(ours(batch).values(), stock(batch).values())
    with pytest.raises(RuntimeError, match="Missing key"):
        stock.load_state_dict(ours.state_dict())
    ours(batch).values().sum().backward()
    weight = torch.from_numpy(ours.tables()["t"].lookup(range(20), insert=False))
    stock.load_state_dict({"embedding_bags.t.weight": weight})
    assert torch.equal(ours(batch).values(), stock(batch).values())


def lengths(*each: int) -> torch.Tensor:
    return torch.tensor(each, dtype=torch.int32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (KeyedJaggedTensor(["f"], torch.tensor([1.0]), lengths=lengths(1)), "dtype torch.float32"),
        (KeyedJaggedTensor(["f"], torch.tensor([[1, 2]]), lengths=lengths(1, 1)), "one dimension"),
        (KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=lengths(1, 5)), r"lengths\[1\] = 5"),
        (KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=lengths(1, 1)), "sum to 2"),
        (KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=lengths(3, -1)), r"lengths\[1\] = -1"),
        (KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3]), lengths=lengths(1, 1, 1)), "3 lengths for 2 features"),
        (KeyedJaggedTensor(["f", "f"], torch.tensor([1, 2]), lengths=lengths(1, 1)), "a name twice"),
        (KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=lengths(1)), "no feature 'f'"),
        (KeyedJaggedTensor(["f"], torch.empty(1, dtype=torch.int64, device="meta"), lengths=lengths(1)), "meta tensor"),
        (kjt(["f"], [[[1]]])["f"], "type JaggedTensor"),
        (None, "type NoneType"),
    ],
)
def test_a_batch_that_is_none_is_refused_and_nothing_changes(batch: Any, message: str) -> None:
    ebc = bags()
    with pytest.raises(ShapeError, match=message):
        ebc(batch)
    assert not len(ebc.tables()["t"])
    ebc(kjt(["f"], [[[1]]])).values().sum().backward()


def test_strided_tensors_are_as_good_as_any() -> None:
    ebc = bags().eval()
    spaced = KeyedJaggedTensor(["f"], torch.tensor([1, 9, 2, 9, 3, 9])[::2], lengths=torch.tensor([2, 9, 1, 9])[::2])
    assert torch.equal(ebc(spaced).values(), ebc(kjt(["f"], [[[1, 2], [3]]])).values())
