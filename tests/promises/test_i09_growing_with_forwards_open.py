"""I9, I3: a growing buffer grows under forwards whose update is still to come, and the results are those of a large one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embcache as ec
from promises.training import check, model_state

KINDS = [ec.EmbeddingBagCollection, ec.EmbeddingCollection]


def batch(**keys: object) -> ec.JaggedFeatures:
    """One key a bag; features of unequal length get empty bags."""
    size = max(len(values) for values in keys.values())
    lengths = [int(place < len(values)) for values in keys.values() for place in range(size)]
    values = np.concatenate([np.asarray(values, dtype=np.int64) for values in keys.values()])
    return ec.JaggedFeatures(list(keys), values, lengths, timestamps=np.zeros(len(values), dtype=np.int64))


def loss_of(collection: torch.nn.Module, features: ec.JaggedFeatures) -> torch.Tensor:
    out = collection(features)
    parts = [out.values()] if isinstance(out, ec.KeyedTensor) else [part.values() for part in out.values()]
    return sum((part * part + part).sum() for part in parts)


def tables(hbm_rows: int | None, admit: ec.AdmitAndEvictConfig | None = None) -> list[ec.TableConfig]:
    return [ec.TableConfig(name, 4, hbm_rows=hbm_rows, admit_and_evict=admit) for name in ("a", "b", "c")]


@pytest.mark.parametrize("kind", KINDS)
def test_i9_a_micro_batch_much_larger_than_the_first_of_its_window(kind) -> None:
    states = []
    for rows in (None, 4000):
        made = kind(tables(rows), optimizer=ec.Adagrad(lr=0.1), accumulate=2)
        for step in range(3):
            loss_of(made, batch(a=[step], b=[1], c=[2])).backward()
            loss_of(made, batch(a=range(1000 * 4**step // 8), b=range(5), c=range(step, 400))).backward()
        check(made.manager)
        states.append(model_state(made.manager))
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", KINDS)
def test_i9_a_window_whose_micro_batches_use_different_tables(kind) -> None:
    states = []
    for rows in (None, 4000):
        made = kind(tables(rows), optimizer=ec.Adagrad(lr=0.1), accumulate=3)
        for _ in range(2):
            loss_of(made, batch(a=range(400), b=[], c=[])).backward()
            loss_of(made, batch(a=[], b=range(700), c=[])).backward()
            loss_of(made, batch(a=[], b=[], c=range(1500))).backward()
        check(made.manager)
        states.append(model_state(made.manager))
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_i9_two_forwards_of_which_the_second_is_much_larger(kind, together) -> None:
    states = []
    for rows in (None, 4000):
        made = kind(tables(rows), optimizer=ec.Adagrad(lr=0.1))
        first = loss_of(made, batch(a=[1], b=[2], c=[3]))
        second = loss_of(made, batch(a=range(1000), b=range(2000), c=[3, 4]))
        if together:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        check(made.manager)
        states.append(model_state(made.manager))
    assert states[0] == states[1]


def test_i9_growth_under_forwards_with_filters_sweeps_and_rows_in_limbo() -> None:
    admit = ec.AdmitAndEvictConfig(
        admit_threshold=2, evict_threshold=3, evict_step_interval=1, time_source="step", not_admitted_default_value=0.5
    )
    states, grown, evicted = [], 0, 0
    for rows in (None, 6000):
        ebc = ec.EmbeddingBagCollection(tables(rows, admit), optimizer=ec.Adagrad(lr=0.1), accumulate=4)
        rng = np.random.default_rng(0)
        for step in range(40):
            most = [3, 40, 400, 2000][step % 4]
            keys = {name: rng.integers(0, 2 * most, most) for name in ("a", "b", "c")}
            before, waiting = ebc.manager.stats()["capacity"], ebc.manager.outstanding
            loss_of(ebc, batch(**keys)).backward()
            grown += waiting > 0 and ebc.manager.stats()["capacity"] > before
        evicted = ebc.manager.stats()["evicted"]
        check(ebc.manager)
        states.append(model_state(ebc.manager))
    assert states[0] == states[1] and grown > 0 and evicted > 0


def test_i9_weights_get_the_gradient_of_the_rows_that_were_read() -> None:
    gradients = []
    for rows in (None, 4000):
        ebc = ec.EmbeddingBagCollection(tables(rows), optimizer=ec.SGD(lr=0.1))
        weights = torch.ones(3, requires_grad=True)
        small = ec.JaggedFeatures(["a", "b", "c"], [1, 2, 3], [1, 1, 1], weights=weights)
        loss = ebc(small).values().sum()
        loss_of(ebc, batch(a=range(1000), b=range(1000), c=range(1000))).backward()
        loss.backward()
        gradients.append(weights.grad.tolist())
    assert gradients[0] == gradients[1]


def test_slots_in_hand_hold_the_buffer_where_it_is() -> None:
    ebc = ec.EmbeddingBagCollection(tables(None), optimizer=ec.SGD(lr=0.1))
    manager = ebc.manager
    info = manager.plan(batch(a=[1], b=[2], c=[3]))
    manager.swap_out(info)
    manager.swap_in(info)
    with pytest.raises(ec.HbmCapacityError, match=r"backward does, and finish_accumulation\(\).*hbm_rows"):
        loss_of(ebc, batch(a=range(1000), b=[], c=[]))
    manager.finish(info)
    loss_of(ebc, batch(a=range(1000), b=[], c=[])).backward()
