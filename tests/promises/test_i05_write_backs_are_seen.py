"""I5: the host look-up of a batch sees the write-backs of every earlier batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.hand import HandTrainer
from promises.strategies import examples, features_of, make_batch, one_feature, pools, table_lists, with_rows
from promises.training import check, rows_of


def test_i5_a_key_swapped_out_by_one_batch_and_wanted_by_the_next() -> None:
    hand = HandTrainer([ec.TableConfig("f", 3, hbm_rows=3)])
    hand.train(one_feature([1, 2, 3]))
    first, second = hand.plan(one_feature([4])), hand.plan(one_feature([1]))  # both planned before any row moves
    assert first.swap_out_keys.tolist() == [1] and second.swap_in_keys.tolist() == [1]
    hand.train_next()
    hand.train_next()  # verifies that key 1 reads what step 1 made of it
    np.testing.assert_array_equal(hand.manager.table("f").lookup([1, 2, 3, 4]), hand.expected("f", [1, 2, 3, 4]))


def test_i5_a_key_that_only_ever_passes_through() -> None:
    """Each batch evicts the key that the next one wants, twenty batches ahead of training."""
    hand = HandTrainer([ec.TableConfig("f", 1, hbm_rows=21)])
    for start in range(0, 300, 20):
        for step in range(start, start + 20):
            hand.plan(one_feature([step % 22]))
        for _ in range(20):
            hand.train_next()
    assert hand.manager.stats()["swap_out_rows"] > 100
    keys = list(range(22))
    np.testing.assert_array_equal(hand.manager.table("f").lookup(keys, insert=False), hand.expected("f", keys))


def test_i5_planning_any_number_of_batches_ahead_changes_no_value() -> None:
    seen = {"returns": 0, "evicted": 0}

    @examples(60)
    @given(
        tables=table_lists(),
        pool=pools(low=10, high=50),
        seed=st.integers(0, 2**32),
        depth=st.integers(1, 5),
        spare=st.integers(0, 8),
        steps=st.integers(6, 40),
    )
    def run(tables: list[ec.TableConfig], pool: list[int], seed: int, depth: int, spare: int, steps: int) -> None:
        rng, names = np.random.default_rng(seed), features_of(tables)
        batches = [make_batch(rng, names, pool, 1, lengths=(0, 1, 2), now=10 * s, skew=1.0) for s in range(steps)]
        # Just enough for `depth` batches at a time: three features, one example, two keys.
        ahead = HandTrainer(with_rows(tables, 6 * depth + spare))
        plain = HandTrainer(with_rows(tables, 1000))
        went: dict[tuple[str, int], int] = {}
        for batch in batches:
            plain.train(batch)
            info = ahead.plan(batch)
            for t, name in enumerate(info.tables):
                a, b = info.swap_in_offsets[t : t + 2]
                c, d = info.swap_out_offsets[t : t + 2]
                for key in info.swap_in_keys[a:b].tolist():
                    oldest = ahead.ahead[0].step
                    seen["returns"] += went.get((name, key), -1) >= oldest
                went.update(dict.fromkeys([(name, key) for key in info.swap_out_keys[c:d].tolist()], info.step))
            while len(ahead.ahead) >= depth:
                ahead.train_next()
        while ahead.ahead:
            ahead.train_next()
        seen["evicted"] += ahead.manager.stats()["evicted"]
        for table in tables:
            one, other = (rows_of(hand.manager.table(table.name)) for hand in (ahead, plain))
            assert one == other
        check(ahead.manager)
        ahead.manager.close()
        plain.manager.close()

    run()
    assert all(count > 0 for count in seen.values()), seen


def test_i5_rows_move_in_plan_order_only() -> None:
    m = ec.EmbCacheManager([ec.TableConfig("f", 2, hbm_rows=8)], optimizer=ec.SGD())
    first, second = m.plan(one_feature([1, 2])), m.plan(one_feature([3]))
    for wrong, words in (
        (lambda: m.swap_in(first), r"swap_in of step 1.*planned"),
        (lambda: m.swap_out(second), "step 2 waits for step 1"),
        (lambda: m.swap_in(second), r"swap_in of step 2.*planned"),
        (lambda: m.finish(first), "planned"),
    ):
        with pytest.raises(ec.PlanError, match=words):
            wrong()
    m.swap_out(first)
    with pytest.raises(ec.PlanError, match="step 2 waits for step 1"):
        m.swap_out(second)
    m.swap_in(first)
    m.swap_out(second)
    m.swap_in(second)
    m.finish(second)
    m.finish(first)
    other = ec.EmbCacheManager([ec.TableConfig("f", 2, hbm_rows=8)], optimizer=ec.SGD())
    foreign = other.plan(one_feature([1]))
    for call in (m.swap_out, m.swap_in, m.finish, m.cancel):
        with pytest.raises(ec.PlanError, match="not a plan of this manager"):
            call(foreign)


def test_i5_flush_needs_every_row_in_its_slot() -> None:
    hand = HandTrainer([ec.TableConfig("f", 2, hbm_rows=3)])
    m = hand.manager
    hand.train(one_feature([1, 2, 3]))
    info = hand.plan(one_feature([4]))
    with pytest.raises(ec.PlanError, match="flush"):
        m.flush()
    m.swap_out(info)
    with pytest.raises(ec.PlanError, match="flush"):
        m.flush()
    m.swap_in(info)
    m.flush()
    hand.change(info)
    m.finish(info)
    m.flush()
    host = m.host_tables[0].lookup_rows(np.array([1, 2, 3, 4]))[0]
    np.testing.assert_array_equal(host, hand.expected("f", [1, 2, 3, 4]))
