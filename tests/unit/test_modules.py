"""The collections as nn.Modules: outputs, one update a backward pass, pins, evaluation, moving, refusals."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import embcache as ec
from embcache.devices import Emulated


def features(
    values: list[int], lengths: list[int] | None = None, name: str = "t", **options: object
) -> ec.JaggedFeatures:
    return ec.JaggedFeatures([name], values, lengths or [1] * len(values), **options)


def bag(lr: float = 1.0, hbm_rows: int | None = None, **options: object) -> ec.EmbeddingBagCollection:
    table = ec.TableConfig("t", 2, initializer=ec.Zeros(), hbm_rows=hbm_rows)
    return ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=lr), **options)


def row(collection: nn.Module, key: int = 1, name: str = "t") -> list[float]:
    return collection.tables()[name].lookup([key], insert=False)[0].tolist()


def pinned(collection: nn.Module) -> int:
    return collection.manager.stats()["pinned"]


# ------------------------------------------------------------------------------------------------------------- outputs


def mixed_tables() -> list[ec.TableConfig]:
    return [
        ec.TableConfig("odd", 3, ["a"], initializer=ec.Constant(1.0)),
        ec.TableConfig("wide", 16, ["b", "c"], initializer=ec.Constant(2.0), pooling="mean"),
        ec.TableConfig("odd too", 3, ["d", "a"], initializer=ec.Constant(3.0)),
    ]


def mixed_batch() -> ec.JaggedFeatures:
    return ec.JaggedFeatures(["unused", "d", "c", "b", "a"], [0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 2, 0, 0, 3, 1, 0, 0, 1])


@pytest.mark.parametrize("training", [True, False])
def test_pooled_outputs_of_mixed_dims_and_shared_features(training):
    out = ec.EmbeddingBagCollection(mixed_tables()).train(training)(mixed_batch())
    assert out.keys() == ["a@odd", "b", "c", "d", "a@odd too"]
    assert out.values().shape == (2, 3 + 16 + 16 + 3 + 3)
    assert [out[name][:, 0].tolist() for name in out] == [[0, 1], [2, 0], [0, 2], [6, 0], [0, 3]]


@pytest.mark.parametrize("training", [True, False])
def test_sequence_outputs_of_mixed_dims_and_shared_features(training):
    out = ec.EmbeddingCollection(mixed_tables()).train(training)(mixed_batch())
    assert list(out) == ["a@odd", "b", "c", "d", "a@odd too"]
    assert [tuple(o.values().shape) for o in out.values()] == [(1, 3), (1, 16), (3, 16), (2, 3), (1, 3)]
    assert [o.lengths().tolist() for o in out.values()] == [[0, 1], [1, 0], [0, 3], [2, 0], [0, 1]]
    assert [o.values()[:, 0].tolist() for o in out.values()] == [[1], [2], [2, 2, 2], [3, 3], [3]]


@pytest.mark.parametrize("kind", [ec.EmbeddingBagCollection, ec.EmbeddingCollection])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [0, 2])
def test_i7_empty_batches_and_bags(kind, training, size):
    collection = kind(mixed_tables()).train(training)
    out = collection(ec.JaggedFeatures(["a", "b", "c", "d"], [], [0] * 4 * size))
    parts = [out.values()] if isinstance(out, ec.KeyedTensor) else [o.values() for o in out.values()]
    assert all(part.dtype == torch.float32 and not part.any() for part in parts)
    assert parts[0].shape == ((size, 41) if isinstance(out, ec.KeyedTensor) else (0, 3))
    if training:
        sum(part.sum() for part in parts).backward()
        assert collection.optimizer.step_count == 1
    assert collection.manager.outstanding == 0


@pytest.mark.parametrize("training", [True, False])
def test_i7_extreme_keys(training):
    keys = [-(2**63), 2**63 - 1, 0, -1, -2, 1 << 32]
    ebc = bag().train(training)
    ebc(features(keys)).values().sum().backward() if training else ebc(features(keys))
    assert [key in ebc.tables()["t"] for key in keys] == [training] * 6


def test_a_mean_of_an_empty_bag_is_zero_not_nan():
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 2, pooling="mean", initializer=ec.Constant(1.0))])
    assert ebc(features([1, 2], [0, 2])).values().tolist() == [[0, 0], [1, 1]]


def test_two_features_of_unequal_length_on_one_table_keep_their_ids():
    table = ec.TableConfig("t", 1, ["a", "b"], initializer=ec.Zeros())
    ebc = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0))
    ebc.tables()["t"].assign(np.arange(10), np.arange(10, dtype=np.float32).reshape(10, 1))
    out = ebc(ec.JaggedFeatures(["a", "b"], [1, 2, 2, 9, 1], [1, 3, 1, 0]))
    assert out["a"].tolist() == [[1], [13]] and out["b"].tolist() == [[1], [0]]


def test_two_collections_and_an_ordinary_embedding_in_one_model():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bag()
            self.sequences = ec.EmbeddingCollection(
                [ec.TableConfig("t", 2, initializer=ec.Zeros())], optimizer=ec.SGD(lr=2.0)
            )
            self.plain = nn.Embedding(4, 2, sparse=True)

        def forward(self, batch: ec.JaggedFeatures) -> torch.Tensor:
            return (
                self.bags(batch).values().sum()
                + self.sequences(batch)["t"].values().sum()
                + self.plain(batch.values()).sum()
            )

    model = Model()
    model(features([1, 2])).backward()
    assert row(model.bags) == [-1, -1] and row(model.sequences) == [-2, -2]
    assert [name for name, _ in model.named_parameters()] == ["plain.weight"]
    assert list(model.state_dict()) == ["plain.weight"]


def test_a_module_holds_no_parameters_and_no_state():
    ebc = bag()
    ebc(features([1])).values().sum().backward()
    assert list(ebc.parameters()) == [] and list(ebc.buffers()) == [] and ebc.state_dict() == {}
    assert "t: dim=2" in repr(ebc)


# -------------------------------------------------------------------------------------------------------------- updates


def test_one_update_for_all_forwards_of_a_backward():
    ebc = bag()
    first, second = ebc(features([1, 2])).values(), ebc(features([2, 3])).values()
    (first.sum() + 10 * second.sum()).backward()
    assert ebc.optimizer.step_count == 1
    assert [row(ebc, key) for key in (1, 2, 3)] == [[-1, -1], [-11, -11], [-10, -10]]
    assert pinned(ebc) == 0


def test_adagrad_sees_the_summed_gradient_of_a_backward():
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 1, initializer=ec.Zeros())], optimizer=ec.Adagrad(lr=1.0))
    (3 * ebc(features([1])).values().sum() + ebc(features([1])).values().sum()).backward()
    weights, state = ebc.tables()["t"].lookup_rows([1])
    assert state.tolist() == [[16]] and weights.tolist() == [[-1]]


def test_forwards_are_summed_in_their_order_whatever_the_order_of_backward():
    ebc = bag()
    outputs = [ebc(features([1])).values().sum() for _ in range(3)]
    (outputs[0] + 1e8 * outputs[1] - 1e8 * outputs[2]).backward()
    assert row(ebc) == [0, 0]  # (1 + 1e8) - 1e8 in float32; the other way round it would be 1


def test_two_forwards_two_backwards():
    ebc = bag()
    first, second = ebc(features([1])).values().sum(), ebc(features([1])).values().sum()
    first.backward()
    second.backward()
    assert ebc.optimizer.step_count == 2 and row(ebc) == [-2, -2]


def test_an_unused_output_group_gets_no_update():
    emc = ec.EmbeddingCollection(
        [ec.TableConfig("a", 2, initializer=ec.Zeros()), ec.TableConfig("b", 3, initializer=ec.Zeros())],
        optimizer=ec.Adam(lr=1.0),
    )
    out = emc(ec.JaggedFeatures(["a", "b"], [1, 1], [1, 1]))
    out["a"].values().sum().backward()
    assert row(emc, 1, "a")[0] < 0 and row(emc, 1, "b") == [0, 0, 0]
    assert emc.tables()["b"].lookup_rows([1])[1].any() == np.False_


def test_accumulate_sums_and_updates_once():
    ebc = bag(accumulate=3)
    for key in (1, 2, 1):
        assert ebc.optimizer.step_count == 0
        ebc(features([key])).values().sum().backward()
        ebc.optimizer.step()  # between micro-batches: harmless
    assert ebc.optimizer.step_count == 1
    assert row(ebc, 1) == [-2, -2] and row(ebc, 2) == [-1, -1]
    assert pinned(ebc) == 0


def test_pins_are_held_through_the_window():
    ebc = bag(accumulate=2, hbm_rows=2)
    ebc(features([1, 2])).values().sum().backward()
    assert pinned(ebc) == 2
    with pytest.raises(ec.HbmCapacityError, match="'t'"):
        ebc(features([3]))
    ebc(features([2])).values().sum().backward()
    assert pinned(ebc) == 0 and row(ebc, 2) == [-2, -2]
    ebc(features([3]))


def test_an_incomplete_window_is_finished_on_demand():
    ebc = bag(accumulate=3)
    ebc.finish_accumulation()
    assert ebc.optimizer.step_count == 0
    ebc(features([1])).values().sum().backward()
    assert row(ebc) == [0, 0]
    ebc.finish_accumulation()
    assert row(ebc) == [-1, -1] and ebc.optimizer.step_count == 1 and pinned(ebc) == 0


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_i11_accumulate_is_checked(accumulate):
    with pytest.raises(ec.ConfigError, match="accumulate"):
        bag(accumulate=accumulate)


def test_gradients_are_unscaled():
    ebc = bag()
    ebc.grad_scale = 8.0
    (8 * ebc(features([1])).values().sum()).backward()
    assert row(ebc) == [-1, -1]
    ebc.grad_scale = lambda: torch.tensor(4.0)
    (4 * ebc(features([1])).values().sum()).backward()
    assert row(ebc) == [-2, -2] and ebc.optimizer.step_count == 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_update_under_grad_scale(bad, accumulate):
    ebc = bag(accumulate=accumulate)
    ebc.grad_scale = 2.0
    for scale in [bad, 1.0][:accumulate]:
        (scale * ebc(features([1])).values().sum()).backward()
    assert ebc.skipped_updates == 1 and ebc.optimizer.step_count == 0
    assert row(ebc) == [0, 0] and pinned(ebc) == 0
    for _ in range(accumulate):
        (2 * ebc(features([1])).values().sum()).backward()
    assert row(ebc) == [-accumulate] * 2


def test_without_grad_scale_a_bad_gradient_is_the_users():
    ebc = bag()
    (float("nan") * ebc(features([1])).values().sum()).backward()
    assert np.isnan(row(ebc)).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "x"])
def test_i11_a_bad_grad_scale_is_refused(scale):
    ebc = bag()
    ebc.grad_scale = scale
    with pytest.raises(ec.ConfigError, match="grad_scale"):
        ebc(features([1])).values().sum().backward()
    assert row(ebc) == [0, 0]


def test_not_admitted_keys_read_the_default_and_learn_nothing():
    admit = ec.AdmitAndEvictConfig(admit_threshold=3, not_admitted_default_value=5.0)
    table = ec.TableConfig("t", 1, pooling="mean", initializer=ec.Zeros(), admit_and_evict=admit)
    ebc = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0))
    out = ebc(features([1, 1, 1, 2], [4], weights=[1.0, 1.0, 1.0, 0.5])).values()
    assert out.item() == pytest.approx(5.0 * 0.5 / 4)
    out.sum().backward()
    assert 1 in ebc.tables()["t"] and 2 not in ebc.tables()["t"]
    assert row(ebc, 1) == [-0.75] and row(ebc, 2) == [5.0]
    ebc(features([2])).values().sum().backward()
    assert ebc(features([2])).values().item() == 0.0  # the third time: admitted, the initial value


def test_the_constant_slot_never_learns():
    admit = ec.AdmitAndEvictConfig(admit_threshold=100, not_admitted_default_value=5.0)
    table = ec.TableConfig("t", 1, initializer=ec.Zeros(), admit_and_evict=admit)
    for accumulate in (1, 2):
        ebc = ec.EmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=1.0, weight_decay=0.1), accumulate=accumulate)
        for _ in range(4):
            out = ebc(features([1, 2])).values()
            assert out.tolist() == [[5.0], [5.0]]
            out.sum().backward()


def test_weight_gradients_are_those_of_the_rows_that_were_read():
    """Two forwards, two backwards: the first update must not reach into the second's gradient of its weights."""
    ebc = bag()
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    losses = [(3 + ebc(features([1], weights=w)).values()).pow(2).sum() for w in weights]
    for loss in losses:
        loss.backward()
    assert weights[0].grad.item() == weights[1].grad.item() == 0.0  # the row was 0 when it was read
    assert row(ebc) == [-12, -12]


