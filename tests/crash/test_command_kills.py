"""R1: the command that compacts, reshards, prunes or restores dies at any call, or at any moment: nothing that was there is lost.

What is left of a checkpoint is judged as in `test_checkpoint_kills`; of a table directory, whether it is the old or the new one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from children import Moments, Say, folder_in_memory, run_child
from deadly import die_at
from stepped import change, check, go_on

from embcache.checkpoint import generations, prune
from embcache.cli import main
from embcache.commands import targets
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def command(*arguments: object) -> int:
    """The exit code of a command whose words nobody reads."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the child's end
    return main([str(one) for one in arguments])


# ---------------------------------------------------------------------------------------------------------- checkpoints


TIDYING: dict[str, Callable[[Path], object]] = {
    "compact": lambda path: command("compact", path / "saved", "--force"),
    "reshard": lambda path: command("reshard", path / "saved", "--writers", "2", "--force"),
    "compact onto another": lambda path: command("compact", path / "saved", path / "other", "--force"),
    "prune": lambda path: prune(path / "saved", 1),
}


def make(path: Path) -> None:
    """Two checkpoints of the same table: the other one has not come as far."""
    table = EmbTable("t", 4)
    for step, delta, where in ((1, False, "other"), (2, False, "saved"), (3, True, "saved"), (4, True, "saved")):
        change(table, step)
        table.save(path / where, delta=delta, state={"step": b"%d" % step})
    table.save(path / "saved", state={"step": b"4"})  # so that there is something to prune
    change(table, 5)
    table.save(path / "saved", delta=True, state={"step": b"5"})


def tidy(say: Say, path: Path, what: str, calls: int, exchange: bool) -> None:
    """One command, which dies at one of its calls."""
    if not exchange:
        targets._renameat2 = lambda *given: False
    die_at(calls)
    TIDYING[what](path)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("what", TIDYING)
