"""R1: a process that dies at any call, or at any moment, loses nothing that was acknowledged, and leaves nothing half done."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from children import Moments, Say, folder_in_memory, run_child
from deadly import die_at
from stepped import change, check, go_on

from embcache.checkpoint import Reader, TableDescription, Writer, generations, next_generation, publish, verify
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def save_three(say: Say, path: Path, calls: int) -> None:
    """Full, then delta, then the full one that removes both."""
    die_at(calls)
    table = EmbTable("t", 4)
    for step in (1, 2, 3):
        change(table, step)
        say(f"{table.save(path, delta=step != 3, keep=1, state={'step': b'%d' % step})} {step}")


def acknowledged_in(said: list[str]) -> dict[int, int]:
    """Generation -> step, of the lines that a child has said."""
    return {int(generation): int(step) for generation, step in map(str.split, said)}


def test_r1_killed_at_every_call_of_a_save(place: Path) -> None:
    """Full, then delta, then the full one that removes older ones: each call of each in turn."""
    unfinished = 0
    for calls in count():
        path = place / str(calls)
        outcome = run_child(save_three, path, calls)
        acknowledged = acknowledged_in(outcome.said)
        step = check(path, acknowledged)
        assert step >= len(acknowledged)
        unfinished += step > len(acknowledged)
        go_on(path, step + 1, 4)
        shutil.rmtree(path)
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL
    assert calls > 60 and unfinished > 3  # published, and not acknowledged yet: whole all the same


def save_for_ever(say: Say, path: Path) -> None:
    """Go on from what is there, changing rows, saving and pruning."""
    say("go")
    table = EmbTable("t", 4)
    step = 0
    if generations(path):
        step = int(table.restore(path).state["step"])
    while True:
        step += 1
        change(table, step)
        generation = table.save(path, delta=step % 7 != 0, keep=3, state={"step": b"%d" % step})
        say(f"{generation} {step}")


def test_r1_killed_at_random_moments(place: Path) -> None:
    """A child that goes on from where the last one was killed, changing rows, saving and pruning all the time."""
    moments = Moments(1)
    acknowledged: dict[int, int] = {}
    lives = 300 if SOAK == 1 else 50 * SOAK
    for life in range(lives):
        outcome = run_child(save_for_ever, place, kill_after=("go", moments.draw()))
        assert outcome.code == -signal.SIGKILL and outcome.said[0] == "go", life
        acknowledged |= acknowledged_in(outcome.said[1:])
        moments.learn(len(outcome.said) - 1)
        check(place, {number: step for number, step in acknowledged.items() if number == max(acknowledged)})
    assert len(acknowledged) > lives // 10
    table = EmbTable("t", 4)
    table.restore(place)
    table.save(place, keep=1)
    assert verify(place) == []


def save_as_two(say: Say, path: Path, step: int, calls: int | None = None) -> None:
    """A generation of two ranks; its publication dies at one of its calls."""
    description, generation = TableDescription("t", 2), next_generation(path)
    writers = [Writer(path, rank, 2) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.begin(generation, metadata={"step": step})
        writer.write_rows(description, np.arange(rank, 100, 2), np.full((50, 2), step, np.float32))
        writer.commit()
    if calls is not None:
        die_at(calls)
    publish(path, generation, 2)
    for writer in writers:
        writer.close()


def test_r1_a_rank_killed_before_the_manifest_leaves_the_last_generation(place: Path) -> None:
    """Both ranks have committed, and the one that publishes dies at each of its calls."""
    save_as_two(print, place, 0)
    outcomes = set()
    for calls in count():
        outcome = run_child(save_as_two, place, 1, calls)
        with Reader(place) as reader:
            step = reader.metadata[0]["step"]
            values = {float(one) for rows in reader.rows("t") for one in rows.weights.ravel()}
            assert values == {float(step)} and len({m["step"] for m in reader.metadata}) == 1
        outcomes.add((outcome.code, step))
        save_as_two(print, place, 0)
        if outcome.code == 0:
            break
    assert outcomes == {(-9, 0), (-9, 1), (0, 1)}
    assert verify(place) == []
