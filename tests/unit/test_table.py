"""EmbTable and the compiled Table: arguments, meaning of each call, memory, failures, and the calls that the planner uses."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embcache._core.table import Table
from embcache.config import Constant, Uniform, Zeros
from embcache.errors import ChangedError, ClosedError, ConfigError, EmbCacheError, HostMemoryError, ShapeError
from embcache.table import EmbTable

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EXTREMES = np.array([INT64_MIN, INT64_MIN + 1, -2, -1, 0, 1, 2, INT64_MAX - 1, INT64_MAX], dtype=np.int64)
F32 = np.float32


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(INT64_MIN, INT64_MAX, n, endpoint=True)


def ramp(n: int, width: int, start: float = 0.0) -> np.ndarray:
    return (start + np.arange(n * width, dtype=F32)).reshape(n, width)


# ------------------------------------------------------------------------------------------------------------- meaning


def test_i7_every_extreme_key_works() -> None:
    with EmbTable("t", 3, state_dim=3) as table:
        assert (table.find(EXTREMES) == -1).all()
        rows = table.insert(EXTREMES)
        assert len(set(rows.tolist())) == len(EXTREMES) == len(table)
        weights = ramp(len(EXTREMES), 3)
        table.assign(EXTREMES, weights, weights + 100)
        assert np.array_equal(table.find(EXTREMES), rows)
        got, state = table.lookup_rows(EXTREMES)
        assert np.array_equal(got, weights) and np.array_equal(state, weights + 100)
        assert all(key in table for key in EXTREMES)
        assert table.erase(EXTREMES[::2]) == 5
        assert [key in table for key in EXTREMES] == [False, True] * 4 + [False]
        table.check()


def test_lookup_inserts_or_not_as_asked() -> None:
    with EmbTable("t", 2, initializer=Constant(0.5)) as table:
        assert (table.lookup([1, 2, 1], insert=False) == 0.5).all() and len(table) == 0
        assert (table.lookup([1, 2, 1]) == 0.5).all() and len(table) == 2
        table.assign([1], np.array([[3, 4]], dtype=F32))
        assert table.lookup([9, 1, 9, 1]).tolist() == [[0.5, 0.5], [3, 4], [0.5, 0.5], [3, 4]]
        assert len(table) == 3


def test_case_5_last_of_duplicate_keys_wins() -> None:
    n = 40_000
    keys = np.random.default_rng(0).integers(0, 500, n)
    weights, state = ramp(n, 4), ramp(n, 2, 7.0)
    last = {int(key): i for i, key in enumerate(keys)}
    places = np.array(list(last.values()))
    for threads in (1, 4):
        with EmbTable("t", 4, state_dim=2, num_threads=threads) as table:
            table.assign(keys, weights, state)
            assert len(table) == len(last)
            got, got_state = table.lookup_rows(np.array(list(last)))
            assert np.array_equal(got, weights[places]) and np.array_equal(got_state, state[places])
            table.check()


def test_assign_without_state_zeroes_it() -> None:
    for state_dim in (1, 2, 3, 40):
        with EmbTable("t", 4, state_dim=state_dim) as table:
            table.assign([1, 2], ramp(2, 4), ramp(2, state_dim, 1.0))
            table.assign([2, 3], ramp(2, 4))
            state = table.lookup_rows([1, 2, 3])[1]
            assert np.array_equal(state[0], ramp(1, state_dim, 1.0)[0]) and not state[1:].any()


def test_nan_and_infinity_are_data() -> None:
    weights = np.array([[np.nan, np.inf, -np.inf, -0.0]], dtype=F32)
    with EmbTable("t", 4) as table:
        table.assign([5], weights)
        assert np.array_equal(table.lookup([5]).view(np.uint32), weights.view(np.uint32))


def test_case_21_erasing_absent_and_repeated_keys() -> None:
    with EmbTable("t", 1) as table:
        table.insert([1, 2, 3])
        version = table.core.version
        assert table.erase([7, 8, 7]) == 0 and len(table) == 3 and table.core.version == version
        assert table.erase([1, 1, 2, 9]) == 2 and len(table) == 1
        assert table.find([1, 2, 3, 9]).tolist() == [-1, -1, 2, -1]


def test_case_18_a_reused_row_carries_nothing_over() -> None:
    table = Table("t", 2, state_dim=2, initializer=("zeros", 0, 0), with_filter=True)
    rows = table.insert(np.array([10, 11]))
    table.assign(np.array([10, 11]), ramp(2, 2, 5.0), ramp(2, 2, 9.0))
    table.write_columns(rows, np.array([3, 4]), np.array([50, 60]))
    assert [column.tolist() for column in table.columns(rows)] == [[10, 11], [3, 4], [50, 60]]
    table.erase(np.array([10, 11]))
    again = table.insert(np.array([20, 21]))
    assert sorted(again) == sorted(rows)
    weights, state = table.lookup_rows(np.array([20, 21]))
    assert not weights.any() and not state.any()
    keys, frequency, timestamp = table.columns(again)
    assert keys.tolist() == [20, 21] and frequency.tolist() == [0, 0] and timestamp.tolist() == [INT64_MIN, INT64_MIN]


def test_rows_that_are_assigned_have_no_trace_of_initial_values_or_of_who_was_there() -> None:
    table = Table("t", 3, state_dim=2, initializer=("uniform", 1, 2), with_filter=True)
    old, keys = np.arange(100, 150), np.array([120, 7, 8, 7, 9])
    table.assign(old, ramp(50, 3, 1e3), ramp(50, 2, 1e6), old, old)
    table.erase(old[::2].copy())
    table.assign(keys, ramp(5, 3, 0.0), None, np.arange(5), -np.arange(5))
    weights, state = table.lookup_rows(keys)
    assert (weights == ramp(5, 3, 0.0)[[0, 3, 2, 3, 4]]).all() and not state.any()
    columns = table.columns(table.find(keys))
    assert [column.tolist() for column in columns] == [keys.tolist(), [0, 3, 2, 3, 4], [0, -3, -2, -3, -4]]
    table.assign(np.array([7, 10]), ramp(2, 3, 5.0))
    assert table.columns(table.find(np.array([7, 10])))[1].tolist() == [3, 0]
    for wrong in ((keys, None), (None, keys), (keys[1:], keys), (keys, keys[1:])):
        with pytest.raises(ShapeError, match="frequencies|timestamps"):
            table.assign(keys, ramp(5, 3, 9.0), None, *wrong)
    with pytest.raises(ShapeError, match="table with a filter"):
        Table("t", 3).assign(keys, ramp(5, 3, 9.0), None, keys, keys)
    assert (table.lookup_rows(keys[:1])[0] == ramp(5, 3, 0.0)[0]).all() and table.check()["rows"] == 30


def test_case_4_empty_batches() -> None:
    with EmbTable("t", 5, state_dim=2) as table:
        for empty in ([], np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), ()):
            assert table.lookup(empty).shape == (0, 5) and table.lookup(empty).dtype == F32
            assert table.find(empty).shape == (0,) and table.find(empty).dtype == np.int64
            assert table.insert(empty).dtype == np.int64
            table.assign(empty, [], [])
            table.assign(empty, np.empty((0, 5), dtype=F32))
            assert table.erase(empty) == 0
            assert [part.shape for part in table.lookup_rows(empty)] == [(0, 5), (0, 2)]
        assert len(table) == 0 and list(table.items()) == []
        table.check()


def test_case_6_any_integer_array_is_a_batch_of_keys() -> None:
    base = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int64)
    frozen = base.copy()
    frozen.flags.writeable = False
    with EmbTable("t", 1) as table:
        expected = table.insert(base)
        wide = np.zeros((8, 3), dtype=np.int64)
        wide[:, 1] = base
        for same in (
            frozen, wide[:, 1], base.tolist(), tuple(base.tolist()), np.repeat(base, 2)[::2], base[::-1][::-1],
            base.astype(">i8"), *(base.astype(kind) for kind in ("i1", "i2", "i4", "u1", "u2", "u4", "u8")),
            base.astype(object), [np.int64(key) for key in base],
        ):  # fmt: skip
            assert np.array_equal(table.find(same), expected)
        assert table.find(np.array([2**63 - 1], dtype=np.uint64)).tolist() == [-1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (np.array([1.0]), ["float64"]),
        ([1.5], ["float64"]),
        (np.array([True]), ["bool"]),
        ([True, False], ["bool"]),
        (np.zeros((2, 2), dtype=np.int64), ["(2, 2)"]),
        (np.int64(3), ["()"]),
        (7, ["()"]),
        (np.array([2**63], dtype=np.uint64), [str(2**63)]),
        ([2**63], [str(2**63)]),
        ([2**70], [str(2**70)]),
        ([-(2**63) - 1], [str(-(2**63) - 1)]),
        ([2**70, True], ["int64"]),
        (["a"], ["<U1"]),
        ([None], ["None"]),
        ([[1], [1, 2]], ["integers"]),
        (np.empty(0, dtype=np.float32), ["float32"]),
        (np.array([1], dtype="M8[s]"), ["datetime64"]),
    ],
    ids=repr,
)
def test_i11_bad_keys_are_named_and_change_nothing(keys: object, words: list[str]) -> None:
    with EmbTable("users", 2) as table:
        calls: list[Callable[[], object]] = [
            lambda: table.lookup(keys), lambda: table.find(keys), lambda: table.insert(keys), lambda: table.erase(keys),
            lambda: table.lookup_rows(keys), lambda: table.assign(keys, np.zeros((1, 2), dtype=F32)),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ShapeError) as error:
                call()
            assert all(word in str(error.value) for word in [*words, "users"])
        assert len(table) == 0


def test_i11_bad_rows_and_outputs_are_named_and_change_nothing() -> None:
    frozen = np.zeros((2, 3), dtype=F32)
    frozen.flags.writeable = False
    good = np.zeros((2, 3), dtype=F32)
    with EmbTable("users", 3, state_dim=1) as table:
        for out, word in (
            (np.zeros((2, 3)), "float64"), (np.zeros((2, 4), dtype=F32), "(2, 4)"), (np.zeros((3, 3), dtype=F32), "(3, 3)"),
            (np.zeros((3, 2), dtype=F32).T, "contiguous"), (frozen, "read-only"), ([[0] * 3] * 2, "list"),
        ):  # fmt: skip
            with pytest.raises(ShapeError, match="users") as error:
                table.lookup([1, 2], out=out)  # type: ignore[arg-type]
            assert word in str(error.value)
        for weights, state, word in (
            (np.zeros((2, 3)), None, "float64"), (np.zeros((2, 3), dtype=np.int32), None, "int32"),
            (np.zeros((1, 3), dtype=F32), None, "(1, 3)"), (np.zeros(6, dtype=F32), None, "(6,)"),
            (good, np.zeros((2, 2), dtype=F32), "(2, 2)"), (good, np.zeros((2, 1)), "float64"),
        ):  # fmt: skip
            with pytest.raises(ShapeError, match="users") as error:
                table.assign([1, 2], weights, state)
            assert word in str(error.value)
        assert len(table) == 0
        assert table.lookup([1, 2], out=good) is good


def test_weights_that_cast_safely_are_taken() -> None:
    with EmbTable("t", 2) as table:
        table.assign([1, 2, 3, 4], np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=np.float16))
        table.assign([2], np.array([[9, 9]], dtype=np.int8))
        table.assign([3, 4], ramp(4, 2)[::2])
        assert table.lookup([1, 2, 3, 4]).tolist() == [[1, 2], [9, 9], [0, 1], [4, 5]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": ""}, "name"), ({"name": 5}, "name"), ({"dim": 0}, "dim = 0"), ({"dim": 8193}, "8193"), ({"dim": 2.0}, "2.0"),
        ({"dim": True}, "True"), ({"state_dim": -1}, "-1"), ({"state_dim": 2**40}, "state_dim"), ({"dtype": "float64"}, "float64"),
        ({"directory": ""}, "directory"), ({"directory": 5}, "5"), ({"seed": 2**63}, "seed"), ({"seed": "x"}, "seed"),
        ({"num_threads": 0}, "num_threads"), ({"num_threads": 65}, "65"),
    ],
    ids=repr,
)  # fmt: skip
def test_i11_bad_construction_is_named(change: dict[str, object], word: str) -> None:
    arguments: dict[str, object] = {"name": "users", "dim": 4, **change}
    with pytest.raises(ConfigError) as error:
        EmbTable(arguments.pop("name"), arguments.pop("dim"), **arguments)  # type: ignore[arg-type]
    assert word in str(error.value) and isinstance(error.value, EmbCacheError)


# -------------------------------------------------------------------------------------------------------------- items


def test_items_gives_every_row_once_in_row_order() -> None:
    n = 5000
    keys = keys_from(3, n)
    with EmbTable("t", 3, state_dim=5) as table:
        weights, state = ramp(n, 3), ramp(n, 5, 0.5)
        table.assign(keys, weights, state)
        table.erase(keys[::7])
        left = {int(key): i for i, key in enumerate(keys) if i % 7}
        for batch_rows in (1000, 65536, len(left), 2**40):
            seen: list[int] = []
            for got_keys, got_weights, got_state, frequency, timestamp in table.items(batch_rows):
                assert len(got_keys) <= batch_rows and frequency is None and timestamp is None
                places = [left[int(key)] for key in got_keys]
                assert np.array_equal(got_weights, weights[places]) and np.array_equal(got_state, state[places])
                seen += got_keys.tolist()
            assert len(seen) == len(left) and set(seen) == set(left)
            rows = table.find(seen)
            assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("change", ["insert", "erase", "assign", "lookup"])
def test_items_refuses_a_table_that_changed(change: str) -> None:
    with EmbTable("t", 1) as table:
        table.insert(np.arange(10))
        walk = table.items(4)
        next(walk)
        table.find([3]), table.lookup([3]), table.insert([3]), table.erase([77])
        next(walk)
        {
            "insert": lambda: table.insert([100]),
            "erase": lambda: table.erase([5]),
            "assign": lambda: table.assign([5], np.ones((1, 1), dtype=F32)),
            "lookup": lambda: table.lookup([100]),
        }[change]()
        with pytest.raises(ChangedError, match="items"):
            next(walk)


def test_items_refuses_bad_batches() -> None:
    with EmbTable("t", 1) as table:
        for bad in (0, -1, 1.5, True, "3"):
            with pytest.raises(ConfigError, match="batch_rows"):
                table.items(bad)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- closing


def test_closed_tables_refuse_everything() -> None:
    table = EmbTable("users", 2)
    table.insert([1])
    walk = table.items()
    table.close()
    table.close()
    assert table.closed and "closed" in repr(table)
    calls: list[Callable[[], object]] = [
        lambda: table.lookup([1]), lambda: table.lookup([]), lambda: table.find([1]), lambda: table.insert([1]),
        lambda: table.assign([1], np.zeros((1, 2), dtype=F32)), lambda: table.lookup_rows([1]), lambda: table.erase([1]),
        lambda: next(walk), lambda: next(table.items()), lambda: len(table), lambda: 1 in table, table.stats, table.check, table.flush,
        table.__enter__, lambda: table.core.columns(np.zeros(1, dtype=np.int64)), lambda: table.core.scan(0, 1),
        lambda: table.core.init_rows(np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=F32)),
        lambda: table.core.read_into(np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=F32)),
        lambda: table.core.write_from(np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=F32)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError, match="users"):
            call()


def test_case_65_results_outlive_the_table() -> None:
    table = EmbTable("t", 4, state_dim=1, initializer=Constant(0.25))
    results = [table.lookup(np.arange(100)), *table.lookup_rows(np.arange(100))]
    results += [*next(iter(table.items()))[:3], table.find(np.arange(100))]
    assert all(array.base is None or array.base.flags.owndata for array in results)
    table.close()
    del table
    gc.collect()
    assert (results[0] == 0.25).all()


def test_case_60_memory_does_not_rise_over_lives() -> None:
    def held() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    def live() -> None:
        with EmbTable("t", 64, state_dim=64) as table:
            table.insert(np.arange(50_000))

    live()
    before = held()
    for _ in range(10):
        live()
    assert held() - before < 16 * 2**20


# -------------------------------------------------------------------------------------------------------------- memory


def test_stats_account_for_every_byte() -> None:
    for dim, state_dim, padding in ((16, 0, 0), (16, 1, 0), (16, 16, 0), (5, 0, 12), (3, 2, 4), (20, 3, 36), (1, 0, 0)):
        with EmbTable("t", dim, state_dim=state_dim) as table:
            assert table.stats()["rows"] == 0 and table.stats()["overhead_bytes_per_row"] == 0.0
            table.insert(np.arange(20_000))
            stats = table.stats()
            assert stats["rows"] == 20_000
            assert stats["row_bytes"] == 20_000 * 4 * (dim + state_dim)
            assert stats["padding_bytes"] == 20_000 * padding
            assert stats["column_bytes"] == 20_000 * 9
            parts = ("row", "padding", "column", "index", "slack", "other", "reserved")
            assert sum(stats[f"{part}_bytes"] for part in parts) == stats["bytes"]
            assert min(stats[f"{part}_bytes"] for part in parts) >= 0
            table.erase(np.arange(5_000))
            assert table.stats()["free_rows"] == 5_000


def test_case_59_hundreds_of_small_tables_cost_little() -> None:
    tables = [EmbTable(f"t{i}", 16, state_dim=16) for i in range(500)]
    for table in tables:
        table.insert(np.arange(10))
    assert sum(table.stats()["bytes"] for table in tables) < 500 * 300 * 1024
    for table in tables:
        table.close()


@pytest.mark.parametrize(("dim", "rows"), [(16, 1_000_000), (64, 400_000), (256, 100_000)])
def test_overhead_per_row_is_small_at_every_moment_of_growth(dim: int, rows: int) -> None:
    with EmbTable("t", dim) as table:
        for start in range(0, rows, 8192):
            table.insert(np.arange(start, start + 8192))
            assert start < 1 << 16 or table.stats()["overhead_bytes_per_row"] <= 48


GROWN = """
import numpy as np
from embcache.table import EmbTable

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