def test_weights_get_their_gradient_in_evaluation_too():
    ebc = bag()
    ebc.tables()["t"].assign([1], np.array([[2, 3]], dtype=np.float32))
    ebc.eval()
    weights = torch.ones(2, requires_grad=True)
    ebc(features([1, 1], [2], weights=weights)).values().sum().backward()
    assert weights.grad.tolist() == [5, 5] and row(ebc) == [2, 3]


def test_a_bad_learning_rate_in_one_collection_stops_the_other_too():
    good, bad = bag(), bag()
    for broken_last in (False, True):
        bad.optimizer.param_groups[0]["lr"] = -1.0
        first, second = (bad, good) if broken_last else (good, bad)
        loss = first(features([1])).values().sum() + second(features([1])).values().sum()
        with pytest.raises(ec.ConfigError, match="lr"):
            loss.backward()
        del loss
        assert row(good) == row(bad) == [0, 0] and good.optimizer.step_count == 0


# ----------------------------------------------------------------------------------------------------------------- pins


def test_i13_pins_end_when_the_graph_is_released():
    ebc = bag(hbm_rows=2)
    gc.disable()  # by reference counting alone
    try:
        for step in range(20):
            out = ebc(features([2 * step, 2 * step + 1]))
            assert pinned(ebc) == 2
            del out
            assert pinned(ebc) == 0
    finally:
        gc.enable()


