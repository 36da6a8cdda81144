"""Sketches in blocks of vshards: what many planners count, each of its vshards, is what one counts of all keys."""

from __future__ import annotations

import numpy as np
import pytest

from embcache._core.digest import hash_keys
from embcache._core.filter import FeatureFilter
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.checkpoint import vshards_of
from embcache.config import AdmitAndEvictConfig
from embcache.errors import ConfigError

STATE = ("sketch_young", "sketch_old", "sketch_clocks")


def planner(config: AdmitAndEvictConfig, rank: int = 0, world: int = 1) -> SwapManager:
    tables = [Table("t", 1, with_filter=True)]
    return SwapManager(tables, [1 << 18], [config], num_threads=1, vshards=vshards_of(rank, world))


def step(manager: SwapManager, keys: np.ndarray, times: np.ndarray, newest: int) -> tuple[list[int], np.ndarray]:
    """A batch; returns the keys that are admitted in it, and the batch's distinct keys."""
    offsets = np.array([0, len(keys)])
    plan = manager.plan(keys, offsets, times, newest=np.array([newest]))
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)
    manager.finish(plan)
    return plan.unique_keys[plan.admitted.astype(bool)].tolist(), plan.unique_keys


def vshards_in(keys: np.ndarray) -> np.ndarray:
    return (hash_keys(keys) >> np.uint64(52)).astype(np.int64)


@pytest.mark.parametrize(
    ("sketch_bytes", "blocks", "worlds"),
    [(1 << 14, 32, (2, 4, 16)), (1 << 21, 4096, (2, 3, 7))],
)
def test_ranks_count_as_one(sketch_bytes: int, blocks: int, worlds: tuple[int, ...]) -> None:
    """Keys that collide, generations that turn by occurrences and by time, admissions and evictions."""
    config = AdmitAndEvictConfig(
        admit_threshold=3, sketch_bytes=sketch_bytes, evict_threshold=25, evict_step_interval=4
    )
    rng = np.random.default_rng(sketch_bytes)
    size, steps = blocks * 12, 8 if blocks > 1000 else 60  # of a batch: three of them fill a generation
    batches = [
        (rng.zipf(1.2, size) * 7919 % (20 * size) - 5 * size, 10 * i + rng.integers(-9, 9, size)) for i in range(steps)
    ]
    alone = planner(config)
    crews = {world: [planner(config, rank, world) for rank in range(world)] for world in worlds}
    estimated = wrong = 0
    seen: dict[int, int] = {}
    for keys, times in batches:
        newest = int(times.max())
        admitted, distinct = step(alone, keys, times, newest)
        estimated += len(distinct)
        for key, count in zip(*np.unique(keys, return_counts=True), strict=True):
            seen[int(key)] = seen.get(int(key), 0) + int(count)
        wrong += sum(seen[key] < 3 for key in admitted)
        owned = vshards_in(keys)
        for world, ranks in crews.items():
            mine: list[int] = []
            for rank, one in enumerate(ranks):
                low, high = vshards_of(rank, world)
                here = (owned >= low) & (owned < high)
                mine += step(one, keys[here], times[here], newest)[0]
            assert sorted(mine) == sorted(admitted), world
    state = alone.export_filter(0)
    assert state["sketch_blocks"] == blocks and state["sketch_clocks"].reshape(-1, 3)[:, 1].min() > 0  # all have turned
    assert wrong > 0  # some keys collide, or the test would say nothing
    for ranks in crews.values():
        parts = [one.export_filter(0) for one in ranks]
        for name in STATE:
            assert np.array_equal(np.concatenate([part[name] for part in parts]), state[name]), name
    for one in (alone, *(one for ranks in crews.values() for one in ranks)):
        one.close()


