"""I1: each live key has exactly one authoritative copy of its row, and ``m.table(name)`` finds it wherever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import embcache as ec
from promises.hand import HandTrainer
from promises.reference import Reference
from promises.strategies import examples, features_of, make_batch, one_feature, pools, table_lists, with_rows
from promises.training import check, model_state, rows_of, whole_state


def dyadic(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 numbers whose small sums and products are exact."""
    return (rng.integers(-8, 9, shape) / 4).astype(np.float32)


def assert_rows(view: object, rows: dict[int, np.ndarray], state: dict[int, np.ndarray], *, exact: bool) -> None:
    found = rows_of(view)
    assert found.keys() == rows.keys()
    for key, (weights, moments, _, _) in found.items():
        if exact:
            assert np.frombuffer(weights, np.float32).tolist() == rows[key].tolist(), key
        else:
            np.testing.assert_allclose(np.frombuffer(weights, np.float32), rows[key], rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(np.frombuffer(moments, np.float32), state[key], rtol=2e-5, atol=2e-6)


def train_both(
    ebc: ec.EmbeddingBagCollection, reference: Reference, batch: ec.JaggedFeatures, rng: np.random.Generator
) -> None:
    out = ebc(batch)
    gradient = dyadic(rng, tuple(out.values().shape))
    blocks = dict(zip(out.keys(), np.split(gradient, out.offset_per_key()[1:-1], axis=1), strict=True))
    expected = reference.train(batch, blocks)
    for name, block in expected.items():
        np.testing.assert_allclose(out[name].detach().numpy(), block, rtol=1e-5, atol=1e-6)
    (out.values() * torch.from_numpy(gradient)).sum().backward()


@pytest.mark.parametrize("spec", [ec.SGD(lr=0.5), ec.Adagrad(lr=0.1), ec.RowWiseAdagrad(lr=0.1)], ids=lambda s: s.kind)
def test_i1_training_and_view_changes_equal_a_reference_trainer(spec: ec.OptimizerSpec) -> None:
    swapped = []

    @examples(15)
    @given(
        tables=table_lists(filtered=st.none()),
        pool=pools(high=40),
        seed=st.integers(0, 2**32),
        spare=st.integers(0, 6),
        steps=st.integers(5, 40),
    )
    @example(tables=[ec.TableConfig("a", 4)], pool=list(range(60)), seed=1, spare=0, steps=150)  # certain to swap
    def run(tables: list[ec.TableConfig], pool: list[int], seed: int, spare: int, steps: int) -> None:
        rng = np.random.default_rng(seed)
        names = features_of(tables)
        reference = Reference(tables, spec)
        # 12: three features of a table, two examples, two keys.
        ebc = ec.EmbeddingBagCollection(with_rows(tables, 12 + spare), optimizer=spec)
        views = ebc.tables()
        outside = [key ^ 0x5555 for key in pool]
        for _ in range(steps):
            name = str(rng.choice(list(views)))
            view, table = views[name], reference.tables[name]
            some = np.array(rng.choice(np.array(pool + outside), size=rng.integers(0, 6)), dtype=np.int64)
            action = rng.choice(["train", "train", "train", "assign", "erase", "insert", "lookup", "read", "flush"])
            if action == "train":
                batch = make_batch(
                    rng, names, pool, int(rng.integers(0, 3)), lengths=(0, 1, 2), weighted=True, skew=1.0
                )
                train_both(ebc, reference, batch, rng)
            elif action == "assign":
                weights = dyadic(rng, (len(some), view.dim))
                state = np.abs(dyadic(rng, (len(some), view.state_dim)))
                view.assign(some, weights, state)
                for i, key in enumerate(some.tolist()):
                    table.rows[key], table.state[key] = weights[i].copy(), state[i].copy()
            elif action == "erase":
                assert view.erase(some) == len(set(some.tolist()) & table.rows.keys())
                for key in some.tolist():
                    table.rows.pop(key, None)
                    table.state.pop(key, None)
            elif action in ("insert", "lookup"):
                seen = view.lookup(some) if action == "lookup" else view.insert(some)
                for i, key in enumerate(some.tolist()):
                    if key not in table.rows:
                        table.rows[key], table.state[key] = table.initial(key).copy(), table.new_state()
                    if action == "lookup":
                        np.testing.assert_allclose(seen[i], table.rows[key], rtol=2e-5, atol=2e-6)
                if action == "insert":
                    assert seen.tolist() == view.find(some).tolist() and (seen >= 0).all()
            elif action == "read":
                weights, state = view.lookup_rows(some)
                for i, key in enumerate(some.tolist()):
                    assert (view.find([key])[0] >= 0) == (key in view) == (key in table.rows)
                    np.testing.assert_allclose(weights[i], table.read(key), rtol=2e-5, atol=2e-6)
                    np.testing.assert_allclose(state[i], table.state.get(key, table.new_state()), rtol=2e-5, atol=2e-6)
            else:
                ebc.manager.flush()
            assert len(view) == len(table.rows)
        for name, view in views.items():
            assert_rows(view, reference.tables[name].rows, reference.tables[name].state, exact=spec.kind == "sgd")
        check(ebc.manager)
        swapped.append(ebc.manager.stats()["swap_out_rows"])
        ebc.close()

    run()
    assert sum(swapped) > 0


def test_i1_training_with_filters_equals_a_reference_trainer() -> None:
    seen = {"evicted": 0, "rejected": 0, "swap_out_rows": 0}

    @examples(40)
    @given(
        tables=table_lists(),
        pool=pools(high=40),
        seed=st.integers(0, 2**32),
        steps=st.integers(6, 40),
    )
    def run(tables: list[ec.TableConfig], pool: list[int], seed: int, steps: int) -> None:
        rng = np.random.default_rng(seed)
        names = features_of(tables)
        reference = Reference(tables, ec.Adagrad(lr=0.1))
        ebc = ec.EmbeddingBagCollection(with_rows(tables, 12), optimizer=ec.Adagrad(lr=0.1))
        for step in range(steps):
            batch = make_batch(
                rng, names, pool, int(rng.integers(0, 3)), lengths=(0, 1, 2), now=10 * step, weighted=step % 2 == 0
            )
            train_both(ebc, reference, batch, rng)
            probe = pool[:5]
            for name, view in ebc.tables().items():
                table = reference.tables[name]
                expected = [table.read(key) for key in probe]
                np.testing.assert_allclose(view.lookup(probe, insert=False), expected, rtol=2e-5, atol=2e-6)
                assert view.find(probe).__ge__(0).tolist() == [key in table.rows for key in probe]
        for t, config in enumerate(ebc.manager.layout.tables):
            table, view = reference.tables[config.name], ebc.tables()[config.name]
            assert_rows(view, table.rows, table.state, exact=False)
            if config.admit_and_evict is not None:
                kept = {key: (c.count, c.last) for key, c in table.counters.items()}
                state = ebc.manager.planner.filter_state(t)
                found = zip(state["counts"].tolist(), state["last"].tolist(), strict=True)
                assert dict(zip(state["keys"].tolist(), found, strict=True)) == kept
                assert {k: v[2:] for k, v in rows_of(view).items()} == {k: table.visible(k) for k in table.rows}
                stats = ebc.manager.stats()["tables"][config.name]
                assert (stats["evicted"], stats["rejected"]) == (table.evicted, table.rejected)
        check(ebc.manager)
        stats = ebc.manager.stats()
        for name in seen:
            seen[name] += stats[name]
        ebc.close()

    run()
    assert all(count > 0 for count in seen.values()), seen


@pytest.mark.parametrize("stage", ["planned", "swapped_out", "swapped_in"])
def test_i1_a_row_in_transit_reads_as_of_the_last_finished_batch(stage: str) -> None:
    hand = HandTrainer([ec.TableConfig("f", 4, hbm_rows=4)])
    m = hand.manager
    for values in ([1, 2, 3, 4], [5, 6, 7], [1, 8, 2]):
        hand.train(one_feature(values))
    before = model_state(m)
    info = m.plan(one_feature([5, 8, 9, 10]))  # 5 and born keys come in; victims go out
    assert len(info.swap_out_keys) == 3 and 8 not in info.swap_out_keys
    if stage != "planned":
        m.swap_out(info)
    if stage == "swapped_in":
        m.swap_in(info)
    assert model_state(m) == before
    view = m.table("f")
    assert [key in view for key in (5, 8, 9, 10, *info.swap_out_keys.tolist())] == [True, True, False, False] + [
        True
    ] * 3
    everything = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    np.testing.assert_array_equal(view.lookup(everything, insert=False), hand.expected("f", everything))
    weights, _ = view.lookup_rows(everything)
    np.testing.assert_array_equal(weights, hand.expected("f", everything))
    if stage == "planned":
        m.swap_out(info)
    if stage != "swapped_in":
        m.swap_in(info)
    hand.change(info)
    m.finish(info)
    np.testing.assert_array_equal(view.lookup(everything, insert=False), hand.expected("f", everything))
    check(m)


@pytest.mark.parametrize("stage", ["planned", "swapped_out", "swapped_in"])
def test_i1_a_pinned_key_refuses_every_change(stage: str) -> None:
    hand = HandTrainer([ec.TableConfig("f", 4, hbm_rows=4)])
    m, view = hand.manager, hand.manager.table("f")
    hand.train(one_feature([1, 2, 3, 4]))
    info = m.plan(one_feature([4, 9]))
    victim = int(info.swap_out_keys[0])
    if stage != "planned":
        m.swap_out(info)
    if stage == "swapped_in":
        m.swap_in(info)
    before = whole_state(m)
    one = np.ones((2, 4), np.float32)
    # A victim refuses while its row is on its way; once that is in host memory, the plan has no more to do with it.
    for key in (4, 9, victim) if stage == "planned" else (4, 9):
        for change in (
            lambda key=key: view.assign([3, key], one),
            lambda key=key: view.erase([3, key]),
        ):
            with pytest.raises(ec.PinnedKeyError, match=rf"\b{key}\b"):
                change()
    for change in (lambda: view.insert([100, 9]), lambda: view.lookup([100, 9])):
        with pytest.raises(ec.PinnedKeyError, match=r"\b9\b"):
            change()
    assert whole_state(m) == before
    view.assign([3, 100], one)  # keys that no batch uses may change
    assert (view.lookup([3, 100], insert=False) == 1).all()
    assert view.erase([3]) == 1 and 3 not in view
    if stage == "planned":
        m.swap_out(info)
    if stage != "swapped_in":
        m.swap_in(info)
    m.finish(info)
    assert view.erase([4, 9, victim]) == 3
    check(m)


def test_i1_assigning_a_resident_is_seen_by_the_next_batch() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 2, hbm_rows=3)], optimizer=ec.SGD(lr=1.0))
    ebc(one_feature([1, 2, 3]))["f"].sum().backward()
    view = ebc.tables()["f"]
    view.assign([2], np.array([[5, 6]], np.float32))
    out = ebc(one_feature([2, 1]))
    assert out["f"][0].tolist() == [5, 6]
    out["f"].sum().backward()
    assert view.lookup([2], insert=False).tolist() == [[4, 5]]
    assert view.erase([2]) == 1
    initial = view.lookup([2], insert=False)
    assert ebc(one_feature([2]))["f"].detach().numpy().tolist() == initial.tolist() != [[4, 5]]


