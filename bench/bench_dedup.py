"""Unique keys of one table: the whole plan of a batch of hits, and its de-duplication alone, against unique functions."""

from __future__ import annotations

import numpy as np
import pytest

from dedup_alone import Dedup
from peers.unique import unique_peers
from plans import Batches, draw_batches, finish, planner, uniques_of
from race import MILLION_KEYS, Contender, Race

KEYS = 1 << 20
POPULATION = 10_000_000


@pytest.fixture(scope="module")
def batches() -> Batches:
    return draw_batches(1, POPULATION, lambda _rng: np.array([KEYS]), "zipf")


@pytest.mark.parametrize("threads", [1, 2])
def test_plan_of_hits(race: Race, batches: Batches, threads: int) -> None:
    with planner(batches, threads=threads) as manager:
        ours = Contender("embcache", lambda i: manager.plan(batches.keys[i], batches.offsets[i]), after=finish(manager))
        case = "plan of 1 M Zipf keys, all hits (unique, inverse, CSR, slots, LRU)"
        race(
            "plan of hits",
            case,
            ours,
            unique_peers(batches.pieces(), uniques_of, (1, 2)),
            threads=threads,
            work=KEYS,
            unit=MILLION_KEYS,
        )


@pytest.mark.parametrize("csr", [False, True], ids=["inverse", "inverse and CSR"])
@pytest.mark.parametrize("threads", [1, 2])
def test_dedup_alone(race: Race, batches: Batches, threads: int, csr: bool) -> None:
    dedup = Dedup(threads)
    peers = unique_peers(batches.pieces(), lambda count: [dedup.result(count, KEYS)], (1, 2))
    ours = Contender("embcache", lambda i: dedup.run(batches.keys[i], csr=csr))
    case = f"dedup alone of 1 M Zipf keys: unique, inverse{', CSR' if csr else ''}"
    race("dedup", case, ours, peers, threads=threads, work=KEYS, unit=MILLION_KEYS)
    dedup.close()
