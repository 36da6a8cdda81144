"""The table at its limits: hostile keys, churn, many small tables, steps of growth, memory that is refused anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embcache._core.digest import hash_keys
from embcache._core.table import Table, refuse_memory
from embcache.errors import HostMemoryError
from hostile import PATTERNS, keys_of_one_vshard, keys_with_hashes

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
SANITIZED = any(os.environ.get(name) for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"))  # ten times as slow
F32 = np.float32
U64 = np.uint64


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(INT64_MIN, INT64_MAX, n, endpoint=True)


def test_keys_with_hashes_are_what_they_say() -> None:
    hashes = keys_from(1, 1000).view(U64)
    assert np.array_equal(hash_keys(keys_with_hashes(hashes)), hashes)


# -------------------------------------------------------------------------------------------------------- hostile keys

N = 30_000


@pytest.mark.parametrize("pattern", PATTERNS)
def test_hostile_keys_cost_what_random_ones_cost(pattern: str) -> None:
    """Whatever is known about the hash, the seed of the bucket choice is not: crafted keys spread like any others."""

    def probes(keys: np.ndarray, index_seed: int | None) -> tuple[int, float]:
        table = Table("t", 1, split_above=N // 3, index_seed=index_seed)
        for start in range(0, len(keys), 5000):
            table.insert(keys[start : start + 5000])
        check = table.check()
        assert len(table) == len(keys)
        assert (table.find(keys) >= 0).all()
        table.close()
        return check["longest_probe"], check["mean_probe"]

    mean = probes(keys_from(3, N), 7)[1]
    for index_seed in (7, None):
        longest, crafted = probes(PATTERNS[pattern](N), index_seed)
        assert crafted <= 1.3 * mean
        assert longest <= 64


def test_keys_of_one_vshard_stay_correct_and_bounded() -> None:
    """They cannot be spread over partitions, so one index grows alone, by factors; the others stay empty."""
    keys = keys_of_one_vshard(60_000)
    assert len(np.unique(hash_keys(keys) >> U64(52))) == 1
    table = Table("t", 4, split_above=2_000)
    for start in range(0, len(keys), 1000):
        table.insert(keys[start : start + 1000])
    check, stats = table.check(), table.stats()
    assert check["partitions"] == 13  # twelve halvings lead to a vshard; nothing is split in vain after that
    assert check["longest_probe"] <= 64 and check["mean_probe"] <= 1.5
    assert stats["overhead_bytes_per_row"] <= 64
    assert (table.find(keys) >= 0).all() and (table.find(keys_from(6, 1000)) == -1).all()
    assert table.erase(keys[::2].copy()) == 30_000
    table.check()
    others = keys_from(7, 20_000)
    table.insert(others)
    table.check()
    assert (table.find(others) >= 0).all() and (table.find(keys[1::2].copy()) >= 0).all()


# --------------------------------------------------------------------------------------------------- growth and bounds


def test_case_29_partitions_take_their_steps_one_after_the_other() -> None:
    """No call splits, or lets grow, more than two of many partitions, though all fill at the same rate."""
    table = Table("t", 1, split_above=20_000, index_seed=1)
    keys = keys_from(2, 1_200_000)
    before, most = 1, 0
    for start in range(0, len(keys), 512):
        table.insert(keys[start : start + 512])
        partitions = table.stats()["partitions"]
        if partitions > 16:
            most = max(most, partitions - before)
        before = partitions
    assert before >= 48
    assert 1 <= most <= 2


def test_case_69_a_table_grown_64_fold_probes_as_a_small_one() -> None:
    table = Table("t", 1, split_above=4_000, index_seed=1)
    keys = keys_from(4, 320_000)
    table.insert(keys[:5_000])
    small = table.check()
    for start in range(5_000, len(keys), 5_000):
        table.insert(keys[start : start + 5_000])
    large = table.check()
    assert large["partitions"] > 32
    assert large["mean_probe"] <= 1.2 * small["mean_probe"]


def test_one_call_splits_as_many_calls_do() -> None:
    keys = keys_from(8, 200_000)
    once, often = Table("t", 1, split_above=8_000), Table("t", 1, split_above=8_000)
    once.insert(keys)
    for start in range(0, len(keys), 4_000):
        often.insert(keys[start : start + 4_000])
    once.insert(keys[:1])
    for table in (once, often):
        table.check()
        assert (table.find(keys) >= 0).all()
    assert 0.5 <= once.stats()["partitions"] / often.stats()["partitions"] <= 2
    # The same few keys over and over are few keys.
    repeated = Table("t", 1, split_above=300_000)
    repeated.insert(np.tile(keys[:1000], 1000))
    assert repeated.stats()["partitions"] == 1 and len(repeated) == 1000
    assert repeated.stats()["index_bytes"] < 2**20


def test_i4_a_batch_cut_by_partition_gets_the_rows_that_it_would_have_got() -> None:
    """Where the cut's memory is refused the batch is served as it comes, to the same rows; any other refusal is an error."""
    keys, later = keys_from(9, 6_000), keys_from(10, 2_000)
    batch = np.concatenate([later, keys[::7], later[::3], keys[5::11]])
    np.random.default_rng(1).shuffle(batch)

    def life(countdown: int, threads: int = 1) -> tuple[int, list[np.ndarray]]:
        table = Table("t", 3, num_threads=threads, split_above=500, index_seed=5)
        for start in range(0, len(keys), 250):
            table.insert(keys[start : start + 250])
        table.erase(keys[::9].copy())
        refuse_memory(countdown)
        try:
            rows, born = table.insert_born(batch)
        finally:
            left = refuse_memory(-1)
        out = np.empty((len(batch), 3), np.float32)
        table.lookup(batch, out, False)
        table.check()
        assert table.stats()["partitions"] > 8
        return left, [rows, born, out, table.scan(0, 10**6)[0]]

    _, whole = life(-1)
    assert np.array_equal(whole[0], life(-1, threads=2)[1][0])
    served = 0
    for countdown in range(40):
        try:
            left, found = life(countdown)
        except HostMemoryError:
            continue
        assert all(np.array_equal(a, b) for a, b in zip(whole, found, strict=True))
        served += left == -1
    assert served >= 1


