"""Readers together, writers alone, close last: a table used by many threads at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from embcache._core.table import Table
from embcache.errors import ChangedError, ClosedError
from embcache.table import EmbTable

F32 = np.float32


def run_together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all started at one barrier; raise the first failure."""
    barrier = threading.Barrier(len(works))
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_readers_never_see_half_a_write(threads: int) -> None:
    """A writer assigns whole batches of one number; each reader must find one number in all rows of a batch."""
    table = Table("t", 24, state_dim=8, num_threads=threads, split_above=2000)
    keys = np.arange(9000, dtype=np.int64)
    stop = threading.Event()

    def write() -> None:
        try:
            for number in range(1, 60):
                table.assign(keys, np.full((9000, 24), number, dtype=F32), np.full((9000, 8), number, dtype=F32))
                table.insert(np.arange(10_000 * number, 10_000 * number + 700))
                table.erase(np.arange(10_000 * number, 10_000 * number + 300))
        finally:
            stop.set()

    def read() -> None:
        out = np.empty((9000, 24), dtype=F32)
        while not stop.is_set():
            table.lookup(keys, out, False)
            assert (out == out[0, 0]).all()
            weights, state = table.lookup_rows(keys)
            assert (weights == weights[0, 0]).all() and (state == state[0, 0]).all()
            assert weights[0, 0] >= out[0, 0]

    table.assign(keys, np.zeros((9000, 24), dtype=F32), np.zeros((9000, 8), dtype=F32))
    run_together(write, *[read] * 8)
    table.check()
    assert len(table) == 9000 + 59 * 400


def test_concurrent_lookups_insert_each_key_once() -> None:
    table = EmbTable("t", 4, num_threads=2)
    keys = np.arange(40_000, dtype=np.int64)
    expected = table.lookup(keys, insert=False)

    def work(seed: int) -> Callable[[], None]:
        order = np.random.default_rng(seed).permutation(40_000)

        def body() -> None:
            for part in np.array_split(order, 20):
                assert np.array_equal(table.lookup(keys[part]), expected[part])

        return body

    run_together(*[work(seed) for seed in range(8)])
    assert len(table) == 40_000
    assert len(set(table.find(keys).tolist())) == 40_000
    table.check()


def test_a_writer_is_not_starved_by_readers() -> None:
    table = EmbTable("t", 8, num_threads=1)
    keys = np.arange(20_000)
    table.insert(keys)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            table.find(keys)

    def write() -> None:
        try:
            for step in range(50):
                table.insert([10**6 + step])
        finally:
            done.set()

    run_together(write, *[read] * 4)
    assert len(table) == 20_050


def test_close_waits_for_running_calls() -> None:
    for _ in range(10):
        table = EmbTable("t", 16, state_dim=16, num_threads=2)
        keys = np.arange(30_000)
        table.insert(keys)
        started = threading.Semaphore(0)

        def use_for_ever(
            table: EmbTable = table, keys: np.ndarray = keys, started: threading.Semaphore = started
        ) -> None:
            while True:
                started.release()
                table.lookup(keys)
                table.lookup_rows(keys[:1000])
                table.erase(keys[:50])
                with contextlib.suppress(ChangedError):
                    for _ in table.items(10_000):
                        pass

        def use(work: Callable[[], None] = use_for_ever) -> None:
            with pytest.raises(ClosedError):
                work()

        def close(table: EmbTable = table, started: threading.Semaphore = started) -> None:
            for _ in range(6):
                started.acquire()
            table.close()

        run_together(close, *[use] * 6)
        assert table.closed


def test_items_sees_changes_by_another_thread() -> None:
    table = EmbTable("t", 2)
    table.insert(np.arange(100))
    walk = table.items(10)
    next(walk)
    other = threading.Thread(target=table.erase, args=([50],))
    other.start()
    other.join()
    with pytest.raises(RuntimeError, match="changed"):
        next(walk)


def test_case_43_exit_in_the_middle_of_calls() -> None:
    code = (
        "import threading, numpy as np\n"
        "from embcache.table import EmbTable\n"
        "table = EmbTable('t', 16, num_threads=3)\n"
        "started = threading.Barrier(5)\n"
        "def use():\n"
        "    started.wait()\n"
        "    while True: table.lookup(np.random.randint(0, 10**6, 20000))\n"
        "for _ in range(4): threading.Thread(target=use, daemon=True).start()\n"
        "started.wait()\n"
        "table.insert(np.arange(10**5))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
