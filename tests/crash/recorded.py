"""Saves whose calls are recorded: a script that runs under `recorder.c`, one forked child for each life it is asked for.

    LD_PRELOAD=recorder.so python recorded.py JOBS    # a file: [{"scenario": "deltas", "under": FOLDER, "log": FILE, ...}, ...]

A life with ``kill_at`` = n dies at the n-th call that goes through `Files`. With ``fail_sync`` = n the n-th sync fails, with
``fail_call`` = n the n-th call of any kind, with ``error`` (0: a short write), LMDB's calls too; the life goes on as a program
would that reports the error and saves again later. Several lives may share a folder and a log:
each restores what it finds and goes on from there. The marks in the log say what was acknowledged.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from powercut import mark
from stepped import change

from embcache.checkpoint import (
    Files,
    Reader,
    TableDescription,
    Writer,
    catalogue,
    emb_table,
    generations,
    next_generation,
    prune,
    segment,
)
from embcache.cli import main
from embcache.commands import targets
from embcache.errors import EmbCacheError
from embcache.filterfile import CLOCKS, SKETCH_CHANGES, SKETCHES, sketch_name
from embcache.table import EmbTable

RANKS = 2
DESCRIPTION = TableDescription("t", 4, 1, with_filter=True)


class Deadly(Files):
    """Ends the process at the call that comes after `calls` more."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def point(self, name: str, path: str) -> None:
        self.calls -= 1
        if self.calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def deltas(path: Path, log: Path, files: Files, steps: int) -> None:
    """A table that is saved step by step, full or as a delta, and pruned at times; it goes on where the last life was."""
    table = EmbTable("t", 4)
    done = 0
    if generations(path):
        done = int(table.restore(path).state["step"])
    original = emb_table.Writer
    emb_table.Writer = lambda where: original(where, files=files)  # type: ignore[assignment,misc]
    for step in range(done + 1, steps + 1):
        change(table, step)
        try:
            generation = table.save(path, delta=step % 4 != 0, state={"step": b"%d" % step})
            (parent,) = [one.parent for one in generations(path) if one.generation == generation]
            mark(log, f"saved {generation} {step} {parent or 0}")
            if step % 3 == 0:
                mark(log, "prune 2")
                prune(path, 2, files=files)
        except EmbCacheError as error:
            mark(log, f"failed {type(error).__name__} {error}")


def ranks_content(step: int) -> dict[str, np.ndarray]:
    """Keys that a step's generation of `ranks` has, and the columns that go with them."""
    keys = np.random.default_rng(step).permutation(6000)[: 3000 + 100 * (step % 7)].astype(np.int64)
    return {"keys": keys, "value": np.full(len(keys), step, np.float32), "stamps": keys * step}


def ranks(path: Path, log: Path, files: Files, steps: int) -> None:
    """Two ranks with filters, several segments each, written in threads, full generations; two are kept."""
    segment._BEHIND_FROM = 0
    done = 0
    if generations(path):
        with Reader(path) as reader:
            done = reader.metadata[0]["step"]
    for step in range(done + 1, steps + 1):
        number = next_generation(path)
        all_of_it = ranks_content(step)
        writers = [
            Writer(path, r, RANKS, files=files, chunk_bytes=1 << 16, most_segment_bytes=1 << 16) for r in range(RANKS)
        ]
        try:
            for rank, writer in enumerate(writers):
                writer.begin(number, metadata={"step": step})
                mine = {name: np.ascontiguousarray(one[rank::RANKS]) for name, one in all_of_it.items()}
                values = mine["value"][:, None]
                writer.write_rows(
                    DESCRIPTION, mine["keys"], values.repeat(4, 1), values.copy(), mine["stamps"], mine["stamps"]
                )
                writer.write_filter(DESCRIPTION, mine["keys"], mine["stamps"], mine["stamps"], None, {"newest": step})
                writer.write_state(f"rank {rank}", b"%d" % step)
                writer.commit()
            writers[0].publish()
            mark(log, f"saved {number} {step} 0")
        except EmbCacheError as error:
            mark(log, f"failed {type(error).__name__} {error}")
        finally:
            for writer in writers:
                writer.close()
        try:
            mark(log, "prune 2")
            prune(path, 2, files=files)
        except EmbCacheError as error:
            mark(log, f"failed {type(error).__name__} {error}")


SKETCH_BLOCKS, BLOCK_BYTES = 4, 64


@functools.lru_cache(64)
def filter_content(step: int) -> dict[str, Any]:
    """What a filter has after so many steps: waiting keys with (count, time), and a sketch in blocks."""
    if step == 0:
        sketch = np.zeros((2, SKETCH_BLOCKS * BLOCK_BYTES), np.uint8)
        return {"waiting": {}, "sketch": sketch, "clocks": np.zeros((SKETCH_BLOCKS, 3), np.int64)}
    before, rng = filter_content(step - 1), np.random.default_rng(step)
    waiting = dict(before["waiting"])
    for key in rng.integers(0, 2000, 100).tolist():
        waiting[key] = (waiting.get(key, (0, 0))[0] + 1, step)
    for key in rng.permutation(sorted(waiting))[:20].tolist():
        del waiting[key]
    sketch, clocks = before["sketch"].copy(), before["clocks"].copy()
    sketch.reshape(-1)[rng.integers(0, sketch.size, 30)] += 1
    clocks[rng.integers(0, SKETCH_BLOCKS)] += (1, 2, step)
    return {"waiting": waiting, "sketch": sketch, "clocks": clocks}


