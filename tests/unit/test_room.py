"""Room for more memory: one count of what this process has promised, and what the system's figures say."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embcache._core.arena import Arena, cgroup_room, memory_promised, memory_room, pretend_room
from embcache._core.index import Index
from embcache._core.simulate import simulate
from embcache._core.swap import SwapManager
from embcache._core.table import Table, refuse_memory
from embcache.config import AdmitAndEvictConfig
from embcache.errors import HostMemoryError

MIB, GIB = 2**20, 2**30
SPARE = 8 * MIB  # never given away
F32 = np.float32


@pytest.fixture(autouse=True)
def start() -> Iterator[int]:
    """What is promised before a test; whatever it does, as much is promised after it."""
    gc.collect()
    before = memory_promised()
    yield before
    refuse_memory(-1)
    pretend_room()
    gc.collect()
    assert memory_promised() == before


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)


# ------------------------------------------------------------------------------------------------------------- the count


def test_what_is_mapped_is_promised_until_it_is_written(start: int) -> None:
    arena = Arena(4096)
    arena.reserve(16 * MIB // 4096)
    assert memory_promised() - start == arena.nbytes
    arena.write(0, bytes(4096))
    assert memory_promised() - start < arena.nbytes
    arena.write(arena.rows - 1, bytes(4096))
    assert memory_promised() == start
    mapped, kept = arena.nbytes, len(arena.segments)
    arena.reserve(2 * arena.rows)
    assert memory_promised() - start == arena.nbytes - mapped
    arena.truncate(kept)
    assert memory_promised() == start
    arena.reserve(arena.rows + 1)  # what comes again is as empty as the first time
    assert memory_promised() - start == arena.nbytes - mapped
    arena.truncate(0)
    assert memory_promised() == start


@pytest.mark.parametrize("state_dim", [0, 2, 16])
@pytest.mark.parametrize("with_filter", [False, True])
def test_a_table_promises_what_its_rows_have_not_reached(start: int, state_dim: int, with_filter: bool) -> None:
    table = Table("t", 64, state_dim=state_dim, with_filter=with_filter, split_above=1_000_000)
    keys, most = keys_from(1, 120_000), 0
    # Rows of the last extent are handed out and not written; the widest rows have a segment in huge pages.
    extent_bytes = 1024 * (256 + 4 * state_dim + 9 + 16 * with_filter) + (2 * MIB if state_dim == 16 else 6 * 4096)
    for at in range(0, len(keys), 3_000):
        table.insert(keys[at : at + 3_000])
        promised = memory_promised() - start
        most = max(most, promised)
        assert 0 <= promised - table.stats()["reserved_bytes"] <= extent_bytes
    assert most > MIB
    promised = memory_promised()
    table.erase(keys[:90_000].copy())
    table.insert(keys_from(2, 80_000))  # into rows that were written before; so large a call makes nothing ready ahead
    assert memory_promised() == promised
    table.close()
    assert memory_promised() == start


def test_a_growth_that_fails_anywhere_promises_nothing(start: int) -> None:
    first, second = keys_from(1, 30_000), keys_from(2, 30_000)
    failed = 0
    for countdown in range(1_000):
        table = Table("t", 8, state_dim=8, num_threads=1, split_above=25_000, index_seed=1)
        table.insert(first)
        before, bytes_before = memory_promised(), table.stats()["bytes"]
        refuse_memory(countdown)
        try:
            table.insert(second)  # splits: what halves and columns ask the room for is refused in turn too
        except HostMemoryError:
            failed += 1
            assert len(table) == 30_000
            assert memory_promised() == before
            assert table.stats()["bytes"] >= bytes_before
            table.check()
        refused = refuse_memory(-1) < 0
        table.close()
        assert memory_promised() == start
        if not refused:
            break
    assert failed >= 10


def test_a_table_in_a_directory_promises_nothing(start: int, tmp_path: Path) -> None:
    table = Table("t", 64, directory=tmp_path / "t")
    table.insert(keys_from(1, 50_000))
    assert memory_promised() == start
    table.close()
    again = Table("t", 64, directory=tmp_path / "t")
    again.insert(keys_from(2, 50_000))
    assert memory_promised() == start
    again.close()


def test_planners_and_filters_leave_the_count_as_it_was(start: int) -> None:
    config = AdmitAndEvictConfig(admit_threshold=2)
    table = Table("t", 8, with_filter=True)
    manager = SwapManager([table], [200_000], [config], num_threads=1)
    for seed in (1, 1, 2):
        keys = keys_from(seed, 100_000)
        plan = manager.plan(keys, np.array([0, len(keys)]), None)
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)
    assert len(table) == 100_000
    assert memory_promised() - start == pytest.approx(table.stats()["reserved_bytes"], abs=8 * MIB)
    simulate(keys_from(3, 100_000), 50_000, "s3fifo")
    del plan, manager
    table.close()
    gc.collect()
    assert memory_promised() == start


@pytest.mark.parametrize("capacity", [65_472, 65_473, 65_535, 65_536])
def test_blocks_just_below_the_least_mapping_are_given_back_as_what_they_are(start: int, capacity: int) -> None:
    """A byte a slot: rounded up to 64 KiB, such a block of the heap was taken for a mapping, uncounted and unmapped."""
    table = Table("t", 1)
    with SwapManager([table], [capacity]):
        assert memory_promised() >= start
    gc.collect()
    assert memory_promised() == start


# -------------------------------------------------------------------------------------------------------------- claims


def test_what_one_table_has_promised_is_not_given_to_another(start: int) -> None:
    first, second = Table("first", 256, num_threads=1), Table("second", 256, num_threads=1)
    wanted, keys, at = keys_from(2, 20_000), keys_from(1, 60_000), 0
    second.insert(wanted)
    need = second.stats()["bytes"]
    second.close()
    while memory_promised() - start < 2 * MIB:  # a segment of 4 MiB, of which the first huge page is in use
        assert at < len(keys)
        first.insert(keys[at : at + 500])
        at += 500
    second = Table("second", 256, num_threads=1)
    pretend_room(start + SPARE + need + MIB // 2)
    with pytest.raises(HostMemoryError, match="second"):
        second.insert(wanted)
    assert len(second) == 0
    pretend_room()
    while memory_promised() - start > MIB:  # the first one writes to what it was promised
        assert at < len(keys)
        first.insert(keys[at : at + 500])
        at += 500
    pretend_room(memory_promised() + SPARE + need)
    second.insert(wanted)
    first.close()
    second.close()


def test_rows_in_memory_are_not_counted_again(start: int) -> None:
    """However much a table holds, its next step is measured against the room that is left, and against nothing twice."""
    table = Table("t", 256, num_threads=1)
    keys = keys_from(1, 100_000)
    table.insert(keys)
    assert table.stats()["bytes"] > 100 * MIB
    assert memory_promised() - start < 16 * MIB
    pretend_room(memory_promised() + SPARE + 20 * MIB)
    other = Table("other", 256, num_threads=1)
    other.insert(keys[:10_000].copy())
    other.close()
    table.close()


def test_of_claims_that_do_not_fit_together_exactly_as_many_are_served_as_fit(start: int) -> None:
    size = 64 * MIB
    arenas = [Arena(4096) for _ in range(8)]
    need = arenas[0].missing(size // 4096)
    pretend_room(start + SPARE + 3 * need + need // 2)
    barrier, served = threading.Barrier(len(arenas)), []

    def grow(arena: Arena) -> None:
        barrier.wait()
        try:
            arena.reserve(size // 4096)
        except HostMemoryError:
            return
        served.append(arena)

    threads = [threading.Thread(target=grow, args=(arena,)) for arena in arenas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(served) == 3
    served[0].truncate(0)
    next(arena for arena in arenas if arena not in served).reserve(size // 4096)


def test_tables_that_grow_in_many_threads_leave_the_count_as_it_was(start: int) -> None:
    def work(seed: int) -> None:
        for turn in range(3):
            table = Table(f"t{seed}", 32, num_threads=1 + seed % 2, split_above=10_000)
            for part in range(4):
                table.insert(keys_from(100 * seed + 10 * turn + part, 20_000))
            table.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory_promised() == start


def _planner() -> None:
    SwapManager([Table("t", 1)], [10_000_000], [None], num_threads=1)


ASKS: dict[str, Callable[[], object]] = {
    "arena": lambda: Arena(4096).reserve(10_000),
    "index": lambda: Index().reserve(10_000_000),
    "table": lambda: Table("t", 64).insert(keys_from(1, 100_000)),
    "swap": _planner,
    "filter": lambda: SwapManager(
        [Table("t", 1, with_filter=True)],
        [10],
        [AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=64 * MIB)],
        num_threads=1,
    ),
    "simulate": lambda: simulate(keys_from(1, 300_000), 300_000, "lru"),
}


@pytest.mark.parametrize("module", ASKS)
def test_every_module_asks_the_same_count(module: str) -> None:
    pretend_room(1)
    with pytest.raises(HostMemoryError):
        ASKS[module]()
    pretend_room()


def _child_of_a_fork(connection: object) -> None:
    counts = [memory_promised()]
    table = Table("child", 64)
    table.insert(keys_from(3, 50_000))
    counts.append(memory_promised())
    table.close()
    counts.append(memory_promised())
    connection.send(counts)  # type: ignore[attr-defined]


def test_i12_a_forked_child_has_promised_nothing(start: int) -> None:
    table = Table("parent", 64)
    table.insert(keys_from(1, 50_000))
    before = memory_promised()
    assert before > start
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child_of_a_fork, args=(theirs,))
    child.start()
    assert ours.poll(60)
    first, grown, last = ours.recv()
    child.join(60)
    assert child.exitcode == 0
    assert first == last == 0 < grown
    assert memory_promised() == before
    table.close()


# ------------------------------------------------------------------------------------------------------- limits, by name

ADDRESS_SPACE = """
import resource
from embcache._core.arena import Arena, memory_promised
from embcache.errors import HostMemoryError
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
arenas = [Arena(1 << 20), Arena(1 << 20), Arena(1 << 20)]
arenas[0].reserve(110)
assert memory_promised() > 100 << 20
arenas[1].reserve(60)  # address space is used by what is mapped, written or not; it is not used twice
before = memory_promised()
try:
    arenas[2].reserve(60)