def test_r1_killed_at_every_call_of_a_command_that_tidies(
    place: Path, what: str, exchange: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "prune" and not exchange:
        pytest.skip("nothing is exchanged")
    make(place / "good")
    found = set()
    for calls in count(0, 1 if SOAK > 1 or what == "prune" else 3):
        path = place / str(calls)
        shutil.copytree(place / "good", path)
        outcome = run_child(tidy, path, what, calls, exchange)
        if not exchange:
            for name in ("saved", "other"):  # where it died between two renames, the next command puts the old one back
                if not (path / name).exists():
                    assert main(["verify", str(path / name)]) == 2 and "left it as" in capsys.readouterr().err
                    assert main(["compact", str(path / name), "--force"]) == 0
        assert check(path / "saved", {5: 5}) == 5
        found.add((check(path / "other", {}), len(generations(path / "saved"))))
        go_on(path / "saved", 6, 7)
        go_on(path / "other", check(path / "other", {}) + 1, 6)
        shutil.rmtree(path)
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL and outcome.said == []
    steps = {"compact onto another": {1, 5}}.get(what, {1})
    kept = {"compact onto another": {5}, "prune": {5, 4, 3, 2}}.get(what, {5, 1})
    assert {step for step, _ in found} == steps and {held for _, held in found} == kept and calls > 8


def save_and_tidy(say: Say, path: Path) -> None:
    """Go on from what is there: save, and after each save another command."""
    say("go")
    table, step = EmbTable("t", 4), 0
    if generations(path):
        step = int(table.restore(path).state["step"])
    while True:
        step += 1
        change(table, step)
        say(f"{table.save(path, delta=step % 5 != 0, state={'step': b'%d' % step})} {step}")
        if step % 3 == 0:
            prune(path, 2)
        elif step % 3 == 1:
            command("compact", path, "--force")
        else:
            command("reshard", path, "--writers", 1 + step // 3 % 2, "--force")


def test_r1_killed_at_random_moments_of_saving_and_tidying(place: Path) -> None:
    """Each life goes on from what the last one has left."""
    moments, last = Moments(2), (0, 0)
    for life in range(60 if SOAK == 1 else 20 * SOAK):
        outcome = run_child(save_and_tidy, place / "saved", kill_after=("go", moments.draw()))
        assert outcome.code == -signal.SIGKILL and outcome.said[0] == "go", life
        for line in outcome.said[1:]:
            last = max(last, tuple(map(int, line.split())))  # type: ignore[assignment]
        moments.learn(len(outcome.said) - 1)
        check(place / "saved", dict([last] if last[0] else []))
    assert last[1] > 10
    assert main(["compact", str(place / "saved"), "--force"]) == 0 and os.listdir(place) == ["saved"]
    assert check(place / "saved", dict([last])) >= last[1]


# ---------------------------------------------------------------------------------------------------- table directories


def make_directory(path: Path, value: float, rows: int) -> None:
    with EmbTable("items", 8, directory=path) as table:
        table.assign(np.arange(rows), np.full((rows, 8), value, np.float32))


def value_of(path: Path) -> float:
    """The one value of the table in a directory; it must be whole."""
    with EmbTable("items", 8, directory=path) as table:
        table.check()
        weights = table.lookup(np.arange(len(table)), insert=False)
    assert len(np.unique(weights)) == 1
    return float(weights[0, 0])


def make_both(place: Path, rows: int) -> None:
    """Checkpoints `one` and `two` of tables full of ones and twos."""
    for value, name in ((1.0, "one"), (2.0, "two")):
        make_directory(place / f"table of {name}", value, rows)
        assert main(["save", str(place / f"table of {name}"), str(place / name)]) == 0


def restore(say: Say, place: Path, name: str, calls: int | None = None, exchange: bool = True) -> None:
    """Restore a checkpoint over the directory `back`."""
    say("go")
    if not exchange:
        targets._renameat2 = lambda *given: False
    if calls is not None:
        die_at(calls)
    assert command("restore", place / name, place / "back", "--force") == 0


@pytest.mark.parametrize("exchange", [True, False])
def test_r1_a_restore_that_dies_at_any_call_leaves_the_old_or_the_new(place: Path, exchange: bool) -> None:
    make_both(place, 2000)
    seen = []
    for calls in count():
        for path in place.glob("back*"):
            shutil.rmtree(path)
        shutil.copytree(place / "table of one", place / "back")
        outcome = run_child(restore, place, "two", calls, exchange)
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL
        if not exchange:
            targets.put_back(str(place / "back"))
        seen.append(value_of(place / "back"))
    assert value_of(place / "back") == 2 and seen == sorted(seen) and set(seen) == {1.0, 2.0} and len(seen) > 8
    assert main(["restore", str(place / "two"), str(place / "back"), "--force"]) == 0
    assert sorted(os.listdir(place)) == ["back", "one", "table of one", "table of two", "two"]


def test_r1_a_restore_killed_at_any_moment_leaves_the_old_or_the_new(place: Path) -> None:
    make_both(place, 30_000)
    assert main(["restore", str(place / "one"), str(place / "back")]) == 0
    begun = time.perf_counter()
    assert run_child(restore, place, "one").code == 0
    draw, longest_s, value, dead = random.Random(5), 1.2 * (time.perf_counter() - begun), 1.0, 0
    for trial in range(40 if SOAK == 1 else 15 * SOAK):
        new = 1 + trial % 2
        outcome = run_child(restore, place, ("one", "two")[new - 1], kill_after=("go", draw.uniform(0, longest_s)))
        assert outcome.code in (0, -signal.SIGKILL)
        dead += outcome.code != 0
        found = value_of(place / "back")
        assert found in (value, new) if outcome.code else found == new
        value = found
    assert dead > 10
    assert main(["restore", str(place / "two"), str(place / "back"), "--force"]) == 0
    assert [name for name in os.listdir(place) if "embcache-" in name] == []
