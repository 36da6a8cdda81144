"""plan: one call for all tables of a batch, against a unique call for each table; with misses; with many small tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from peers.limits import HugeMemory, lines_and_seats
from peers.unique import unique_peers
from plans import Batches, draw_batches, finish, planner, uniques_of
from race import MILLION_KEYS, Contender, Race

TABLES, BATCH, POPULATION = 26, 4096, 1_000_000
LONGEST = 20  # ids of a bag: 1 .. 20
SMALL_TABLES, SMALL_IDS = 1000, 64
BUCKET_KEYS = 3.5  # keys a line of the limit's memory stands for, as in bench_find.py


def bag_sizes(rng: np.random.Generator) -> np.ndarray:
    """Ids of each table: a batch of bags of 1 .. 20 ids."""
    return rng.integers(1, LONGEST + 1, (TABLES, BATCH)).sum(axis=1)


@pytest.fixture(scope="module", params=["uniform", "zipf"])
def batches(request: pytest.FixtureRequest) -> tuple[str, Batches]:
    return request.param, draw_batches(TABLES, POPULATION, bag_sizes, request.param)


class Touched:
    """Memory as large as the tables' indexes and seats, and the places in it of each batch's keys, known beforehand."""

    def __init__(self, drawn: Batches) -> None:
        at: list[list[np.ndarray]] = [[] for _ in drawn.keys]
        seat: list[list[np.ndarray]] = [[] for _ in drawn.keys]
        lines = seats = 0
        rng = np.random.default_rng(3)
        for table in range(TABLES):
            pieces = [drawn.of_table(i, table) for i in range(len(drawn.keys))]
            distinct, ordinals = np.unique(np.concatenate(pieces), return_inverse=True)
            buckets = int(len(distinct) / BUCKET_KEYS) + 1
            home, chair = rng.integers(0, buckets, len(distinct)), rng.permutation(len(distinct))
            for i, those in enumerate(np.split(ordinals, np.cumsum([len(piece) for piece in pieces])[:-1])):
                at[i].append(lines + home[those])
                seat[i].append(seats + chair[those])
            lines, seats = lines + buckets, seats + len(distinct)
        self.at, self.seat = [[np.concatenate(places) for places in both] for both in (at, seat)]
        self.lines, self.seats = HugeMemory(lines, 16), HugeMemory(seats, 4)

    def touch(self, i: int) -> None:
        """Touch what a plan of batch `i` does."""
        lines_and_seats(self.lines.array, self.at[i], self.seats.array, self.seat[i])

    def close(self) -> None:
        """Unmap both."""
        self.lines.close()
        self.seats.close()


@pytest.fixture(scope="module")
def touched(batches: tuple[str, Batches]) -> Iterator[Touched]:
    memory = Touched(batches[1])
    yield memory
    memory.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_plan_of_hits(race: Race, batches: tuple[str, Batches], touched: Touched, threads: int) -> None:
    kind, drawn = batches
    peers = unique_peers(drawn.pieces(), uniques_of, (threads,))
    if threads == 1:
        peers.append(Contender("limit: a line and a seat a key", touched.touch))
    with planner(drawn, threads=threads) as manager:
        ours = Contender("embcache", lambda i: manager.plan(drawn.keys[i], drawn.offsets[i]), after=finish(manager))
        case = f"plan of {TABLES} tables x {BATCH} x 1..{LONGEST} ids, {kind}, all hits"
        race(
            "plan",
            case,
            ours,
            peers,
            threads=threads,
            work=drawn.size,
            unit=MILLION_KEYS,
            rounds=5,
        )


def test_plan_with_swaps(race: Race, batches: tuple[str, Batches]) -> None:
    kind, drawn = batches
    with planner(drawn, share=0.3) as manager:
        ours = Contender("embcache", lambda i: manager.plan(drawn.keys[i], drawn.offsets[i]), after=finish(manager))
        case = f"plan of {TABLES} tables x {BATCH} x 1..{LONGEST} ids, {kind}, victims for every miss"
        race(
            "plan with swaps",
            case,
            ours,
            unique_peers(drawn.pieces(), uniques_of),
            work=drawn.size,
            unit=MILLION_KEYS,
            rounds=5,
        )
        swaps = sum(stats["swap_out_rows"] for stats in manager.stats())
        assert swaps > 0


def test_many_small_tables(race: Race) -> None:
    drawn = draw_batches(SMALL_TABLES, 1000, lambda _rng: np.full(SMALL_TABLES, SMALL_IDS), "zipf")
    single = drawn.as_one_table()
    with planner(drawn) as manager, planner(single) as one:
        ours = Contender("embcache", lambda i: manager.plan(drawn.keys[i], drawn.offsets[i]), after=finish(manager))

        def same(plan, other) -> None:
            assert np.array_equal(plan.unique_keys[plan.inverse], other.unique_keys[other.inverse])

        peer = Contender(
            "embcache, one table", lambda i: one.plan(single.keys[i], single.offsets[i]), same, after=finish(one)
        )
        case = f"plan of {SMALL_TABLES} tables of {SMALL_IDS} ids"
        race(
            "many tables",
            case,
            ours,
            [peer, *unique_peers(drawn.pieces(), uniques_of)],
            work=drawn.size,
            unit=MILLION_KEYS,
        )
