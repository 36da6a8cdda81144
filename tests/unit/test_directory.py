"""File-backed tables: what comes back at the next open, what is refused, and what a full disk leaves."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embcache as ec
from embcache._core.table import Table
from embcache.errors import (
    ConfigError,
    CorruptionError,
    FormatVersionError,
    LockedError,
    StorageError,
    UncleanDirectoryError,
)
from embcache.table import EmbTable

F32 = np.float32


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "lock"}


def everything(table: EmbTable) -> dict[int, tuple[int, bytes, bytes]]:
    found: dict[int, tuple[int, bytes, bytes]] = {}
    for keys, weights, state, _, _ in table.items():
        for key, row, w, s in zip(keys.tolist(), table.find(keys).tolist(), weights, state, strict=True):
            found[key] = (row, w.tobytes(), s.tobytes())
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def closed(place: Path) -> Path:
    """The directory of a small table, clean."""
    with EmbTable("t", 4, state_dim=4, directory=place) as table:
        table.assign(np.arange(500), np.full((500, 4), 7, dtype=F32))
    return place


# -------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize(("dim", "state_dim"), [(1, 0), (7, 1), (16, 2), (5, 16)])
def test_a_closed_table_comes_back_and_goes_on_like_one_in_memory(place: Path, dim: int, state_dim: int) -> None:
    """Keys, row indexes, values, free lists: every later call has the same result as on a table that never closed."""
    twin = EmbTable("t", dim, state_dim=state_dim)
    for part in range(4):
        keys = keys_from(part, 40_000)
        weights = np.random.default_rng(part).random((len(keys), dim), dtype=F32)
        with EmbTable("t", dim, state_dim=state_dim, directory=place) as table:
            assert everything(table) == everything(twin)
            for each in (table, twin):
                each.assign(keys, weights)
                each.erase(keys[::3])
                each.erase(keys_from(max(part - 1, 0), 40_000)[1::3])
                each.insert(keys[:500])
            table.check()
            assert np.array_equal(table.find(keys), twin.find(keys))
            assert table.stats()["partitions"] == twin.stats()["partitions"]
    with EmbTable("t", dim, state_dim=state_dim, directory=place) as table:
        table.check()
        assert everything(table) == everything(twin)


def test_new_rows_do_not_depend_on_the_directory(place: Path) -> None:
    with EmbTable("t", 8, directory=place) as table, EmbTable("t", 8) as memory:
        assert np.array_equal(table.lookup([1, 2, 3]), memory.lookup([1, 2, 3]))


def test_the_hash_seed_and_splits_come_back(place: Path) -> None:
    table = Table("t", 2, split_above=64, directory=place)
    table.insert(np.arange(5000))
    table.insert(np.arange(5001))  # what has grown too large is split by the next call
    partitions = table.stats()["partitions"]
    table.close()
    table = Table("t", 2, split_above=64, directory=place)
    assert table.stats()["partitions"] == partitions > 8
    table.check()
    table.close()


def test_counters_of_a_table_with_a_filter_come_back_and_an_emb_table_takes_them_over(place: Path) -> None:
    keys = np.arange(100)
    table = Table("t", 4, with_filter=True, initial_state=np.full(3, 0.5, F32), state_dim=3, directory=place)
    rows = table.insert(keys)
    table.write_columns(rows, keys * 2, keys * 3)
    table.close()
    with EmbTable("t", 4, state_dim=3, directory=place) as opened:
        (found, _, state, frequency, timestamp), *_ = opened.items()
        assert frequency is not None and timestamp is not None
        assert np.array_equal(frequency, found * 2) and np.array_equal(timestamp, found * 3)
        assert (state == 0.5).all()
        opened.insert([1000])
        assert (opened.lookup_rows([1000])[1] == 0.5).all()


def test_rows_of_a_planner_that_is_gone_are_settled_at_the_next_open(place: Path) -> None:
    """Detached rows are free again, and the table is whole."""
    table = Table("t", 4, directory=place)
    keys = np.arange(3000)
    table.insert(keys)
    gone = table.detach(keys[100:200].copy())
    table.flush()
    del table
    table = Table("t", 4, directory=place)
    table.check()
    assert table.stats()["limbo_rows"] == 0 and table.stats()["free_rows"] == 100 and len(table) == 2900
    assert set(table.insert(np.arange(10_000, 10_100)).tolist()) == set(gone.tolist())
    table.check()
    table.close()


def test_the_planners_bytes_come_back(place: Path) -> None:
    table = Table("t", 4, directory=place)
    assert table.filter_state == b""
    table.insert(np.arange(10))
    table.flush(b"counters")
    table.flush(b"counters")
    assert table.directory is not None and table.directory.clean
    table.insert(np.arange(20))
    table.close()
    table = Table("t", 4, directory=place)
    assert table.filter_state == b"counters"
    table.flush(b"")  # nothing else has changed
    table.close()
    table = Table("t", 4, directory=place)
    assert table.filter_state == b""
    table.close()
    (place / "filter").write_bytes(b"")
    Table("t", 4, directory=place).close()


def test_disk_use_stays_bounded_while_keys_churn(place: Path) -> None:
    """Index arrays that were outgrown are used again."""
    with EmbTable("t", 4, directory=place) as table:
        for part in range(30):
            keys = keys_from(part, 20_000)
            table.insert(keys)
            table.erase(keys)
        table.insert(keys_from(99, 20_000))
        stats = table.stats()
        assert os.path.getsize(place / "data") <= 3 * (20_000 * 64 + stats["index_bytes"])
        held = (place / "data").stat().st_blocks * 512
        assert held >= os.path.getsize(place / "data")  # no holes


def test_stats_show_files_apart(place: Path) -> None:
    with EmbTable("t", 16, directory=place) as table, EmbTable("t", 16) as memory:
        for each in (table, memory):
            each.insert(np.arange(50_000))
        stats, in_memory = table.stats(), memory.stats()
        assert stats["file_bytes"] >= stats["row_bytes"] + stats["index_bytes"]
        assert stats["bytes"] == stats["other_bytes"] < 100_000
        assert in_memory["file_bytes"] == 0 and in_memory["bytes"] > in_memory["row_bytes"]


# ------------------------------------------------------------------------------------------------- clean and unclean


def test_clean_until_the_first_store_and_again_after_a_flush(place: Path) -> None:
    table = EmbTable("t", 4, directory=place)
    directory = table.core.directory
    assert directory is not None and directory.clean  # nothing was stored yet
    table.find([1])
    table.lookup([1], insert=False)
    assert directory.clean
    for change in (
        lambda: table.insert([1]),
        lambda: table.lookup([2]),
        lambda: table.erase([2]),
        lambda: table.insert([]),
    ):
        change()
        assert not directory.clean
        table.flush()
        assert directory.clean
    table.flush()
    table.close()


def test_a_table_that_was_dropped_without_close_is_closed(place: Path) -> None:
    table = EmbTable("t", 4, directory=place)
    table.assign([5], np.full((1, 4), 3, dtype=F32))
    del table
    with EmbTable("t", 4, directory=place) as again:
        assert again.lookup([5], insert=False).tolist() == [[3, 3, 3, 3]]


def test_an_unclean_directory_is_refused_and_names_the_checkpoint(place: Path) -> None:
    table = Table("t", 4, directory=place)
    table.insert(np.arange(10))
    assert table.directory is not None
    table.directory.note_checkpoint("/backup/ctr, generation 12")
    del table  # the core alone never marks anything clean
    before = content(place)
    for _ in range(2):
        with pytest.raises(
            UncleanDirectoryError, match=r"delete it and restore the last checkpoint \(/backup/ctr, generation 12\)"
        ) as error:
            EmbTable("t", 4, directory=place)
        assert error.value.directory == str(place) and error.value.checkpoint == "/backup/ctr, generation 12"
        again = pickle.loads(pickle.dumps(error.value))
        assert (again.directory, again.checkpoint) == (error.value.directory, error.value.checkpoint)
    assert content(place) == before


def test_every_flipped_bit_of_the_header_is_noticed(closed: Path) -> None:
    header = (closed / "header").read_bytes()
    for at in range(len(header)):
        for bit in (1, 128):
            damaged = bytearray(header)
            damaged[at] ^= bit
            (closed / "header").write_bytes(damaged)
            with pytest.raises((CorruptionError, FormatVersionError)):
                EmbTable("t", 4, state_dim=4, directory=closed)
    (closed / "header").write_bytes(header)
    EmbTable("t", 4, state_dim=4, directory=closed).close()


def test_every_flipped_bit_of_the_metadata_is_noticed(closed: Path) -> None:
    metadata = (closed / "metadata").read_bytes()
    for at in range(0, len(metadata), 7):
        damaged = bytearray(metadata)
        damaged[at] ^= 1 << at % 8
        (closed / "metadata").write_bytes(damaged)
        with pytest.raises(CorruptionError, match="digest"):
            EmbTable("t", 4, state_dim=4, directory=closed)
    (closed / "metadata").write_bytes(metadata)
    EmbTable("t", 4, state_dim=4, directory=closed).close()


def damage(directory: Path, what: str) -> None:
    name, how = what.split()
    path = directory / name
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "long":
        with path.open("ab") as file:
            file.write(b"x")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "link":
        path.rename(directory.parent / name)
        path.symlink_to(directory.parent / name)
    elif how == "fifo":
        path.unlink()
        os.mkfifo(path)


HOWS = ("missing", "empty", "short", "long", "folder", "link", "fifo")


@pytest.mark.parametrize("what", [f"{name} {how}" for name in ("header", "data", "metadata") for how in HOWS])
def test_missing_and_misshapen_files_are_refused_by_name(closed: Path, what: str) -> None:
    damage(closed, what)
    before = sorted((path.name, path.lstat().st_size, path.lstat().st_mode) for path in closed.iterdir())
    with pytest.raises((CorruptionError, ConfigError), match="rows"):
        EmbTable("t", 4, state_dim=4, directory=closed)
    assert before == sorted((path.name, path.lstat().st_size, path.lstat().st_mode) for path in closed.iterdir())


def test_a_newer_format_is_refused_as_that(closed: Path) -> None:
    raw = bytearray((closed / "header").read_bytes())
    raw[8] = 9
    (closed / "header").write_bytes(raw)
    with pytest.raises(FormatVersionError, match="format 9"):
        EmbTable("t", 4, state_dim=4, directory=closed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "u"}, "name = 't', not 'u'"), ({"dim": 5}, "dim = 4, not 5"), ({"state_dim": 0}, "state_dim = 4, not 0"),
        ({"seed": 1}, "seed = 0, not 1"), ({"initializer": ec.Zeros()}, "initializer = .*'zeros'"),
        ({"initializer": ec.Uniform(-0.05, 0.06)}, "initializer"), ({"name": "u", "dim": 8}, "name.*; dim"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_table_of_another_description_is_refused_by_field(closed: Path, change: dict[str, Any], words: str) -> None:
    before = content(closed)
    arguments = {"name": "t", "dim": 4, "state_dim": 4} | change
    with pytest.raises(ConfigError, match=words):
        EmbTable(arguments.pop("name"), arguments.pop("dim"), directory=closed, **arguments)
    assert content(closed) == before
    EmbTable("t", 4, state_dim=4, directory=closed).close()


def test_a_filter_and_an_initial_state_are_part_of_the_description(place: Path) -> None:
    Table("t", 4, state_dim=2, with_filter=True, initial_state=np.array([1, 2], F32), directory=place).close()
    with pytest.raises(ConfigError, match="with_filter = True, not False"):
        Table("t", 4, state_dim=2, with_filter=False, initial_state=np.array([1, 2], F32), directory=place)
    with pytest.raises(ConfigError, match="initial_state"):
        Table("t", 4, state_dim=2, with_filter=True, initial_state=np.array([1, 3], F32), directory=place)


# ----------------------------------------------------------------------------------------------------- who has it open


def test_one_object_at_a_time(place: Path) -> None:
    with EmbTable("t", 4, directory=place) as table:
        with pytest.raises(LockedError, match="open in this process") as error:
            EmbTable("t", 4, directory=place)
        assert error.value.pid == os.getpid() == pickle.loads(pickle.dumps(error.value)).pid
        with pytest.raises(LockedError):
            EmbTable("u", 8, directory=place)
        table.insert([1])
    EmbTable("t", 4, directory=place).close()


def test_a_failed_construction_gives_the_lock_back(closed: Path) -> None:
    with pytest.raises(ConfigError):
        EmbTable("u", 4, state_dim=4, directory=closed)
    with pytest.raises(ConfigError):
        EmbTable("t", 4, state_dim=4, num_threads=0, directory=closed)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        EmbTable("u", 4, state_dim=4, directory=closed)
    assert len(os.listdir("/proc/self/fd")) == before
    EmbTable("t", 4, state_dim=4, directory=closed).close()


def test_pickled_by_path_and_opened_when_the_other_is_closed(place: Path) -> None:
    table = EmbTable("t", 4, state_dim=2, seed=5, initializer=ec.Normal(0, 0.1), directory=place, num_threads=3)
    rows = table.lookup([1, 2, 3])
    packed = pickle.dumps(table)
    assert len(packed) < 1000
    with pytest.raises(LockedError):
        pickle.loads(packed)
    table.close()
    with pickle.loads(packed) as again:
        assert np.array_equal(again.lookup([1, 2, 3], insert=False), rows)
        assert (again.name, again.seed, again.directory, again.state_dim) == ("t", 5, str(place), 2)


def test_descriptors_and_mappings_go_with_the_table(place: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(str(place))

    before = held()
    for part in range(5):
        with EmbTable("t", 4, directory=place) as table:
            table.insert(keys_from(part, 100_000))
            assert held()[1] > 0
    assert held() == before


# ------------------------------------------------------------------------------------------------------ hostile places


def test_a_file_a_missing_parent_and_odd_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        tmp_path / "file", tmp_path / "file" / "below", tmp_path / "no" / "parent", tmp_path / "full", tmp_path / ("x" * 300),
        tmp_path / "dangling", tmp_path / "loop", "", "a\0b", 5, None.__class__,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="directory"):
            EmbTable("t", 4, directory=path)  # type: ignore[arg-type]
    assert (tmp_path / "file").read_text() == "mine" == (tmp_path / "full" / "letter.txt").read_text()
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "full", "loop"]


def test_a_relative_path_survives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = EmbTable("t", 4, directory="rows")
    monkeypatch.chdir("/")
    table.insert(np.arange(100_000))
    table.close()
    assert table.directory == str(tmp_path / "rows")
    with EmbTable("t", 4, directory=tmp_path / "rows") as again:
        assert len(again) == 100_000


def test_symbolic_links_and_odd_but_legal_names_work(tmp_path: Path) -> None:
    target = tmp_path / ("ä b\n" + "x" * 200)
    (tmp_path / "link").symlink_to(target)
    target.mkdir()
    with EmbTable("t\udcff\n", 4, directory=tmp_path / "link") as table:
        table.insert([1])
        with pytest.raises(LockedError):
            EmbTable("t\udcff\n", 4, directory=target)
    with EmbTable("t\udcff\n", 4, directory=os.fsencode(target)) as table:
        assert 1 in table


def test_a_copy_of_a_clean_directory_works_with_holes_or_without(closed: Path, tmp_path: Path) -> None:
    shutil.copytree(closed, tmp_path / "copy")
    (tmp_path / "sparse").mkdir()
    for path in closed.iterdir():
        subprocess.run(["cp", "--sparse=always", path, tmp_path / "sparse" / path.name], check=True)
    for copy in (tmp_path / "copy", tmp_path / "sparse", closed):
        with EmbTable("t", 4, state_dim=4, directory=copy) as table:
            data = (copy / "data").stat()
            assert data.st_blocks * 512 >= data.st_size
            table.check()
            assert (table.lookup(np.arange(500), insert=False) == 7).all()


def test_a_small_hole_in_a_copy_is_filled_though_the_file_has_blocks_enough(closed: Path) -> None:
    """File systems count blocks of their own: here as many beyond the file's end as the hole has."""
    data = closed / "data"
    size = data.stat().st_size
    subprocess.run(["fallocate", "--keep-size", "--offset", str(size), "--length", "65536", data], check=True)
    before = data.stat().st_blocks
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", str(size // 8192 * 4096), "--length", "4096", data], check=True
    )
    after = data.stat().st_blocks
    assert size <= after * 512 < before * 512
    EmbTable("t", 4, state_dim=4, directory=closed).close()
    assert data.stat().st_blocks == before


