"""Sweeps of a large table: total time and the longest pause in one step.

`python -m bench.bench_sweep [--rows 100e6] [--dead 0.01] [--keep 0]` makes a table of one float32 a row, gives its rows
timestamps (all at once, through the planner's door for loaded counters), sweeps, and plans small batches until nothing
dead is left. Everything but the sweep is the same in each step, so the time of a step before it is subtracted.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig

BATCH = 4096


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make(rows: int, dead: float, keep: int, slots: int) -> tuple[SwapManager, np.ndarray]:
    """A planner whose table has `rows` rows, the share `dead` of them with timestamp 0, the others with 1,000."""
    config = AdmitAndEvictConfig(evict_threshold=500, evict_step_interval=4, evict_keep_min=keep)
    table = Table("t", 1, with_filter=True)
    manager = SwapManager([table], [slots], [config], num_threads=1)
    rng = np.random.default_rng(0)
    for first in range(0, rows, 1 << 22):
        keys = rng.permutation(np.arange(first, min(rows, first + (1 << 22))))
        table.insert(keys)
        last = np.where(rng.random(len(keys)) < dead, 0, 1000)
        manager.load_filter_state(0, keys, np.ones(len(keys), np.int64), last, 0, 0)
    return manager, np.arange(rows - BATCH, rows)


def step(manager: SwapManager, keys: np.ndarray) -> tuple[float, float]:
    """CPU and wall seconds of a planned and finished batch."""
    cpu, wall = cpu_s(), time.perf_counter()
    plan = manager.plan(keys, np.array([0, len(keys)]), np.full(len(keys), 1000))
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)
    manager.finish(plan)
    return cpu_s() - cpu, time.perf_counter() - wall


def measure(rows: int, dead: float, keep: int, slots: int) -> dict[str, float]:
    manager, keys = make(rows, dead, keep, slots)
    step(manager, keys)
    before = [step(manager, keys) for _ in range(2)]
    after = []
    while True:
        after.append(step(manager, keys))
        # The next sweep is due in 4 steps and starts another round: the first one ends when it has been everywhere.
        if manager.stats()[0]["dead"] == 0 and len(after) >= 2:
            break
    base = min(cpu for cpu, _ in before)
    figures = {
        "steps": float(len(after)),
        "total_s": sum(cpu - base for cpu, _ in after),
        "longest_ms": 1e3 * max(cpu for cpu, _ in after),
        "longest_wall_ms": 1e3 * max(wall for _, wall in after),
        "step_before_ms": 1e3 * base,
        "evicted": float(manager.stats()[0]["evicted"]),
    }
    manager.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=20e6)
    parser.add_argument("--dead", type=float, default=0.01)
    parser.add_argument("--keep", type=float, default=0)
    parser.add_argument("--slots", type=float, default=1 << 20)
    options = parser.parse_args()
    figures = measure(int(options.rows), options.dead, int(options.keep), int(options.slots))
    print(
        f"{int(options.rows):,} rows, {options.dead:.0%} dead: "
        + ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
