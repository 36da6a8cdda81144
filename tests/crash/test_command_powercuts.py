"""R2: a command puts new content in the place of old, and the power is cut: either of the two is there, whole; the new one once it is done.

As in `test_checkpoint_powercuts`, with what commands replace: a checkpoint, a table directory, a file.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Say, folder_in_memory, run_child
from powercut import EXCHANGE, FAILED_SYNC, RENAME
from recorded import TARGETS
from test_checkpoint_powercuts import PER_CHILD, SOAK, Recording, images, record, recorder

from embcache.checkpoint import Reader, verify
from embcache.cli import main
from embcache.commands.targets import put_back
from embcache.table import EmbTable

__all__ = ["recorder"]  # a fixture

ROWS, STEPS = 60, 4
MOST_SYNCS = 140


def make_table(path: Path, value: float) -> None:
    with EmbTable("items", 4, directory=path) as table:
        table.assign(np.arange(ROWS), np.full((ROWS, 4), value, np.float32))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with what commands read: tables full of the number of their step, 9 for what comes after a cut."""
    with folder_in_memory() as folder:
        (folder / "sources").mkdir()
        for value in (*range(1, STEPS + 1), 9):
            make_table(folder / "sources" / f"table-{value}", value)
            saved = folder / "sources" / f"saved-{value}"
            assert main(["save", str(folder / "sources" / f"table-{value}"), str(saved)]) == 0
        yield folder


def value_of(path: Path) -> float:
    """The one value of all that is at `path`; it must be whole."""
    if path.name.startswith("checkpoint"):
        damage = [one.what for one in verify(path) if one.severity == "damage"]
        assert damage == [], damage
        with Reader(path) as reader:
            weights = np.concatenate([rows.weights.copy() for rows in reader.rows("items")])
    elif path.name.startswith("table"):
        with EmbTable("items", 4, directory=path) as table:
            table.check()
            weights = table.lookup(np.arange(len(table)), insert=False)
    else:
        with np.load(path) as file:
            weights = file["weights"]
    assert weights.shape == (ROWS, 4) and len(np.unique(weights)) == 1
    return float(weights[0, 0])


def allowed(marks: list[str], name: str) -> set[int]:
    """The steps whose value a target may have; 0: it is not there."""
    found = {0}
    for word, target, step in (text.split() for text in marks):
        if target == name:
            found = {int(step)} if word == "done" else found | {int(step)}
    return found


def judge(folder: Path, sources: Path, marks: list[str], spare: bool) -> str:
    """Raise `AssertionError` where a target in `folder` is neither the old nor the new one; returns the steps that are there.

    With `spare` an old one may have been kept beside the target: where it is not known whether the new one has got its name.
    """
    seen: list[str] = []
    for name in TARGETS:
        path, wanted = folder / name, allowed(marks, name)
        if not folder.exists():
            assert 0 in wanted, (name, wanted)
            return "none"
        if not path.exists() and 0 not in wanted:
            put_back(str(path))  # as every command for this target does first
        if not path.exists() and 0 not in wanted and spare:
            path = max(folder.glob(f"{name}.old-*"), default=path)
        there = path.exists() and (path.is_file() or len(os.listdir(path)) > 0)
        step = value_of(path) if there else 0
        assert step in wanted, f"{name}: {step} of {wanted}, beside {os.listdir(folder)}"
        seen.append(f"{step:.0f}")
    for name, source in zip(TARGETS, ("table-9", "saved-9", "saved-9"), strict=True):
        words = {"checkpoint": "save", "table": "restore"}.get(name, "export")
        assert main([words, str(sources / source), str(folder / name), "--force"]) == 0
        assert value_of(folder / name) == 9
    left = [name for name in os.listdir(folder) if name not in TARGETS]
    assert all(spare and ".old-" in name for name in left), left
    return " ".join(seen)


def judge_images(
    say: Say, life: tuple[str, Path, int, Path], cuts: list[int], seed: int, place: Path, folder: str, spare: bool
) -> None:
    """Make images of a recording and judge them."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the child's end
    for name, marks in images(Recording(*life), 0, seed, place / "image", cuts):
        say(f"image {name}")
        say(judge(place / "image" / folder, place / "sources", marks, spare))


def look_at(place: Path, recording: Recording, cuts: list[int], seed: int, folder: str, spare: bool) -> list[str]:
    """Make images and judge them, in children; returns what each held in `folder`."""
    found: list[str] = []
    life = (recording.scenario, recording.under, recording.inode, recording.log)
    for first in range(0, len(cuts), PER_CHILD):
        some = cuts[first : first + PER_CHILD]
        outcome = run_child(
            judge_images, life, some, seed + first, place, folder, spare, limit_s=120, memory_bytes=2 << 30
        )
        assert outcome.code == 0, f"{outcome.said[-1]}, code {outcome.code}, late: {outcome.late}"
        found += [line for line in outcome.said if not line.startswith("image")]
    return found


def cuts_of(recording: Recording, drawn: int, seed: int, at_moves: int) -> list[int]:
    """Drawn events, and those behind each change of names between folders, where the old one is at stake."""
    rng, events = random.Random(seed), recording.events
    moves = [
        number
        for number, event in enumerate(events)
        if event.kind in (RENAME, EXCHANGE) and os.path.dirname(event.path) != os.path.dirname(event.other)
    ]
    cuts = [rng.randrange(len(events) + 1) for _ in range(drawn)]
    return cuts + [min(move + after, len(events)) for move in moves for after in (1, 2, 3) for _ in range(at_moves)]


@pytest.mark.parametrize("exchange", [True, False])
def test_r2_a_cut_leaves_the_old_or_the_new(recorder: Path, place: Path, exchange: bool) -> None:
    life = {"scenario": "replace", "steps": STEPS, "exchange": exchange, "made_by_caller": True}
    (recording,) = record(recorder, place, [[life]])
    assert any(event.kind == EXCHANGE for event in recording.events) == exchange
    found = look_at(
        place, recording, cuts_of(recording, 60 * SOAK, 1, (1 if exchange else 4) * SOAK), 1, "deep", spare=not exchange
    )
    assert {"0 0 0", *(f"{step} {step} {step}" for step in range(1, STEPS))} <= set(found)


def test_r21_a_cut_after_a_sync_that_failed_leaves_the_old_or_the_new(recorder: Path, place: Path) -> None:
    """Each sync (one in four without a soak) fails in turn; the command says so, and the next ones go on. In a folder that is there
    for good: nobody can make up for a sync that has lost the name of a folder of the caller's."""
    lives = [
        [{"scenario": "replace", "steps": 2, "exchange": n % 3 > 0, "fail_sync": n, "folder": "."}]
        for n in range(1, MOST_SYNCS, 1 if SOAK > 1 else 4)
    ]
    failed = []
    for number, recording in enumerate(record(recorder, place, lives)):
        failed.append(any(event.kind == FAILED_SYNC for event in recording.events))
        assert failed[-1] == any(event.path.startswith("failed") for event in recording.events)
        if failed[-1]:
            look_at(place, recording, cuts_of(recording, SOAK, number, 0), 200 + number, ".", spare=True)
    assert all(failed[:20]) and not failed[-1]  # every sync there is had its turn
