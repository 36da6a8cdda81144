"""A process that dies, at any instruction: the directory opens with exactly what a flush made durable, or is refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from children import Say, run_child
from fingerprint import digest

from embcache._core.table import Table
from embcache.errors import UncleanDirectoryError
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))
EC_FAULT_KILL = -9


def killed(body: Callable[..., object], *arguments: object, after_s: float | None = None) -> list[str]:
    """Run `body(say, *arguments)` in a child that ends by SIGKILL, its own or ours; what it said."""
    outcome = run_child(body, *arguments, kill_after=None if after_s is None else ("go", after_s))
    assert outcome.code == -signal.SIGKILL and (after_s is None) != outcome.late
    return outcome.said if after_s is None else outcome.said[1:]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make(place: Path) -> Table:
    return Table("t", 4, state_dim=4, split_above=300, directory=place, num_threads=2)


def flush_and_die(say: Say, place: Path, calls: int) -> None:
    table = make(place)
    table.insert(np.arange(2000))
    table.flush(b"one")
    table.erase(np.arange(0, 2000, 3))
    table.insert(np.arange(5000, 9000))
    say(digest(table))
    assert table.directory is not None
    table.directory.fail_after(calls, EC_FAULT_KILL)
    table.flush(b"two")
    say("flushed")
    table.insert(np.arange(1))  # key 0 was erased: the mark, then the store
    say("stored")
    die()


def test_killed_at_every_call_of_a_flush_and_of_the_next_store(tmp_path: Path) -> None:
    outcomes = []
    for calls in count():
        place = tmp_path / str(calls)
        said = killed(flush_and_die, place, calls)
        try:
            table = make(place)
        except UncleanDirectoryError:
            outcomes.append("refused")
        else:
            outcomes.append("clean")
            # Only the second flush can have left it so: the first was followed by stores.
            table.check()
            assert digest(table) == said[0] and table.filter_state == b"two"
            table.close()
        if "stored" in said:
            break
    first, last = outcomes.index("clean"), len(outcomes) - 1 - outcomes[::-1].index("clean")
    assert outcomes == ["refused"] * first + ["clean"] * (last + 1 - first) + ["refused"] * (len(outcomes) - 1 - last)
    assert first > 8 and last > first and outcomes[-1] == "refused"


def flush_find_and_die(say: Say, place: Path) -> None:
    table = make(place)
    table.insert(np.arange(3000))
    table.flush()
    table.find(np.arange(3000))
    say(digest(table))
    die()


def test_killed_after_a_flush_with_no_later_store_opens(tmp_path: Path) -> None:
    said = killed(flush_find_and_die, tmp_path / "rows")
    table = make(tmp_path / "rows")
    assert digest(table) == said[0]
    table.close()


def make_and_die(say: Say, place: Path) -> None:
    table = make(place)
    table.find(np.arange(3))
    die()


def test_killed_between_making_and_the_first_store_opens(tmp_path: Path) -> None:
    killed(make_and_die, tmp_path / "rows")
    table = make(tmp_path / "rows")
    assert len(table) == 0
    table.close()


def change_for_ever(say: Say, place: Path, seed: int) -> None:
    table = make(place)
    rng = np.random.default_rng(seed)
    say("go")
    while True:
        table.insert(rng.integers(0, 30_000, 2000))
        table.erase(rng.integers(0, 30_000, 300))
        if rng.random() < 0.3:
            table.flush()
            say(digest(table))


@pytest.mark.parametrize("seed", range(40 if SOAK == 1 else 10 * SOAK))
def test_killed_at_a_random_moment_is_refused_or_is_a_flush(tmp_path: Path, seed: int) -> None:
    place = tmp_path / "rows"
    flushed = killed(change_for_ever, place, seed, after_s=random.Random(seed).random() / 5)
    try:
        table = make(place)
    except UncleanDirectoryError as error:
        assert "delete it and restore" in str(error)
        return
    table.check()
    assert digest(table) not in flushed[:-1]  # those were followed by stores; the last may not have been told
    table.close()


def test_an_interpreter_that_ends_without_close_leaves_a_clean_directory(tmp_path: Path) -> None:
    code = "import sys\nimport numpy as np\nfrom embcache.table import EmbTable\n"
    code += "table = EmbTable('t', 4, directory=sys.argv[1])\ntable.insert(np.arange(100))\nraise SystemExit(3)\n"
    command = [sys.executable, "-c", code, tmp_path / "rows"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 3 and ran.stderr == ""
    with EmbTable("t", 4, directory=tmp_path / "rows") as table:
        assert len(table) == 100