def test_i13_pins_end_at_the_next_optimizer_step():
    ebc = bag(hbm_rows=2)
    kept = []
    for step in range(5):
        kept.append(ebc(features([2 * step, 2 * step + 1])))
        ebc.optimizer.step()
        assert pinned(ebc) == 0
    with pytest.raises(ec.PlanError, match="used up"):
        kept[0].values().sum().backward()
    assert ebc.optimizer.step_count == 0 and pinned(ebc) == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_i13_backward_twice_raises_and_applies_once(accumulate):
    ebc = bag(accumulate=accumulate)
    loss = ebc(features([1])).values().sum()
    loss.backward(retain_graph=True)
    with pytest.raises((ec.PlanError, RuntimeError), match="used up"):
        loss.backward()
    ebc.finish_accumulation()
    assert row(ebc) == [-1, -1] and ebc.optimizer.step_count == 1 and pinned(ebc) == 0


def test_i13_an_error_inside_backward_leaks_no_pin_and_no_gradient():
    ebc = bag(hbm_rows=2)
    other = nn.Parameter(torch.ones(()))

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    for step in range(6):
        # The scale's gradient comes after the embedding's: our node has run when the hook raises.
        scaled = other * 1.0
        scaled.register_hook(explode)
        loss = scaled + ebc(features([2 * step, 2 * step + 1])).values().sum()
        with pytest.raises(ValueError, match="in a hook"):
            loss.backward()
    ebc(features([0, 1])).values().sum().backward()
    assert row(ebc, 0) == [-1, -1] and ebc.optimizer.step_count == 1 and pinned(ebc) == 0