with EmbTable("t", 64) as table:
    table.insert([1])
    keys = np.arange(300_000)
    before = resident()
    for start in range(0, len(keys), 4096):
        table.insert(keys[start:start + 4096])
    stats = table.stats()
    print(stats["bytes"] - stats["reserved_bytes"], resident() - before)
"""


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer's own memory is in the figure")
def test_stats_say_what_memory_a_table_takes() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, timeout=120, check=True)
    said, taken = map(int, done.stdout.split())
    assert abs(said - taken) <= 0.06 * taken


def test_row_indexes_do_not_move_while_the_table_grows() -> None:
    table = Table("t", 2, split_above=64)
    first = table.insert(np.arange(100))
    table.assign(np.arange(100), ramp(100, 2))
    for seed in range(20):
        table.insert(keys_from(seed, 1000))
    assert table.stats()["partitions"] == 256
    assert np.array_equal(table.find(np.arange(100)), first)
    out = np.empty((100, 2), dtype=F32)
    table.lookup(np.arange(100), out, False)
    assert np.array_equal(out, ramp(100, 2))
    table.check()


@pytest.mark.parametrize("split_above", [50, 65536])
def test_i4_rows_do_not_depend_on_threads_or_bucket_seed(split_above: int) -> None:
    def life(threads: int, index_seed: int) -> list[np.ndarray]:
        table = Table("t", 3, num_threads=threads, split_above=split_above, index_seed=index_seed)
        trace = []
        rng = np.random.default_rng(5)
        for step in range(12):
            batch = rng.integers(-20_000, 20_000, rng.choice([100, 9_000, 30_000]))
            trace.append(table.insert(batch))
            table.assign(batch[::3].copy(), rng.random((len(batch[::3]), 3), dtype=F32))
            table.erase(rng.integers(-20_000, 20_000, 5_000 if step % 3 else 20))
            out = np.empty((len(batch), 3), dtype=F32)
            table.lookup(batch, out, bool(step % 2))
            trace.append(out)
            trace.append(table.scan(0, 10**6)[0])
        table.check()
        return trace

    reference = life(1, 1)
    for threads, index_seed in ((2, 1), (4, 77), (4, None)):
        assert all(np.array_equal(a, b) for a, b in zip(reference, life(threads, index_seed), strict=True))


def in_memory() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_coming_memory_is_had_ahead_and_nothing_else_changes() -> None:
    table = Table("t", 1024, num_threads=1)
    count = 0
    while table.stats()["reserved_bytes"] < 7 << 20:  # until it is in a new segment, which is mapped whole
        table.insert(np.arange(count, count + 1024))
        count += 1024
    rows = table.lookup_rows(np.arange(count))[0]
    stats, version, before = table.stats(), table.version, in_memory()
    coming = table.coming_memory(8, 1500)  # of 4 KiB
    calls = 1
    while coming.ready():
        calls += 1
    assert calls == 3
    assert in_memory() - before > 3 << 20
    assert (
        not coming.ready() and not table.coming_memory(1 << 40, 5).ready() and not table.coming_memory(-1, -1).ready()
    )
    assert (table.stats(), table.version) == (stats, version)
    assert np.array_equal(table.lookup_rows(np.arange(count))[0], rows)
    table.insert(np.arange(count + 3000))
    assert np.array_equal(table.lookup_rows(np.arange(count))[0], rows)
    table.check()
    table.close()
    assert not coming.ready()


def test_no_page_of_a_file_is_had_ahead(tmp_path: Path) -> None:
    table = Table("t", 1024, directory=tmp_path / "t")
    table.insert(np.arange(1000))
    assert table.stats()["reserved_bytes"] and not table.coming_memory(0, 1000).ready()
    table.close()


@pytest.mark.parametrize(("split_above", "at_a_time", "threads"), [(3000, 1000, 1), (1 << 20, 20_000, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_assigning_new_keys_alone_is_inserting_and_then_writing(
    split_above: int, at_a_time: int, threads: int, dtype: str
) -> None:
    """Keys that are all new take another way (ec_insert_fill), as those of a restore do."""

    def table() -> Table:
        one = Table(
            "t",
            5,
            state_dim=7,
            dtype=dtype,
            with_filter=True,
            num_threads=threads,
            split_above=split_above,
            index_seed=1,
        )
        one.insert(np.arange(500))
        one.write_columns(one.find(np.arange(300)), np.full(300, 9), np.full(300, 9))
        one.mark_saved()
        one.erase(np.arange(200, 500))  # the first new rows will lie where these did, the last of all among them
        return one

    keys, at_once, in_two = keys_from(3, 20_000), table(), table()
    weights, state = ramp(20_000, 5), ramp(20_000, 7)
    for begin in range(0, len(keys), at_a_time):
        some = slice(begin, begin + at_a_time)
        at_once.assign(keys[some], weights[some], state[some])
        in_two.insert(keys[some])
        in_two.assign(keys[some], weights[some], state[some])
    for one in at_once, in_two:
        one.check()
    rows = at_once.find(keys)
    assert np.array_equal(rows, in_two.find(keys)) and len(at_once) == 20_200
    for mine, other in zip(at_once.lookup_rows(keys), in_two.lookup_rows(keys), strict=True):
        assert np.array_equal(mine, other)
    assert all(map(np.array_equal, at_once.columns(rows), in_two.columns(rows)))
    assert not at_once.columns(rows)[1].any() and (at_once.columns(rows)[2] == INT64_MIN).all()
    assert at_once.changed() == in_two.changed() == 20_000
    if split_above < len(keys):
        return  # who splits a partition between inserts gives other rows after their undoing
    at_once.unborn(keys)
    in_two.unborn(keys)
    assert np.array_equal(at_once.insert(keys), in_two.insert(keys))


def test_insert_born_marks_first_places_only() -> None:
    table = Table("t", 1)
    table.insert(np.array([5]))
    rows, born = table.insert_born(np.array([7, 5, 7, 8, 5, 8, 9]))
    assert born.tolist() == [1, 0, 0, 1, 0, 0, 1]
    assert rows[0] == rows[2] and rows[3] == rows[5] and rows[1] == rows[4] and len(set(rows.tolist())) == 4


def test_case_69_a_growing_table_never_stops_for_long_per_insert() -> None:
    """The work of one call follows the call: no call moves more index entries than a few times the largest partition."""
    table = Table("t", 1, split_above=500)
    keys = keys_from(1, 60_000)
    for start in range(0, len(keys), 500):
        table.insert(keys[start : start + 500])
    check = table.check()
    assert check["partitions"] >= 128 and check["longest_probe"] < 40


@pytest.mark.parametrize("split_above", [430_080, 300])
def test_look_ups_find_the_same_whether_the_index_is_taken_to_be_far_or_near(split_above: int) -> None:
    near, far = (Table("t", 2, split_above=split_above, far_above=above, index_seed=3) for above in (1 << 26, 0))
    rng = np.random.default_rng(5)
    stored = rng.choice(np.arange(-30_000, 30_000), 20_000, replace=False)
    for table in (near, far):
        for begin in range(0, len(stored), 1000):
            table.insert(stored[begin : begin + 1000])
        table.erase(stored[:3000])
    for count in (*range(1, 200), 20_000):
        keys = rng.integers(-31_000, 31_000, count)
        assert near.find(keys).tolist() == far.find(keys).tolist()
    assert (far.find(stored) >= 0).sum() == len(far)


@pytest.mark.parametrize("split_above", [40, 65536])
def test_detached_keys_keep_their_room(split_above: int) -> None:
    """Attaching cannot fail: the indexes keep room for limbo keys through growth and splits."""
    table = Table("t", 1, split_above=split_above, index_seed=3)
    keys = np.arange(200, dtype=np.int64)
    table.insert(keys)
    rows = table.detach(keys)
    for key in range(1000, 2000):
        table.insert(np.array([key]))
        table.check()
    table.attach(keys[:150], rows[:150])
    table.check()
    table.free(keys[150:], rows[150:])
    table.check()
    assert np.array_equal(table.find(keys[:150]), rows[:150]) and (table.find(keys[150:]) == -1).all()
    again = set(table.insert(keys[150:]))
    assert again <= set(rows[150:]) or split_above == 40  # a split shares the free rows out
    for call in (table.attach, table.free):
        with pytest.raises(ShapeError, match="not the detached row"):
            call(keys[:1], rows[:1])
    with pytest.raises(ShapeError, match="unborn"):
        table.unborn(np.array([77_777]))


# ------------------------------------------------------------------------------------------------- buffers of the cache


def test_read_into_and_write_from_move_rows_and_state() -> None:
    n, height = 20_000, 25_000
    keys = keys_from(9, n)
    for dim, widths in ((4, ()), (4, (4,)), (4, (4, 4)), (8, (1,)), (3, (1, 1)), (20, (20, 1, 2))):
        state_dim = sum(widths)
        table = Table("t", dim, state_dim=state_dim, num_threads=3)
        rows = table.insert(keys)
        places = np.random.default_rng(1).permutation(height)[:n]
        weights = np.random.default_rng(2).random((height, dim), dtype=F32)
        states = [np.random.default_rng(3 + i).random((height, width), dtype=F32) for i, width in enumerate(widths)]
        table.write_from(
            rows, weights, places, [state[:, 0].copy() if state.shape[1] == 1 else state for state in states]
        )
        got, state = table.lookup_rows(keys)
        assert np.array_equal(got, weights[places])
        if widths:
            assert np.array_equal(state, np.concatenate([part[places] for part in states], axis=1))
        back = np.zeros_like(weights)
        backs = [np.zeros_like(part) for part in states]
        table.read_into(rows, back, places, backs)
        expected = np.zeros_like(weights)
        expected[places] = weights[places]
        assert np.array_equal(back, expected)
        assert all(np.array_equal(part[places], whole[places]) for part, whole in zip(backs, states, strict=True))
        holes = rows.copy()
        holes[::2] = -1
        back[:] = 0
        table.read_into(holes, back, None, backs)
        assert not back[:n:2].any() and np.array_equal(back[1:n:2], weights[places][1::2])


def test_write_from_repeated_rows_the_last_wins() -> None:
    n = 30_000
    for threads in (1, 4):
        table = Table("t", 2, num_threads=threads)
        rows = table.insert(np.arange(1000))
        picks = np.random.default_rng(0).integers(0, 1000, n)
        weights = ramp(n, 2)
        table.write_from(rows[picks], weights)
        expected = np.zeros((1000, 2), dtype=F32)
        expected[picks] = weights
        got = table.lookup_rows(np.arange(1000))[0]
        touched = np.unique(picks)
        assert np.array_equal(got[touched], expected[touched])


def test_init_rows_neither_inserts_nor_reads() -> None:
    table = Table("t", 4)
    out = np.empty((3, 4), dtype=F32)
    table.init_rows(EXTREMES[:3], out)
    assert len(table) == 0
    fresh = np.empty((3, 4), dtype=F32)
    table.lookup(EXTREMES[:3], fresh)
    assert np.array_equal(out, fresh)
    table.assign(EXTREMES[:3], np.ones((3, 4), dtype=F32))
    table.init_rows(EXTREMES[:3], out)
    assert np.array_equal(out, fresh)


def test_initial_state_fills_new_rows() -> None:
    for state in ([0.1], [0.1, 0.2], [0.1, 0.2, 0.3]):
        table = Table("t", 4, state_dim=len(state), initial_state=np.array(state, dtype=F32))
        assert np.array_equal(table.lookup_rows(np.array([1]))[1], np.array([state], dtype=F32))
        table.insert(np.array([1]))
        assert np.array_equal(table.lookup_rows(np.array([1]))[1], np.array([state], dtype=F32))


def test_i11_bad_buffers_are_named() -> None:
    table = Table("users", 4, state_dim=4)
    rows = table.insert(np.arange(3))
    weights, state = np.zeros((5, 4), dtype=F32), np.zeros((5, 4), dtype=F32)
    frozen = state.copy()
    frozen.flags.writeable = False
    cases: list[tuple[tuple[object, ...], str]] = [
        ((rows, np.zeros((5, 3), dtype=F32)), "(5, 3)"),
        ((rows, weights[:2]), "3 rows for 2"),
        ((rows, weights, np.array([0, 1])), "2 places"),
        ((rows, weights, np.array([0, 1, 5])), "place 5"),
        ((rows, weights, np.array([0, 1, -1])), "place -1"),
        ((rows, weights, None, [state[:3]]), "3 rows"),
        ((rows, weights, None, [np.zeros((5, 3), dtype=F32)]), "state_dim = 4"),
        ((rows, weights, None, [np.zeros((5, 0), dtype=F32)] * 9), "9 state arrays"),
        ((np.array([0, 1, 10**6]), weights), "1000000"),
    ]
    for arguments, word in cases:
        for call in (table.read_into, table.write_from):
            with pytest.raises(ShapeError) as error:
                call(*arguments)  # type: ignore[arg-type]
            assert word in str(error.value)
    with pytest.raises(ShapeError, match="read-only"):
        table.read_into(rows, weights, None, [frozen])
    with pytest.raises(ShapeError):
        table.columns(np.array([-1]))
    with pytest.raises(ShapeError):
        table.scan(-1, 5)
    with pytest.raises(ConfigError, match="with_filter"):
        table.write_columns(rows, rows, rows)
    counted = Table("users", 1, with_filter=True)
    rows = counted.insert(np.arange(3))
    for arguments in ((rows, rows[:2], rows), (rows, rows, rows[:2]), (rows - 1, rows, rows), (rows + 100, rows, rows)):
        with pytest.raises(ShapeError, match="users"):
            counted.write_columns(*arguments)
    assert not counted.columns(rows)[1].any()


# ------------------------------------------------------------------------------------------------------------- failures

STARVED = """
import json, resource, sys
import numpy as np
from embcache._core.table import Table
from embcache.errors import HostMemoryError

