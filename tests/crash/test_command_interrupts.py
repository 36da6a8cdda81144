"""Ctrl-C at any line of a command that replaces something: the old or the new is there, whole, and the same command run again, by
another process as it were, succeeds and leaves nothing else behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from children import folder_in_memory
from test_interrupts import SOAK, Interrupts

from embcache.checkpoint import Reader
from embcache.cli import main
from embcache.commands import (
    copies,
    counters,
    directories,
    exporting,
    gathering,
    importing,
    incoming,
    ordering,
    outgoing,
    sources,
    targets,
)
from embcache.table import EmbTable

MODULES = (
    copies,
    counters,
    directories,
    exporting,
    gathering,
    importing,
    incoming,
    ordering,
    outgoing,
    sources,
    targets,
)
ROWS = 40
COMMANDS = {
    "save": ("save", "table 2", "checkpoint"),
    "restore": ("restore", "saved 2", "table"),
    "compact": ("compact", "saved 2", "checkpoint"),
    "export": ("export", "saved 2", "file.npz"),
    "import": ("import", "theirs", "checkpoint"),
    "import to a directory": ("import", "theirs", "table", "--to", "directory"),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Tables, checkpoints and a RecSDK save full of their number; what is replaced is full of ones."""
    with folder_in_memory() as folder:
        for value, name in ((1, "table"), (2, "table 2")):
            with EmbTable("items", 4, directory=folder / name) as table:
                table.assign(np.arange(ROWS), np.full((ROWS, 4), value, np.float32))
        for source, target in (("table", "checkpoint"), ("table 2", "saved 2")):
            assert main(["save", str(folder / source), str(folder / target)]) == 0
        assert main(["export", str(folder / "table"), str(folder / "file.npz")]) == 0
        for what, head, *arrays in (
            ("key", [8, ROWS], ("slice", np.arange(ROWS))),
            ("embedding", [4, ROWS, 4], ("slice", np.full((ROWS, 4), 2, np.float32))),
            ("evict_timestamp", [8, ROWS], ("slice_evict_key", np.arange(ROWS)), ("slice_evict_ts", np.arange(ROWS))),
        ):
            (folder / "theirs" / "items" / what).mkdir(parents=True)
            np.array(head, np.int64).tofile(folder / "theirs" / "items" / what / "slice.attribute")
            for name, array in arrays:
                array.tofile(folder / "theirs" / "items" / what / f"{name}.data")
        yield folder


def value_of(path: Path) -> float:
    """The one value of all that is at `path`; it must be whole."""
    if path.name == "checkpoint":
        with Reader(path) as reader:
            weights = np.concatenate([rows.weights.copy() for rows in reader.rows("items")])
    elif path.name == "table":
        with EmbTable("items", 4, directory=path) as table:
            weights = table.lookup(np.arange(len(table)), insert=False)
    else:
        with np.load(path) as file:
            weights = file["weights"]
    assert weights.shape == (ROWS, 4) and len(np.unique(weights)) == 1
    return float(weights[0, 0])


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_r1_a_command_interrupted_at_any_line_leaves_the_old_or_the_new(
    place: Path, name: str, exchange: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not exchange:
        monkeypatch.setattr(targets, "_renameat2", lambda *given: False)
    verb, source, goal, *options = COMMANDS[name]
    words = [verb, str(place / source), str(place / goal), *options, "--force"]
    back = {"checkpoint": "save", "table": "restore", "file.npz": "export"}[goal]
    assert main(["save", str(place / "table"), str(place / "saved 1")]) == 0

    def restore_old() -> None:
        assert (
            main([back, str(place / ("table 1" if back == "save" else "saved 1")), str(place / goal), "--force"]) == 0
        )

    os.rename(place / "table", place / "table 1")
    assert main(["restore", str(place / "saved 1"), str(place / "table")]) == 0

    def act() -> None:
        code = main(words)
        if code == 130:
            raise KeyboardInterrupt
        assert code == 0

    interrupts = Interrupts(*MODULES)
    points = interrupts.points(act)
    seen, there, opened = set(), sorted(os.listdir(place)), set(os.listdir("/proc/self/fd"))
    for point in points if SOAK > 1 else [points[i * (len(points) - 1) // 7] for i in range(8)]:
        restore_old()
        where = interrupts.run(act, point)
        if not (place / goal).exists():
            assert not exchange, where
            targets.put_back(str(place / goal))
        seen.add(value_of(place / goal))
        gc.collect()
        for number in set(os.listdir("/proc/self/fd")) - opened:  # as the process's end would
            with suppress(OSError):
                os.close(int(number))
        assert main(words) == 0 and value_of(place / goal) == 2, where
        assert sorted(os.listdir(place)) == there, where
    assert seen == {1.0, 2.0}
