"""How near a sweep comes to what it cannot avoid: `python bench/sweep_least.py [ROUNDS]` (see LIMITS.md).

Prints milliseconds of CPU time of the parts of sweep_least.c: looks at every row, and taking a tenth of the rows away.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
from pathlib import Path

from dedup_alone import HEADERS, OPTIONS
from peers.native import build

ROWS = int(os.environ.get("BENCH_ROWS", "10000000"))
PARTS = ["flags, timestamps", "and counts", "the same, two threads", "10% taken away"]
KEYS_A_LINE = 3  # of an index that is 0.6 full


def main(rounds: int) -> None:
    """Print each round and the medians."""
    library = build(str(Path(__file__).with_name("sweep_least.c")), (*OPTIONS, "-pthread"), include=str(HEADERS))
    print(" | ".join(PARTS))
    found = []
    for _ in range(rounds):
        seconds = (ctypes.c_double * len(PARTS))()
        sizes = [ctypes.c_int64(size) for size in (ROWS, ROWS // 10, ROWS // KEYS_A_LINE)]
        assert library.sweep_least(*sizes, seconds) == 0, "no memory"
        found.append([1e3 * part for part in seconds])
        print(" | ".join(f"{part:.1f}" for part in found[-1]), flush=True)
    print("medians: " + " | ".join(f"{statistics.median(column):.1f}" for column in zip(*found, strict=True)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
