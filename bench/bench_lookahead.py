"""What looking ahead costs: nanoseconds of CPU an id, beside the same batches planned without it under "lru".

    python bench/bench_lookahead.py

`look` is the notice itself; `plan` and `finish` are those calls with a notice, beside those without. Batches of both run in turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embcache._core.swap import SwapManager
from embcache._core.table import Table
from samples import Sampler, keys_of

STEPS, POPULATION = 16, 1_000_000
CASES = [
    ("zipf", 1, 65_536, 1),
    ("zipf", 26, 4096, 20),
    ("uniform", 1, 65_536, 1),
]  # kind, tables, bags, ids of a bag at most


@dataclass
class Run:
    """One planner on its way through the batches, twice: the first round warms up."""

    manager: SwapManager
    window: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("look", "plan", "finish"), 0.0))
    notices: deque[Any] = field(default_factory=deque)
    told: int = 0
    hits: int = 0

    def step(self, number: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Tell of what comes into view, plan, finish."""
        timed = number >= len(batches)
        while self.window and self.told < min(number + self.window + 1, 2 * len(batches)):
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
    for kind, tables, bags, longest in CASES:
        batches = draw(kind, tables, bags, longest)
        slots = max(POPULATION // 10, int(1.2 * max(len(np.unique(keys)) for keys, _ in batches) / tables))
        window = 8
        names = [f"{kind} {t}" for t in range(tables)]
        ours, plain = (
            Run(SwapManager([Table(name, 1) for name in names], [slots] * tables, policy=policy, num_threads=1), ahead)
            for policy, ahead in (("lookahead", window), ("lru", 0))
        )
        for number in range(2 * STEPS):
            ours.step(number, batches)
            plain.step(number, batches)
            if number == STEPS:
                held = sum(stats["coming_bytes"] for stats in ours.manager.stats())
        ids = sum(len(keys) for keys, _ in batches)
        uniques = sum(s["hits"] + s["misses"] for s in plain.manager.stats()) / 2
        cells = [1e9 * run.seconds[name] / ids for name, run in (("look", ours), ("plan", ours), ("plan", plain))]
        cells += [1e9 * run.seconds["finish"] / ids for run in (ours, plain)]
        print(
            f"| {kind}, {tables} x {bags} x 1..{longest} | {window} batches | {ids // STEPS:,} | "
            + " | ".join(f"{cell:.0f}" for cell in cells)
            + f" | {ours.hits / uniques:.2f} | {plain.hits / uniques:.2f} | {held / (window * ids / STEPS):.0f} |",
            flush=True,
        )
        ours.manager.close()
        plain.manager.close()


if __name__ == "__main__":
    main()