def test_i13_arrived_gradients_of_a_failed_pass_are_dropped_not_applied_later():
    ebc = bag()
    first, second = ebc(features([1])).values(), ebc(features([2])).values()

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    first.register_hook(explode)  # the later forward's node runs first and arrives; then this
    loss = first.sum() + second.sum()
    with pytest.raises(ValueError, match="in a hook"):
        loss.backward()
    ebc(features([3])).values().sum().backward()
    assert [row(ebc, key) for key in (1, 2, 3)] == [[0, 0], [0, 0], [-1, -1]]
    del first, second, loss
    assert pinned(ebc) == 0


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused_clearly():
    ebc = bag()
    out = ebc(features([1])).values().sum()
    with pytest.raises(ec.PlanError, match="create_graph"):
        out.backward(create_graph=True)
    assert row(ebc) == [0, 0]
    del out
    assert pinned(ebc) == 0


def test_i13_pins_of_a_failed_pass_end_with_its_graph():
    ebc = bag(hbm_rows=2)

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    def fail() -> None:
        scaled = torch.ones((), requires_grad=True) * 1.0
        scaled.register_hook(explode)
        (scaled + ebc(features([1, 2])).values().sum()).backward()

    with pytest.raises(ValueError, match="in a hook") as caught:
        fail()
    assert pinned(ebc) == 2  # the traceback holds the graph
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert pinned(ebc) == 0


