"""I9: training with any HBM size that holds one batch's unique rows gives weights, state and filter state bit-identical
to everything resident, at any thread count and policy.

The size of a batch's share is where most faults would show, so half of the sizes drawn are the smallest possible.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
import embcache.manager as manager_module
from embcache._core.notice import Notice
from embcache._core.swap import POLICIES
from promises.strategies import (
    ROW_TYPES,
    World,
    examples,
    features_of,
    filters,
    make_batch,
    optimizers,
    pools,
    table_lists,
    with_rows,
    worlds,
)
from promises.training import check, evaluate, make_collection, model_state, train, train_window

COUNTED = ("hits", "swap_out_rows", "evicted", "rejected", "forgotten")


@st.composite
def sizes(draw: st.DrawFn, world: World) -> dict[str, int]:
    """Slots of each table: from one window's unique rows up to all rows and more."""
    least, most = world.least_rows(), world.all_rows()
    return {
        name: least[name] + draw(st.just(0) | st.integers(0, max(0, most[name] - least[name]) + 3)) for name in least
    }


def test_i9_bit_identical_at_any_hbm_size() -> None:
    """Any tables, filters, optimizers, poolings, weights, windows; a random and the smallest size, and a growing buffer."""
    seen: Counter[str] = Counter()

    @examples(80)
    @given(world=worlds(steps=(6, 30)), data=st.data())
    def run(world: World, data: st.DataObject) -> None:
        resident = make_collection(world, world.all_rows(), num_threads=1)
        outputs, state = train(resident, world), model_state(resident.manager)
        count = resident.manager.stats()
        # A row that a batch evicts and whose slot it takes is written back, for whoever reads before it finishes.
        assert count["swap_out_rows"] == 0 or count["evicted"] > 0
        rows = data.draw(st.sampled_from([None, world.least_rows()]) | sizes(world))
        threads = data.draw(st.sampled_from([1, 2, 5]))
        policy = data.draw(st.sampled_from(POLICIES))
        collection = make_collection(world, rows, num_threads=threads, policy=policy)
        windows = world.windows()
        expect = data.draw(st.integers(0, 4)) if policy == "lookahead" else 0
        notices: dict[int, list[Notice]] = {}

        def look_ahead(number: int) -> None:
            """Tell of the batches of the next windows; what was expected of this one is here."""
            for coming in range(number + 1, min(number + 1 + expect, len(windows))):
                if coming not in notices:
                    notices[coming] = [collection.manager.look_ahead(batch) for batch in windows[coming]]
            for notice in notices.get(number, []):
                collection.manager.withdraw(notice)

        found = train(collection, world, look_ahead)
        for step, (one, other) in enumerate(zip(found, outputs, strict=True)):
            assert one == other, f"output {step} with {rows} slots"
        assert model_state(collection.manager) == state, f"{rows} slots, {threads} threads, {policy}"
        stats = collection.manager.stats()
        for name in ("admitted", "rejected", "evicted", "forgotten", "born", "rows"):
            assert stats[name] == count[name], name
        assert collection.optimizer.step_count == resident.optimizer.step_count
        assert stats["pinned"] == 0
        check(collection.manager)
        seen.update({name: stats[name] for name in COUNTED})
        seen.update(
            {
                f"accumulate {world.accumulate}": 1,
                f"joint {world.joint}": 1,
                world.optimizer.kind: 1,
                f"pooled {world.pooled}": 1,
            }
        )
        resident.close()
        collection.close()

    run()
    needed = [
        *COUNTED,
        "accumulate 2",
        "joint 2",
        "sgd",
        "adagrad",
        "rowwise_adagrad",
        "adam",
        "pooled True",
        "pooled False",
    ]
    assert all(seen[name] > 0 for name in needed), seen


def test_i9_bit_identical_with_filters_on_every_table() -> None:
    """Keys that are born, evicted, swapped out, evicted while swapped out, and born again."""
    seen: Counter[str] = Counter()

    @examples(50)
    @given(
        world=worlds(steps=(16, 40), tables=table_lists(most=2, filtered=filters(), dtypes=ROW_TYPES)), data=st.data()
    )
    def run(world: World, data: st.DataObject) -> None:
        resident = make_collection(world, None)
        outputs, state = train(resident, world), model_state(resident.manager)
        rows = data.draw(st.just(world.least_rows()) | sizes(world))
        collection = make_collection(world, rows, num_threads=data.draw(st.integers(1, 3)))
        assert train(collection, world) == outputs
        assert model_state(collection.manager) == state
        check(collection.manager)
        seen.update({name: collection.manager.stats()[name] for name in COUNTED})
        resident.close()
        collection.close()

    run()
    assert seen["evicted"] > 500 and seen["rejected"] > 500 and seen["swap_out_rows"] > 100, seen


