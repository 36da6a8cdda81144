"""What looking ahead costs: nanoseconds of CPU an id, beside the same batches planned without it under "lru".

    python bench/bench_lookahead.py

`look` is the notice itself; `plan` and `finish` are those calls with a notice, beside those without. Batches of both run in turns.
As a bench it gives the notice, and all that an id takes more than under "lru".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from embcache._core.swap import SwapManager
from embcache._core.table import Table
from race import Contender, Race, Unit
from samples import Sampler, keys_of

STEPS, POPULATION = 16, 1_000_000
WINDOW = 8  # batches
NANOSECONDS = Unit("ns", 1e-9, rate=False)
CASES = [
    ("zipf", 1, 65_536, 1),
    ("zipf", 26, 4096, 20),
    ("uniform", 1, 65_536, 1),
]  # kind, tables, bags, ids of a bag at most


@dataclass
class Run:
    """One planner on its way through the batches, round after round: the first one warms up."""

    manager: SwapManager
    window: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("look", "plan", "finish"), 0.0))
    notices: deque[Any] = field(default_factory=deque)
    told: int = 0
    hits: int = 0

    def step(self, number: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Tell of what comes into view, plan, finish."""
        timed = number >= len(batches)
        while self.window and self.told < number + self.window + 1:
            batch = batches[self.told % len(batches)]
            self.notices.append(self.spent("look", timed, self.manager.look_ahead, *batch))
            self.told += 1
        notice = self.notices.popleft() if self.notices else None
        plan = self.spent("plan", timed, self.manager.plan, *batches[number % len(batches)], None, None, notice)
        self.manager.mark_swapped_out(plan)
        self.manager.mark_swapped_in(plan)
        self.spent("finish", timed, self.manager.finish, plan)
        self.hits += plan.hits if timed else 0

    def spent(self, name: str, timed: bool, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and add up the CPU time of it."""
        start = time.process_time()
        result = call(*arguments)
        self.seconds[name] += (time.process_time() - start) if timed else 0.0
        return result


def draw(kind: str, tables: int, bags: int, longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches: keys table by table, and offsets."""
    sampler, batches = Sampler(POPULATION), []
    for _ in range(STEPS):
        counts = sampler.rng.integers(1, longest + 1, (tables, bags)).sum(axis=1)
        keys = [sampler.draw(kind, int(count)) + table * POPULATION for table, count in enumerate(counts)]
        batches.append((keys_of(np.concatenate(keys)), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)))
    return batches


class Pair:
    """The same batches under "lookahead" and under "lru", in turns, one thread.

    Attributes
    ----------
    label : str
    ids : int
        Of a round of `STEPS` batches.
    ours, plain : Run
    """

    def __init__(self, kind: str, tables: int, bags: int, longest: int) -> None:
        self.label = f"{kind}, {tables} x {bags} x 1..{longest}"
        self._batches = draw(kind, tables, bags, longest)
        self.ids = sum(len(keys) for keys, _ in self._batches)
        slots = max(POPULATION // 10, int(1.2 * max(len(np.unique(keys)) for keys, _ in self._batches) / tables))
        names = [f"{kind} {t}" for t in range(tables)]
        self.ours, self.plain = (
            Run(SwapManager([Table(name, 1) for name in names], [slots] * tables, policy=policy, num_threads=1), ahead)
            for policy, ahead in (("lookahead", WINDOW), ("lru", 0))
        )
        self._number = 0

    def round(self) -> tuple[dict[str, float], dict[str, float]]:
        """One round of both; what it took, by call. Nothing is counted in the first."""
        before = [dict(run.seconds) for run in (self.ours, self.plain)]
        for number in range(self._number, self._number + STEPS):
            self.ours.step(number, self._batches)
            self.plain.step(number, self._batches)
        self._number += STEPS
        ours, plain = (
            {name: run.seconds[name] - old[name] for name in old}
            for run, old in zip((self.ours, self.plain), before, strict=True)
        )
        return ours, plain

    def close(self) -> None:
        """Free the tables."""
        self.ours.manager.close()
        self.plain.manager.close()


def noticing(took: tuple[dict[str, float], dict[str, float]]) -> float:
    """Seconds of the notices."""
    return took[0]["look"]


def beyond_lru(took: tuple[dict[str, float], dict[str, float]]) -> float:
    """Seconds of all calls beyond those under "lru"."""
    return sum(took[0].values()) - sum(took[1].values())


@pytest.mark.parametrize("what", [noticing, beyond_lru], ids=["the notice", "all beyond lru"])
@pytest.mark.parametrize("shape", CASES, ids=[f"{kind} {tables}" for kind, tables, _, _ in CASES])
def test_look_ahead(
    race: Race,
    shape: tuple[str, int, int, int],
    what: Callable[[tuple[dict[str, float], dict[str, float]]], float],
) -> None:
    pair = Pair(*shape)
    case = f"look-ahead, {pair.label}: {'the notice' if what is noticing else 'all beyond lru'}"
    ours = Contender("embcache", lambda i: pair.round(), seconds_of=what)
    race("look-ahead", case, ours, [], work=pair.ids, unit=NANOSECONDS, rounds=5)
    pair.close()


def main() -> None:
    """Print a table in Markdown."""
    head = [
        "ids",
        "window",
        "ids a batch",
        "look",
        "plan",
        "plan, lru",
        "finish",
        "finish, lru",
        "hits",
        "hits, lru",
        "bytes an id",
    ]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for case in CASES:
        pair = Pair(*case)
        pair.round()
        held = sum(stats["coming_bytes"] for stats in pair.ours.manager.stats())
        ours, plain = pair.round()
        ids = pair.ids
        uniques = sum(s["hits"] + s["misses"] for s in pair.plain.manager.stats()) / 2
        cells = [1e9 * took[name] / ids for name, took in (("look", ours), ("plan", ours), ("plan", plain))]
        cells += [1e9 * took["finish"] / ids for took in (ours, plain)]
        print(
            f"| {pair.label} | {WINDOW} batches | {ids // STEPS:,} | "
            + " | ".join(f"{cell:.0f}" for cell in cells)
            + f" | {pair.ours.hits / uniques:.2f} | {pair.plain.hits / uniques:.2f} | {held / (WINDOW * ids / STEPS):.0f} |",
            flush=True,
        )
        pair.close()


if __name__ == "__main__":
    main()
