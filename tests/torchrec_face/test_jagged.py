"""A KeyedJaggedTensorWithTimestamp keeps its timestamps, and labels, through everything that TorchRec's can do."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torchrec import KeyedJaggedTensor

import embcache as ec
from embcache.errors import ShapeError
from embcache.features import as_jagged_features
from embcache.torchrec import JaggedTensorWithTimestamp, KeyedJaggedTensorWithTimestamp


def stamped(lengths: list[list[int]], weighted: bool = False, first: str = "f") -> KeyedJaggedTensorWithTimestamp:
    """Values count up from 0; a value's timestamp is 1000 more, its weight a half."""
    count = sum(map(sum, lengths))
    values = torch.arange(count)
    return KeyedJaggedTensorWithTimestamp(
        [f"{first}{number}" for number in range(len(lengths))],
        values,
        values + 1000,
        weights=values / 2 if weighted else None,
        lengths=torch.tensor([one for row in lengths for one in row], dtype=torch.int32),
        labels=torch.arange(len(lengths[0])) % 2,
    )


def check(batch: KeyedJaggedTensor, labels: bool = True) -> None:
    """Each value has its own timestamp and weight."""
    assert isinstance(batch, KeyedJaggedTensorWithTimestamp)
    assert torch.equal(batch.timestamps, batch.values() + 1000)
    if batch.weights_or_none() is not None:
        assert torch.equal(batch.weights(), batch.values() / 2)
    assert not labels or torch.equal(batch.labels_or_none(), torch.arange(batch.stride()) % 2)


lengths_of = st.integers(1, 3).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 3), min_size=size, max_size=size), min_size=1, max_size=4)
)


@settings(max_examples=40)
@given(lengths_of, st.booleans(), st.data())
def test_whatever_moves_values_moves_their_timestamps(
    lengths: list[list[int]], weighted: bool, data: st.DataObject
) -> None:
    batch = stamped(lengths, weighted)
    order = data.draw(st.permutations(range(len(lengths))))
    permuted = batch.permute(order)
    check(permuted)
    assert permuted.keys() == [f"f{place}" for place in order]
    cut = data.draw(st.integers(0, len(lengths)))
    parts = batch.split([cut, len(lengths) - cut])
    assert [part.keys() for part in parts] == [batch.keys()[:cut], batch.keys()[cut:]]
    for part in parts:
        if part.keys():
            check(part)
        assert part.timestamps.shape == part.values().shape
    whole = KeyedJaggedTensorWithTimestamp.concat([part for part in parts if part.keys()])
    check(whole)
    assert torch.equal(whole.timestamps, batch.timestamps)
    for key, part in batch.to_dict().items():
        for one in (part, batch[key]):
            assert isinstance(one, JaggedTensorWithTimestamp)
            assert torch.equal(one.timestamps, one.values() + 1000)
    check(KeyedJaggedTensorWithTimestamp.from_jt_dict(batch.to_dict()), labels=False)


def test_copies_elsewhere_keep_them() -> None:
    batch = stamped([[1, 2], [0, 3]], weighted=True)
    check(batch.to(torch.device("cpu")))
    assert batch.to("meta").timestamps.device.type == "meta" and batch.to("meta").labels_or_none().device.type == "meta"
    assert batch.to("cpu", dtype=torch.float64).weights().dtype == torch.float64
    check(batch.flatten_lengths())
    check(pickle.loads(pickle.dumps(batch)))
    leaves, spec = pytree.tree_flatten(batch)
    assert any(torch.equal(leaf, batch.timestamps) for leaf in leaves if leaf is not None)
    check(pytree.tree_unflatten(leaves, spec))
    check(pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, batch))
    other = KeyedJaggedTensorWithTimestamp.empty_like(batch, torch.device("cpu"))
    check(other.copy_(batch))
    empty = KeyedJaggedTensorWithTimestamp.empty_like(batch)
    assert empty.timestamps.numel() == empty.values().numel() == 0
    assert batch.size_in_bytes() > KeyedJaggedTensor.size_in_bytes(batch)


def test_pinned_copies_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())  # there may be no device to pin for
    check(stamped([[1, 2], [0, 3]], weighted=True).pin_memory())


def test_streams_are_told_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append(self))
    batch = stamped([[1, 2]])
    batch.record_stream(None)
    batch["f0"].record_stream(None)
    assert any(one is batch.timestamps for one in told) and any(one is batch.labels_or_none() for one in told)
    assert any(torch.equal(one, batch.timestamps) and one is not batch.timestamps for one in told)


def test_memory_is_given_up_whole() -> None:
    batch = stamped([[1, 2]], weighted=True)
    assert batch.clear_storage() > 0
    assert batch.timestamps.untyped_storage().nbytes() == 0


def test_syncing_constructors_take_timestamps() -> None:
    values = torch.tensor([5, 6])
    made = KeyedJaggedTensorWithTimestamp.from_lengths_sync(["a"], values, torch.tensor([2]), values + 1000)
    check(made, labels=False)
    check(
        KeyedJaggedTensorWithTimestamp.from_offsets_sync(["a"], values, torch.tensor([0, 2]), values + 1000),
        labels=False,
    )
    assert made.length_per_key() == [2]


def test_bad_timestamps_are_refused() -> None:
    values = torch.tensor([5, 6])
    with pytest.raises(ShapeError, match="one int64 a value"):
        KeyedJaggedTensorWithTimestamp(["a"], values, torch.tensor([1]), lengths=torch.tensor([2]))
    with pytest.raises(ShapeError, match="one int64 a value"):
        KeyedJaggedTensorWithTimestamp(["a"], values, torch.tensor([1.0, 2.0]), lengths=torch.tensor([2]))
    plain = KeyedJaggedTensor(["b"], values, lengths=torch.tensor([2, 0]))
    with pytest.raises(ShapeError, match="1 of 2 parts have timestamps"):
        KeyedJaggedTensorWithTimestamp.concat([stamped([[1, 1]]), plain])
    other = stamped([[1, 1]], first="g")
    other._labels = torch.tensor([1, 1])
    with pytest.raises(ShapeError, match="labels of these batches differ"):
        KeyedJaggedTensorWithTimestamp.concat([stamped([[1, 1]]), other])


def test_the_engine_finds_timestamps_and_labels() -> None:
    batch = stamped([[1, 2], [0, 3]], weighted=True)
    made = as_jagged_features(batch)
    assert torch.equal(made.timestamps_or_none(), batch.timestamps)
    assert torch.equal(made.labels_or_none(), batch.labels_or_none())
    table = ec.TableConfig(
        "t", 4, ["f0"], admit_and_evict=ec.AdmitAndEvictConfig(evict_threshold=10, evict_step_interval=1)
    )
    ebc = ec.EmbeddingBagCollection([table])
    ebc(batch)
    with pytest.raises(ec.ConfigError, match="timestamps"):
        ebc(KeyedJaggedTensor(["f0"], torch.tensor([1]), lengths=torch.tensor([1])))
