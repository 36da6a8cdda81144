"""R1: a process that dies at any call, or at any moment, loses nothing that was acknowledged, and leaves nothing half done."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from children import Say, folder_in_memory, run_child
from stepped import change, check

from embcache.checkpoint import Files, Reader, generations, prune, prune_after, publish, verify
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


class Deadly(Files):
    """Ends the process at the call that comes after `calls` more; says how far it got."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def point(self, name: str, path: str) -> None:
        self.calls -= 1
        if self.calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_r1_killed_at_every_call_of_a_save(place: Path) -> None:
    """Full, then delta, then the delta that removes older ones: each call of each in turn."""
    from embcache.checkpoint import emb_table

    unfinished = 0
    for calls in count():
        path = place / str(calls)

        def body(say: Say, path: Path = path, calls: int = calls) -> None:
            files = Deadly(calls)
            original = emb_table.Writer
            emb_table.Writer = lambda where: original(where, files=files)  # type: ignore[assignment,misc]
            prune_after.__globals__["prune"] = lambda where, keep: prune(where, keep, files=files)
            table = EmbTable("t", 4)
            for step in (1, 2, 3):
                change(table, step)
                say(f"{table.save(path, delta=step != 3, keep=1, state={'step': b'%d' % step})} {step}")

        outcome = run_child(body)
        acknowledged = dict(tuple(map(int, line.split())) for line in outcome.said)  # type: ignore[misc]
        step = check(path, acknowledged)
        assert step >= len(acknowledged)
        unfinished += step > len(acknowledged)
        table = EmbTable("t", 4)
        if step:
            table.restore(path)
        for one in range(step + 1, 5):
            change(table, one)
        table.save(path, delta=True, keep=1, state={"step": b"4"})
        assert check(path, {}) == 4 and verify(path) == []  # what the dead left behind is gone
        shutil.rmtree(path)
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL
    assert calls > 60 and unfinished > 3  # published, and not acknowledged yet: whole all the same


def test_r1_killed_at_random_moments(place: Path) -> None:
    """A child that goes on from where the last one was killed, changing rows, saving and pruning all the time."""
    rng = random.Random(1)
    acknowledged: dict[int, int] = {}
    lives, longest_s = 300 if SOAK == 1 else max(2000, 100 * SOAK), 0.05

    def body(say: Say) -> None:
        say("go")
        table = EmbTable("t", 4)
        step = 0
        if generations(place):
            step = int(table.restore(place).state["step"])
        while True:
            step += 1
            change(table, step)
            generation = table.save(place, delta=step % 7 != 0, keep=3, state={"step": b"%d" % step})
            say(f"{generation} {step}")

    for life in range(lives):
        outcome = run_child(body, kill_after=("go", rng.uniform(0.0, longest_s)))
        assert outcome.code == -signal.SIGKILL and outcome.said[0] == "go", life
        said = outcome.said[1:]
        acknowledged |= dict(tuple(map(int, line.split())) for line in said)  # type: ignore[misc]
        longest_s *= 1.2 if not said else 0.9 if len(said) > 2 else 1.0  # as fast as the machine is now
        check(place, {number: step for number, step in acknowledged.items() if number == max(acknowledged)})
    assert len(acknowledged) > lives // 10
    table = EmbTable("t", 4)
    table.restore(place)
    table.save(place, keep=1)
    assert verify(place) == []


def test_r1_a_rank_killed_before_the_manifest_leaves_the_last_generation(place: Path) -> None:
    """Both ranks have committed, and the one that publishes dies at each of its calls."""
    from embcache.checkpoint import TableDescription, Writer, next_generation

    description = TableDescription("t", 2)

    def save(calls: int | None, step: int) -> None:
        generation = next_generation(place)
        writers = [Writer(place, rank, 2) for rank in range(2)]
        for rank, writer in enumerate(writers):
            writer.begin(generation, metadata={"step": step})
            writer.write_rows(description, np.arange(rank, 100, 2), np.full((50, 2), step, np.float32))
            writer.commit()
        publish(place, generation, 2, files=None if calls is None else Deadly(calls))
        for writer in writers:
            writer.close()

    save(None, 0)
    outcomes = set()
    for calls in count():
        outcome = run_child(lambda say, calls=calls: save(calls, 1))
        with Reader(place) as reader:
            step = reader.metadata[0]["step"]
            values = {float(one) for rows in reader.rows("t") for one in rows.weights.ravel()}
            assert values == {float(step)} and len({m["step"] for m in reader.metadata}) == 1
        outcomes.add((outcome.code, step))
        save(None, 0)
        if outcome.code == 0:
            break
    assert outcomes == {(-9, 0), (-9, 1), (0, 1)}
    assert verify(place) == []