def test_i13_a_second_backward_after_a_failed_one_applies_its_own_gradient_only():
    ebc = bag()
    first, second = ebc(features([1])).values(), ebc(features([2])).values()

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in a hook")

    scaled = torch.ones((), requires_grad=True) * 1.0
    scaled.register_hook(explode)
    with pytest.raises(ValueError, match="in a hook"):
        (scaled + first.sum()).backward()
    second.sum().backward()  # at once: nothing in between that could clean up
    assert row(ebc, 1) == [0, 0] and row(ebc, 2) == [-1, -1] and ebc.optimizer.step_count == 1
    ebc.optimizer.step()
    assert pinned(ebc) == 0


def test_a_backward_inside_a_backward_keeps_what_arrived_before_it():
    """As reentrant checkpointing does: a forward and its backward run inside the backward of another forward."""
    ebc = bag()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                inner = ebc(features([2])).values().sum()
            inner.backward()
            return gradient

    early = ebc(features([1])).values()
    nested = Nested.apply(ebc(features([3])).values())
    late = ebc(features([1])).values()  # its node runs first
    (early.sum() + nested.sum() + late.sum()).backward()
    assert [row(ebc, key)[0] for key in (1, 2, 3)] == [-2, -1, -1] and pinned(ebc) == 0
    assert ebc.optimizer.step_count == 2


def test_gradients_of_other_tensors_alone_leave_the_rows():
    ebc = bag()
    other = torch.ones(2, requires_grad=True)
    loss = (ebc(features([1])).values() * other).sum()
    torch.autograd.grad(loss, [other], retain_graph=True)
    assert row(ebc) == [0, 0]
    loss.backward()
    assert row(ebc) == [-1, -1]


def test_a_batch_that_does_not_fit_changes_nothing():
    ebc = bag(hbm_rows=2)
    ebc(features([1])).values().sum().backward()
    before = ebc.manager.stats()
    with pytest.raises(ec.HbmCapacityError) as caught:
        ebc(features([1, 2, 3]))
    assert caught.value.never_fits and caught.value.need == 3 and caught.value.table == "t"
    assert ebc.manager.stats() == before
    ebc(features([2, 3])).values().sum().backward()


# ----------------------------------------------------------------------------------------------------------- evaluation


def snapshot(collection: nn.Module) -> tuple[object, ...]:
    planner = collection.manager.planner
    return (
        collection.manager.stats(),
        [column.tolist() for column in planner.residents(0)],
        [[column.tolist() for column in columns if column is not None] for columns in collection.tables()["t"].items()],
    )


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_i6_reading_changes_nothing(how):
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 2, hbm_rows=3)], optimizer=ec.SGD(lr=1.0))
    for keys in ([1, 2, 3], [4, 5]):
        ebc(features(keys)).values().sum().backward()
    expected = ebc.tables()["t"].lookup([1, 2, 4, 5, 99, -1], insert=False)
    before = snapshot(ebc)
    if how == "eval":
        out = ebc.eval()(features([1, 2, 4, 5, 99, -1])).values()
    else:
        with getattr(torch, how)():
            out = ebc(features([1, 2, 4, 5, 99, -1])).values()
    assert not out.requires_grad
    np.testing.assert_array_equal(out.numpy(), expected)
    assert snapshot(ebc) == before
    assert 99 not in ebc.tables()["t"]


