"""The optimizer face: hyper-parameters that may change, schedulers that work, a state that is checked."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import embcache as ec


def collection(spec: ec.OptimizerSpec, **options: object) -> ec.EmbeddingBagCollection:
    return ec.EmbeddingBagCollection([ec.TableConfig("t", 2, initializer=ec.Zeros())], optimizer=spec, **options)


def one_step(ebc: ec.EmbeddingBagCollection, key: int = 1) -> torch.Tensor:
    """A forward and backward with gradient 1 for `key`; returns its row afterwards."""
    ebc(ec.JaggedFeatures(["t"], [key], [1])).values().sum().backward()
    return torch.from_numpy(ebc.tables()["t"].lookup([key], insert=False))[0]


def test_param_groups_show_the_spec():
    group = collection(ec.Adam(lr=0.5, weight_decay=0.25, betas=(0.5, 0.75), eps=0.125)).optimizer.param_groups[0]
    shown = {name: group[name] for name in ("lr", "weight_decay", "betas", "eps", "kind")}
    assert shown == {"lr": 0.5, "weight_decay": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "kind": "adam"}
    assert len(collection(ec.SGD()).optimizer.param_groups) == 1


def test_an_update_uses_the_learning_rate_of_its_moment():
    ebc = collection(ec.SGD(lr=1.0))
    assert one_step(ebc).tolist() == [-1.0, -1.0]
    ebc.optimizer.param_groups[0]["lr"] = 0.5
    assert one_step(ebc).tolist() == [-1.5, -1.5]
    rate = torch.tensor(0.25)
    ebc.optimizer.param_groups[0]["lr"] = rate
    assert one_step(ebc).tolist() == [-1.75, -1.75]
    rate.fill_(0.125)  # in place: the same object, another value
    assert one_step(ebc).tolist() == [-1.875, -1.875]


def test_step_and_zero_grad_change_no_row():
    ebc = collection(ec.SGD(lr=1.0))
    one_step(ebc)
    before = ebc.optimizer.step_count
    ebc.optimizer.step()
    ebc.optimizer.zero_grad()
    assert ebc.optimizer.step_count == before == 1
    assert ebc.tables()["t"].lookup([1], insert=False).tolist() == [[-1.0, -1.0]]


def test_hooks_and_a_profiler_see_a_step():
    """As those of any optimizer, though a step that nobody looks at goes past torch's wrapper."""
    ebc = collection(ec.SGD(lr=1.0))
    seen: list[object] = []
    for register in (ebc.optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        handle = register(lambda optimizer, args, kwargs: seen.append((optimizer, args, kwargs)))
        ebc.optimizer.step()
        handle.remove()
    for register in (ebc.optimizer.register_step_post_hook, register_optimizer_step_post_hook):
        handle = register(lambda optimizer, args, kwargs: seen.append((optimizer, args, kwargs)))
        ebc.optimizer.step()
        handle.remove()
    ebc.optimizer.step()
    assert seen == [(ebc.optimizer, (ebc.optimizer,), {})] * 4
    with torch.profiler.profile() as profile:
        ebc.optimizer.step()
    assert any("EmbOptimizer.step" in event.key for event in profile.key_averages())


def test_step_calls_a_closure():
    ebc = collection(ec.SGD(lr=1.0))

    def closure() -> torch.Tensor:
        loss = ebc(ec.JaggedFeatures(["t"], [1], [1])).values().sum()
        loss.backward()
        return loss

    assert ebc.optimizer.step(closure).item() == 0.0
    assert ebc.optimizer.step_count == 1


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), [0.5, 0.25, 0.125]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (epoch + 1)), [0.5, 1 / 3, 0.25]),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.1), [0.1, 0.01, 0.001]),
    ],
)
def test_schedulers(make, rates):
    ebc = collection(ec.SGD(lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make(ebc.optimizer)
        for rate in rates:
            one_step(ebc)  # no optimizer.step(): the scheduler must not complain, the update has happened
            scheduler.step()
            assert ebc.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    before = one_step(ebc)
    assert (one_step(ebc) - before).tolist() == pytest.approx([-rates[-1]] * 2, rel=1e-3)


def test_one_cycle_and_plateau():
    ebc = collection(ec.Adam(lr=1.0))
    cycle = lr_scheduler.OneCycleLR(ebc.optimizer, max_lr=0.1, total_steps=10)
    seen = []
    for _ in range(9):
        one_step(ebc)
        ebc.optimizer.step()
        cycle.step()
        seen.append((ebc.optimizer.param_groups[0]["lr"], ebc.optimizer.param_groups[0]["betas"][0]))
    assert max(rate for rate, _ in seen) == pytest.approx(0.1) and len({beta for _, beta in seen}) > 3
    other = collection(ec.SGD(lr=1.0))
    plateau = lr_scheduler.ReduceLROnPlateau(other.optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0):
        one_step(other)
        plateau.step(loss)
    assert other.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("rate", [math.nan, -1.0, math.inf, "fast", torch.tensor(math.nan)])
def test_i11_a_bad_learning_rate_is_refused_before_any_row_changes(rate):
    ebc = collection(ec.Adagrad(lr=1.0))
    one_step(ebc)
    before = [column.tolist() for column in ebc.tables()["t"].lookup_rows([1])]
    ebc.optimizer.param_groups[0]["lr"] = rate
    out = ebc(ec.JaggedFeatures(["t"], [1], [1])).values().sum()
    with pytest.raises(ec.ConfigError, match=r"param_groups\[0\].*lr"):
        out.backward()
    del out
    assert [column.tolist() for column in ebc.tables()["t"].lookup_rows([1])] == before
    assert ebc.optimizer.step_count == 1
    ebc.optimizer.param_groups[0]["lr"] = 1.0
    one_step(ebc)
    assert ebc.manager.stats()["pinned"] == 0


@pytest.mark.parametrize(("name", "value"), [("weight_decay", -1.0), ("eps", math.nan), ("eps", -1.0)])
def test_i11_other_hyper_parameters_are_checked_too(name, value):
    ebc = collection(ec.Adagrad(lr=1.0))
    ebc.optimizer.param_groups[0][name] = value
    with pytest.raises(ec.ConfigError, match=name):
        one_step(ebc)


@pytest.mark.parametrize(
    "value",
    [10**400, 1e39, torch.ones(2), torch.ones(1, device="meta"), np.ones(2), [1.0], (), "1", None],
    ids=lambda value: str(value)[:20],
)
def test_i11_what_is_not_one_number_is_refused_before_anything_changes(value):
    ebc = collection(ec.SGD(lr=1.0))
    one_step(ebc)
    group = ebc.optimizer.param_groups[0]
    for _ in range(2):  # the second time too: nothing of it was remembered
        group["lr"] = value
        with pytest.raises(ec.ConfigError, match=r"param_groups\[0\].*lr"):
            one_step(ebc)
    assert ebc.optimizer.step_count == 1
    group["lr"] = 1.0
    assert one_step(ebc).tolist() == [-2.0, -2.0]


def test_i11_a_missing_hyper_parameter_is_named():
    ebc = collection(ec.SGD(lr=1.0))
    del ebc.optimizer.param_groups[0]["lr"]
    with pytest.raises(ec.ConfigError, match=r"param_groups\[0\] has no 'lr'; set it, for example to 1.0"):
        one_step(ebc)
    assert ebc.optimizer.step_count == 0


def test_values_changed_in_place_are_seen():
    ebc = collection(ec.Adam(lr=1.0))
    optimizer = ebc.optimizer
    rate, betas = np.array(0.5), [0.5, torch.tensor(0.75)]
    optimizer.param_groups[0].update(lr=rate, betas=betas)
    assert (optimizer.current_spec().lr, optimizer.current_spec().betas) == (0.5, (0.5, 0.75))
    rate[()] = 0.25
    betas[0] = 0.125
    betas[1].fill_(0.5)
    assert (optimizer.current_spec().lr, optimizer.current_spec().betas) == (0.25, (0.125, 0.5))


def test_i11_a_rate_that_bias_correction_makes_infinite_is_refused():
    ebc = collection(ec.Adam(lr=3e38, betas=(0.999, 0.0)))
    with pytest.raises(ec.ConfigError, match="bias correction"):
        one_step(ebc)
    assert ebc.optimizer.step_count == 0


def test_state_dict_round_trip():
    ebc = collection(ec.Adam(lr=0.5))
    one_step(ebc)
    one_step(ebc)
    ebc.optimizer.param_groups[0]["lr"] = 0.25
    state = pickle.loads(pickle.dumps(ebc.optimizer.state_dict()))
    assert sum(t.numel() for t in state["state"].values() if isinstance(t, torch.Tensor)) == 0
    fresh = collection(ec.Adam(lr=0.5))
    fresh.optimizer.load_state_dict(state)
    assert fresh.optimizer.step_count == 2
    assert fresh.optimizer.param_groups[0]["lr"] == 0.25
    one_step(fresh)
    assert fresh.optimizer.step_count == 3 and ebc.optimizer.step_count == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state["param_groups"][0].update(kind="sgd"), "'sgd'"),
        (lambda state: state["param_groups"][0].update(lr=-1.0), "lr"),
        (lambda state: state["param_groups"][0].pop("eps"), "eps"),
        (lambda state: state["state"][0].update(step=-1), "step count is -1"),
        (lambda state: state["state"][0].update(step=1.5), "step count is 1.5"),
        (lambda state: state["state"][0].update(step=2**63), "step count is 9223372036854775808"),
        (lambda state: state["state"][0].update(step=10**5000), "step count is"),
        (lambda state: state["param_groups"][0].update(params=[0, 1]), "ValueError"),
        (lambda state: state["param_groups"][0].update(params=[]), "ValueError"),
        (lambda state: state["param_groups"][0].update(lr=torch.ones(2)), "lr"),
        (lambda state: state["param_groups"][0].update(lr=1e39), "float32"),
        (lambda state: state.pop("state"), "state"),
        (lambda state: state["param_groups"].append(state["param_groups"][0]), "ValueError"),
    ],
)
def test_i11_a_state_that_does_not_fit_is_refused_whole(spoil, message):
    ebc = collection(ec.Adam(lr=0.5))
    one_step(ebc)
    state = copy.deepcopy(ebc.optimizer.state_dict())
    state["param_groups"][0]["weight_decay"] = 0.125
    spoil(state)
    with pytest.raises(ec.ConfigError, match=message):
        ebc.optimizer.load_state_dict(state)
    assert ebc.optimizer.step_count == 1 and ebc.optimizer.param_groups[0]["weight_decay"] == 0.0


def test_what_it_refuses():
    optimizer = collection(ec.SGD()).optimizer
    with pytest.raises(ec.ConfigError, match="one parameter group"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ec.ConfigError, match="state_dict"):
            make_copy(optimizer)