def test_case_20_churned_keys_leave_nothing_behind() -> None:
    """Keys come and go for ever (10^7 of them): length, probes and bytes stay what the live keys need."""
    total, live, batch = (600_000 if SANITIZED else 10_000_000), 20_000, 2_000
    table = Table("t", 4, state_dim=4, split_above=6_000, index_seed=3)
    rng = np.random.default_rng(11)
    held: list[np.ndarray] = []
    settled = None
    for step in range(total // batch):
        keys = rng.integers(INT64_MIN, INT64_MAX, batch, endpoint=True)
        table.insert(keys)
        held.append(keys)
        if len(held) * batch > live:
            gone = held.pop(int(rng.integers(len(held))))
            assert table.erase(gone) == batch
        if step == 100:
            settled = table.stats()["bytes"]
    assert settled is not None
    assert len(table) == sum(map(len, held))
    check = table.check()
    assert check["longest_probe"] <= 64 and check["mean_probe"] <= 1.5
    assert table.stats()["bytes"] <= 1.5 * settled
    assert (table.find(np.concatenate(held)) >= 0).all()


def test_case_59_a_thousand_small_tables() -> None:
    tables = [Table(f"t{i}", 16, state_dim=16) for i in range(1000)]
    assert sum(table.stats()["bytes"] for table in tables) < 1000 * 32 * 2**10  # before the first key
    for table in tables:
        table.insert(np.arange(64))
    assert sum(table.stats()["bytes"] for table in tables) < 1000 * 256 * 2**10
    for table in tables:
        table.close()


# ------------------------------------------------------------------------------------------- memory refused at any place


def content(table: Table, probe: np.ndarray) -> tuple[bytes, ...]:
    """All that a caller can see of a table."""
    weights, state = table.lookup_rows(probe)
    rows = table.find(probe)
    return rows.tobytes(), weights.tobytes(), state.tobytes(), str((len(table), table.version)).encode()


def test_i11_every_allocation_failing_in_turn_changes_nothing() -> None:
    """Each request for memory of an insert, an assign, a look-up and a split is refused once; the call fails whole, or can
    do without (a step of growth that was not due yet)."""
    probe = np.concatenate([np.arange(3_000), keys_from(1, 6_000), keys_from(2, 2_000), keys_from(3, 500)])
    calls: list[Callable[[Table], object]] = [
        lambda table: table.insert(keys_from(1, 6_000)),
        lambda table: table.insert(keys_from(2, 2_000)),  # splits what the first has filled
        lambda table: table.assign(keys_from(3, 500), np.ones((500, 3), dtype=F32), np.ones((500, 5), dtype=F32)),
        lambda table: table.lookup(np.arange(3_000), np.empty((3_000, 3), dtype=F32), True),
        lambda table: table.erase(np.arange(0, 3_000, 2)),
        lambda table: table.insert(np.arange(3_000)),
    ]

    def table_before(call: int) -> Table:
        table = Table("t", 3, state_dim=5, with_filter=True, num_threads=1, split_above=900, index_seed=1)
        for earlier in calls[:call]:
            earlier(table)
        return table

    raised = 0
    for number, call in enumerate(calls):
        table = table_before(number)
        call(table)
        after = content(table, probe)
        for countdown in range(1000):
            table = table_before(number)
            before = content(table, probe)
            refuse_memory(countdown)
            try:
                call(table)
            except HostMemoryError as error:
                refuse_memory(-1)
                raised += 1
                assert "'t'" in str(error)
                table.check()
                assert content(table, probe) == before
                call(table)  # nothing that is needed was lost
            refused = refuse_memory(-1) < 0
            table.check()
            assert content(table, probe)[1:3] == after[1:3]
            if not refused:
                break
    assert raised >= 40
    assert table.stats()["partitions"] > 4


# ------------------------------------------------------------------------------------------------- the limit of a cgroup

FENCED = """
import os, sys
from pathlib import Path
import numpy as np
from embcache.errors import HostMemoryError
from embcache.table import EmbTable

fence, limit_file = Path(sys.argv[1]), sys.argv[2]
table = EmbTable("users", 256, num_threads=1)
table.insert(np.arange(1000))
(fence / "cgroup.procs").write_text(str(os.getpid()))
(fence / limit_file).write_text(str(400 * 2**20))
start = 1000
while True:
    keys = np.arange(start, start + 5000)
    try:
        table.insert(keys)
    except HostMemoryError as error:
        assert "users" in str(error) and "memory.max" in str(error)
        break
    start += 5000
    assert start < 1_000_000, "the limit did not bite"
assert len(table) == start and not (table.find(keys) >= 0).any()
assert (table.find(np.arange(start)) >= 0).all()
table.core.check()
table.erase(np.arange(10_000))
table.insert(keys)  # into the rows that are free now
print(start)
"""


@pytest.fixture
def fence() -> Iterator[tuple[Path, str]]:
    """A control group of our own below the one we are in, and the name of its limit; skipped where none can be made."""
    root, limit, at = Path("/sys/fs/cgroup"), "memory.max", ""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, limit, at = root / "memory", "memory.limit_in_bytes", path
            break
        if not controllers:
            at = path
    made = root / at.lstrip("/") / f"embcache-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (made / limit).exists():
            pytest.skip("the memory controller is not ours to use here")
        yield made, limit
    finally:
        made.rmdir()


def test_i11_the_limit_of_a_cgroup_is_an_error_and_not_a_kill(fence: tuple[Path, str]) -> None:
    made, limit = fence
    done = subprocess.run(
        [sys.executable, "-c", FENCED, str(made), limit], capture_output=True, text=True, timeout=300, check=False
    )
    if "PermissionError" in done.stderr or "Device or resource busy" in done.stderr:
        pytest.skip("the control group may not be used here")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 50_000
