"""TorchRec's collections and ours, made of the same configurations, give the same outputs and learn the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Shape, kjt, shapes
from hypothesis import example, given, settings
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from embcache.torchrec import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection, replace_embeddings

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.25, "initial_accumulator_value": 0.5}),
    (RowWiseAdagrad, {"lr": 0.25}),
]
EVERYTHING = Shape(
    [("t0", 5, 4, False, ["f0", "f1"]), ("t1", 7, 3, True, ["f1"]), ("t2", 2, 8, False, ["f2"])],
    ["f2", "f0", "f3", "f1"],
    [
        [[[0, 1], []], [[4, 4], [4]], [[99], []], [[0], [2, 3, 3]]],
        [[[]], [[]], [[]], [[]]],
    ],
)


def pair(shape: Shape, pooled: bool, optimizer: tuple[Any, Any], weighted: bool = False) -> tuple[Any, Any]:
    """TorchRec's collection, and ours with its weights and its optimizer; ours has room for half a table's rows at times."""
    torch.manual_seed(1)
    configs = shape.configs(pooled)
    stock = EmbeddingBagCollection(configs, weighted) if pooled else EmbeddingCollection(configs)
    apply_optimizer_in_backward(optimizer[0], stock.parameters(), optimizer[1])
    ours = replace_embeddings(stock).model
    return stock, ours


def flat(out: Any) -> torch.Tensor:
    """All values of an output."""
    if isinstance(out, KeyedTensor):
        return out.values()
    return torch.cat([part.values().reshape(-1) for part in out.values()])


def weights_of(stock: Any, ours: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    held = stock.embedding_bags if isinstance(stock, EmbeddingBagCollection) else stock.embeddings
    views = ours.tables()
    return [
        (part.weight.detach(), torch.from_numpy(views[name].lookup(range(len(part.weight)), insert=False)))
        for name, part in held.items()
    ]


def check_training(shape: Shape, pooled: bool, optimizer: tuple[Any, Any], weighted: bool = False) -> None:
    stock, ours = pair(shape, pooled, optimizer, weighted)
    for batch in shape.kjts(weighted):
        expected, found = stock(batch), ours(batch)
        assert type(found) is type(expected)
        assert list(found.keys()) == list(expected.keys())
        assert flat(found).dtype == flat(expected).dtype and flat(found).shape == flat(expected).shape
        torch.testing.assert_close(flat(found), flat(expected), rtol=1e-5, atol=1e-6)
        scale = torch.linspace(0.5, 1.5, flat(expected).numel()).reshape(flat(expected).shape)
        (flat(expected) * scale).sum().backward()
        (flat(found) * scale).sum().backward()
    for expected, found in weights_of(stock, ours):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one[0].__name__)
@settings(max_examples=12)
@given(shapes())
@example(EVERYTHING)
def test_pooled_collections_train_alike(optimizer: Any, shape: Shape) -> None:
    check_training(shape, True, optimizer)


@settings(max_examples=12)
@given(shapes(means=False))  # torch itself has no weighted mean
def test_weighted_collections_train_alike(shape: Shape) -> None:
    check_training(shape, True, OPTIMIZERS[1], weighted=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one[0].__name__)
@settings(max_examples=12)
@given(shapes(same_dim=True))
def test_sequence_collections_train_alike(optimizer: Any, shape: Shape) -> None:
    check_training(shape, False, optimizer)


@settings(max_examples=12)
@given(shapes())
@example(EVERYTHING)
def test_what_an_output_says_of_itself_is_the_same(shape: Shape) -> None:
    stock, ours = pair(shape, True, OPTIMIZERS[0])
    for batch in shape.kjts():
        expected, found = stock(batch), ours(batch)
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        assert found.offset_per_key() == expected.offset_per_key()
        for name in expected.keys():  # noqa: SIM118
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert [config.name for config in ours.embedding_bag_configs()] == [t[0] for t in shape.tables]
    assert ours.is_weighted() is stock.is_weighted() is False and ours.device == stock.device


@settings(max_examples=12)
@given(shapes(same_dim=True))
def test_sequence_outputs_have_the_batchs_lengths_and_on_request_its_ids(shape: Shape) -> None:
    stock = EmbeddingCollection(shape.configs(False), need_indices=True)
    ours = EmbCacheEmbeddingCollection(shape.configs(False), need_indices=True)
    for batch in shape.kjts(weighted=True):
        expected, found = stock(batch), ours(batch)
        assert list(found) == list(expected) == [n for names in ours.embedding_names_by_table() for n in names]
        for name, part in expected.items():
            assert torch.equal(found[name].lengths(), part.lengths())
            assert found[name].lengths().dtype == part.lengths().dtype
            assert torch.equal(found[name].weights(), part.weights())
            assert found[name].values().shape == part.values().shape
    assert ours.need_indices() and ours.embedding_dim() == stock.embedding_dim()
    assert ours.embedding_names_by_table() == stock.embedding_names_by_table()


@settings(max_examples=12)
@given(shapes(same_dim=True))
def test_evaluation_reads_what_was_learned_and_changes_nothing(shape: Shape) -> None:
    stock, ours = pair(shape, True, OPTIMIZERS[1])
    first, *others = shape.kjts()
    for module in (stock, ours):
        module(first).values().sum().backward()
        module.eval()
    before = [found.clone() for _, found in weights_of(stock, ours)]
    for batch in others:
        torch.testing.assert_close(ours(batch).values(), stock(batch).values(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(found, old) for (_, found), old in zip(weights_of(stock, ours), before, strict=True))


# ------------------------------------------------------------------------------------------- variable batch per feature


def variable(inverse: bool) -> Any:
    """Three examples of f0, one of f1, a batch of four."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        ["f0", "f1"],
        torch.tensor([1, 2, 0, 3, 4]),
        lengths=torch.tensor([2, 0, 1, 2]),
        stride_per_key_per_rank=[[3], [1]],
        inverse_indices=(["f0", "f1"], torch.tensor([[2, 0, 1, 0], [0, 0, 0, 0]])) if inverse else None,
    )


