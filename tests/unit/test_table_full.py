"""A table that has no row left to number: 2^32 rows in a partition, 2^40 in a table. One more is refused, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from embcache._core.swap import SwapManager
from embcache._core.table import Table, number_rows_from
from embcache.errors import HostMemoryError

EXTENT = 1024  # rows that a partition takes at a time


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)


def content(table: Table, probe: np.ndarray) -> tuple[bytes, bytes, int, int]:
    return table.find(probe).tobytes(), table.lookup_rows(probe)[0].tobytes(), len(table), table.version


def test_a_partition_numbers_its_rows_up_to_2_to_the_32_and_no_further() -> None:
    table = Table("big", 4)
    number_rows_from(table, local=2**32 - 2 * EXTENT)
    keys = keys_from(1, 2 * EXTENT)
    rows = table.insert(keys[:-10].copy())
    assert (
        len(np.unique(rows)) == len(rows) and rows.max() < 2**20
    )  # the numbers are the partition's, not the rows' places
    probe = np.concatenate([keys, keys_from(2, 20)])
    before = content(table, probe)
    with pytest.raises(HostMemoryError, match=r"'big'.* 2\^32 in each of its 1 partitions.*erase keys"):
        table.insert(np.concatenate([keys[:5], keys_from(2, 11)]))
    assert content(table, probe) == before
    table.check()
    table.insert(keys)  # the last ten
    table.check()
    assert len(table) == 2 * EXTENT
    assert np.array_equal(table.find(keys[:-10].copy()), rows)
    before = content(table, probe)
    with pytest.raises(HostMemoryError, match="2048 live"):
        table.insert(keys_from(2, 1))
    assert content(table, probe) == before
    assert table.erase(keys[:3].copy()) == 3
    assert sorted(table.insert(keys_from(2, 3))) == sorted(rows[:3])  # rows that are free have their numbers
    with pytest.raises(HostMemoryError):
        table.insert(keys_from(3, 1))
    table.check()
    table.close()


def test_a_partition_that_is_full_when_it_splits_keeps_its_keys() -> None:
    table = Table("big", 4, split_above=2_000, index_seed=1)
    number_rows_from(table, local=2**32 - 2 * EXTENT)
    keys = keys_from(1, 2 * EXTENT)
    rows = np.concatenate([table.insert(keys[at : at + 512].copy()) for at in range(0, 2 * EXTENT, 512)])
    assert table.stats()["partitions"] == 1
    with pytest.raises(HostMemoryError, match="big"):
        table.insert(keys_from(2, 300))  # splits first: neither half has a number left
    table.check()
    assert table.stats()["partitions"] > 1
    assert np.array_equal(table.find(keys), rows)
    assert table.erase(keys[:1_000].copy()) == 1_000
    table.insert(keys[:1_000].copy())
    table.check()


def test_a_table_numbers_its_rows_up_to_2_to_the_40_and_no_further() -> None:
    table = Table("big", 4, split_above=1_500, index_seed=1)
    keys = keys_from(1, 4_000)
    rows = table.insert(keys)
    number_rows_from(table, last_extent=True)
    probe = np.concatenate([keys, keys_from(2, 8_000)])
    before = content(table, probe)
    with pytest.raises(HostMemoryError, match=r"'big'.*4000 live; at most 2\^40 in a table"):
        table.insert(keys_from(2, 8_000))
    assert content(table, probe) == before
    table.check()
    table.erase(keys[:100].copy())
    table.insert(keys[:100].copy())
    assert np.array_equal(np.sort(table.find(keys)), np.sort(rows))
    table.check()


def test_i3_a_plan_that_meets_a_full_table_changes_nothing() -> None:
    tables = [Table("full", 2, index_seed=1), Table("other", 2)]
    number_rows_from(tables[0], local=2**32 - EXTENT)
    manager = SwapManager(tables, [2 * EXTENT, 16], [None, None], num_threads=1)

    def plan(first: np.ndarray, second: np.ndarray) -> object:
        return manager.plan(np.concatenate([first, second]), np.array([0, len(first), len(first) + len(second)]), None)

    keys, others = keys_from(1, EXTENT - 2), keys_from(2, 8)
    one = plan(keys, others)
    before = [content(table, np.concatenate([keys, others]))[:3] for table in tables]
    residents = [[column.tolist() for column in manager.residents(t)] for t in range(2)]
    with pytest.raises(HostMemoryError, match="limit"):
        plan(keys_from(3, 3), keys_from(4, 3))
    assert [content(table, np.concatenate([keys, others]))[:3] for table in tables] == before
    assert [[column.tolist() for column in manager.residents(t)] for t in range(2)] == residents
    manager.check()
    two = plan(keys_from(3, 2), keys_from(4, 3))
    for each in (one, two):
        manager.mark_swapped_out(each)
        manager.mark_swapped_in(each)
        manager.finish(each)
    assert (len(tables[0]), len(tables[1])) == (EXTENT, 11)
    manager.check()