def test_a_block_of_two_ranks_is_on_both_and_only_its_keys_may_be_counted_otherwise() -> None:
    config = AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 14)
    rng = np.random.default_rng(3)
    batches = [rng.zipf(1.2, 400) * 7919 % 8000 for _ in range(12)]
    alone, ranks = planner(config), [planner(config, rank, 3) for rank in range(3)]
    borders = [vshards_of(rank, 3)[0] * 32 // 4096 for rank in (1, 2)]
    others = 0
    for keys in batches:
        times = np.zeros(len(keys), np.int64)
        admitted, distinct = step(alone, keys, times, 0)
        shared = np.isin(vshards_in(distinct) * 32 // 4096, borders)
        owned = vshards_in(keys)
        mine: list[int] = []
        for rank, one in enumerate(ranks):
            low, high = vshards_of(rank, 3)
            here = (owned >= low) & (owned < high)
            mine += step(one, keys[here], times[here], 0)[0]
        differing = set(mine) ^ set(admitted)
        assert differing <= set(distinct[shared].tolist())
        others += int((~shared).sum())
    assert others > 1000
    firsts = [one.export_filter(0)["sketch_first"] for one in ranks]
    counts = [len(one.export_filter(0)["sketch_clocks"]) // 3 for one in ranks]
    assert firsts == [0, *borders] and counts == [borders[0] + 1, borders[1] - borders[0] + 1, 32 - borders[1]]


@pytest.mark.parametrize(
    ("threshold", "sketch_bytes", "blocks"),
    [
        (2, 1024, 2),  # 128 counters in a row
        (2, 1023 + 1024, 2),
        (2, 2048, 4),
        (16, 2048, 2),  # 8 times the threshold
        (17, 2048, 1),
        (255, 2048, 1),
        (300, 1 << 16, 1),  # counters of two bytes
        (300, 1 << 17, 2),
        (3, 1 << 21, 4096),
        (3, 1 << 24, 4096),
        (2**32 - 1, 1 << 20, 1),
    ],
)
def test_as_many_blocks_as_leave_each_its_window(threshold: int, sketch_bytes: int, blocks: int) -> None:
    state = FeatureFilter(AdmitAndEvictConfig(admit_threshold=threshold, sketch_bytes=sketch_bytes), 0).state()
    assert state["sketch_blocks"] == blocks and len(state["sketch_clocks"]) == 3 * blocks
    cell = 1 if threshold < 256 else 2 if threshold < 2**16 else 4
    assert len(state["sketch_young"]) == sketch_bytes // (8 * cell) // blocks * 4 * cell * blocks


def test_a_key_that_alone_comes_to_its_block_is_admitted_at_the_threshold() -> None:
    for threshold in (3, 8, 16, 40, 255):
        manager = planner(AdmitAndEvictConfig(admit_threshold=threshold, sketch_bytes=1 << 14))
        for count in range(1, threshold + 1):
            admitted, _ = step(manager, np.array([5]), np.array([0]), 0)
            assert admitted == [5] * (count == threshold), (threshold, count)


def test_keys_of_other_vshards_do_no_harm() -> None:
    manager = planner(AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=1 << 14), 1, 3)
    keys = np.arange(5000)
    step(manager, keys, keys * 0, 0)
    admitted, _ = step(manager, keys[:100], keys[:100] * 0, 0)
    assert admitted == list(range(100))
    manager.check()


@pytest.mark.parametrize("vshards", [(0, 0), (5, 4), (-1, 3), (0, 4097)])
def test_vshards_that_are_none_are_refused(vshards: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="vshards = "):
        FeatureFilter(AdmitAndEvictConfig(admit_threshold=2), 0, vshards)


def test_sketches_of_other_blocks_are_refused() -> None:
    config = AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=4096)
    state = FeatureFilter(config, 0, (0, 2048)).state()
    FeatureFilter(config, 0, (0, 2048)).load(state)
    for changed, what in (
        ({"sketch_blocks": 3}, "sketch_blocks = 3"),
        ({"sketch_blocks": 0}, "sketch_blocks = 0"),
        ({"sketch_blocks": 8192}, "sketch_blocks = 8192"),
        ({"sketch_first": 4}, "4 blocks of the sketch, from 4 on"),
        ({"sketch_clocks": np.zeros(9, np.int64)}, "3 blocks of the sketch"),
        ({"sketch_clocks": None}, "sketch_clocks = None"),
    ):
        with pytest.raises(ConfigError, match=what):
            FeatureFilter(config, 0, (0, 2048)).load(state | changed)
    with pytest.raises(ConfigError, match="4 blocks of the sketch, from 0 on; this filter's vshards have 4, from 4 on"):
        FeatureFilter(config, 0, (2048, 4096)).load(state)
    for missing in ("sketch_added", "sketch_blocks"):
        earlier = {name: value for name, value in state.items() if name != missing and name != "sketch_blocks"}
        with pytest.raises(ConfigError, match="sketch_added, sketch_old_added, sketch_since = "):
            FeatureFilter(config, 0, (0, 2048)).load(earlier)


def test_i4_tables_with_sketches_are_planned_alike_by_any_number_of_threads() -> None:
    config = AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 14, evict_threshold=25, evict_step_interval=4)
    count, size = 6, 1500  # several threads from 8,192 keys on
    rng = np.random.default_rng(6)
    batches = [(rng.zipf(1.2, count * size) % 20000, 10 * i + rng.integers(-9, 9, count * size)) for i in range(12)]
    planners = [
        SwapManager(
            [Table(f"t{t}", 1, with_filter=True) for t in range(count)],
            [1 << 12] * count,
            [config] * count,
            num_threads=n,
        )
        for n in (1, 4)
    ]
    for keys, times in batches:
        plans = [one.plan(keys, np.arange(count + 1) * size, times) for one in planners]
        for one, plan in zip(planners, plans, strict=True):
            one.mark_swapped_out(plan)
            one.mark_swapped_in(plan)
            one.finish(plan)
        assert np.array_equal(plans[0].unique_keys, plans[1].unique_keys)
        assert np.array_equal(plans[0].admitted, plans[1].admitted)
    for t in range(count):
        states = [one.export_filter(t) for one in planners]
        assert states[0]["sketch_clocks"].reshape(-1, 3)[:, 1].min() > 0  # generations have turned
        for name in STATE:
            assert np.array_equal(states[0][name], states[1][name]), (t, name)
    for one in planners:
        one.close()