def write_filter_changes(writer: Writer, step: int, since: int) -> None:
    """A filter's state after `step`: what has changed after step `since`; all of it where that is 0."""
    now, before = filter_content(step), filter_content(since)
    items = [(key, *one) for key, one in now["waiting"].items() if before["waiting"].get(key) != one]
    columns = [np.array(column, np.int64) for column in zip(*items, strict=True)]
    numbers = {"newest": step, "sketch_blocks": SKETCH_BLOCKS, "sketch_first": 0}
    gone = np.array(sorted(before["waiting"].keys() - now["waiting"].keys()), np.int64)
    writer.write_filter(DESCRIPTION, *columns, None, numbers, changes=since > 0, gone=gone if since else None)
    if since:
        old, new = before["sketch"].reshape(-1), now["sketch"].reshape(-1)
        places = np.flatnonzero(old != new).astype("<u4")
        writer.write_state(sketch_name("t", SKETCH_CHANGES), places.tobytes() + new[places].tobytes())
    else:
        for which, content in zip(SKETCHES, now["sketch"], strict=True):
            writer.write_state(sketch_name("t", which), content.tobytes())
    writer.write_state(sketch_name("t", CLOCKS), now["clocks"].astype("<i8").tobytes())


def save_filter(path: Path, files: Files, step: int, since: int, parent: int | None) -> int:
    """A generation of a table whose filter is what counts; a delta on `parent`, which has step `since`, where that is given."""
    with Writer(path, files=files) as writer:
        generation = writer.begin(parent=parent, metadata={"step": step})
        keys = np.arange(20, dtype=np.int64)
        value = np.full((20, 1), step, np.float32)
        writer.write_rows(DESCRIPTION, keys, value.repeat(4, 1), value, keys, keys)
        write_filter_changes(writer, step, since if parent else 0)
        writer.commit()
        writer.publish()
    return generation


def filters(path: Path, log: Path, files: Files, steps: int) -> None:
    """A filter that is saved step by step, whole or what has changed of it, and pruned at times; it goes on where the last life was."""
    done, parent = 0, None
    if generations(path):
        with Reader(path) as reader:
            done, parent = reader.metadata[0]["step"], reader.generation
    for step in range(done + 1, steps + 1):
        parent = parent if step % 4 else None
        generation = save_filter(path, files, step, done, parent)
        mark(log, f"saved {generation} {step} {parent or 0}")
        done, parent = step, generation
        if step % 3 == 0:
            mark(log, "prune 2")
            prune(path, 2, files=files)


TARGETS = ("checkpoint", "table", "file.npz")


def replace(path: Path, log: Path, files: Files, steps: int) -> None:
    """Commands that put new content in the place of old: a checkpoint, a table directory and a file, of the value of each step in turn.

    What they read, a table directory and a checkpoint for each step, lies beside the recorded folder.
    """
    sources = log.parent / "sources"
    for step in range(1, steps + 1):
        checkpoint, table, file = (str(path.parent / name) for name in TARGETS)
        for target, *words in (
            (checkpoint, "save", str(sources / f"table-{step}"), checkpoint),
            (table, "restore", str(sources / f"saved-{step}"), table),
            (file, "export", str(sources / f"saved-{step}"), file),
            (checkpoint, "compact", checkpoint),
        ):
            name = os.path.basename(target)
            mark(log, f"begin {name} {step}")
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                code = main([*words, "--force"])
            mark(log, f"{'done' if code == 0 else 'failed'} {name} {step}")


SCENARIOS = {"deltas": deltas, "ranks": ranks, "filters": filters, "replace": replace}


def careless(what: str) -> Files:
    """System calls of which one kind does nothing: `powercut.py` must find out."""
    files = Files()
    if what == "lmdb":
        with_sync = catalogue.lmdb.open
        catalogue.lmdb.open = lambda *place, **options: with_sync(*place, sync=False, **options)
    else:
        setattr(files, what, lambda *_: None)
    return files


def live(job: dict[str, Any]) -> None:
    """One life."""
    begin = ctypes.CDLL(None).recorder_begin
    numbers = [ctypes.c_long(job.get(what, 0)) for what in ("fail_sync", "fail_call")]
    begin(os.fsencode(job["under"]), os.fsencode(job["log"]), *numbers, job.get("error", 0))
    path = Path(job["under"]) / job.get("folder", "deep") / "checkpoint"
    if job.get("made_by_caller"):
        made = path.parent if job["scenario"] == "replace" else path
        made.mkdir(parents=True, exist_ok=True)  # as a training script would: nothing of it is durable
    if not job.get("exchange", True):
        targets._renameat2 = lambda *given: False
    kill_at = job.get("kill_at")
    files = careless(job["without"]) if "without" in job else Files() if kill_at is None else Deadly(kill_at)
    SCENARIOS[job["scenario"]](path, Path(job["log"]), files, job["steps"])


def run_all() -> int:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(job)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, -signal.SIGKILL) or (code and "kill_at" not in job):
            sys.stderr.write(f"{job}: ended with {code}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_all())
