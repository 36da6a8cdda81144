"""A digest of everything that a table holds, for processes that die before they can compare it themselves."""

from __future__ import annotations

import hashlib

import numpy as np

from embcache._core.table import Table


def digest(table: Table) -> str:
    """Of all keys, rows, states and row indexes."""
    rows, cursor = [], 0
    while True:
        found, cursor = table.scan(cursor, 10_000)
        if len(found) == 0:
            break
        rows.append(found)
    places = np.concatenate(rows) if rows else np.empty(0, np.int64)
    keys = table.columns(places)[0]
    weights, state = table.lookup_rows(keys)
    return hashlib.sha256(places.tobytes() + keys.tobytes() + weights.tobytes() + state.tobytes()).hexdigest()
