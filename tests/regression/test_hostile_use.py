"""What a stranger found who tried to break the first version: wrong values, a deadlock, errors without a type."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

import embcache as ec


def collection(**options: object) -> ec.EmbeddingBagCollection:
    return ec.EmbeddingBagCollection([ec.TableConfig("a", 4, **options)], optimizer=ec.SGD(lr=1.0))


def batch(keys: object, weights: torch.Tensor | None = None) -> ec.JaggedFeatures:
    values = torch.as_tensor(keys)
    return ec.JaggedFeatures(["a"], values, torch.ones(len(values), dtype=torch.int64), weights)


def test_weights_changed_in_place_before_backward_do_not_reach_the_rows() -> None:
    ebc = collection()
    rows = ebc.tables()["a"].lookup([1, 2])
    weights = torch.ones(2)
    loss = ebc(batch([1, 2], weights)).values().sum()
    weights.mul_(100)
    loss.backward()
    np.testing.assert_allclose(ebc.tables()["a"].lookup([1, 2]), rows - 1, rtol=1e-6)


def test_keys_changed_in_place_before_backward_do_not_reach_other_rows() -> None:
    ebc = collection()
    rows = ebc.tables()["a"].lookup([1, 2, 3])
    features = batch([1, 2])
    loss = ebc(features).values().sum()
    features.values().fill_(3)
    loss.backward()
    after = ebc.tables()["a"].lookup([1, 2, 3])
    np.testing.assert_allclose(after, rows - np.array([[1], [1], [0]]), rtol=1e-6)


def test_a_default_dtype_of_float64_changes_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ebc, sequences = collection(), ec.EmbeddingCollection([ec.TableConfig("a", 4)], optimizer=ec.SGD(lr=1.0))
        rows = ebc.tables()["a"].lookup([1])
        out = ebc(batch([1], torch.ones(1, dtype=torch.float32, requires_grad=True))).values()
        assert out.dtype is torch.float32
        out.sum().backward()
        np.testing.assert_allclose(ebc.tables()["a"].lookup([1]), rows - 1, rtol=1e-6)
        sequences(batch([1]))["a"].values().sum().backward()
        np.testing.assert_allclose(sequences.tables()["a"].lookup([1]), rows - 1, rtol=1e-6)
        assert ebc.eval()(batch([1, 2])).values().dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_plan_in_a_callback_of_plan_async_is_refused_where_it_would_wait_for_itself() -> None:
    manager = ec.EmbCacheManager([ec.TableConfig("a", 4, hbm_rows=1000)])
    answers: list[object] = []
    go = threading.Event()
    called = threading.Event()

    def callback(_: Future[object]) -> None:
        go.wait(60)  # until another batch is queued behind this one
        try:
            answers.append(manager.plan(batch([3])))
        except ec.PlanError as error:
            answers.append(error)
        called.set()

    with manager.door:  # the worker waits for this lock, so the callback runs in the worker
        first = manager.plan_async(batch(np.arange(900) % 800))
        first.add_done_callback(callback)
        second = manager.plan_async(batch([2]))
    go.set()
    assert called.wait(60)
    assert second.result(60).unique_keys.tolist() == [2]
    assert isinstance(answers[0], ec.PlanError)
    assert "plan_async()" in str(answers[0])
    manager.close()


def test_other_threads_never_see_a_training_batch_half_way() -> None:
    """flush() used to raise PlanError between a forward's plan and its swap-in."""
    ebc = collection(hbm_rows=40)
    done = threading.Event()
    errors: list[BaseException] = []

    def flush() -> None:
        while not done.is_set():
            try:
                ebc.manager.flush()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        for step in range(300):
            ebc(batch(np.arange(20) + 7 * step)).values().sum().backward()
    finally:
        done.set()
        thread.join(60)
    assert errors == []


def test_look_up_into_the_memory_of_its_own_keys() -> None:
    ebc = collection()
    view = ebc.tables()["a"]
    keys = np.arange(100, 108)
    ebc(batch(keys)).values().sum().backward()
    rows = view.lookup(keys)
    memory = np.zeros(16, np.int64)
    memory[:8] = keys
    np.testing.assert_array_equal(view.lookup(memory[:8], out=memory.view(np.float32).reshape(8, 4)), rows)


@pytest.mark.parametrize("scale", [10**400, float("inf"), -1.0, "much"])
def test_a_loss_scale_that_is_no_number_is_refused(scale: object) -> None:
    ebc = collection()
    rows = ebc.tables()["a"].lookup([1])
    ebc.grad_scale = scale
    with pytest.raises(ec.ConfigError, match="grad_scale"):
        ebc(batch([1])).values().sum().backward()
    np.testing.assert_array_equal(ebc.tables()["a"].lookup([1]), rows)