threads = int(sys.argv[1])
table = Table("users", 16, state_dim=16, num_threads=threads, split_above=4_000, index_seed=1)
twin = Table("users", 16, state_dim=16, num_threads=threads, index_seed=1)  # one partition: splits are not undone
first = np.arange(30_000)
for one in (table, twin):
    one.insert(first)
    one.erase(first[::3].copy())
probe = np.arange(400_000)
failures = 0
before = (table.find(probe), table.stats()["rows"], table.version)
for margin in range(0, 96 * 2**20, 2**20):
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (held + margin, resource.RLIM_INFINITY))
    try:
        table.insert(np.arange(100_000, 350_000))
        failed = False
    except HostMemoryError as error:
        failed = True
        message = str(error)
    except MemoryError:
        failed = None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    table.check()
    if failed is False:
        break
    if failed:
        failures += 1
        assert "users" in message and "250000 keys" in message and "unchanged" in message, message
    after = (table.find(probe), table.stats()["rows"], table.version)
    assert np.array_equal(before[0], after[0]) and before[1:] == after[1:]
assert failed is False
table.erase(np.arange(100_000, 350_000))
starved = Table("users", 16, state_dim=16, num_threads=threads, index_seed=1)
starved.insert(first)
starved.erase(first[::3].copy())
with open("/proc/self/statm") as file:
    held = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (held + 16 * 2**20, resource.RLIM_INFINITY))