def test_i9_bit_identical_with_a_changing_schedule_and_upkeep() -> None:
    """Learning rates that change, evaluations, flushes, rebalancing, and a new window size do not matter either."""
    seen: Counter[str] = Counter()

    @examples(25)
    @given(world=worlds(steps=(6, 24)), seed=st.integers(0, 2**32))
    def run(world: World, seed: int) -> None:
        results = []
        for small in (False, True):
            rng = np.random.default_rng(seed)
            collection = make_collection(world, world.least_rows() if small else None)
            schedule = torch.optim.lr_scheduler.ExponentialLR(collection.optimizer, 0.9)

            def between(number: int, collection=collection, schedule=schedule, rng=rng, small=small) -> None:
                if number:
                    schedule.step()
                probe = world.batches[int(rng.integers(len(world.batches)))]
                if small:
                    evaluate(collection, probe)
                    collection.manager.flush()
                    collection.manager.rebalance()

            outputs = train(collection, world, between)
            results.append((outputs, model_state(collection.manager)))
            seen.update({name: collection.manager.stats()[name] for name in COUNTED})
            collection.close()
        assert results[0] == results[1]

    run()
    assert seen["swap_out_rows"] > 0, seen


@pytest.mark.parametrize("budget", [None, 9, 16])
def test_i9_bit_identical_under_a_byte_budget_that_is_split_anew(budget: int | None) -> None:
    """``hbm_bytes`` over three tables of two dims; `rebalance` moves slots between tables in mid-run."""
    tables = [
        ec.TableConfig("a", 4),
        ec.TableConfig("b", 4, admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2)),
        ec.TableConfig("c", 6, pooling="mean"),
    ]
    row_bytes = 4 * (4 + 4 + 6) * 2
    runs = []
    for hbm_bytes in (None, budget and row_bytes * budget):
        ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.Adagrad(lr=0.1), hbm_bytes=hbm_bytes)
        rng = np.random.default_rng(4)
        outputs, capacities = [], set()
        for step in range(30):
            batch = make_batch(rng, ["a", "b", "c"], range(60), 4, lengths=(0, 1, 1), weighted=True, skew=1.0)
            outputs += train_window(ebc, [batch])
            if step % 10 == 9:
                ebc.manager.rebalance()
            capacities.add(tuple(t["capacity"] for t in ebc.manager.stats()["tables"].values()))
        if hbm_bytes:
            assert ebc.manager.stats()["hbm_bytes"] <= hbm_bytes and ebc.manager.stats()["swap_out_rows"] > 0
        runs.append((outputs, model_state(ebc.manager)))
    assert runs[0] == runs[1]


SCORED = ec.AdmitAndEvictConfig(
    admit_threshold=2.0,
    not_admitted_default_value=0.5,
    evict_step_interval=3,
    policy="show_click",
    show_click=ec.ShowClick(beta=1.5, score_decay=0.9, evict_percentage=0.2),
)
SKETCHED = ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1024, evict_threshold=40, evict_step_interval=4)
DRAWN = ec.AdmitAndEvictConfig(
    admit_probability=0.4, admit_seed=3, evict_threshold=6, evict_step_interval=2, evict_keep_min=20, time_source="step"
)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("policy", ["lru", "s3fifo", "lookahead"])
def test_i9_bit_identical_with_scores_chance_and_sketches_swept_in_slices(
    pooled: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, several features a table, dead rows that stay for many steps; a row read, born again or swapped meanwhile."""
    tables = [
        ec.TableConfig("a", 4, ["a", "b"], admit_and_evict=SCORED),
        ec.TableConfig("c", 4, ["c", "b"], pooling="mean", admit_and_evict=SKETCHED),
        ec.TableConfig("d", 6, admit_and_evict=DRAWN),
    ]
    rng = np.random.default_rng(6)
    names = ["a", "b", "c", "d"]
    batches = []
    for step in range(60):
        plain = make_batch(rng, names, range(step, step + 150), 6, now=4 * step, skew=2.0)
        labels = rng.integers(0, 2, 6).astype(np.float32)
        stamps = plain.timestamps_or_none()
        batches.append(ec.JaggedFeatures(names, plain.values(), plain.lengths(), None, stamps, labels))
    world = World(tables, ec.Adagrad(lr=0.1), pooled, 1, 1, batches)
    resident = make_collection(world, world.all_rows(), num_threads=1)
    outputs, state, count = train(resident, world), model_state(resident.manager), resident.manager.stats()
    assert all(table["evicted"] > 20 and table["rejected"] > 20 for table in count["tables"].values()), count
    for sweep_rows, threads in ((2, 1), (150, 3)):
        sliced = functools.partial(manager_module.SwapManager, sweep_rows=sweep_rows)
        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "SwapManager", sliced)
            collection = make_collection(world, world.least_rows(), num_threads=threads, policy=policy)
            dead = 0

            def look(number: int, collection=collection) -> None:
                nonlocal dead
                dead += sum(table["dead"] for table in collection.manager.planner.stats())
                if number % 20 == 19:
                    evaluate(collection, batches[number // 2])
                    collection.manager.rebalance()

            assert train(collection, world, look) == outputs
        assert model_state(collection.manager) == state
        stats = collection.manager.stats()
        for name in ("admitted", "rejected", "evicted", "forgotten", "born", "rows"):
            assert stats[name] == count[name], name
        assert stats["swap_out_rows"] > 0 and dead > 100
        check(collection.manager)
        collection.close()


def test_i9_bit_identical_with_big_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that wake the thread pool, tables of several partitions, sums in blocks."""
    monkeypatch.setattr(manager_module, "Table", functools.partial(manager_module.Table, split_above=20_000))
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=12, evict_step_interval=2)
    tables = [ec.TableConfig("a", 8, ["a", "b"], admit_and_evict=rule), ec.TableConfig("c", 4, pooling="mean")]
    rng = np.random.default_rng(8)
    batches = [
        make_batch(
            rng,
            ["a", "b", "c"],
            range(step * 9_000, step * 9_000 + 600_000),
            13_000,
            lengths=(0, 1, 2),
            now=10 * step,
            skew=3.0,
        )
        for step in range(8)
    ]
    world = World(tables, ec.Adam(lr=0.01), True, 1, 1, batches)
    least = world.least_rows()
    resident = make_collection(world, world.all_rows(), num_threads=1)
    outputs, state = train(resident, world), model_state(resident.manager)
    assert max(table.stats()["partitions"] for table in resident.manager.host_tables) > 1
    for spare, threads in ((0, 2), (700, 4)):
        collection = make_collection(world, {name: count + spare for name, count in least.items()}, num_threads=threads)
        assert train(collection, world) == outputs
        assert model_state(collection.manager) == state
        stats = collection.manager.stats()
        assert stats["swap_out_rows"] > 1000 and stats["evicted"] > 1000 and stats["rejected"] > 1000
        check(collection.manager)
        collection.close()


