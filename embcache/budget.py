"""How many device slots each table gets: the arithmetic of ``hbm_bytes`` and ``hbm_rows``.

Everything is in whole bytes and whole slots; the result never exceeds the budget. Each table costs one slot more than
it can use: the constant slot, which holds what a key reads while it is not admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from .config import OptimizerSpec, TableConfig
from .errors import ConfigError
from .rowtypes import ROW_TYPES

__all__ = ["layout_bytes", "row_bytes", "split_budget"]

STATE_ELEMENT_BYTES = 4


def row_bytes(table: TableConfig, spec: OptimizerSpec) -> int:
    """Device bytes of one slot of `table`: weights and optimizer state."""
    weights = ROW_TYPES[table.dtype].bytes * table.embedding_dim
    return weights + STATE_ELEMENT_BYTES * sum(spec.state_widths(table.embedding_dim))


def layout_bytes(tables: Sequence[TableConfig], spec: OptimizerSpec, capacities: Sequence[int]) -> int:
    """Device bytes of all tables with these capacities, constant slots included."""
    return sum((capacity + 1) * row_bytes(table, spec) for table, capacity in zip(tables, capacities, strict=True))


def split_budget(
    tables: Sequence[TableConfig], spec: OptimizerSpec, budget_bytes: int, shares: Sequence[int]
) -> list[int]:
    """Return each table's slots so that all together take at most `budget_bytes`.

    Parameters
    ----------
    tables : sequence of TableConfig
        A table with ``hbm_rows`` gets exactly that; ``num_embeddings`` caps the others.
    budget_bytes : int
    shares : sequence of int
        Relative claims, > 0. What a capped table leaves goes to the others.

    Raises
    ------
    ConfigError
        Not every table can have its ``hbm_rows``, or one slot.
    """
    sizes = [row_bytes(table, spec) for table in tables]
    slots = [table.hbm_rows or 0 for table in tables]
    least = sum((max(count, 1) + 1) * size for count, size in zip(slots, sizes, strict=True))
    if budget_bytes < least:
        worst = max(range(len(tables)), key=lambda t: (max(slots[t], 1) + 1) * sizes[t])
        needs = (max(slots[worst], 1) + 1) * sizes[worst]
        raise ConfigError(
            f"hbm_bytes = {budget_bytes} is too small: {len(tables)} table(s) need at least {least} bytes, table {tables[worst].name!r} "
            f"alone {needs} ({max(slots[worst], 1)} slot(s) and a constant one of {sizes[worst]} bytes); raise hbm_bytes or lower hbm_rows"
        )
    left = budget_bytes - sum(((table.hbm_rows or 0) + 1) * size for table, size in zip(tables, sizes, strict=True))
    open_tables = [t for t, table in enumerate(tables) if table.hbm_rows is None]
    while open_tables:
        # A table whose share is beyond its cap, or below one slot, is settled first: that changes the others' shares.
        total = sum(shares[t] for t in open_tables)
        want = {t: left * shares[t] // total // sizes[t] for t in open_tables}
        settled = {t: 1 for t in open_tables if want[t] < 1}
        if not settled:
            caps = {t: tables[t].num_embeddings for t in open_tables}
            settled = {t: cap for t, cap in caps.items() if cap is not None and want[t] >= cap}
        for t, count in (settled or want).items():
            slots[t] = count
            left -= count * sizes[t]
        open_tables = [t for t in open_tables if t not in settled] if settled else []
    return slots
