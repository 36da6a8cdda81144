"""The state of a filter as bytes, for the directory of a file-backed table.

One JSON object (numbers, and of each array its name, dtype and length) behind its own length as int64, then the arrays,
each padded to 8 bytes. A waiting key takes 24 bytes. Digests are the directory's business.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .errors import ConfigError, CorruptionError

__all__ = ["pack", "unpack"]

FORMAT = 1


def pack(state: dict[str, Any], step: int, policy: str) -> bytes:
    """Return the bytes of what `SwapManager.export_filter` gave, of the step at which it did, and of the filter's policy."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    head: dict[str, Any] = {name: int(value) for name, value in state.items() if name not in arrays}
    head |= {"format": FORMAT, "step": step, "policy": policy}
    head["arrays"] = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = json.dumps(head).encode()
    parts = [len(text).to_bytes(8, "little"), _padded(text)]
    parts += [_padded(array.tobytes()) for array in arrays.values()]
    return b"".join(parts)


def unpack(content: bytes, owner: str, policy: str) -> tuple[dict[str, Any], int]:
    """Return (state, step) of what `pack` gave.

    Raises
    ------
    ConfigError
        The filter had another policy: its counters mean something else.
    CorruptionError
        The bytes are no filter's, or of another version; `owner` is whose they are.
    """
    try:
        size = int.from_bytes(content[:8], "little")
        state = json.loads(content[8 : 8 + size])
        if state.pop("format") != FORMAT:
            raise ValueError
        kept, step, at = str(state.pop("policy")), int(state.pop("step")), 8 + (size + 7) // 8 * 8
        for name, dtype, length in state.pop("arrays"):
            array = np.frombuffer(content, dtype, length, at)
            state[name] = array
            at += (array.nbytes + 7) // 8 * 8
        if at != len(content):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptionError(f"{owner}: the state of its filter is not what this version writes") from None
    if kept != policy:
        raise ConfigError(
            f"{owner}: its directory holds a filter of policy {kept!r}, not {policy!r}; describe the filter as it was made"
        )
    return state, step


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 8)
