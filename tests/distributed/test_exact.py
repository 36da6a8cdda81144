"""Many ranks hold what one process holds that is given whole batches: keys, counters, admissions and evictions exactly, weights too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from crew import Crews
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_cases import Case, batch_of, joined, one_process, same
from sharded_jobs import one_step, train_case

WORLDS = [1, 2, 3, 4]
SOAK = int(os.environ.get("EMBCACHE_SOAK", "0"))

CASES = [
    Case(1, kind="time"),
    Case(2, kind="floor", optimizer="Adam"),
    Case(3, kind="clicks", optimizer="SGD"),
    Case(4, kind="step", weighted=True),
    Case(5, kind="count", pooled=False),
    Case(6, kind="time", weighted=True, optimizer="RowWiseAdagrad", small=False),
    Case(7, kind="chance", accumulate=2),
    Case(8, kind="none", dtype="float16"),
    Case(9, kind="floor", pooled=False, small=False, steps=16),
    Case(10, kind="sketch", steps=16),
    Case(11, kind="sketches"),
]
EVICTING = ("time", "floor", "clicks", "step", "sketch", "sketches")


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    with Crews() as crews:
        yield crews


def check(crews: Crews, case: Case, worlds: Sequence[int], depths: Sequence[int]) -> int:
    """What ranks hold and give is what one process does; returns the rows that were evicted."""
    outputs, state, evicted = one_process(case)
    for world, depth in product(worlds, depths):
        answers = crews[world].run(train_case, case, "exact", {}, depth)
        same(joined([answer[1] for answer in answers]), state)
        assert sum(answer[2] for answer in answers) == evicted, (world, depth)
        assert {answer[3] for answer in answers} == {case.steps}
        for step in range(case.steps):
            rows = [part["rows"] for part in batch_of(case, step, world)]
            for (low, high), (mine, *_) in zip(rows, answers, strict=True):
                if case.pooled:
                    assert torch.equal(mine[step], outputs[step][low:high])
    return evicted


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seed}-{case.kind}")
def test_i9_ranks_hold_what_one_process_holds_bit_for_bit(crews: Crews, case: Case) -> None:
    """Step after step, and through a pipeline at depth 6."""
    worlds = [1, 2, 4] if case.kind == "sketch" else WORLDS  # three ranks share two of its blocks
    evicted = check(crews, case, worlds, (0, 6) if case.seed <= 2 else (6,))
    if case.kind in EVICTING:
        assert evicted > 0  # else the case is about nothing


KINDS = ("none", "count", "time", "floor", "step", "clicks", "chance", "sketches")


@st.composite
def drawn_cases(draw: Any) -> Case:
    """Any case: what the filters do, what is trained, and how much room there is."""
    return Case(
        draw(st.integers(1000, 1 << 20)),
        steps=draw(st.integers(1, 30)),
        kind=draw(st.sampled_from(KINDS)),
        pooled=draw(st.booleans()),
        weighted=draw(st.booleans()),
        small=draw(st.booleans()),
        optimizer=draw(st.sampled_from(("SGD", "Adagrad", "RowWiseAdagrad", "Adam"))),
        accumulate=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(("float32", "float16", "bfloat16"))),
        most=draw(st.integers(1, 9)),
        policy=draw(st.sampled_from(("lru", "lfu", "s3fifo"))),
    )


@pytest.mark.skipif(not SOAK, reason="drawn cases: make soak")
@settings(max_examples=10 * max(SOAK, 1))
@given(case=drawn_cases(), world=st.sampled_from(WORLDS), depth=st.sampled_from((0, 1, 2, 6)))
def test_i9_any_case_on_any_number_of_ranks(crews: Crews, case: Case, world: int, depth: int) -> None:
    check(crews, case, [world], [depth])


@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: f"{case.seed}-{case.kind}")
def test_sums_by_rank_change_weights_by_rounding_alone(crews: Crews, case: Case) -> None:
    _, state, _ = one_process(case)
    answers = crews[3].run(train_case, case, "rank", {})
    same(joined([answer[1] for answer in answers]), state, tolerance=1e-4)  # after many steps, each within 1e-6


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_a_step_of_sums_by_rank_is_within_a_millionth(crews: Crews, optimizer: str) -> None:
    case = Case(21, kind="none", optimizer=optimizer, small=False)
    _, before, _ = one_process(replace(case, steps=6))
    _, after, _ = one_process(replace(case, steps=7))
    for world in (2, 4):
        same(joined(crews[world].run(one_step, case, before, 6, {})), after, tolerance=1e-6)


def test_keys_that_are_multiples_of_the_ranks_spread_within_5_percent() -> None:
    from embcache.distributed import owners

    for world in (2, 3, 4, 8, 64):
        counts = np.bincount(owners(np.arange(400_000) * world, world), minlength=world)
        assert counts.min() > 0.95 * counts.mean() and counts.max() < 1.05 * counts.mean()
