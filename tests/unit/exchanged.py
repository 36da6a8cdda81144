"""What tests of export and import share: commands run in this process, and rows as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache.checkpoint import Reader
from embcache.cli import main

__all__ = ["content", "expected", "run"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def content(path: Path) -> dict[int, bytes]:
    """Each key's row of the only table of a checkpoint, as bytes; each key must be there once."""
    with Reader(path) as reader:
        (name,) = reader.tables
        found: dict[int, bytes] = {}
        for rows in reader.rows(name):
            parts = [rows.weights, rows.state]
            parts += [] if rows.frequencies is None else [rows.frequencies[:, None], rows.timestamps[:, None]]
            for at, key in enumerate(rows.keys.tolist()):
                assert key not in found
                found[key] = b"".join(part[at].tobytes() for part in parts)
    return found


def expected(given: dict[str, np.ndarray]) -> dict[int, bytes]:
    names = [name for name in ("weights", "state") if name in given]
    return {key: b"".join(given[name][at].tobytes() for name in names) for at, key in enumerate(given["keys"].tolist())}
