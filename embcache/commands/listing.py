"""`embcache list`: the generations of a checkpoint."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from ..checkpoint import GenerationInfo, generations
from .output import FINDINGS, FINE, Output, bytes_text, columns_text
from .paths import CHECKPOINT, expect

__all__ = ["add"]

_ABOUT = """\
List the generations of a checkpoint, the oldest first: which are full, which are deltas on which other, when they were
made, what they hold. Manifests and the lengths of files are looked at; `embcache verify` reads every byte."""


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "list", help="the generations of a checkpoint", description=_ABOUT
    )
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of the checkpoint")
    one.set_defaults(run=run)


def run(given: argparse.Namespace, output: Output) -> int:
    """Print one line a generation, and why it cannot be restored if it cannot."""
    path = expect(given.checkpoint, CHECKPOINT)
    found = generations(path)
    result = {"path": os.path.abspath(path), "generations": [_object(one) for one in found]}
    rows = [
        (
            one.generation,
            one.kind if one.parent is None else f"delta on {one.parent}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.created)) if one.problem is None else "?",
            one.world,
            len(one.tables),
            sum(one.tables.values()),
            bytes_text(one.bytes),
            "ok" if one.problem is None else "DAMAGED",
        )
        for one in found
    ]
    lines = columns_text(("generation", "kind", "made (UTC)", "writers", "tables", "rows", "bytes", ""), rows)
    lines += [f"generation {one.generation}: {one.problem}" for one in found if one.problem]
    output.give(result, lines if found else [f"{path}: no generation has been published"])
    return FINDINGS if any(one.problem for one in found) else FINE


def _object(one: GenerationInfo) -> dict[str, Any]:
    return {
        "generation": one.generation,
        "kind": one.kind,
        "parent": one.parent,
        "writers": one.world,
        "bytes": one.bytes,
        "tables": one.tables,
        "created": one.created,
        "problem": one.problem,
    }
