"""Feature filter against its model: admission and eviction alone, every batch trained at once, in roomy and in tight HBM.

Promise I9 for the filter: what is admitted, counted and evicted does not depend on the number of slots or of threads.
"""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from embcache.config import AdmitAndEvictConfig, ShowClick
from models.planner_rig import Rig

SOAK = int(os.environ.get("EMBCACHE_SOAK") or 1)  # a soak run multiplies the examples
KEYS = [0, 1, -1, 2, 3, 5, 8, 13, -(2**63), 2**63 - 1]
ROOMY, TIGHT = len(KEYS), 6
EXTREMES = [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1, 0]


class FilterMachine(RuleBasedStateMachine):
    """Planners with one filter: all keys fit; few do; few do and every second batch is planned ahead; and the last two once
    more with sweeps that take away one key, or a few, in each plan."""

    @initialize(
        score=st.one_of(
            st.none(),
            st.none(),
            st.builds(
                ShowClick,
                alpha=st.sampled_from([0.25, 1.0]),
                beta=st.sampled_from([0.0, 3.0, 0.1]),
                score_decay=st.sampled_from([0.0, 0.3, 0.9]),
                evict_percentage=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
            ),
        ),
        chance=st.sampled_from([1.0, 1.0, 0.3, 0.8]),
        sketch=st.sampled_from([0, 0, 1024]),
        admit=st.sampled_from([-1, 0, 1, 2, 3, 5]),
        evict=st.sampled_from([0, 1, 2, 5, 2**62, 2**63 - 1]),
        interval=st.integers(1, 4),
        keep=st.sampled_from([0, 0, 1, 3, 6, 20]),
        source=st.sampled_from(["timestamps", "step"]),
    )
    def start(self, score, chance, sketch, admit, evict, interval, keep, source):
        config = AdmitAndEvictConfig(
            admit_threshold=admit,
            evict_threshold=evict,
            evict_step_interval=interval if evict else 0,
            evict_keep_min=keep if evict else 0,
            time_source=source,
            admit_probability=chance,
            admit_seed=-7,
            sketch_bytes=sketch if admit > 1 else 0,
        )
        if score is not None:
            config = AdmitAndEvictConfig(
                admit_threshold=admit * 0.4,
                evict_step_interval=interval,
                evict_keep_min=keep if score.evict_percentage else 0,
                policy="show_click",
                show_click=score,
                admit_probability=chance,
            )
        self.rigs = [Rig([capacity], [config]) for capacity in (ROOMY, TIGHT, 2 * TIGHT)]
        self.rigs += [Rig([capacity], [config], sweep_rows=rows) for capacity, rows in ((TIGHT, 1), (2 * TIGHT, 70))]

    def batch(self, keys, times):
        decisions = []
        clicks = [time % 3 == 0 for time in times]
        for rig, ahead in zip(self.rigs, (0, 0, 1, 0, 1), strict=True):
            while len(rig.plans) > ahead:
                while rig.plans[0].state != "swapped_in":
                    rig.move()
                rig.train_and_finish(0)
            plan = rig.plan([keys], [times], [clicks])
            assert plan is not None
            decisions.append(plan.admitted.tolist())
        assert all(decision == decisions[0] for decision in decisions)

    @rule(entries=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 12)), max_size=TIGHT))
    def ordinary_batch(self, entries):
        self.batch([key for key, _ in entries], [time for _, time in entries])

    @rule(entries=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(EXTREMES)), max_size=3))
    def extreme_times(self, entries):
        self.batch([key for key, _ in entries], [time for _, time in entries])

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 6), time=st.integers(0, 12))
    def hot_key(self, key, count, time):
        self.batch([key] * count, [time - i for i in range(count)])

    @rule()
    def empty_batch(self):
        self.batch([], [])

    @rule(key=st.sampled_from(KEYS))
    def row_from_outside(self, key):
        """A row that the user puts in is admitted, keeps what was counted before, and never dies unseen."""
        if not any(rig.model.in_use(0, key) for rig in self.rigs):
            for rig in self.rigs:
                rig.put(0, key)

    @invariant()
    def agree(self):
        if not hasattr(self, "rigs"):
            return
        states = []
        for rig in self.rigs:
            rig.compare_state(KEYS)
            state = rig.manager.filter_state(0)
            states.append({name: np.asarray(value).tolist() for name, value in state.items()})
        assert all(state == states[0] for state in states)

    def teardown(self):
        for rig in getattr(self, "rigs", []):
            rig.close()


TestFilterMachine = FilterMachine.TestCase
# Fewer where the profile says so: under the sanitizers everything is many times slower.
TestFilterMachine.settings = settings(
    max_examples=min(30 * SOAK, settings().max_examples), stateful_step_count=min(40, settings().stateful_step_count)
)