@pytest.mark.parametrize("flushed", [False, True], ids=["close", "flush and close"])
def test_a_table_whose_directory_was_deleted_can_be_closed(place: Path, flushed: bool) -> None:
    table = EmbTable("t", 4, directory=place)
    table.assign([5], np.ones((1, 4), dtype=F32))
    shutil.rmtree(place)
    if flushed:
        with pytest.raises(StorageError, match="deleted"):
            table.flush()
        with pytest.raises(StorageError, match="no longer changed"):
            table.insert([6])
        assert table.lookup([5], insert=False).tolist() == [[1, 1, 1, 1]]
    with pytest.raises(StorageError, match="deleted") as error:
        table.close()
    assert error.value.errno == errno.ENOENT
    assert table.closed
    table.close()
    EmbTable("t", 4, directory=place).close()


def test_a_dropped_table_whose_directory_was_deleted_warns(place: Path) -> None:
    table = EmbTable("t", 4, directory=place)
    table.assign([5], np.ones((1, 4), dtype=F32))
    shutil.rmtree(place)
    with pytest.warns(RuntimeWarning, match="table 't'.*deleted") as warned:
        del table
    assert len(warned) == 1 and "\n" not in str(warned[0].message)


def test_a_start_that_broke_off_leaves_a_directory_that_can_be_started_again(place: Path) -> None:
    place.mkdir()
    for name in ("data", "metadata", "filter", "header.new", "lock"):
        (place / name).write_bytes(b"" if name != "header.new" else b"half a hea")
    EmbTable("t", 4, directory=place).close()
    (place / "header").unlink()
    (place / "metadata").write_bytes(b"more than nothing")
    with pytest.raises(CorruptionError, match="header is missing"):
        EmbTable("t", 4, directory=place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied") as error:
        EmbTable("t", 4, directory=tmp_path / "rows")
    assert error.value.errno == errno.EACCES
