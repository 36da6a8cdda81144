"""What the runs of the demo showed, side by side, and whether two of them ended in the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from runs import Run

__all__ = ["first_difference", "print_report"]


def print_report(runs: Sequence[Run]) -> None:
    """Print one table: a line for each figure, a column for each run."""
    lines: list[tuple[str, Callable[[Run], str]]] = [
        ("test AUC", lambda run: f"{run.auc:.5f}"),
        ("test log loss", lambda run: f"{run.log_loss:.5f}"),
        ("HBM hit rate", lambda run: _optional(run.hit_rate, ".1%")),
        ("device busy", lambda run: _optional(run.device_busy, ".1%")),
        ("host work overlapped", lambda run: _optional(run.overlap, ".1%")),
        ("rows swapped in", lambda run: _optional(run.swap_in_rows, ",")),
        ("rows swapped out", lambda run: _optional(run.swap_out_rows, ",")),
        ("MB swapped", lambda run: _optional(None if run.swap_bytes is None else run.swap_bytes / 1e6, ",.1f")),
        ("host MB", lambda run: f"{run.host_bytes / 1e6:,.1f}"),
        ("HBM MB", lambda run: f"{run.hbm_bytes / 1e6:,.1f}"),
        ("rows/s in training", lambda run: f"{run.rows_per_second:,.0f}"),
        ("seconds of training", lambda run: f"{run.seconds:,.1f}"),
    ]
    print(f"\n{'':<22}" + "".join(f"{run.name:>16}" for run in runs))
    for title, show in lines:
        print(f"{title:<22}" + "".join(f"{show(run):>16}" for run in runs))
    print(flush=True)


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def first_difference(one: Run, other: Run) -> str:
    """Compare all rows and the dense model bit by bit; return where they differ first, or an empty string."""
    if one.rows.keys() != other.rows.keys():
        return f"tables {sorted(one.rows)} and {sorted(other.rows)}"
    for table, (keys, *values) in one.rows.items():
        other_keys, *other_values = other.rows[table]
        if not np.array_equal(keys, other_keys):
            return f"table {table!r} has {len(keys)} and {len(other_keys)} keys, not the same ones"
        for what, mine, theirs in zip(("weights", "state"), values, other_values, strict=True):
            wrong = (mine.view(np.uint32) != theirs.view(np.uint32)).any(axis=1)
            if wrong.any():
                return f"{what} of {int(wrong.sum())} rows of table {table!r}, first that of key {keys[wrong.argmax()]}"
    for name, value in one.dense.items():
        if not torch.equal(value, other.dense[name]):
            return f"parameter {name!r} of the dense model"
    return ""
