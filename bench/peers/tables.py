"""Key -> row index through Python libraries: pandas, NumPy, dict."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pandas._libs.hashtable import Int64HashTable

__all__ = ["DictTable", "IndexTable", "KhashTable", "SortedTable"]


class KhashTable:
    """pandas' khash: Int64HashTable.lookup."""

    name = "pandas Int64HashTable.lookup"

    def __init__(self, keys: np.ndarray) -> None:
        self._table = Int64HashTable(len(keys))
        self._table.map_locations(keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Positions, -1 where absent."""
        return self._table.lookup(keys)


class IndexTable:
    """pandas' public face: Index.get_indexer."""

    name = "pandas Index.get_indexer"

    def __init__(self, keys: np.ndarray) -> None:
        self._index = pd.Index(keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Positions, -1 where absent."""
        return self._index.get_indexer(keys)


class SortedTable:
    """Binary search over sorted keys."""

    name = "numpy searchsorted"

    def __init__(self, keys: np.ndarray) -> None:
        self._rows = np.argsort(keys)
        self._keys = keys[self._rows]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Positions, -1 where absent."""
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._rows[at], -1)


class DictTable:
    """The built-in dict, queried with int objects made beforehand."""

    name = "dict"

    def __init__(self, keys: np.ndarray) -> None:
        self._row_of = {key: row for row, key in enumerate(keys.tolist())}

    def find(self, keys: list[int]) -> list[int]:
        """Positions, -1 where absent."""
        get = self._row_of.get
        return [get(key, -1) for key in keys]