try:
    starved.insert(np.arange(100_000, 350_000))  # the index fits, the rows do not
    raise SystemExit("the limit did not bite")
except HostMemoryError:
    pass
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for batch in (np.arange(500_000, 503_000), np.arange(100_000, 350_000)):
    assert np.array_equal(starved.insert(batch), twin.insert(batch)), "a failed insert left a trace in the row indexes"
starved.check()
print(json.dumps({"failures": failures}))
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_i11_refused_memory_leaves_the_table_as_it_was(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(threads)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failures"] >= 10


def test_i11_more_than_the_machine_has_is_refused() -> None:
    with EmbTable("users", 8192, state_dim=32768) as table:
        with pytest.raises(HostMemoryError, match="users"):
            table.insert(np.arange(2_000_000))
        assert len(table) == 0
        table.check()
        assert table.insert([1]).tolist() == [0]
        assert isinstance(HostMemoryError("x"), MemoryError)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, embcache.table; assert not {'torch', 'pandas', 'lmdb', 'torchrec'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_calls_import_nothing() -> None:
    """What is imported late may meet a process without descriptors, after a part of the work is done."""
    code = (
        "import sys, numpy as np, embcache.table\n"
        "table, before = embcache.table.EmbTable('t', 4), set(sys.modules)\n"
        "keys, rows = np.arange(9), np.ones((9, 4), np.float32)\n"
        "table.assign(keys, rows); table.insert(keys + 5); table.find(keys); table.lookup(keys); table.erase(keys[:3])\n"
        "assert len(table) == 11 and set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_defaults_are_those_of_the_design() -> None:
    with EmbTable("t", 4) as table:
        assert table.initializer == Uniform(-0.05, 0.05)
        assert (table.dim, table.state_dim, table.seed, table.closed) == (4, 0, 0, False)
        assert "0 rows" in repr(table)
        table.flush()
    with EmbTable("t", 4, initializer=Zeros()) as table:
        assert not table.lookup([1]).any()
        assert "x" not in table and 1.0 not in table and True not in table and 2**63 not in table and 1 in table


# ------------------------------------------------------------------------------------------------------ odd arguments


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_i11_a_table_is_not_copied_or_pickled(make_copy: Callable[[object], object]) -> None:
    with EmbTable("t", 2) as table:
        with pytest.raises(ConfigError, match=r"host memory of this process; make a new one.*items\(\) and assign"):
            make_copy(table)
        assert len(table) == 0


def test_i11_a_table_that_was_never_constructed_says_so() -> None:
    table = EmbTable.__new__(EmbTable)
    for use in (
        lambda: table.lookup([1]),
        lambda: table.assign([1], [[1.0]]),
        lambda: table.items(),
        lambda: len(table),
        lambda: 1 in table,
        lambda: table.close(),
        lambda: table.name,
        lambda: repr(table),
    ):
        with pytest.raises(ClosedError, match="never constructed; make one"):
            use()
    with EmbTable("t", 2) as whole, pytest.raises(AttributeError, match="'EmbTable' object has no attribute 'nothing'"):
        whole.nothing  # noqa: B018


def unaligned(array: np.ndarray) -> np.ndarray:
    """The content of `array` one byte off its alignment, as a field of a packed record lies."""
    moved = np.empty(array.nbytes + 1, dtype=np.uint8)[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert moved.flags.c_contiguous and not moved.flags.aligned
    return moved


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unaligned_input_is_copied_and_unaligned_output_refused_as_that(dtype: str) -> None:
    keys, rows, state = np.array([5, -6]), np.arange(4, dtype=F32).reshape(2, 2), np.full((2, 1), 7, dtype=F32)
    with EmbTable("t", 2, state_dim=1, dtype=dtype) as table:
        table.assign(unaligned(keys), unaligned(rows), unaligned(state))
        assert table.find(unaligned(keys)).tolist() == table.insert(unaligned(keys)).tolist() == [0, 1]
        assert table.find(unaligned(keys.astype(np.int32))).tolist() == [0, 1]
        assert table.lookup(unaligned(keys)).tolist() == rows.tolist()
        table.assign(unaligned(keys), unaligned(rows.astype(np.float16)))
        weights, states = table.lookup_rows(unaligned(keys))
        assert weights.tolist() == rows.tolist() and states.tolist() == [[0], [0]]
        for use in (
            lambda: table.lookup(keys, out=unaligned(rows)),
            lambda: table.find(keys, out=unaligned(keys)),
            lambda: table.insert(keys + 9, out=unaligned(keys)),
            lambda: table.lookup_rows(keys, out=(rows, unaligned(state))),
        ):
            with pytest.raises(ShapeError, match=r"table 't': out.* is not aligned .*give an aligned array"):
                use()
        assert len(table) == 2 and table.erase(unaligned(keys)) == 2


def test_i11_masked_arrays_are_refused() -> None:
    keys, rows = np.array([1, 2]), np.zeros((2, 2), dtype=F32)
    with EmbTable("t", 2, state_dim=2) as table:
        for use in (
            lambda: table.lookup(np.ma.masked_array(keys, mask=[0, 1])),
            lambda: table.find(np.ma.masked_array(keys)),
            lambda: table.lookup(keys, np.ma.masked_array(rows)),
            lambda: table.assign(keys, np.ma.masked_array(rows, mask=True)),
            lambda: table.assign(keys, rows, np.ma.masked_array(rows, mask=True)),
        ):
            with pytest.raises(ShapeError, match="is a masked array; give a plain one"):
                use()
        assert len(table) == 0


def test_i11_what_numpy_cannot_make_an_array_of_is_refused() -> None:
    class Odd:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise RuntimeError("no data here")

    with EmbTable("t", 2) as table:
        for weights in ([[1.0, 2.0], [3.0]], Odd()):
            with pytest.raises(ShapeError, match="weights is not an array of numbers"):
                table.assign([1, 2], weights)  # type: ignore[arg-type]
        for keys in ([1, [2, 3]], Odd(), [10**5000]):
            with pytest.raises(ShapeError, match="key"):
                table.find(keys)  # type: ignore[arg-type]
        assert len(table) == 0
    with pytest.raises(ConfigError, match="too long to print"):
        EmbTable("t", 10**5000)
