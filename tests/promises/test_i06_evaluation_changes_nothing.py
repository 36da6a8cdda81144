"""I6: evaluation sees the state after the last finished training batch and changes nothing that training can see."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.hand import HandTrainer
from promises.strategies import World, examples, make_batch, one_feature, worlds
from promises.training import check, evaluate, make_collection, outputs_of, train_window, whole_state

READING: dict[str, type[AbstractContextManager]] = {
    "eval": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("how", READING)
def test_i6_a_run_with_evaluations_equals_a_run_without(how: str) -> None:
    seen = {"evicted": 0, "rejected": 0, "swap_out_rows": 0}

    @examples(15)
    @given(world=worlds(), seed=st.integers(0, 2**32))
    def run(world: World, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = world.least_rows()
        never, often = make_collection(world, rows), make_collection(world, rows)
        known = [int(key) for batch in world.batches for key in batch.values().tolist()] or [0]
        for number, window in enumerate(world.windows()):
            if how == "eval":
                often.eval()
            with READING[how]():
                # More keys than there are slots, known ones and new ones; no timestamps are needed for reading.
                pool = [*known, *rng.integers(-(2**62), 2**62, 20).tolist()]
                batch = make_batch(rng, world.batches[0].keys(), pool, 20, skew=1.0)
                before = whole_state(often.manager)
                first, second = outputs_of(often(batch)), outputs_of(often(batch))
                assert not any(out.requires_grad for out in first)
                assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
                assert whole_state(often.manager) == before
            often.train()
            assert train_window(often, window, world.joint) == train_window(never, window, world.joint), number
            # Places, counters, versions: victims of later batches depend on all of them.
            assert whole_state(often.manager) == whole_state(never.manager)
        for name in seen:
            seen[name] += often.manager.stats()[name]
        check(often.manager)
        never.close()
        often.close()

    run()
    assert all(count > 0 for count in seen.values()), seen


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_i6_evaluation_reads_what_training_would_have_read(pooled: bool) -> None:
    """Residents, rows in host memory and unknown keys; the same bits as a training forward that comes next."""
    kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection
    collection = kind(
        [ec.TableConfig("f", 6, hbm_rows=5, initializer=ec.Normal(0.0, 1.0))], optimizer=ec.Adagrad(lr=0.5)
    )
    for values in ([1, 2, 3, 4, 5], [6, 7, 8], [1, 9]):
        train_window(collection, [one_feature(values)])
    for values in ([6, 1, 9], [2, 3, 4], [100, 101], [2, 100, 8, 6, 1]):
        batch = one_feature(values, weights=torch.linspace(-1, 2, len(values)))
        expected = evaluate(collection, batch)
        found = outputs_of(collection(batch))
        assert [out.detach().numpy().tobytes() for out in found] == expected
        del found


def test_i6_a_key_that_is_not_admitted_reads_the_default() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=3, not_admitted_default_value=-2.5)
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("f", 2, hbm_rows=4, admit_and_evict=rule), ec.TableConfig("g", 2, hbm_rows=4)],
        optimizer=ec.SGD(lr=1.0),
    )

    def both(values: list[int]) -> ec.JaggedFeatures:
        return ec.JaggedFeatures(["f", "g"], torch.tensor(values * 2), torch.ones(2 * len(values), dtype=torch.int64))

    def read(key: int) -> tuple[list[float], list[float]]:
        ebc.eval()
        out = ebc(both([key]))
        ebc.train()
        return out["f"][0].tolist(), out["g"][0].tolist()

    view = ebc.tables()["g"]
    assert read(7) == ([-2.5, -2.5], view.lookup([7], insert=False)[0].tolist())
    for seen in range(1, 4):
        for _ in range(5):  # evaluation does not count
            assert read(7)[0] == [-2.5, -2.5]
        out = ebc(both([7]))
        assert (out["f"][0].tolist() == [-2.5, -2.5]) is (seen < 3)
        out.values().sum().backward()
    assert read(7)[0] == ebc.tables()["f"].lookup([7], insert=False)[0].tolist() != [-2.5, -2.5]


@pytest.mark.parametrize("stage", ["planned", "swapped_out", "swapped_in"])
def test_i6_evaluation_between_plan_and_finish_sees_the_last_finished_batch(stage: str) -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=3, evict_step_interval=1, time_source="step")
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("f", 3, hbm_rows=3, admit_and_evict=rule)], optimizer=ec.SGD(lr=1.0)
    )
    m = ebc.manager
    for values in ([1, 2], [2, 3], [3, 4], [4, 5]):
        ebc(one_feature(values)).values().sum().backward()
    probe = one_feature([1, 2, 3, 4, 5, 50, 51])
    before = evaluate(ebc, probe)
    state = whole_state(m)
    info = m.plan(one_feature([50, 2]))  # evicts 1, bears 50, brings 2 in, sends others out
    assert m.stats()["evicted"] > 0 and len(info.swap_out_keys) > 0
    if stage != "planned":
        m.swap_out(info)
    if stage == "swapped_in":
        m.swap_in(info)
    assert evaluate(ebc, probe) == before
    if stage == "planned":
        m.cancel(info)
        assert whole_state(m) == state
        return
    if stage == "swapped_out":
        m.swap_in(info)
    m.finish(info)
    after = np.frombuffer(evaluate(ebc, probe)[0], np.float32).reshape(-1, 3)
    np.testing.assert_array_equal(after, m.table("f").lookup([1, 2, 3, 4, 5, 50, 51], insert=False))
    assert 1 not in m.table("f") and 50 in m.table("f")


def test_i6_evaluation_needs_no_slots_and_no_timestamps() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=3, evict_step_interval=1)
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 3, hbm_rows=2, admit_and_evict=rule)]).eval()
    out = ebc(one_feature(range(1000)))
    assert out.values().shape == (1000, 3)
    stats = ebc.manager.stats()
    assert (
        stats["rows"] == stats["resident"] == stats["pinned"] == stats["hits"] == stats["misses"] == stats["step"] == 0
    )


def test_i6_per_sample_weights_get_their_gradient_in_evaluation_too() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 3, hbm_rows=4)], optimizer=ec.SGD(lr=1.0))
    ebc(one_feature([1, 2])).values().sum().backward()
    before = whole_state(ebc.manager)
    weights = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    ebc.eval()(one_feature([1, 2, 9], weights=weights)).values().sum().backward()
    rows = ebc.tables()["f"].lookup([1, 2, 9], insert=False)
    np.testing.assert_allclose(weights.grad.numpy(), rows.sum(axis=1), rtol=1e-6)
    assert whole_state(ebc.manager) == before


def test_i6_reading_beside_training_sees_whole_rows_and_disturbs_nothing() -> None:
    """A thread evaluates while another trains: each row it reads is one that some finished batch left."""
    hand = HandTrainer([ec.TableConfig("f", 16, hbm_rows=24, initializer=ec.Zeros())])
    view, stop, torn = hand.manager.table("f"), threading.Event(), []
    keys = np.arange(40)

    def read() -> None:
        while not stop.is_set():
            rows = view.lookup(keys, insert=False)
            if (rows != rows[:, :1]).any():
                torn.append(rows)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        rng = np.random.default_rng(5)
        for _ in range(150):
            hand.train(one_feature(rng.integers(0, 40, 12).tolist()))
    finally:
        stop.set()
        reader.join()
    assert not torn
    np.testing.assert_array_equal(view.lookup(keys, insert=False), hand.expected("f", keys.tolist()))
    check(hand.manager)