VARIABLE = Shape([("t0", 5, 4, False, ["f0"]), ("t1", 5, 3, True, ["f1", "f0"])], ["f0", "f1"], [])


def test_variable_batches_are_spread_by_their_inverse_indices() -> None:
    stock, ours = pair(VARIABLE, True, OPTIMIZERS[1])
    for _ in range(2):
        expected, found = stock(variable(True)), ours(variable(True))
        assert found.values().shape == expected.values().shape == (4, 10)
        torch.testing.assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-6)
        scale = torch.linspace(0.5, 1.5, 40).reshape(4, 10)
        (expected.values() * scale).sum().backward()
        (found.values() * scale).sum().backward()
    for expected, found in weights_of(stock, ours):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours.eval()
    torch.testing.assert_close(ours(variable(True)).values(), stock(variable(True)).values(), rtol=1e-5, atol=1e-6)


def test_a_sequence_has_each_features_own_examples() -> None:
    shape = Shape([("t0", 5, 4, False, ["f0"]), ("t1", 5, 4, False, ["f1", "f0"])], ["f0", "f1"], [])
    stock, ours = pair(shape, False, OPTIMIZERS[1])
    expected, found = stock(variable(True)), ours(variable(True))
    for name, part in expected.items():
        assert found[name].lengths().tolist() == part.lengths().tolist()
        torch.testing.assert_close(found[name].values(), part.values())


def test_pooled_features_of_unequal_batches_need_inverse_indices() -> None:
    ours = EmbCacheEmbeddingBagCollection(VARIABLE.configs(True))
    with pytest.raises(ValueError, match="inverse_indices"):
        ours(variable(False))
    assert not len(ours.tables()["t0"])
    batch = variable(True)
    batch._inverse_indices = (["f0", "f1"], torch.tensor([[2, 0, 1, 0], [0, 0, 1, 0]]))
    with pytest.raises(ValueError, match="'f1' go from 0 to 1, and it has 1 examples"):
        ours(batch)
    batch._inverse_indices = (["f0"], torch.tensor([[2, 0, 1, 0]]))
    with pytest.raises(ValueError, match="no feature 'f1'"):
        ours(batch)
    assert not len(ours.tables()["t0"])


