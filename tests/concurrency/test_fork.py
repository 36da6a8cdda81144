"""I12: a child of fork gets ForkError from an inherited table, can use its own, and leaves the parent unharmed."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from embcache.errors import ForkError
from embcache.table import EmbTable

F32 = np.float32


def in_child(body: Callable[[], None]) -> None:
    """Run `body` in a forked child; the child's failure is the test's."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def table() -> EmbTable:
    made = EmbTable("users", 16, state_dim=16, num_threads=2)
    made.assign(np.arange(50_000), np.full((50_000, 16), 3, dtype=F32))
    return made


def verify(table: EmbTable) -> None:
    table.check()
    assert len(table) == 50_000
    assert (table.lookup(np.arange(50_000)) == 3).all()


def test_i12_every_door_refuses_in_a_child(table: EmbTable) -> None:
    row = np.zeros((1, 16), dtype=F32)
    walk = table.items()
    core, one = table.core, np.zeros(1, dtype=np.int64)
    calls: list[Callable[[], object]] = [
        lambda: table.lookup([1]), lambda: table.lookup([]), lambda: table.find([1]), lambda: table.insert([1]), lambda: table.erase([1]),
        lambda: table.assign([1], row), lambda: table.lookup_rows([1]), lambda: next(walk), lambda: len(table), lambda: 1 in table,
        table.stats, table.check, table.flush, table.close, table.__enter__, lambda: core.read_into(one, row), lambda: core.write_from(one, row),
        lambda: core.init_rows(one, row), lambda: core.columns(one), lambda: core.scan(0, 1), lambda: core.detach(one),
        lambda: core.attach(one, one), lambda: core.free(one, one), lambda: core.unborn(one),
    ]  # fmt: skip

    def body() -> None:
        for call in calls:
            with pytest.raises(ForkError, match="users"):
                call()

    in_child(body)
    verify(table)


def test_i12_deallocation_in_a_child_unmaps_nothing() -> None:
    """The child drops the inherited table while its own mappings lie where the parent's are."""
    holder = [EmbTable("users", 16, state_dim=16)]
    holder[0].assign(np.arange(50_000), np.full((50_000, 16), 3, dtype=F32))
    alive = weakref.ref(holder[0].core)

    def body() -> None:
        own = EmbTable("own", 16, state_dim=16)
        own.assign(np.arange(50_000), np.full((50_000, 16), 5, dtype=F32))
        holder.clear()
        gc.collect()
        assert alive() is None
        own.check()
        assert (own.lookup(np.arange(50_000)) == 5).all()
        own.close()

    in_child(body)
    verify(holder[0])


def test_i12_a_child_may_use_tables_of_its_own(table: EmbTable) -> None:
    def body() -> None:
        with EmbTable("users", 16, num_threads=4) as own:
            own.insert(np.arange(30_000))
            own.check()

            def grandchild() -> None:
                with pytest.raises(ForkError):
                    own.find([1])

            in_child(grandchild)
            assert len(own) == 30_000

    in_child(body)
    verify(table)


def test_i12_fork_while_other_threads_call(table: EmbTable) -> None:
    """Locks held by threads that do not exist in the child must not hang it."""
    stop = threading.Event()

    def use() -> None:
        keys = np.arange(50_000)
        while not stop.is_set():
            table.lookup(keys)
            table.erase([10**9])
            table.insert(keys[:100])

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()

    def body() -> None:
        with pytest.raises(ForkError):
            table.find([1])
        with EmbTable("own", 4, num_threads=3) as own:
            own.insert(np.arange(20_000))
            own.check()

    try:
        for _ in range(15):
            in_child(body)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    verify(table)


def test_case_61_rows_are_not_copied_into_children() -> None:
    """Segments are MADV_DONTFORK: a worker's memory does not hold the table."""
    table = EmbTable("big", 64)
    table.insert(np.arange(400_000))
    size = table.stats()["row_bytes"]

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")

    parent = resident()

    def body() -> None:
        assert parent - resident() > 0.9 * size

    in_child(body)
    assert len(table) == 400_000
