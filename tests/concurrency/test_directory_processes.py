"""File-backed tables among processes and threads: one holder, whose children neither share nor end its lock (I12)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_fork import in_child

from embcache.errors import ClosedError, ForkError, LockedError, UncleanDirectoryError
from embcache.table import EmbTable

F32 = np.float32

HOLD = """
import sys
import numpy as np
from embcache.table import EmbTable
table = EmbTable("t", 4, directory=sys.argv[1])
table.insert(np.arange(1000))
print("open", flush=True)
sys.stdin.readline()
table.close()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def test_another_process_is_named_and_its_close_frees_the_directory(place: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "open\n"
    with pytest.raises(LockedError, match=f"open in process {other.pid}") as error:
        EmbTable("t", 4, directory=place)
    assert error.value.pid == other.pid
    other.stdin.write("\n")
    other.stdin.close()
    assert other.wait() == 0
    with EmbTable("t", 4, directory=place) as table:
        assert len(table) == 1000
    other.stdout.close()


def test_the_kernel_frees_the_lock_of_a_killed_process(place: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "open\n"
    other.send_signal(signal.SIGKILL)
    other.wait()
    with pytest.raises(UncleanDirectoryError):
        EmbTable("t", 4, directory=place)
    other.stdin.close()
    other.stdout.close()


def test_i12_a_child_can_neither_use_nor_harm_what_its_parent_has_open(place: Path) -> None:
    table = EmbTable("t", 4, directory=place)
    table.assign(np.arange(50_000), np.full((50_000, 4), 3, dtype=F32))

    def body() -> None:
        row = np.zeros((1, 4), dtype=F32)
        for call in (
            lambda: table.find([1]),
            lambda: table.insert([1]),
            lambda: table.assign([1], row),
            table.flush,
            table.close,
            len,
        ):
            with pytest.raises(ForkError, match="'t'"):
                call(table) if call is len else call()
        with pytest.raises(LockedError, match=f"process {os.getppid()}"):
            EmbTable("t", 4, directory=place)
        assert str(place) not in Path("/proc/self/maps").read_text()
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ]
        assert not [link for link in links if link.startswith(str(place))]

    in_child(body)
    assert table.core.directory is not None and not table.core.directory.clean
    with pytest.raises(LockedError):  # the child's end freed nothing
        EmbTable("t", 4, directory=place)
    table.check()
    table.close()
    with EmbTable("t", 4, directory=place) as again:
        assert (again.lookup(np.arange(50_000), insert=False) == 3).all()


def test_i12_a_child_that_ends_like_a_script_marks_nothing_clean(place: Path) -> None:
    """Interpreter exit in the child runs finalizers of the inherited table."""
    code = """
import os, sys
import numpy as np
from embcache.table import EmbTable
from embcache.errors import LockedError, UncleanDirectoryError
table = EmbTable("t", 4, directory=sys.argv[1])
table.insert(np.arange(1000))
if os.fork() == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert not table.core.directory.clean
try:
    EmbTable("t", 4, directory=sys.argv[1])
except LockedError:
    pass
else:
    sys.exit("the child's end freed the lock")
os._exit(7)
"""
    ran = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (7, "")
    with pytest.raises(UncleanDirectoryError):
        EmbTable("t", 4, directory=place)


def test_i12_a_parent_that_closes_frees_the_directory_though_children_live(place: Path) -> None:
    table = EmbTable("t", 4, directory=place)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    table.close()
    EmbTable("t", 4, directory=place).close()
    os.close(write)
    os.waitpid(pid, 0)


def test_close_and_flush_while_others_work(place: Path) -> None:
    """Flush runs beside readers and waits for writers; close waits for all, and what is on disk is one state."""
    table = EmbTable("t", 8, directory=place)
    keys = np.arange(20_000)
    table.insert(keys)
    errors: list[BaseException] = []
    begun = threading.Barrier(5)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        begun.wait()
        try:
            for part in range(10**6):
                if number == 0:
                    table.flush()
                elif number == 1:
                    table.lookup(keys, insert=False)
                else:
                    chosen = rng.permutation(keys)[:500]
                    table.assign(chosen, np.full((500, 8), part, dtype=F32))
        except ClosedError:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    for _ in range(20):
        table.check()
    table.close()
    for thread in threads:
        thread.join()
    assert errors == []
    with EmbTable("t", 8, directory=place) as again:
        again.check()
        rows = again.lookup(keys, insert=False)
        written = (rows == rows[:, :1]).all(axis=1)  # each row is one writer's, whole, or has its initial value
        assert written.any()
        fresh = EmbTable("t", 8).lookup(keys[~written])
        assert np.array_equal(rows[~written], fresh)


def test_many_threads_open_one_directory_and_one_wins(place: Path) -> None:
    opened: list[EmbTable] = []
    refused = []
    begun = threading.Barrier(8)

    def attempt() -> None:
        begun.wait()
        try:
            opened.append(EmbTable("t", 4, directory=place))
        except LockedError as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1 and len(refused) == 7
    opened[0].insert([1])
    opened[0].close()
    EmbTable("t", 4, directory=place).close()