except HostMemoryError:
    assert arenas[2].nbytes == 0 and memory_promised() == before
else:
    raise SystemExit("RLIMIT_AS did not bite")
"""


def test_address_space_is_not_counted_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADDRESS_SPACE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


NO_DESCRIPTORS = """
import os, resource
import numpy as np
from embcache._core.arena import memory_room
from embcache._core.table import Table
table = Table("t", 256, num_threads=1)
table.insert(np.arange(100))
resource.setrlimit(resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
table.insert(np.arange(100, 20_000))
assert memory_room() > 1 << 30
assert len(table) == 20_000
table.check()
"""


def test_without_a_file_descriptor_left_nothing_is_refused() -> None:
    """What the system does not say cannot be held against a step."""
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_more_is_never_had_than_the_room_says() -> None:
    assert memory_room() < 2**63
    pretend_room(5 * MIB)
    assert memory_room() <= 5 * MIB


# --------------------------------------------------------------------------------------------- what a cgroup would give up

NAMES = {
    2: ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current", ""),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.memsw.usage_in_bytes",
        "total_",
    ),
}
FIELDS = {
    2: {"dirty": "file_dirty", "writeback": "file_writeback"},
    1: {"dirty": "dirty", "writeback": "writeback"},
}


def room_of(
    folder: Path,
    version: int,
    limit: int,
    used: int,
    *,
    swap: tuple[object, object] | None = None,
    free: int = 0,
    **stat: int,
) -> int:
    """The room in one made-up cgroup."""
    at = folder / ("memory/g" if version == 1 else "g")
    at.mkdir(parents=True, exist_ok=True)
    membership = folder / "membership"
    membership.write_text("3:memory:/g\n" if version == 1 else "0::/g\n")
    names = NAMES[version]
    (at / names[0]).write_text(f"{limit}\n")
    (at / names[1]).write_text(f"{used}\n")
    for name, value in zip(names[2:4], swap or (), strict=False):
        (at / name).write_text(f"{value}\n")
    lines = [f"{names[4]}{FIELDS[version].get(name, name)} {value}\n" for name, value in stat.items()]
    noise = [
        "anon 77\n",
        "inactive_anon 5\n",
        "inactive_file_of_another 9\n",
        *(["inactive_file 11\n"] if version == 1 else []),
    ]
    (at / "memory.stat").write_text("".join([*noise, *lines, "pgfault 99999\n"]))
    return cgroup_room(str(folder), str(membership), free)


@pytest.mark.parametrize("version", [1, 2])
def test_file_pages_that_are_clean_are_room_read_lately_or_not(tmp_path: Path, version: int) -> None:
    """The cache of a large file in use is "active"; it is dropped before anybody is killed, unless it must be written first."""
    assert room_of(tmp_path, version, 1000, 900) == 100
    assert room_of(tmp_path, version, 1000, 900, inactive_file=200, active_file=300) == 600
    assert room_of(tmp_path, version, 1000, 1000, inactive_file=200, active_file=300, dirty=50, writeback=70) == 380
    assert room_of(tmp_path, version, 1000, 1000, inactive_file=20, dirty=50) == 0
    assert room_of(tmp_path, version, 1000, 400, inactive_file=500) == 1000
    assert room_of(tmp_path, version, 1000, 900, slab_reclaimable=100) == 150


def test_swap_that_a_cgroup_may_use_is_room(tmp_path: Path) -> None:
    assert room_of(tmp_path / "a", 2, 1000, 1000, swap=("max", 0), free=300) == 300
    assert room_of(tmp_path / "b", 2, 1000, 1000, swap=(500, 400), free=300) == 100
    assert room_of(tmp_path / "c", 2, 1000, 1000, swap=(0, 0), free=300) == 0
    assert room_of(tmp_path / "d", 2, 1000, 900, free=300) == 400  # swap is not limited here
    assert room_of(tmp_path / "e", 1, 1000, 900, swap=(1200, 1050), free=300) == 150  # of memory and swap together
    assert room_of(tmp_path / "f", 1, 1000, 900, swap=(1000, 900), free=300) == 100
    assert room_of(tmp_path / "g", 1, 1000, 900, swap=(5000, 900), free=300) == 400


def test_a_cgroup_that_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/g\n")
    (tmp_path / "g").mkdir()
    assert cgroup_room(str(tmp_path), str(membership)) == 2**64 - 1
    (tmp_path / "g" / "memory.max").write_text("1000\n")  # and nothing says what is used
    assert cgroup_room(str(tmp_path), str(membership)) == 1000
    assert os.path.exists(membership)