# ------------------------------------------------------------------------------------------------- weights that do not count


def test_weights_count_where_the_collection_is_weighted_and_nowhere_else() -> None:
    shape = Shape([("t", 5, 4, False, ["f"])], ["f"], [])
    stock, ours = pair(shape, True, OPTIMIZERS[0])
    batch = kjt(["f"], [[[1, 2], [3]]], weights=torch.tensor([3.0, 4.0, 5.0]))
    torch.testing.assert_close(ours(batch).values(), stock(batch).values())
    weighted = EmbCacheEmbeddingBagCollection(shape.configs(True), is_weighted=True)
    with pytest.raises(ValueError, match="no weights"):
        weighted(kjt(["f"], [[[1, 2], [3]]]))
    assert not len(weighted.tables()["t"])


def test_weights_that_are_learned_get_torchs_gradients() -> None:
    """TorchRec's position weights, inside the module that puts them before a collection."""
    shape = Shape([("t", 5, 4, False, ["f"])], ["f"], [])
    stock, ours = pair(shape, True, OPTIMIZERS[0], weighted=True)
    learned = []
    for collection in (stock, ours):
        positions = PositionWeightedModuleCollection({"f": 3})
        whole = FeatureProcessedEmbeddingBagCollection(collection, positions)
        out = whole(kjt(["f"], [[[1, 2, 2], [3]]])).values()
        (out * torch.arange(8.0).view(2, 4)).sum().backward()
        learned.append((out.detach(), positions.position_weights["f"].grad))
    for theirs, own in zip(*learned, strict=True):
        torch.testing.assert_close(own, theirs)


def test_a_model_of_torchrecs_trains_on_either() -> None:
    """DeepFM, whose sparse part asks the collection for its configurations and regroups what it gives."""
    shape = Shape([("t0", 5, 4, False, ["f0", "f1"]), ("t1", 5, 4, True, ["f2"])], ["f0", "f1", "f2"], [])
    stock, ours = pair(shape, True, OPTIMIZERS[0])
    batch, dense = kjt(["f0", "f1", "f2"], [[[1, 2], []], [[3], [4]], [[0], [0, 1]]]), torch.ones(2, 3)
    found = []
    for collection in (stock, ours):
        torch.manual_seed(3)
        model = SimpleDeepFMNN(3, collection, 8, 2)
        logits = model(dense, batch)
        logits.sum().backward()
        found.append(logits.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    for expected, own in weights_of(stock, ours):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_int32_ids_and_offsets_in_place_of_lengths() -> None:
    from torchrec import KeyedJaggedTensor

    shape = Shape([("t", 5, 4, False, ["f"])], ["f"], [])
    stock, ours = pair(shape, True, OPTIMIZERS[0])
    batch = KeyedJaggedTensor(
        ["f"], torch.tensor([1, 2, 4], dtype=torch.int32), offsets=torch.tensor([0, 2, 3], dtype=torch.int32)
    )
    torch.testing.assert_close(ours(batch).values(), stock(batch).values())


def test_an_empty_batch_has_outputs_of_the_same_kind() -> None:
    """Which TorchRec's own collections fail on."""
    ours = EmbCacheEmbeddingBagCollection(EVERYTHING.configs(True))
    out = ours(kjt(["f0", "f1", "f2"], [[], [], []]))
    assert out.values().shape == (0, 19) and out.values().dtype == torch.float32
    out.values().sum().backward()
    sequence = EmbCacheEmbeddingCollection(VARIABLE.configs(False))
    found = sequence(kjt(["f0", "f1"], [[], []]))
    assert found["f1"].values().shape == (0, 3) and found["f1"].lengths().shape == (0,)
