"""Planner against its model: any sequence of plans, cancels, movements, finishes, refusals and changes from outside.

Promises I1, I2, I3, I5, I6 and I7 on data that really moves, with few slots and keys so that everything collides.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from embcache._core.swap import POLICIES
from embcache.config import AdmitAndEvictConfig, ShowClick
from embcache.errors import PlanError
from models.planner_rig import Rig

SOAK = int(os.environ.get("EMBCACHE_SOAK") or 1)  # a soak run multiplies the examples
KEYS = [0, 1, -1, 2, 3, 4, 5, -(2**63), 2**63 - 1, 1 << 40]
TIMES = [0, 1, 2, 3, 4, 5, 6, 7, -(2**63), 2**63 - 1]

filters = st.one_of(
    st.none(),
    st.builds(
        AdmitAndEvictConfig,
        admit_threshold=st.sampled_from([-1, 0, 1, 2, 3]),
        evict_threshold=st.sampled_from([1, 2, 2**63 - 1]),
        evict_step_interval=st.sampled_from([1, 2, 3]),
        evict_keep_min=st.sampled_from([0, 0, 1, 3]),
        time_source=st.sampled_from(["step", "timestamps"]),
    ),
    st.builds(
        AdmitAndEvictConfig, admit_threshold=st.sampled_from([0, 2, 3]), admit_probability=st.sampled_from([0.4, 1.0])
    ),
    st.builds(
        AdmitAndEvictConfig,
        admit_threshold=st.sampled_from([2, 3]),
        evict_threshold=st.sampled_from([1, 3]),
        evict_step_interval=st.sampled_from([1, 2]),
        sketch_bytes=st.just(1024),
    ),
    st.builds(
        AdmitAndEvictConfig,
        admit_threshold=st.sampled_from([-1, 1.5]),
        evict_step_interval=st.sampled_from([1, 2, 3]),
        policy=st.just("show_click"),
        show_click=st.builds(ShowClick, beta=st.just(2.0), score_decay=st.just(0.7), evict_percentage=st.just(0.5)),
    ),
)
ordinary_times = st.integers(0, 6)


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        tables=st.lists(st.tuples(st.integers(1, 8), filters), min_size=1, max_size=3),
        policy=st.sampled_from(["lru", "lfu", "s3fifo", "lookahead", "lookahead"]),
        threads=st.sampled_from([1, 2]),
        sweep_rows=st.sampled_from([None, 1, 2, 5, 80]),
    )
    def start(self, tables, policy, threads, sweep_rows):
        capacities, configs = [capacity for capacity, _ in tables], [config for _, config in tables]
        self.rig = Rig(capacities, configs, policy=policy, num_threads=threads, sweep_rows=sweep_rows)
        self.looks_ahead = policy == "lookahead"

    def batch(self, data, most):
        keys = [data.draw(st.lists(st.sampled_from(KEYS), max_size=most)) for _ in self.rig.tables]
        stamps = st.sampled_from(TIMES) if data.draw(st.integers(0, 9)) == 0 else ordinary_times
        times = [data.draw(st.lists(stamps, min_size=len(part), max_size=len(part))) for part in keys]
        return keys, times

    @rule(data=st.data(), most=st.sampled_from([2, 3, 4, 8]))
    def plan(self, data, most):
        keys, times = self.batch(data, most)
        self.rig.plan(keys, times, [[time % 2 for time in part] for part in times])

    @rule(data=st.data(), countdown=st.integers(0, 24))
    def plan_without_memory(self, data, countdown):
        keys, times = self.batch(data, 4)
        clicks = [[time % 2 for time in part] for part in times]
        self.rig.plan(keys, times, clicks, fail_allocation=countdown)

    @precondition(lambda self: self.looks_ahead)
    @rule(data=st.data(), most=st.sampled_from([2, 4, 8]), countdown=st.sampled_from([-1] * 4 + list(range(12))))
    def look_ahead(self, data, most, countdown):
        self.rig.look_ahead(self.batch(data, most)[0], fail_allocation=countdown)

    @precondition(lambda self: self.looks_ahead and self.rig.notices)
    @rule(data=st.data(), countdown=st.sampled_from([-1] * 6 + list(range(24))))
    def plan_what_was_foreseen(self, data, countdown):
        """In turn or not, with all the keys that the notice has, or fewer, or others."""
        notice = data.draw(st.sampled_from(sorted(self.rig.notices, key=lambda notice: notice.number)))
        keys = [list(part) for part in self.rig.notices[notice]]
        for part in keys:
            if part and data.draw(st.integers(0, 4)) == 0:
                part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.sampled_from(KEYS))
        times = [data.draw(st.lists(ordinary_times, min_size=len(part), max_size=len(part))) for part in keys]
        clicks = [[time % 2 for time in part] for part in times]
        self.rig.plan(keys, times, clicks, fail_allocation=countdown, notice=notice)

    @precondition(lambda self: self.looks_ahead and self.rig.notices)
    @rule(data=st.data())
    def withdraw(self, data):
        self.rig.withdraw(data.draw(st.sampled_from(sorted(self.rig.notices, key=lambda notice: notice.number))))

    @precondition(lambda self: self.rig.plans and self.rig.plans[-1].state == "planned")
    @rule()
    def cancel(self):
        self.rig.cancel()

    @precondition(lambda self: self.rig.plans and self.rig.plans[-1].state == "swapped_in")
    @rule()
    def take_back(self):
        self.rig.take_back()

    @precondition(lambda self: any(plan.state != "swapped_in" for plan in self.rig.plans))
    @rule()
    def move(self):
        self.rig.move()

    @precondition(lambda self: self.rig.plans)
    @rule(keep=st.integers(0, 3))
    def train_all_but(self, keep):
        """What a pipeline does: the oldest plans run, the newest `keep` stay ahead."""
        while len(self.rig.plans) > keep:
            while self.rig.plans[0].state != "swapped_in":
                self.rig.move()
            self.rig.train_and_finish(0)

    @precondition(lambda self: any(plan.state == "swapped_in" for plan in self.rig.plans))
    @rule(data=st.data())
    def finish(self, data):
        ready = sum(plan.state == "swapped_in" for plan in self.rig.plans)
        self.rig.train_and_finish(data.draw(st.integers(0, ready - 1)))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def put(self, data, key):
        self.rig.put(data.draw(st.integers(0, len(self.rig.tables) - 1)), key)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def erase(self, data, key):
        self.rig.erase(data.draw(st.integers(0, len(self.rig.tables) - 1)), key)

    @precondition(lambda self: self.rig.plans)
    @rule(data=st.data())
    def use_out_of_order(self, data):
        plans = self.rig.plans
        plan = data.draw(st.sampled_from(plans))
        at = plans.index(plan)
        waits = any(earlier.state != "swapped_in" for earlier in plans[:at])
        wrong = []
        if plan.state != "planned" or at != len(plans) - 1:
            wrong.append(self.rig.manager.cancel)
        if plan.state != "planned" or waits:
            wrong.append(self.rig.manager.mark_swapped_out)
        if plan.state != "swapped_out":
            wrong.append(self.rig.manager.mark_swapped_in)
        if plan.state != "swapped_in":
            wrong.append(self.rig.manager.finish)
        if plan.state != "swapped_in" or plan.step != self.rig.model.step:
            wrong.append(self.rig.manager.take_back)
        for call in wrong:
            with pytest.raises(PlanError, match=str(plan.step)):
                call(plan)

    @precondition(lambda self: not self.rig.plans)
    @rule(data=st.data(), more=st.integers(0, 3))
    def grow(self, data, more):
        t = data.draw(st.integers(0, len(self.rig.tables) - 1))
        self.rig.grow(t, more)

    @invariant()
    def agree(self):
        if hasattr(self, "rig"):
            self.rig.compare_state(KEYS)

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.close()


TestPlannerMachine = PlannerMachine.TestCase
# Fewer where the profile says so: under the sanitizers everything is many times slower.
TestPlannerMachine.settings = settings(
    max_examples=min(60 * SOAK, settings().max_examples), stateful_step_count=min(50, settings().stateful_step_count)
)


def random_run(seed: int, steps: int, policy: str, sweep_rows: int | None = None) -> dict[str, int]:
    """A long run with the habits of training: a pipeline some batches deep, now and then something unusual."""
    rng = random.Random(seed)
    pool = [rng.choice([1, -1]) * rng.getrandbits(rng.choice([3, 8, 62])) for _ in range(14)] + KEYS[:6]
    configs = [
        rng.choice(
            [
                None,
                AdmitAndEvictConfig(
                    admit_threshold=rng.choice([-1, 2, 3]),
                    evict_threshold=rng.choice([1, 2, 4]),
                    evict_step_interval=rng.choice([1, 2, 3]),
                    evict_keep_min=rng.choice([0, 0, 2, 5]),
                    time_source=rng.choice(["step", "timestamps"]),
                    admit_probability=rng.choice([1.0, 1.0, 0.5]),
                ),
                AdmitAndEvictConfig(
                    admit_threshold=rng.choice([0, 1.5]),
                    evict_step_interval=rng.choice([1, 2, 3]),
                    evict_keep_min=rng.choice([0, 3]),
                    policy="show_click",
                    show_click=ShowClick(beta=2.5, score_decay=0.9, evict_percentage=rng.choice([0.2, 0.6])),
                ),
                AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=1024, evict_threshold=3, evict_step_interval=2),
            ]
        )
        for _ in range(rng.randint(1, 3))
    ]
    capacities, threads = [rng.randint(3, 12) for _ in configs], rng.choice([1, 2])
    rig = Rig(capacities, configs, policy=policy, num_threads=threads, sweep_rows=sweep_rows)
    clock, window = 0, rng.choice([1, 2, 4, 8, 30])
    for _ in range(steps):
        clock += rng.choice([0, 0, 1, 1, 3])
        draw = rng.random()
        ready = sum(plan.state == "swapped_in" for plan in rig.plans)
        if draw < 0.45:
            keys = [rng.choices(pool, weights=range(1, len(pool) + 1), k=rng.randint(0, 6)) for _ in configs]
            times = [[clock - rng.choice([0, 0, 0, 1, 2, 9]) for _ in part] for part in keys]
            clicks = [[key & 1 for key in part] for part in keys]
            failure, notice = rng.choice([-1] * 9 + [rng.randint(0, 20)]), None
            if policy == "lookahead":
                rig.look_ahead(keys, fail_allocation=rng.choice([-1, -1, -1, -1, 0, 1]))
                if len(rig.notices) < window or not rng.randrange(20):
                    continue
                notice = min(rig.notices, key=lambda notice: notice.number)
                keys = [list(part) for part in rig.notices[notice]]
                for part in keys:
                    if part and not rng.randrange(9):
                        rng.shuffle(part)
                        part.pop()
                times = [[clock - rng.choice([0, 0, 0, 1, 2, 9]) for _ in part] for part in keys]
                clicks = [[key & 1 for key in part] for part in keys]
            if rig.plan(keys, times, clicks, fail_allocation=failure, notice=notice) is None and rig.plans:
                while rig.plans[0].state != "swapped_in":
                    rig.move()
                rig.train_and_finish(0)
        elif draw < 0.65 and any(plan.state != "swapped_in" for plan in rig.plans):
            rig.move()
        elif draw < 0.80 and ready:
            rig.train_and_finish(rng.randrange(ready))
        elif draw < 0.88 and rig.plans and rig.plans[-1].state == "planned":
            rig.cancel()
        elif draw < 0.91 and rig.plans:
            while rig.plans[-1].state != "swapped_in":
                rig.move()
            rig.take_back()
        elif draw < 0.94 and rig.notices:
            rig.withdraw(rng.choice(sorted(rig.notices, key=lambda notice: notice.number)))
        elif draw < 0.97:
            rng.choice([rig.put, rig.erase])(rng.randrange(len(configs)), rng.choice(pool))
        elif not rig.plans:
            rig.grow(rng.randrange(len(configs)), rng.randint(0, 1))
        rig.compare_state(pool)
    seen = dict(rig.seen)
    rig.close()
    return seen


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "lookahead"])
def test_long_runs_agree_with_the_model(policy):
    total: Counter[str] = Counter()
    for seed in range(12 * SOAK):
        total.update(random_run(seed, 120, policy))
    assert all(total[name] > 20 for name in ("hits", "swap_out_rows", "evicted", "forgotten", "rejected")), total
    assert all(total[name] > 20 for name in ("zombies", "dying slots taken", "cancelled", "refused")), total
    assert total["taken back"] > 20 and total["not taken back"] > 0, total
    if policy == "lookahead":
        assert all(total[name] > 20 for name in ("notices", "withdrawn", "notices refused")), total


def test_long_runs_with_sweeps_in_small_slices_agree_with_the_model():
    total: Counter[str] = Counter()
    for seed in range(20 * SOAK):
        total.update(random_run(seed, 120, POLICIES[seed % 4], sweep_rows=1 + seed % 4 * 9 + seed // 4))
    assert all(total[name] > 20 for name in ("hits", "swap_out_rows", "evicted", "forgotten", "rejected")), total
    assert total["dead not taken away"] > 200 and total["cancelled"] > 20, total
