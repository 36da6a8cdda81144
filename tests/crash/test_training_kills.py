"""R1, R5, R17: training, swapping, saving in the background and pruning, killed or refused at any call and any moment.

What is restored has the bits of an uninterrupted run after as many batches, whoever was killed on the way there.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Moments, Say, folder_in_memory, run_child
from deadly import die_at
from trained import Truth, model, step

from embcache import savejob
from embcache.checkpoint import Files, Reader, Writer, generations, prune, prune_after, verify
from embcache.checkpoint.chunk import GONE
from embcache.cli import main
from embcache.errors import StorageError
from promises.resuming import digest

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))


@pytest.fixture
def place() -> Iterator[Path]:
    torch.set_num_threads(1)
    with folder_in_memory() as folder:
        yield folder


class Refusing(Files):
    """Refuses the call that comes after `calls` more."""

    def __init__(self, calls: int, error: int) -> None:
        self.calls, self.error, self.refused = calls, error, False

    def point(self, name: str, path: str) -> None:
        self.calls -= 1
        if self.calls == -1:
            self.refused = True
            raise OSError(self.error, os.strerror(self.error))


def through(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have managers save through these calls."""
    monkeypatch.setattr(savejob, "Writer", functools.partial(Writer, files=files))
    monkeypatch.setitem(prune_after.__globals__, "prune", lambda path, keep: prune(path, keep, files=files))


def resumed(path: Path) -> tuple[Any, int]:
    """A collection that goes on from what is at `path`, and the number of batches behind it."""
    collection = model()
    return collection, collection.restore(path).state["step"] if generations(path) else 0


def check(path: Path, truth: Truth, acknowledged: int) -> int:
    """What is restored is the state after at least the last acknowledged batch; returns which."""
    collection, done = resumed(path)
    assert done >= acknowledged and digest(collection) == truth.after(done)
    assert not path.exists() or [one for one in verify(path) if one.severity == "damage"] == []
    return done


def train_and_save(collection: Any, path: Path, first: int, say: Say, last: int = 1 << 30) -> None:
    """Train and save, in the background where the number of the batch says so, while the next batches are trained."""
    saving: tuple[int, Any] | None = None
    for number in range(first, last):
        step(collection, number)
        if saving is not None and (number % 3 == 2 or number + 1 == last):
            saving[1].result()
            say(str(saving[0]))
            saving = None
        elif saving is None:
            background = number % 3 == 1
            one = collection.save(path, delta=number % 5 != 0, background=background, state={"step": number}, keep=2)
            if background:
                saving = (number, one)
            else:
                say(str(number))


def train_and_die(say: Say, path: Path, calls: int) -> None:
    """A first life that ends at one of its calls."""
    torch.set_num_threads(1)
    die_at(calls)
    train_and_save(model(), path, 1, say, 7)


def test_r1_killed_at_every_call_of_saves_during_training(place: Path) -> None:
    truth = Truth()
    # The calls are those of test_checkpoint_kills.py: here one in three.
    for calls in count(0, 1 if SOAK > 1 else 3):
        path = place / str(calls)
        outcome = run_child(train_and_die, path, calls)
        done = check(path, truth, int(outcome.said[-1]) if outcome.said else 0)
        collection, done = resumed(path)
        step(collection, done + 1)
        collection.save(path, delta=True, state={"step": done + 1}, keep=1)
        assert check(path, truth, done + 1) == done + 1 and verify(path) == []
        shutil.rmtree(path)
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL
    assert calls > 100


def train_for_ever(say: Say, path: Path) -> None:
    """Go on from what is there."""
    say("go")
    torch.set_num_threads(1)
    collection, done = resumed(path)
    train_and_save(collection, path, done + 1, say)


def test_r1_r17_killed_at_random_moments_of_training(place: Path) -> None:
    """The life that survives has the bits of a run that nobody interrupted."""
    moments, truth, acknowledged = Moments(3), Truth(), 0
    for life in range(80 if SOAK == 1 else 20 * SOAK):
        outcome = run_child(train_for_ever, place / "saved", kill_after=("go", moments.draw()))
        assert outcome.code == -signal.SIGKILL and outcome.said[0] == "go", life
        said = outcome.said[1:]
        moments.learn(len(said))
        acknowledged = check(place / "saved", truth, int(said[-1]) if said else acknowledged)
    assert acknowledged > 10


def train_and_tidy(say: Say, path: Path) -> None:
    """The same, with a command after each save: deltas, those of filters too, become full generations, and deltas follow on these."""
    say("go")
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the child's end
    collection, done = resumed(path)
    for number in range(done + 1, 1 << 30):
        step(collection, number)
        collection.save(path, delta=True, state={"step": number})
        say(str(number))
        if number % 4 == 0:
            assert main(["compact", str(path), "--force"]) == 0
        elif number % 7 == 0:
            assert main(["reshard", str(path), "--writers", "2", "--force"]) == 0
            assert main(["reshard", str(path), "--writers", "1", "--force"]) == 0


def test_r1_killed_at_random_moments_of_training_and_tidying(place: Path) -> None:
    moments, truth, acknowledged = Moments(4), Truth(), 0
    changes: set[int] = set()
    for life in range(30 if SOAK == 1 else 20 * SOAK):
        outcome = run_child(train_and_tidy, place / "saved", kill_after=("go", moments.draw()))
        assert outcome.code == -signal.SIGKILL and outcome.said[0] == "go", (life, outcome)
        said = outcome.said[1:]
        moments.learn(len(said))
        acknowledged = check(place / "saved", truth, int(said[-1]) if said else acknowledged)
        if generations(place / "saved"):
            with Reader(place / "saved", check="catalogue") as reader:
                changes |= {place.kind for level in reader._levels for place in level.chunks()}
    assert acknowledged > 10 and GONE in changes  # keys that wait no more were among what was killed
    assert main(["compact", str(place / "saved"), "--force"]) == 0 and os.listdir(place) == ["saved"]
    assert check(place / "saved", truth, acknowledged) >= acknowledged


@pytest.mark.parametrize("background", [False, True])
def test_r5_r21_a_save_that_fails_at_any_call_costs_nothing_but_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Training goes on, and the next delta has all that the failed one would have had."""
    truth = Truth()
    for calls in count(0, 1 if SOAK > 1 else 2):
        path, collection = place / str(calls), model()
        for number in (1, 2, 3):
            step(collection, number)
        collection.save(path, state={"step": 3})
        step(collection, 4)
        files = Refusing(calls, errno.EIO)
        failed = False
        with monkeypatch.context() as patch:
            through(files, patch)
            try:
                saving = collection.save(path, delta=True, background=background, state={"step": 4})
                step(collection, 5)
                if background:
                    saving.result()
            except StorageError:
                failed = True
                if collection.optimizer.step_count == 4:
                    step(collection, 5)
        assert check(path, truth, 3 if failed else 4) == (3 if failed else 4)
        step(collection, 6)
        collection.save(path, delta=True, state={"step": 6})
        kinds = [one.kind for one in generations(path)]
        assert kinds == ["full", "delta"] if failed else ["full", "delta", "delta"]
        assert check(path, truth, 6) == 6 and digest(collection) == truth.after(6)
        shutil.rmtree(path)
        if not files.refused:
            break
    assert calls > 20
