"""How near an insert of new keys comes to what it cannot avoid: `python bench/insert_least.py [ROUNDS]` (see LIMITS.md).

Prints ns a key of a memset of the same fresh pages, of the parts of insert_least.c, and of an insert of ten million keys.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from bench_insert import DIM, filled, ready_memory
from dedup_alone import HEADERS, OPTIONS
from peers.native import build
from samples import keys_of

ROWS = int(os.environ.get("BENCH_ROWS", "10000000"))
PARTS = ["memset", "values into fresh rows", "(values alone)", "keys, flags", "hashes", "index lines"]


def least(library: ctypes.CDLL, lines: int, held: int) -> list[float]:
    """Seconds of each part."""
    seconds = (ctypes.c_double * len(PARTS))()
    sizes = [ctypes.c_int64(size) for size in (ROWS, DIM, lines, held)]
    assert library.insert_least(*sizes, seconds) == 0, "no memory"
    return list(seconds)


def main(rounds: int) -> None:
    """Print each round and the medians."""
    library = build(str(Path(__file__).with_name("insert_least.c")), OPTIONS, include=str(HEADERS))
    keys = keys_of(np.arange(ROWS))
    table = filled(keys, ROWS)
    stats = table.stats()
    table.close()
    ready = ready_memory(stats["bytes"])
    print(" | ".join([*PARTS, "least", "memset / least", "embcache", "memset / embcache"]))
    shares = []
    for _ in range(rounds):
        ready()
        parts = least(library, stats["index_bytes"] // 64, stats["bytes"])
        ready()
        began = time.perf_counter()
        table = filled(keys, ROWS)
        ours = time.perf_counter() - began
        table.close()
        whole = parts[1] + sum(parts[3:])
        shares.append((parts[0] / whole, parts[0] / ours))
        times = [f"{1e9 * part / ROWS:.0f}" for part in (*parts, whole)]
        print(
            " | ".join([*times, f"{shares[-1][0]:.2f}", f"{1e9 * ours / ROWS:.0f}", f"{shares[-1][1]:.2f}"]), flush=True
        )
    print(
        f"medians: memset / least {statistics.median(s[0] for s in shares):.2f}, memset / embcache {statistics.median(s[1] for s in shares):.2f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
