"""I2: a slot used by a planned, unfinished batch is never a victim."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.hand import HandTrainer
from promises.strategies import examples, features_of, make_batch, one_feature, pools, table_lists, with_rows
from promises.training import check


def pins_of(infos: list) -> dict[str, set[int]]:
    """Table -> slots that unfinished plans use."""
    pinned: dict[str, set[int]] = {}
    for info in infos:
        for t, name in enumerate(info.tables):
            part = slice(int(info.unique_offsets[t]), int(info.unique_offsets[t + 1]))
            used = info.slots[part][info.admitted[part].astype(bool)]
            pinned.setdefault(name, set()).update(used.tolist())
    return pinned


def taken_by(info) -> dict[str, tuple[set[int], set[int]]]:
    """Table -> slots of the plan's victims, slots of its swap-ins."""
    edges = zip(
        info.swap_out_offsets[:-1],
        info.swap_out_offsets[1:],
        info.swap_in_offsets[:-1],
        info.swap_in_offsets[1:],
        strict=True,
    )
    return {
        name: (set(info.swap_out_slots[a:b].tolist()), set(info.swap_in_slots[c:d].tolist()))
        for name, (a, b, c, d) in zip(info.tables, edges, strict=True)
    }


def test_i2_slots_of_outstanding_plans_are_never_victims() -> None:
    seen = {"victims": 0, "refused": 0, "ahead": 0}

    @examples(40)
    @given(
        tables=table_lists(),
        pool=pools(high=60),
        seed=st.integers(0, 2**32),
        capacity=st.integers(12, 40),
        steps=st.integers(4, 40),
    )
    def run(tables: list[ec.TableConfig], pool: list[int], seed: int, capacity: int, steps: int) -> None:
        rng = np.random.default_rng(seed)
        hand = HandTrainer(with_rows(tables, capacity))
        m, names = hand.manager, features_of(tables)
        moved: list = []  # swapped in, not finished
        for step in range(steps):
            action = rng.choice(["plan", "plan", "plan", "move", "finish", "finish"])
            if action == "plan":
                batch = make_batch(rng, names, pool, 2, lengths=(0, 1, 2), now=10 * step, skew=1.0)
                pinned = pins_of([*moved, *hand.ahead])
                free = {config.name: m.planner.free_slots(t) for t, config in enumerate(m.layout.tables)}
                try:
                    info = hand.plan(batch)
                except ec.HbmCapacityError as error:
                    assert not error.never_fits and error.have < error.need <= capacity
                    assert len(pinned[error.table]) > capacity - error.need
                    seen["refused"] += 1
                    continue
                for name, (victims, places) in taken_by(info).items():
                    assert not (victims | places) & pinned.get(name, set()), name
                    # Free slots first, victims after.
                    assert len(victims) == max(0, len(places) - free[name]) or any(t.admit_and_evict for t in tables)
                    seen["victims"] += len(victims)
                seen["ahead"] = max(seen["ahead"], len(hand.ahead) + len(moved))
            elif action == "move" and hand.ahead:
                info = hand.ahead.popleft()
                hand.move(info)
                moved.append(info)
            elif action == "finish" and moved:
                m.finish(moved.pop(int(rng.integers(len(moved)))))
            # The rows of every batch that has been swapped in are still where its plan says.
            for name, weights, keys, slots, _ in (part for info in moved for part in hand.parts(info)):
                np.testing.assert_array_equal(weights.numpy()[slots], hand.expected(name, keys.tolist()))
            for name, slots in pins_of([*moved, *hand.ahead]).items():
                assert m.planner.pinned(m.layout.index_of[name]) >= len(slots)
        while hand.ahead:
            moved.append(hand.ahead.popleft())
            hand.move(moved[-1])
        for info in moved:
            m.finish(info)
        assert m.stats()["pinned"] == 0
        check(m)
        m.close()

    run()
    assert seen["victims"] > 0 and seen["refused"] > 0 and seen["ahead"] >= 3, seen


def test_i2_a_batch_is_refused_rather_than_given_a_pinned_slot() -> None:
    hand = HandTrainer([ec.TableConfig("f", 2, hbm_rows=4)])
    m = hand.manager
    first, second = m.plan(one_feature([1, 2])), m.plan(one_feature([2, 3]))
    with pytest.raises(ec.HbmCapacityError, match="'f'") as caught:
        m.plan(one_feature([4, 5]))
    assert (caught.value.need, caught.value.have, caught.value.never_fits) == (2, 1, False)
    shares = m.plan(one_feature([1, 2, 3, 4]))  # pinned slots may be shared
    for info in (first, second, shares):
        m.swap_out(info)
        m.swap_in(info)
    m.finish(shares)
    m.finish(first)
    info = m.plan(one_feature([5, 6]))  # 1 and 4 are free to go; 2 and 3 stay pinned
    assert sorted(info.swap_out_keys.tolist()) == [1, 4]
    m.cancel(info)
    m.finish(second)
    assert m.stats()["pinned"] == 0


def test_i2_an_evicted_key_keeps_its_slot_until_its_batches_finish() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1, time_source="step")
    hand = HandTrainer([ec.TableConfig("f", 2, hbm_rows=4, admit_and_evict=rule)])
    m = hand.manager
    hand.train(one_feature([1, 2]))
    old = m.plan(one_feature([1, 2]))
    m.swap_out(old)
    m.swap_in(old)
    others = [m.plan(one_feature([3])), m.plan(one_feature([3])), m.plan(one_feature([4]))]
    assert m.stats()["evicted"] == 2  # 1 and 2 were last seen two steps before the second sweep
    for info in others:
        m.swap_out(info)
        m.swap_in(info)
    slots = set(old.slots.tolist())
    with pytest.raises(ec.HbmCapacityError):
        m.plan(one_feature([5, 6, 7]))
    view = m.table("f")
    assert 1 in view and 2 in view  # as of the last finished batch
    for info in (*others, old):
        m.finish(info)
    assert 1 not in view and len(view) == 2
    again = m.plan(one_feature([5, 6, 7]))
    assert slots <= set(again.slots.tolist())
    m.cancel(again)
    check(m)
