"""The state of a filter as bytes, for the directory of a file-backed table.

One JSON object (numbers, and of each array its name, dtype and length) behind its own length as int64, then the arrays,
each padded to 8 bytes. A waiting key takes 24 bytes. Digests are the directory's business. Format 3 has a sketch in blocks, 2 one of earlier
versions, or none.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .config import AdmitAndEvictConfig
from .errors import ConfigError, CorruptionError

__all__ = [
    "CLOCKS",
    "OLD",
    "SKETCHES",
    "SKETCH_CHANGES",
    "YOUNG",
    "meaning",
    "merged_numbers",
    "pack",
    "pack_as",
    "sketch_blobs",
    "sketch_cell_bytes",
    "sketch_name",
    "take_apart",
    "unpack",
]

FORMAT, FORMAT_BLOCKS = 2, 3
YOUNG, OLD, SKETCH_CHANGES, CLOCKS = "sketch_young", "sketch_old", "sketch_changes", "sketch_clocks"
SKETCHES = (YOUNG, OLD)


def sketch_name(table: str, which: str) -> str:
    """The name of the bytes of one generation of a filter's sketch, of what has changed in both, or of its blocks' clocks."""
    return f"filter/{table}/{which}"


def sketch_blobs(table: str) -> list[str]:
    """The names of all bytes that a generation may have of a table's sketch."""
    return [sketch_name(table, which) for which in (*SKETCHES, SKETCH_CHANGES, CLOCKS)]


_CELL = "bytes of a sketch's counter (by admit_threshold)"


def meaning(rule: AdmitAndEvictConfig) -> dict[str, Any]:
    """What of the rule decides what counters and times mean; the rest may change from one opening to the next."""
    sketch = rule.sketch_bytes > 0
    cell = 1 if rule.admit_threshold <= 0xFF else 2 if rule.admit_threshold <= 0xFFFF else 4  # as ec_sketch.h has it
    return {
        "policy": rule.policy,
        "time_source": rule.time_source,
        "sketch_bytes": rule.sketch_bytes,
        "admit_seed": rule.admit_seed if sketch else 0,
        _CELL: cell if sketch else 0,
    }


def sketch_cell_bytes(kept: Any) -> int:
    """Bytes of a counter of the sketch, by what `meaning` gave of its rule; 1 where that does not say."""
    size = kept.get(_CELL) if isinstance(kept, dict) else None
    return size if size in (1, 2, 4) else 1


def pack(state: dict[str, Any], step: int, rule: AdmitAndEvictConfig) -> bytes:
    """Return the bytes of what `SwapManager.export_filter` gave, of the step at which it did, and of what `rule` makes it mean."""
    return pack_as(state, step, meaning(rule))


def pack_as(state: dict[str, Any], step: int, kept: dict[str, Any]) -> bytes:
    """`pack` by what `meaning` gave of the rule."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    head: dict[str, Any] = {name: int(value) for name, value in state.items() if name not in arrays}
    head |= {"format": FORMAT_BLOCKS if state.get("sketch_blocks") else FORMAT, "step": step, "rule": kept}
    head["arrays"] = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = json.dumps(head).encode()
    parts: list[Any] = [len(text).to_bytes(8, "little"), text, bytes(-len(text) % 8)]
    for array in arrays.values():
        parts += [np.ascontiguousarray(array).view(np.uint8), bytes(-array.nbytes % 8)]
    return b"".join(parts)


def unpack(content: bytes, owner: str, rule: AdmitAndEvictConfig) -> tuple[dict[str, Any], int]:
    """Return (state, step) of what `pack` gave.

    Raises
    ------
    ConfigError
        The filter had another policy, time source or sketch: its counters mean something else.
    CorruptionError
        The bytes are no filter's, or of another version; `owner` is whose they are.
    """
    state, step, kept = take_apart(content, owner)
    for field, value in meaning(rule).items():
        if kept.get(field) != value:
            raise ConfigError(
                f"{owner}: its directory holds a filter with {field} = {kept.get(field)!r}, not {value!r}; describe the filter as it was made"
            )
    return state, step


def take_apart(content: bytes, owner: str) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return (state, step, what `meaning` gave of the rule) of what `pack` gave; `CorruptionError` as `unpack`."""
    try:
        size = int.from_bytes(content[:8], "little")
        state = json.loads(content[8 : 8 + size])
        if state.pop("format") not in (FORMAT, FORMAT_BLOCKS):
            raise ValueError
        kept, step, at = dict(state.pop("rule")), int(state.pop("step")), 8 + (size + 7) // 8 * 8
        for name, dtype, length in state.pop("arrays"):
            array = np.frombuffer(content, dtype, length, at)
            state[name] = array
            at += (array.nbytes + 7) // 8 * 8
        if at != len(content):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptionError(f"{owner}: the state of its filter is not what this version writes") from None
    return state, step, kept


def merged_numbers(numbers: list[dict[str, Any]]) -> dict[str, Any]:
    """One filter's numbers out of those of several writers: of clocks, cut-offs and counts the furthest.

    All writers of a generation have seen the same global batches, so where their numbers differ one of them is behind.
    """
    merged: dict[str, Any] = {}
    for one in numbers:
        for what, value in one.items():
            merged[what] = max(merged[what], value) if what in merged and isinstance(value, (int, float)) else value
    return merged