def test_i9_order_of_tables_and_features_does_not_matter() -> None:
    """The core puts tables of a dim together; neither that nor the batch's order of features shows."""

    @examples(15)
    @given(tables=table_lists(most=3, dtypes=ROW_TYPES), pool=pools(), seed=st.integers(0, 2**32), spec=optimizers)
    def run(tables: list[ec.TableConfig], pool: list[int], seed: int, spec: ec.OptimizerSpec) -> None:
        names, states = features_of(tables), []
        for turn in range(2):
            ordered = tables if turn == 0 else tables[::-1]
            ebc = ec.EmbeddingBagCollection(with_rows(ordered, 30), optimizer=spec)
            rng = np.random.default_rng(seed)
            for step in range(6):
                batch = make_batch(rng, names, pool, 2, lengths=(0, 1, 2), now=10 * step)
                if turn:
                    batch = reordered(batch, names[::-1])
                out = ebc(batch)
                loss = sum(
                    (out[name] * torch.linspace(-1, 1, out[name].numel()).view_as(out[name])).sum()
                    for name in sorted(out.keys())
                )
                loss.backward()
            states.append(model_state(ebc.manager))
            ebc.close()
        assert states[0] == states[1]

    run()


def reordered(batch: ec.JaggedFeatures, names: list[str]) -> ec.JaggedFeatures:
    """The same batch with its features in another order."""
    size, edges = batch.batch_size, batch.offsets()
    places = [batch.keys().index(name) for name in names]
    pieces = [slice(int(edges[f * size]), int(edges[(f + 1) * size])) for f in places]
    lengths = torch.cat([batch.lengths()[f * size : (f + 1) * size] for f in places])

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.cat([tensor[piece] for piece in pieces])

    return ec.JaggedFeatures(
        names,
        cut(batch.values()),
        lengths,
        cut(batch.weights_or_none()),
        cut(batch.timestamps_or_none()),
        batch.labels_or_none(),
    )


def test_i9_the_torch_backend_keeps_the_promise_too() -> None:
    """What runs on a CUDA or NPU device: stock operators, staged copies. Here on CPU tensors."""
    from embcache.devices import backend_for

    seen: Counter[str] = Counter()

    @examples(15)
    @given(world=worlds(steps=(6, 20)))
    def run(world: World) -> None:
        runs = []
        for rows in (world.all_rows(), world.least_rows()):
            collection = make_collection(world, rows)
            collection.manager.backend = backend_for("cpu", kernels="torch")
            collection.manager.buffer.move(collection.manager.backend)
            runs.append((train(collection, world), model_state(collection.manager)))
            seen.update({name: collection.manager.stats()[name] for name in COUNTED})
            check(collection.manager)
            collection.close()
        assert runs[0] == runs[1]

    run()
    assert seen["swap_out_rows"] > 0, seen


def test_i9_one_slot_is_enough_for_batches_of_one_key() -> None:
    table = ec.TableConfig("f", 3)
    for accumulate in (1, 2):
        rng = np.random.default_rng(0)
        batches = [make_batch(rng, ["f"], range(9), 1, lengths=(1,), skew=1.0) for _ in range(60)]
        world = World([table], ec.Adam(lr=0.1), True, accumulate, 1, batches)
        runs = []
        for rows in (accumulate, 9):
            collection = make_collection(replace(world), rows)
            runs.append((train(collection, world), model_state(collection.manager)))
        assert runs[0] == runs[1]