def test_i1_iteration_notices_a_change() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 2, hbm_rows=8)], optimizer=ec.SGD(lr=1.0))
    ebc(one_feature(range(6)))["f"].sum().backward()
    view = ebc.tables()["f"]
    changes = [
        lambda: ebc(one_feature([1])),
        lambda: view.assign([1], np.zeros((1, 2), np.float32)),
        lambda: view.erase([1]),
        lambda: view.insert([77]),
    ]
    for change in changes:
        iterator = view.items(batch_rows=2)
        next(iterator)
        change()
        with pytest.raises(ec.ChangedError, match="'f'.*changed"):
            next(iterator)


def test_i1_rebalance_and_growth_keep_every_row() -> None:
    tables = [ec.TableConfig("a", 4), ec.TableConfig("b", 4)]
    for hbm_bytes in (None, 16 * 60):
        ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.SGD(lr=0.5), hbm_bytes=hbm_bytes)
        rng = np.random.default_rng(0)
        for step in range(12):
            batch = make_batch(rng, ["a", "b"], range(40 if step % 3 else 9), 6, lengths=(0, 1, 2), skew=1.0)
            ebc(batch).values().sum().backward()
            before = model_state(ebc.manager)
            ebc.manager.rebalance()
            assert model_state(ebc.manager) == before
            check(ebc.manager)
        assert ebc.manager.stats()["rows"] > 40
