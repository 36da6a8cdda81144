"""Batches: what `JaggedFeatures` accepts, refuses, and hands out."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from embcache.errors import ShapeError
from embcache.features import JaggedFeatures, JaggedTensor, KeyedTensor, as_jagged_features, check_lengths


def batch(**changes: object) -> JaggedFeatures:
    arguments: dict = {
        "keys": ["a", "b"],
        "values": torch.tensor([1, 2, 3, 4, 5]),
        "lengths": torch.tensor([1, 0, 1, 3]),
        "weights": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
        "timestamps": torch.arange(5),
        "labels": torch.tensor([0.0, 1.0]),
    }
    return JaggedFeatures(**{**arguments, **changes})


def test_accessors_follow_the_feature_major_layout():
    made = batch()
    assert made.keys() == ["a", "b"]
    assert made.batch_size == made.stride() == 2
    assert made.offsets().tolist() == [0, 1, 1, 2, 5]
    assert made["a"].values().tolist() == [1] and made["a"].lengths().tolist() == [1, 0]
    assert made["b"].values().tolist() == [2, 3, 4, 5] and made["b"].lengths().tolist() == [1, 3]
    assert made["b"].weights_or_none().tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert made["b"].offsets().tolist() == [0, 1, 4]
    with pytest.raises(KeyError, match=r"no feature 'c'.*\['a', 'b'\]"):
        made["c"]


def test_i7_every_int64_is_a_legal_value():
    extremes = torch.tensor([-(2**63), 2**63 - 1, 0, -1, -2])
    assert batch(values=extremes).values().tolist() == extremes.tolist()


def test_int32_is_widened_and_views_and_read_only_arrays_are_taken():
    made = batch(values=torch.arange(5, dtype=torch.int32), lengths=torch.tensor([1, 0, 1, 3], dtype=torch.int32))
    assert made.values().dtype == made.lengths().dtype == torch.int64
    assert batch(values=torch.arange(10)[::2]).values().tolist() == [0, 2, 4, 6, 8]
    frozen = np.arange(5)
    frozen.flags.writeable = False
    assert batch(values=frozen).values().tolist() == [0, 1, 2, 3, 4]
    assert batch(values=np.arange(5)[::-1]).values().tolist() == [4, 3, 2, 1, 0]
    assert batch(values=[9, 8, 7, 6, 5]).values().tolist() == [9, 8, 7, 6, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.arange(5.0)}, "values has dtype torch.float32"),
        ({"values": torch.zeros(5, 1, dtype=torch.int64)}, r"values has shape \(5, 1\)"),
        ({"values": "abcde"}, "values"),
        ({"values": np.array(["x"] * 5)}, "values"),
        ({"lengths": torch.tensor([1, 0, 1, 2])}, "lengths sum to 4, but there are 5 values"),
        ({"lengths": torch.tensor([1, -1, 2, 3])}, r"lengths\[1\] = -1"),
        ({"lengths": torch.tensor([2**62, 2**62, 2**62, 2**62 + 5])}, r"lengths\[3\]"),
        ({"lengths": torch.tensor([1, 1, 3])}, "3 lengths for 2 features"),
        ({"lengths": torch.tensor([1.0, 0.0, 1.0, 3.0])}, "lengths has dtype"),
        ({"weights": torch.ones(4)}, "4 weights for 5 values"),
        ({"weights": torch.ones(5, dtype=torch.int64)}, "weights have dtype"),
        ({"timestamps": torch.arange(6)}, "6 timestamps for 5 values"),
        ({"timestamps": torch.arange(5.0)}, "timestamps has dtype"),
        ({"labels": torch.ones(3)}, "3 labels for a batch of 2"),
        ({"labels": torch.zeros(2, dtype=torch.complex64)}, "labels have dtype torch.complex64.*give bool"),
        ({"labels": np.zeros(2, np.uint16)}, "labels have dtype torch.uint16.*give bool"),
        ({"labels": np.zeros(2, np.uint64)}, "labels have dtype torch.uint64.*give bool"),
        ({"labels": torch.zeros(2).to(torch.float8_e5m2)}, "labels have dtype torch.float8_e5m2.*give bool"),
        ({"values": torch.empty(5, dtype=torch.int64, device="meta")}, "values is a meta tensor.*real device"),
        ({"lengths": torch.empty(4, dtype=torch.int64, device="meta")}, "lengths is a meta tensor.*real device"),
        ({"weights": torch.empty(5, device="meta")}, "weights is a meta tensor.*real device"),
        ({"values": torch.arange(5).to_sparse()}, "values is a tensor of layout torch.sparse_coo; give a dense one"),
        ({"lengths": torch.tensor([1, 0, 1, 3]).to_sparse()}, "lengths is a tensor of layout torch.sparse_coo"),
        ({"weights": torch.ones(5).to_sparse()}, "weights is a tensor of layout torch.sparse_coo"),
        ({"timestamps": torch.arange(5).to_sparse()}, "timestamps is a tensor of layout torch.sparse_coo"),
        ({"weights": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "weights is a nested tensor"),
        ({"values": np.ma.masked_array(np.arange(5), mask=[0, 1, 0, 0, 0])}, "values is a masked array.*filled"),
        ({"weights": np.ma.masked_array(np.ones(5, np.float32))}, "weights is a masked array.*filled"),
        ({"keys": ["a", "a"]}, "twice"),
        ({"keys": "ab"}, "list of feature names"),
        ({"keys": [1, 2]}, "list of feature names"),
        ({"keys": []}, "no keys"),
    ],
)
def test_i11_bad_input_is_named(changes, message):
    with pytest.raises(ShapeError, match=message):
        batch(**changes)


def test_lazily_negated_views_are_resolved():
    weights = torch.ones(5, requires_grad=True)
    made = batch(values=torch._neg_view(torch.arange(5)), weights=torch._neg_view(weights))
    assert not made.values().is_neg() and made.values().numpy().tolist() == [0, -1, -2, -3, -4]
    assert not made.weights().is_neg() and made.weights().detach().numpy().tolist() == [-1] * 5
    made.weights().sum().backward()
    assert weights.grad.tolist() == [-1] * 5
    imaginary = torch.full((5,), 2j).conj().imag  # how such a view comes about
    assert imaginary.is_neg() and batch(weights=imaginary).weights().numpy().tolist() == [-2] * 5


def test_unaligned_arrays_are_copied():
    values = np.zeros(5 * 8 + 1, np.uint8)[1:].view(np.int64)
    values[:] = range(5)
    assert not values.flags.aligned
    made = batch(values=values).values()
    assert made.data_ptr() % 8 == 0 and made.tolist() == [0, 1, 2, 3, 4]


def test_lengths_that_wrap_to_the_right_sum_are_refused():
    wrapping = np.array([2**62, 2**62, 2**62, 2**62 + 5], dtype=np.int64)
    assert int(wrapping.sum()) == 5  # it does wrap
    with pytest.raises(ShapeError, match="4611686018427387909"):
        check_lengths("batch", wrapping, 5)


def test_empty_batches():
    nothing = JaggedFeatures(["a"], [], [])
    assert nothing.batch_size == 0 and nothing["a"].values().numel() == 0
    no_features = JaggedFeatures([], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert no_features.batch_size == 0
    empty_bags = JaggedFeatures(["a", "b"], torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))
    assert empty_bags.batch_size == 3 and empty_bags["b"].lengths().tolist() == [0, 0, 0]


def test_to_keeps_everything_and_shares_what_is_there_already():
    made = batch()
    moved = made.to("cpu")
    assert moved.values() is made.values()
    assert moved.timestamps_or_none() is made.timestamps_or_none() and moved.labels_or_none() is made.labels_or_none()
    assert moved["b"].values().tolist() == [2, 3, 4, 5]
    assert batch().to("meta").weights().device.type == "meta"


def test_pickle_round_trip():
    made = batch()
    copy = pickle.loads(pickle.dumps(made))
    assert (
        copy.keys() == made.keys()
        and torch.equal(copy.values(), made.values())
        and torch.equal(copy.weights(), made.weights())
    )


class FakeKjt:
    """The methods of a torchrec KeyedJaggedTensor, and nothing else."""

    def __init__(self, variable: bool = False, timestamps: object = None) -> None:
        self._variable, self.timestamps = variable, timestamps

    def keys(self):
        return ["a"]

    def values(self):
        return torch.tensor([1, 2], dtype=torch.int32)

    def lengths(self):
        return torch.tensor([2], dtype=torch.int32)

    def weights_or_none(self):
        return torch.tensor([0.5, 1.5])

    def variable_stride_per_key(self):
        return self._variable


def test_a_keyed_jagged_tensor_is_taken_by_its_methods():
    made = as_jagged_features(FakeKjt(timestamps=torch.tensor([3, 4])))
    assert made.keys() == ["a"] and made.values().dtype == torch.int64
    assert made.weights().tolist() == [0.5, 1.5] and made.timestamps_or_none().tolist() == [3, 4]
    assert as_jagged_features(made) is made


def test_what_is_not_a_batch_is_refused():
    with pytest.raises(ShapeError, match="type dict"):
        as_jagged_features({"a": torch.ones(1)})


def test_weights_are_asked_for_by_name():
    with pytest.raises(ShapeError, match="no weights"):
        batch(weights=None).weights()
    weights = torch.ones(5, dtype=torch.float64, requires_grad=True)
    made = batch(weights=weights)
    assert made.weights().dtype == torch.float32 and made.weights().requires_grad


def test_keyed_tensor_blocks_and_their_gradient():
    values = torch.arange(10.0).reshape(2, 5).requires_grad_()
    keyed = KeyedTensor(["a", "b"], [2, 3], values)
    assert keyed["b"].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert keyed.offset_per_key() == [0, 2, 5] and keyed.length_per_key() == [2, 3]
    assert list(keyed) == keyed.keys() == ["a", "b"] and len(keyed) == 2 and "a" in keyed and "c" not in keyed
    (keyed["a"].sum() + 2 * keyed["b"].sum()).backward()
    assert values.grad.tolist() == [[1, 1, 2, 2, 2]] * 2
    with pytest.raises(KeyError, match="no key 'c'"):
        keyed["c"]
    with pytest.raises(ShapeError, match="do not fit"):
        KeyedTensor(["a"], [2], torch.zeros(2, 3))


def test_jagged_tensor_padding_and_its_gradient():
    values = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    jagged = JaggedTensor(values, torch.tensor([2, 0, 1]))
    padded = jagged.to_padded_dense(padding_value=-1.0)
    assert padded.squeeze(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert jagged.to_padded_dense(1).squeeze(-1).tolist() == [[1], [0], [3]]
    assert [len(rows) for rows in jagged.to_dense()] == [2, 0, 1]
    padded.sum().backward()
    assert values.grad.squeeze(-1).tolist() == [1, 1, 1]
    assert JaggedTensor(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)).to_padded_dense().shape == (0, 0, 2)
