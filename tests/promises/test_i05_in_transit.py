"""I5 and I9 on a device whose copies take time: rows on their way to the host are wanted by the next batches."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache._core.moves import _forget_what_is_under_way
from embcache.devices import Emulated
from embcache.mover import Mover
from promises.piped import train_piped
from promises.strategies import World, examples, worlds
from promises.training import check, make_collection, model_state, train

SLOW_GBPS = 2e-5  # six rows take some milliseconds


def on_device(world: World, rows: dict[str, int], device: Emulated) -> Any:
    """The world's collection on an emulated device, with so many slots a table."""
    collection = make_collection(world, rows)
    manager = collection.manager
    manager.backend = device
    manager.buffer.move(device)
    return collection


def watch(monkeypatch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    """Count rows that a batch waits for, and departures."""
    land, out = Mover.land, Mover.out

    def counted(mover: Mover) -> None:
        seen["awaited"] += mover._moves.awaited
        land(mover)

    def left(mover: Mover, plan: Any) -> None:
        out(mover, plan)
        seen["left"] += mover._moves.under_way

    monkeypatch.setattr(Mover, "land", counted)
    monkeypatch.setattr(Mover, "out", left)


def coming_back(steps: int = 30) -> World:
    """Three sets of keys, in turn, of which two fit: each row leaves with one batch and returns with the next."""
    batches = [ec.JaggedFeatures(["f"], [10 * (step % 3) + i for i in range(6)], [6]) for step in range(steps)]
    return World([ec.TableConfig("f", 4)], ec.Adagrad(lr=0.1), True, 1, 1, batches)


def test_i5_i9_any_world_on_a_device_with_slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    watch(monkeypatch, seen)

    @examples(25)
    @given(
        world=worlds(steps=(6, 20)),
        share=st.floats(0, 1),
        depth=st.integers(1, 8),
        slow=st.sampled_from([SLOW_GBPS, math.inf]),
        seed=st.none() | st.integers(0, 2**32),
    )
    def run(world: World, share: float, depth: int, slow: float, seed: int | None) -> None:
        plain = make_collection(world, world.all_rows(), num_threads=1)
        outputs, state = train(plain, world), model_state(plain.manager)
        plain.close()
        rows = {name: least + int(2 * share * least) for name, least in world.least_rows().items()}
        collection = on_device(world, rows, Emulated(10 * slow, slow, 0.0))
        assert train_piped(collection, world, depth, seed)[0] == outputs
        assert model_state(collection.manager) == state
        check(collection.manager)
        assert (collection.manager.stats()["pinned"], collection.manager.outstanding) == (0, 0)
        collection.close()

    run()
    assert seen["left"] > 0, seen


@pytest.mark.parametrize("slow", [SLOW_GBPS, math.inf])
def test_i5_rows_that_return_at_once(monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    seen: Counter[str] = Counter()
    watch(monkeypatch, seen)
    world = coming_back()
    plain = make_collection(world, 100)
    outputs, state = train(plain, world), model_state(plain.manager)
    for depth in (1, 2, 5):
        collection = on_device(world, {"f": 12}, Emulated(math.inf, slow, 0.0))
        assert train_piped(collection, world, depth)[0] == outputs and model_state(collection.manager) == state
        assert collection.manager.stats()["swap_out_rows"] >= 28 * 6
        collection.close()
    assert seen["left"] == 28 * 3
    assert (seen["awaited"] > 0) == (slow == SLOW_GBPS)


def test_a_planted_bug_batches_that_do_not_wait_for_rows_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the dependency the test above finds old rows, however fast the copies are: their order is no luck."""
    out = Mover.out

    def forgetful(mover: Mover, plan: Any) -> None:
        out(mover, plan)
        _forget_what_is_under_way(mover._moves)

    monkeypatch.setattr(Mover, "out", forgetful)
    world = coming_back()
    plain = make_collection(world, 100)
    outputs = train(plain, world)
    for slow in (SLOW_GBPS, math.inf):
        collection = on_device(world, {"f": 12}, Emulated(math.inf, slow, 0.0))
        assert train_piped(collection, world, 2)[0] != outputs, f"{slow} GB/s"
        collection.close()


def test_a_planted_bug_rows_are_written_home_before_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated copy brings nothing before its time: who does not wait writes what was in the staging memory."""

    land = Mover.land

    def hasty(mover: Mover) -> None:
        leaving = mover._leaving
        if leaving is not None and mover._moves.under_way:
            mover._moves.arrive()
            mover._moves.serve()
            mover._moves.land()
        land(mover)

    monkeypatch.setattr(Mover, "land", hasty)
    world = coming_back()
    plain = make_collection(world, 100)
    outputs = train(plain, world)
    collection = on_device(world, {"f": 12}, Emulated(math.inf, SLOW_GBPS, 0.0))
    assert train_piped(collection, world, 2)[0] != outputs
    collection.close()


def test_whoever_looks_finds_rows_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, evaluation and figures between two steps, with rows on their way: they wait until these have landed."""
    seen: Counter[str] = Counter()
    watch(monkeypatch, seen)
    world = coming_back(20)
    plain = make_collection(world, 100)
    train(plain, world)
    expected = plain.manager.table("f").lookup_rows([10 * part + i for part in range(3) for i in range(6)])
    collection = on_device(world, {"f": 12}, Emulated(math.inf, SLOW_GBPS, 0.0))
    manager = collection.manager

    def look(step: int) -> None:
        seen["waited"] += manager.door.transit is not None
        manager.table("f").lookup(list(range(26)), insert=False)
        assert manager.door.transit is None

    train_piped(collection, world, 3, between=look)
    found = manager.table("f").lookup_rows([10 * part + i for part in range(3) for i in range(6)])
    for left, right in zip(found, expected, strict=True):
        assert left.tobytes() == right.tobytes()
    assert seen["waited"] > 0, seen
    collection.close()


def test_rows_that_an_abandoned_plan_sends_home_are_there_before_the_tables_close(tmp_path: Path) -> None:
    """They leave behind the manager's door, so that nobody's entry lands them."""
    table = ec.TableConfig("f", 4, directory=tmp_path / "f", hbm_rows=12)
    manager = ec.EmbCacheManager([table], optimizer=ec.SGD(lr=1.0))
    device = Emulated(math.inf, SLOW_GBPS, 0.0)
    manager.backend = device
    manager.buffer.move(device)

    def plan(first: int) -> Any:
        return manager.plan(ec.JaggedFeatures(["f"], list(range(first, first + 6)), [6]))

    for first in (0, 6):
        info = plan(first)
        manager.swap_out(info)
        manager.swap_in(info)
        manager.buffer.weights[0][info.slots] = float(first + 1)
        manager.finish(info)
    one, _ = plan(12), plan(6)
    manager.abandon(one)  # not the newest: it has to be completed, and sends the trained rows of 0 to 5 home
    manager.close()
    with ec.EmbCacheManager([table], optimizer=ec.SGD(lr=1.0)) as again:
        found = again.table("f").lookup(np.arange(12), insert=False)
    assert (found == np.repeat([1.0, 7.0], 6)[:, None]).all()