def test_i6_reading_while_a_forward_is_outstanding():
    ebc = bag(hbm_rows=3)
    ebc(features([1, 2, 3])).values().sum().backward()
    loss = (
        ebc(features([4, 5])).values().sum()
    )  # two of 1, 2, 3 were swapped out; 4 and 5 are born, but have not trained
    with torch.no_grad():
        assert ebc(features([1, 2, 3, 4])).values()[:, 0].tolist() == [-1, -1, -1, 0]
    assert 4 not in ebc.tables()["t"] and len(ebc.tables()["t"]) == 3
    loss.backward()
    assert 4 in ebc.tables()["t"] and len(ebc.tables()["t"]) == 5
    assert row(ebc, 4) == [-1, -1]


def test_i6_an_unknown_key_reads_its_initial_value_or_the_default():
    admit = ec.AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=7.0)
    tables = [ec.TableConfig("t", 2, initializer=ec.Constant(3.0)), ec.TableConfig("u", 2, admit_and_evict=admit)]
    ebc = ec.EmbeddingBagCollection(tables).eval()
    assert ebc(ec.JaggedFeatures(["t", "u"], [1, 1], [1, 1])).values().tolist() == [[3, 3, 7, 7]]
    assert len(ebc.tables()["t"]) == 0


# --------------------------------------------------------------------------------------------------- moving and copying


def test_to_the_same_place_is_nothing_and_other_dtypes_are_refused():
    ebc = bag()
    ebc(features([1])).values().sum().backward()
    assert ebc.to("cpu") is ebc and ebc.cpu() is ebc and ebc.to(torch.float32) is ebc
    for convert in (ebc.half, ebc.double, ebc.bfloat16, lambda: ebc.to(torch.float16)):
        with pytest.raises(ec.ConfigError, match="float32"):
            convert()
    with pytest.raises(ec.ConfigError, match="meta"):
        ebc.to("meta")
    assert row(ebc) == [-1, -1]


def test_moving_the_buffer_keeps_rows_and_slots():
    ebc = bag(hbm_rows=4)
    ebc(features([1, 2])).values().sum().backward()
    slots = ebc.manager.planner.residents(0)[1].tolist()
    address = ebc.manager.buffer.weights[0].data_ptr()
    ebc.manager.move("cpu")
    assert ebc.manager.buffer.weights[0].data_ptr() != address
    assert ebc.manager.planner.residents(0)[1].tolist() == slots and row(ebc) == [-1, -1]
    loss = ebc(features([1])).values().sum()
    with pytest.raises(ec.PlanError, match="1 plan"):
        ebc.manager.move("cpu")
    loss.backward()
    assert row(ebc) == [-2, -2]


def test_copies_are_refused_clearly():
    ebc = bag()
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ec.ConfigError, match="cannot be copied or pickled"):
            make_copy(ebc)
        with pytest.raises(ec.ConfigError, match="cannot be copied or pickled"):
            make_copy(ebc.manager)


def test_a_dropped_module_frees_its_tables_without_a_collector():
    ebc = bag()
    ebc(features([1])).values().sum().backward()
    ebc.optimizer.step()
    manager, buffer = weakref.ref(ebc.manager), weakref.ref(ebc.manager.buffer)
    gc.disable()
    try:
        del ebc
        assert manager() is None and buffer() is None
    finally:
        gc.enable()


def test_closed():
    ebc = bag()
    ebc(features([1])).values().sum().backward()
    loss = ebc(features([1])).values().sum()
    ebc.close()
    ebc.close()
    for use in (
        lambda: ebc(features([1])),
        lambda: ebc.eval()(features([1])),
        ebc.manager.stats,
        lambda: row(ebc),
        loss.backward,
    ):
        with pytest.raises(ec.ClosedError, match="closed"):
            use()


