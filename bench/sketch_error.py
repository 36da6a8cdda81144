"""The error of a filter's sketch over traces, beside what its documentation states (ec_sketch.h).

    python bench/sketch_error.py [TRACE ...] [--bytes 4096]

replays traces as `bench_hit_ratio.py` does, in batches, through planners whose filters count in a sketch, and prints a
table in Markdown. Over-counts are the sketch's estimates, read off its exported cells, less the true counts of its window,
over all keys of the window that fit into a counter, at eight times in the trace; no key is admitted meanwhile. Early and late are keys admitted in a batch
before, or after, the one in which exact counts admit them, of all keys that exact counts admit. Nothing here is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench_hit_ratio import traces
from embcache._core.digest import hash_keys
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig
from plans import finish

BATCH = 1024
SIZES = (4096, 16384, 65536)
THRESHOLD = 3
TOP = 2**8 - 1  # of a counter
NEVER = 1e-30  # is a key admitted
STATED_SHARE = 0.037  # of estimates that are too high by 2 or more
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SKETCH_ROWS = 4


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def estimates(state: dict[str, np.ndarray], keys: np.ndarray) -> np.ndarray:
    """What the sketch of an exported filter says of `keys`; its seed is 0, its counters have one byte, and it has several blocks."""
    blocks = state["sketch_blocks"]
    width = len(state["sketch_young"]) // (SKETCH_ROWS * blocks)
    first = mixed(keys.astype(np.uint64))
    second = mixed(first + GOLDEN)
    low, shift = np.uint64(2**32 - 1), np.uint64(32)
    block = blocks_of(state, keys)
    total = np.zeros(len(keys), np.int64)
    for name in ("sketch_young", "sketch_old"):
        cells, least = state[name].reshape(blocks, SKETCH_ROWS, width), np.full(len(keys), TOP)
        for row, half in enumerate((first >> shift, first & low, second >> shift, second & low)):
            place = half * np.uint64(width) >> shift
            least = np.minimum(least, cells[block, row, place.astype(np.int64)])
        total += least
    return total


def blocks_of(state: dict[str, np.ndarray], keys: np.ndarray) -> np.ndarray:
    """The block in which each key counts."""
    return (hash_keys(keys) >> np.uint64(52)).astype(np.int64) * state["sketch_blocks"] // 4096


def planner(sketch_bytes: int, chance: float = 1.0) -> SwapManager:
    """A planner of one table whose filter counts in a sketch, or exactly for 0 bytes."""
    config = AdmitAndEvictConfig(admit_threshold=THRESHOLD, sketch_bytes=sketch_bytes, admit_probability=chance)
    return SwapManager([Table("sketch", 1, with_filter=True)], [1 << 17], [config], num_threads=1)


def batches(keys: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]


def over_counts(keys: np.ndarray, sketch_bytes: int) -> np.ndarray:
    """Estimates less true counts, of every key of the window at eight times."""
    manager, found = planner(sketch_bytes, NEVER), []
    stops = set(np.linspace(0, len(keys) // BATCH, 9).astype(int)[1:].tolist())
    for number, batch in enumerate(batches(keys), 1):
        finish(manager)(manager.plan(batch, np.array([0, len(batch)])))
        if number in stops:
            state = manager.export_filter(0)
            distinct, counts = in_window(state, keys[: min(number * BATCH, len(keys))])
            fits = counts <= TOP
            found.append(estimates(state, distinct[fits]) - counts[fits])
    manager.close()
    return np.concatenate(found)


def in_window(state: dict[str, np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys that both generations hold, and how often: of each block those that came to it last."""
    window = state["sketch_clocks"].reshape(-1, 3)[:, :2].sum(axis=1)
    keys = np.ascontiguousarray(keys[::-1])
    order = np.argsort(blocks_of(state, keys), kind="stable")
    block = blocks_of(state, keys)[order]
    rank = np.arange(len(keys)) - np.searchsorted(block, block)
    return np.unique(keys[order][rank < window[block]], return_counts=True)


def admissions(keys: np.ndarray, sketch_bytes: int) -> dict[int, int]:
    """Key -> number of the batch that admits it."""
    manager = planner(sketch_bytes)
    when: dict[int, int] = {}
    for number, batch in enumerate(batches(keys)):
        plan = manager.plan(batch, np.array([0, len(batch)]))
        for key in plan.unique_keys[plan.admitted.astype(bool)].tolist():
            when.setdefault(key, number)
        finish(manager)(plan)
    manager.close()
    return when


def rows(paths: Sequence[Path], sizes: Sequence[int]) -> Iterator[list[str]]:
    """The table, its head first."""
    head = "trace|accesses|keys|sketch_bytes|too high by 1+|by 2+ (stated: at most)|mean|most|early|late or never"
    yield head.split("|")
    yield ["---"] * len(head.split("|"))
    for name, keys in traces(paths):
        exact = admissions(keys, 0)
        for size in sizes:
            over, when = over_counts(keys, size), admissions(keys, size)
            assert over.min() >= 0, "an estimate is below the truth"
            early = sum(number < exact.get(key, len(keys)) for key, number in when.items())
            late = sum(when.get(key, len(keys)) > number for key, number in exact.items())
            yield [
                name,
                f"{len(keys):,}",
                f"{len(np.unique(keys)):,}",
                f"{size:,}",
                f"{np.mean(over >= 1):.2%}",
                f"{np.mean(over >= 2):.2%} ({STATED_SHARE:.1%})",
                f"{over.mean():.4f}",
                f"{over.max()}",
                f"{early / len(exact):.2%}",
                f"{late / len(exact):.2%}",
            ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="the error of a filter's sketch over traces")
    parser.add_argument("traces", nargs="*", type=Path, help="files to replay besides")
    parser.add_argument("--bytes", type=int, action="append", help="a size of the sketch, 1024 or more")
    options = parser.parse_args()
    for row in rows(options.traces, options.bytes or SIZES):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
