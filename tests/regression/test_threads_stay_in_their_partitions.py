"""An insert's threads looked ahead into indexes of partitions that other threads were moving: it crashed."""

from __future__ import annotations

import numpy as np

from embcache._core.table import Table


def test_indexes_of_many_partitions_grow_under_one_insert() -> None:
    rng = np.random.default_rng(0)
    table = Table("t", 2, num_threads=4, split_above=20_000)
    for _ in range(12):
        keys = rng.integers(-(2**63), 2**63, 60_000)
        rows = table.insert(keys)
        assert len(np.unique(rows)) == len(np.unique(keys))
        assert np.array_equal(table.find(keys), rows)
    assert table.stats()["partitions"] > 8
    table.check()
    table.close()
