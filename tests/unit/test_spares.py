"""Memory for indexes is made ready ahead of the insert that needs it: in steps, bounded, counted, and never for the answer's sake."""

from __future__ import annotations

import numpy as np
import pytest

from embcache._core.table import Table, refuse_memory
from embcache.errors import HostMemoryError

HUGE = 2 << 20
CALL = 4096
KEYS = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 500_000)  # a table of one partition splits at 430,080


def calls(size: int = CALL) -> list[np.ndarray]:
    return [KEYS[start : start + size] for start in range(0, len(KEYS), size)]


@pytest.mark.parametrize("size", [700, CALL])
def test_small_calls_make_ready_one_huge_page_each_before_a_partition_moves(size: int) -> None:
    table = Table("t", 1, num_threads=1)
    before, ahead, most = table.stats(), 0, 0
    for keys in calls(size):
        table.insert(keys)
        now = table.stats()
        parts = (
            "row_bytes",
            "padding_bytes",
            "column_bytes",
            "index_bytes",
            "slack_bytes",
            "other_bytes",
            "reserved_bytes",
        )
        assert sum(now[part] for part in parts) == now["bytes"]
        more = now["index_bytes"] - before["index_bytes"]
        if now["partitions"] == before["partitions"] == 1 and 0 < more <= HUGE and now["rows"] > 300_000:
            ahead += 1
            most = max(most, now["index_bytes"])
        before = now
    assert ahead >= 1, "a growth and a split lie in these calls, of several huge pages each"
    assert most <= 7 * HUGE, "what is ready is bounded by a third of the indexes, here one of less than 10 MiB"
    assert table.stats()["partitions"] == 2
    table.check()


def test_a_large_call_makes_nothing_ready_and_reads_the_same() -> None:
    small, large = Table("t", 1, num_threads=1), Table("t", 1, num_threads=1)
    for keys in calls():
        small.insert(keys)
    large.insert(KEYS)
    ours, theirs = np.empty((len(KEYS), 1), np.float32), np.empty((len(KEYS), 1), np.float32)
    small.lookup(KEYS, ours, insert=False)
    large.lookup(KEYS, theirs, insert=False)
    assert np.array_equal(ours, theirs) and len(small) == len(large)


def test_a_refused_block_costs_nothing_but_the_time() -> None:
    table = Table("t", 1, num_threads=1)
    refused = 0
    for keys in calls():
        refuse_memory(0)  # the next request: in most calls there is none, in some it is the block to come
        try:
            table.insert(keys)
        except HostMemoryError:
            table.insert(keys)
        refused += refuse_memory(-1) == -1
    assert refused > 0 and len(table) == len(np.unique(KEYS))
    table.check()


def mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def test_what_was_made_ready_is_given_back_with_the_table() -> None:
    Table("warm", 1, num_threads=1).insert(KEYS[:CALL])
    before = mapped_bytes()
    table = Table("t", 1, num_threads=1)
    for keys in calls()[: 430_080 // CALL - 3]:  # just before the split into two indexes of 4 MiB
        table.insert(keys)
    stats = table.stats()
    assert stats["partitions"] == 1 and mapped_bytes() - before > stats["row_bytes"] + 16 * 2**20
    table.close()
    assert mapped_bytes() - before < 2 * HUGE
