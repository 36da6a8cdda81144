"""R2, R21: whatever part of what was not synced a power cut loses, what was acknowledged is restored, whole and with the right rows.

`recorder.c` logs every call that saves, prunes and LMDB make; `powercut.py` makes images of what the disk may hold after a cut
at any of them. Each image is looked at in a child: restored, verified, saved to again.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Say, folder_in_memory, run_child
from powercut import FAILED_SYNC, MARK, REFUSED, Disk, Event, events_of
from recorded import DESCRIPTION, RANKS, filter_content, ranks_content, save_filter
from stepped import change, content, expected

from embcache.checkpoint import Files, Reader, Writer, generations, next_generation, prune, verify
from embcache.errors import CorruptionError
from embcache.filterfile import CLOCKS, SKETCHES
from embcache.filterparts import filter_state
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))
PER_CHILD = 60
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled recorder."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("recorder") / "recorder.so"
    options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *options, HERE / "recorder.c", "-o", made, "-ldl"], check=True)
    return made


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@dataclass
class Recording:
    """What happened, and to which folder."""

    scenario: str
    under: Path
    inode: int
    log: Path

    @functools.cached_property
    def events(self) -> list[Event]:
        """What happened, in order."""
        return events_of(self.log)


def record(recorder: Path, place: Path, recordings: list[list[dict[str, Any]]]) -> list[Recording]:
    """Run lives, each list of them on a folder of its own, one after the other."""
    jobs, made = [], []
    for number, lives in enumerate(recordings):
        under, log = place / f"disk-{number}", place / f"log-{number}"
        under.mkdir()
        jobs += [{**life, "under": str(under), "log": str(log)} for life in lives]
        made.append((lives[0]["scenario"], under, log))
    (place / "jobs").write_text(json.dumps(jobs))
    preload = " ".join([*os.environ.get("LD_PRELOAD", "").split(), str(recorder)])
    environment = os.environ | {"LD_PRELOAD": preload, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    subprocess.run([sys.executable, HERE / "recorded.py", place / "jobs"], env=environment, check=True)
    return [Recording(scenario, under, under.stat().st_ino, log) for scenario, under, log in made]


# ------------------------------------------------------------------------------------------------------- what must hold


def promised(marks: list[str]) -> dict[int, int]:
    """Generation -> step of all that was acknowledged and not given to pruning."""
    saved: dict[int, tuple[int, int]] = {}
    for text in marks:
        word, *rest = text.split()
        if word == "saved":
            generation, step, parent = map(int, rest)
            saved[generation] = (step, parent)
        elif word == "prune":
            needed = sorted(saved)[-int(rest[0]) :]
            for generation in needed:
                if saved[generation][1] not in (0, *needed):
                    needed.append(saved[generation][1])
            saved = {generation: saved[generation] for generation in needed}
    return {generation: step for generation, (step, _) in saved.items()}


def judge_deltas(path: Path, generation: int | None) -> tuple[int, int]:
    """(generation, step) of what is restored, its rows compared."""
    table = EmbTable("t", 4)
    report = table.restore(path, generation)
    step = int(report.state["step"])
    assert content(table) == expected(step)
    return report.generation, step


def go_on_deltas(path: Path) -> None:
    table = EmbTable("t", 4)
    step = int(table.restore(path).state["step"]) if generations(path) else 0
    for delta in (True, False):
        step += 1
        change(table, step)
        generation = table.save(path, delta=delta, keep=1, state={"step": b"%d" % step})
        assert judge_deltas(path, None) == (generation, step)


def judge_ranks(path: Path, generation: int | None) -> tuple[int, int]:
    with Reader(path, generation) as reader:
        (step,) = {one["step"] for one in reader.metadata}
        wanted = ranks_content(step)
        order = np.argsort(wanted["keys"])
        rows = [(r.keys.copy(), r.weights.copy(), r.state.copy(), r.timestamps.copy()) for r in reader.rows("t")]  # type: ignore[union-attr]
        keys, weights, state, stamps = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        found = np.argsort(keys)
        assert np.array_equal(keys[found], wanted["keys"][order])
        assert np.all(weights == step) and np.all(state == step)
        assert np.array_equal(stamps[found], wanted["stamps"][order])
        waiting = reader.filter("t")
        assert waiting is not None and np.array_equal(waiting.keys, np.sort(wanted["keys"]))
        assert {reader.state(name) for name in reader.state_names} == {b"%d" % step}
        return reader.generation, step


def go_on_ranks(path: Path) -> None:
    number, step = next_generation(path), 3
    mine = ranks_content(step)
    writers = [Writer(path, rank, RANKS) for rank in range(RANKS)]
    for rank, writer in enumerate(writers):
        writer.begin(number, metadata={"step": step})
        keys, values, stamps = (np.ascontiguousarray(mine[name][rank::RANKS]) for name in ("keys", "value", "stamps"))
        writer.write_rows(DESCRIPTION, keys, values[:, None].repeat(4, 1), values[:, None].copy(), stamps, stamps)
        writer.write_filter(DESCRIPTION, keys, stamps, stamps)
        writer.write_state(f"rank {rank}", b"%d" % step)
        writer.commit()
    writers[0].publish()
    for writer in writers:
        writer.close()
    prune(path, 1)
    assert judge_ranks(path, None) == (number, step)


def judge_filters(path: Path, generation: int | None) -> tuple[int, int]:
    with Reader(path, generation) as reader:
        step = int(reader.metadata[0]["step"])
        wanted, found = filter_content(step), filter_state(reader, "t")
        assert found is not None and found["newest"] == step
        items = zip(*(found[name].tolist() for name in ("keys", "counts", "last")), strict=True)
        assert {key: tuple(one) for key, *one in items} == wanted["waiting"]
        for which, content in zip(SKETCHES, wanted["sketch"], strict=True):
            assert np.array_equal(found[which], content)
        assert np.array_equal(found[CLOCKS].reshape(-1, 3), wanted["clocks"])
        return reader.generation, step


def go_on_filters(path: Path) -> None:
    done, parent = judge_filters(path, None)[::-1] if generations(path) else (0, None)
    for step in (done + 1, done + 2):
        done, parent = step, save_filter(path, Files(), step, done, parent)
        assert judge_filters(path, None) == (parent, step)
    prune(path, 1)
    assert judge_filters(path, None) == (parent, done)


JUDGES: dict[str, tuple[Callable[[Path, int | None], tuple[int, int]], Callable[[Path], None]]] = {
    "deltas": (judge_deltas, go_on_deltas),
    "ranks": (judge_ranks, go_on_ranks),
    "filters": (judge_filters, go_on_filters),
}


def judge(image: Path, scenario: str, marks: list[str], clean: bool) -> str:
    """Raise `AssertionError` where the image breaks a promise; returns what was restored."""
    path, must = image / "deep" / "checkpoint", promised(marks)
    restored, go_on = JUDGES[scenario]
    listed = [one.generation for one in generations(path)]
    assert set(must) <= set(listed), f"lost generations {sorted(set(must) - set(listed))} of {must}"
    newest = (0, 0)
    if listed:
        for generation in listed:
            try:
                found = restored(path, generation)
            except CorruptionError:
                assert not clean and generation not in must
            else:
                assert must.get(generation, found[1]) == found[1]
        newest = restored(path, None)
        assert newest[0] >= max(must, default=0)
    if clean and path.exists():
        assert [one for one in verify(path) if one.severity == "damage"] == []
    go_on(path)
    assert verify(path) == []
    return f"{newest[0]}"


def images(
    recording: Recording, count: int, seed: int, place: Path, cuts: list[int] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Make images one after the other at `place`: `count` at drawn events, or one at each of `cuts`; yields a name for messages, and
    the marks until the cut."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(recording.events) + 1) for _ in range(count)) if cuts is None else sorted(cuts)
    disk, at = Disk(str(recording.under), recording.inode), 0
    for number, cut in enumerate(cuts):
        while at < cut:
            disk.feed(recording.events[at])
            at += 1
        place.mkdir()
        in_flight = recording.events[cut] if cut < len(recording.events) else None
        disk.write_image(place, random.Random(seed * 1_000_003 + number), in_flight)
        yield f"image {number} of seed {seed}, after {cut} events of {recording.scenario}", disk.marks
        shutil.rmtree(place)


def judge_images(say: Say, life: tuple[Any, ...], count: int, seed: int, image: Path, clean: bool) -> None:
    """Make images of a recording and judge them."""
    recording = Recording(*life)
    for name, marks in images(recording, count, seed, image):
        say(name)
        say(judge(image, recording.scenario, marks, clean))


def look_at(place: Path, recording: Recording, count: int, seed: int, *, clean: bool = True) -> list[str]:
    """Make images and judge them, in children; returns what each restored."""
    restored: list[str] = []
    for first in range(0, count, PER_CHILD):
        some, life = (
            min(PER_CHILD, count - first),
            (recording.scenario, recording.under, recording.inode, recording.log),
        )
        outcome = run_child(
            judge_images, life, some, seed + first, place / "image", clean, limit_s=120, memory_bytes=2 << 30
        )
        assert outcome.code == 0, f"{outcome.said[-1]}, code {outcome.code}, late: {outcome.late}"
        restored += [line for line in outcome.said if not line.startswith("image")]
    return restored


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("scenario", "steps", "count"), [("deltas", 9, 300), ("ranks", 5, 150), ("filters", 9, 100)])
def test_r2_no_power_cut_loses_or_tears_what_was_acknowledged(
    recorder: Path, place: Path, scenario: str, steps: int, count: int
) -> None:
    (recording,) = record(recorder, place, [[{"scenario": scenario, "steps": steps, "made_by_caller": True}]])
    restored = look_at(place, recording, count * SOAK, 1)
    assert len(restored) == count * SOAK
    assert {"0", *map(str, range(1, steps + 1))} <= set(restored)


@pytest.mark.parametrize("scenario", ["deltas", "ranks", "filters"])
def test_r2_a_cut_after_processes_that_died(recorder: Path, place: Path, scenario: str) -> None:
    """Several lives on one disk, each killed at some call, the next going on from what it sees, which may not be durable."""
    rng = random.Random(7)
    lives = [[{"scenario": scenario, "steps": 9, "kill_at": rng.randrange(60)} for _ in range(4)] for _ in range(8)]
    for number, recording in enumerate(record(recorder, place, lives)):
        look_at(place, recording, 15 * SOAK, 100 + number)


@pytest.mark.parametrize(("scenario", "most"), [("deltas", 34), ("ranks", 66)])
def test_r21_a_cut_after_a_sync_that_failed(recorder: Path, place: Path, scenario: str, most: int) -> None:
    """Each sync of the first saves fails in turn, LMDB's too, and for good: what it should have made durable may be lost for
    ever. The program goes on; a second life starts from what the first has left in the system's memory. Where the sync was of
    a manifest's removal, a generation that was given up may come back without its files; it is named and passed over."""
    lives = [
        [{"scenario": scenario, "steps": 3, "fail_sync": n}, {"scenario": scenario, "steps": 5}] for n in range(1, most)
    ]
    failed = []
    for number, recording in enumerate(record(recorder, place, lives)):
        failed.append(any(event.kind == FAILED_SYNC for event in recording.events))
        assert failed[-1] == any(event.path.startswith("failed") for event in recording.events)  # and it was reported
        if failed[-1]:
            look_at(place, recording, 2 * SOAK, 200 + number, clean=False)
    assert all(failed[:20]) and not failed[-1]  # every sync there is had its turn