def test_i12_a_forked_child_is_told_and_harms_nothing():
    ebc = bag()
    ebc(features([1])).values().sum().backward()
    loss = ebc(features([2])).values().sum()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        errors = []
        uses = (
            lambda: ebc(features([1])),
            lambda: ebc.eval()(features([1])),
            lambda: row(ebc),
            loss.backward,
            ebc.optimizer.step,
        )
        for use in (*uses, ebc.manager.stats, ebc.manager.close, lambda: len(ebc.tables()["t"])):
            try:
                use()
                errors.append("none")
            except ec.ForkError:
                pass
            except BaseException as error:
                errors.append(repr(error))
        os.write(writing, repr(errors).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 1 << 16) == b"[]"
    os.close(reading)
    loss.backward()
    assert row(ebc, 2) == [-1, -1]


def test_i11_what_is_no_batch_is_refused():
    ebc = bag()
    before = ebc.manager.stats()
    for wrong in ({"t": [1]}, torch.tensor([1]), None, features([1], name="x")):
        with pytest.raises(ec.ShapeError):
            ebc(wrong)
        with pytest.raises(ec.ShapeError):
            ebc.eval()(wrong)
        ebc.train()
    assert ebc.manager.stats() == before


# ------------------------------------------------------------------------------------------- failures between the steps


@pytest.mark.parametrize("step", ["out", "into"])
@pytest.mark.parametrize("failures", [1, 3])
def test_i13_a_forward_whose_rows_could_not_be_moved_holds_up_nobody(monkeypatch, step, failures):
    ebc = bag(
        hbm_rows=2, device=Emulated(math.inf, math.inf, 0)
    )  # staged: on the CPU nothing can fail once it is planned
    ebc(features([1, 2])).values().sum().backward()
    good, left = getattr(ebc.manager._mover, step), [failures]

    def failing(*arguments: object) -> None:
        if left[0]:
            left[0] -= 1
            raise ec.HostMemoryError("refused")
        good(*arguments)

    monkeypatch.setattr(ebc.manager._mover, step, failing)
    for _ in range(failures):
        with pytest.raises(ec.HostMemoryError):
            ebc(features([3, 4]))
        assert [row(ebc, key) for key in (1, 2, 3, 4)] == [[-1, -1], [-1, -1], [0, 0], [0, 0]]
    ebc(features([4, 5])).values().sum().backward()
    assert [row(ebc, key) for key in (1, 2, 3, 4, 5)] == [[-1, -1], [-1, -1], [0, 0], [-1, -1], [-1, -1]]
    assert pinned(ebc) == 0 and ebc.manager.outstanding == 0
    ebc.manager.flush()
    ebc.tables()["t"].check()


def test_flush_and_rebalance_complete_what_a_failed_forward_left(monkeypatch):
    for use in (ec.EmbCacheManager.flush, ec.EmbCacheManager.rebalance, lambda manager: manager.move("cpu")):
        ebc = bag(hbm_bytes=1000, device=Emulated(math.inf, math.inf, 0))
        with monkeypatch.context() as patch:
            patch.setattr(ebc.manager._mover, "into", lambda *_: (_ for _ in ()).throw(ec.HostMemoryError("refused")))
            with pytest.raises(ec.HostMemoryError):
                ebc(features([3, 4]))
        use(ebc.manager)
        assert pinned(ebc) == 0 and ebc.manager.outstanding == 0


def test_i13_a_failure_between_plan_and_graph_leaves_no_pins(monkeypatch):
    for kind in (ec.EmbeddingBagCollection, ec.EmbeddingCollection):
        collection = kind([ec.TableConfig("t", 2, hbm_rows=2)], optimizer=ec.SGD(lr=1.0))
        for start in range(0, 8, 2):
            with monkeypatch.context() as patch:
                patch.setattr(collection._update, "begin", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
                with pytest.raises(RuntimeError, match="lost"):
                    collection(features([start, start + 1]))
            assert pinned(collection) == 0 and collection.manager.outstanding == 0
    ebc = bag(hbm_rows=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            ebc(features([1, 2], weights=torch.ones(2)))
    assert pinned(ebc) == 0 and ebc.manager.outstanding == 0


def test_a_name_that_is_not_there_is_answered_with_those_that_are():
    for kind in (ec.EmbeddingBagCollection, ec.EmbeddingCollection):
        with pytest.raises(KeyError, match=r"no (key|feature) 'nope'; there are \['t'\]"):
            kind([ec.TableConfig("t", 2)])(features([1]))["nope"]