def judge_ends(say: Say, ends: list[tuple[Path, str, list[str]]]) -> None:
    """Judge what lives have left, which nothing has cut."""
    for number, (under, scenario, marks) in enumerate(ends, 1):
        say(f"call {number}")
        judge(under, scenario, marks, clean=True)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINTR, 0])
def test_r5_every_call_fails_in_turn_lmdbs_too(recorder: Path, place: Path, error: int) -> None:
    """Refused with an error, or (0) a write of which only a part is taken. What was acknowledged is there at the end, the
    program has gone on by itself, and what it says of a full disk is that it is full."""
    lives = [
        [{"scenario": "deltas", "steps": 3, "fail_call": n, "error": error}]
        for n in range(1, 30 if error == 0 else 130)
    ]
    recordings = [one for one in record(recorder, place, lives) if any(event.kind == REFUSED for event in one.events)]
    assert (10 if error == 0 else 80) < len(recordings) < len(lives)  # every call there is had its turn

    wanted = {"DiskFullError"} if error == errno.ENOSPC else {"StorageError"}
    wanted |= {"DiskFullError"} if error == 0 else set()  # what LMDB takes a short write for is the engine's affair
    ends = []
    for recording in recordings:
        marks = [event.path for event in recording.events if event.kind == MARK]
        failures = [text.split()[1] for text in marks if text.startswith("failed")]
        assert set(failures) <= wanted and len(failures) < 2
        assert sum(text.startswith("saved") for text in marks) >= 2
        ends.append((recording.under, recording.scenario, marks))
    outcome = run_child(judge_ends, ends, limit_s=240, memory_bytes=2 << 30)
    assert outcome.code == 0, f"{outcome.said[-1]}, code {outcome.code}, late: {outcome.late}"


@pytest.mark.parametrize("without", ["sync", "sync_folder", "lmdb"])
def test_r22_a_sync_that_is_left_out_is_found(recorder: Path, place: Path, without: str) -> None:
    """The harness sees what it is there to see."""
    (recording,) = record(recorder, place, [[{"scenario": "deltas", "steps": 5, "without": without}]])
    with pytest.raises(AssertionError, match="of deltas, code 1"):
        look_at(place, recording, 120, 3)
