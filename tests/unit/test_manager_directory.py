"""Managers whose tables lie in files: what close and flush leave, and going on from it as if nothing had happened."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.errors import ConfigError, DiskFullError, LockedError, StorageError, UncleanDirectoryError
from promises.training import loss_of, outputs_of, rows_of

TABLES = ("item", "user")


def batches(first: int, count: int) -> Iterator[ec.JaggedFeatures]:
    """Two features, timestamps that rise, keys that come once, often, or after a long time."""
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        keys = np.concatenate([rng.integers(0, 400, 150), rng.integers(0, 10**6, 50), rng.zipf(1.3, 200) % 5000])
        lengths = torch.full((20,), 20)
        times = torch.from_numpy(np.sort(rng.integers(number * 10, number * 10 + 30, 400)))
        yield ec.JaggedFeatures(["item", "user"], torch.from_numpy(keys), lengths, timestamps=times)


def make(base: Path | None, hbm_rows: int = 300, **filters: Any) -> ec.EmbeddingBagCollection:
    rules: dict[str, Any] = {"admit_threshold": 2, "evict_threshold": 60, "evict_step_interval": 3} | filters
    tables = [
        ec.TableConfig(
            name,
            8,
            hbm_rows=hbm_rows,
            directory=None if base is None else base / name,
            admit_and_evict=ec.AdmitAndEvictConfig(**rules) if name == "item" else None,
        )
        for name in TABLES
    ]
    return ec.EmbeddingBagCollection(tables, optimizer=ec.RowWiseAdagrad(lr=0.1))


def train(collection: ec.EmbeddingBagCollection, first: int, count: int) -> list[bytes]:
    seen = []
    for batch in batches(first, count):
        outputs = outputs_of(collection(batch))
        seen += [out.detach().numpy().tobytes() for out in outputs]
        loss_of(outputs).backward()
    return seen


def state_of(collection: ec.EmbeddingBagCollection) -> Any:
    kept = collection.manager.planner.filter_state(0)
    filters = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in kept.items()}
    return [rows_of(collection.manager.table(name)) for name in TABLES], filters


@pytest.mark.parametrize(
    "rules", [{}, {"evict_keep_min": 150}, {"time_source": "step", "evict_threshold": 7}], ids=repr
)
def test_closing_and_opening_between_batches_changes_no_bit(tmp_path: Path, rules: dict[str, Any]) -> None:
    """Rows, optimizer state, counters, waiting keys, sweeps and their passes go on where they stopped."""
    whole = make(None, **rules)
    for part in range(6):
        collection = make(tmp_path, hbm_rows=300 + 50 * part, **rules)
        assert train(collection, 5 * part, 5) == train(whole, 5 * part, 5)
        assert state_of(collection) == state_of(whole)
        collection.manager.planner.check()
        collection.manager.close()
    assert whole.manager.stats()["evicted"] > 0


def test_a_flush_is_what_a_killed_process_leaves(tmp_path: Path) -> None:
    """Residents stay in HBM and train on there; the directories hold what the flush wrote."""
    whole = make(None)
    train(whole, 0, 6)
    pid = os.fork()
    if pid == 0:
        collection = make(tmp_path)
        train(collection, 0, 6)
        collection.manager.flush()
        collection.manager.flush()
        for table in collection.manager.host_tables:
            assert table.directory is not None
            if not table.directory.clean:
                os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    collection = make(tmp_path)
    assert state_of(collection) == state_of(whole)
    collection.manager.planner.check()
    assert train(collection, 6, 4) == train(whole, 6, 4)
    assert state_of(collection) == state_of(whole)
    collection.manager.close()


def test_a_manager_that_dies_without_close_leaves_directories_that_refuse(tmp_path: Path) -> None:
    collection = make(tmp_path)
    train(collection, 0, 2)
    collection.manager.flush()
    train(collection, 2, 2)
    del collection
    with pytest.raises(UncleanDirectoryError, match="restore the last checkpoint"):
        make(tmp_path)


def test_the_view_of_a_table_flushes_that_table(tmp_path: Path) -> None:
    collection = make(tmp_path)
    train(collection, 0, 2)
    item, user = (table.directory for table in collection.manager.host_tables)
    assert item is not None and user is not None
    collection.manager.table("item").flush()
    assert (item.clean, user.clean) == (True, False)
    collection.manager.close()


def test_close_with_plans_at_every_stage_leaves_what_has_trained(tmp_path: Path) -> None:
    """Unused plans are undone; rows on their way arrive."""
    for stage in ("planned", "swapped out", "swapped in", "finished"):
        base = tmp_path / stage
        base.mkdir()
        collection, whole = make(base), make(None)
        for each in (collection, whole):
            train(each, 0, 4)
        manager = collection.manager
        first, second = batches(4, 2)
        info = manager.plan(first)
        if stage != "planned":
            manager.swap_out(info)
            manager.plan(second)
        if stage in ("swapped in", "finished"):
            manager.swap_in(info)
        if stage == "finished":
            manager.finish(info)
        manager.close()
        again = make(base)
        again.manager.planner.check()
        trained = [rows_of(whole.manager.table(name)) for name in TABLES]
        for name, rows in zip(TABLES, trained, strict=True):
            found = rows_of(again.manager.table(name))
            assert {key: found[key][:2] for key in rows if key in found} == {
                key: row[:2] for key, row in rows.items() if key in found
            }
            assert stage != "planned" or found == rows
        again.manager.close()


def test_a_disk_that_is_full_at_close_leaves_a_manager_that_can_be_closed_again(tmp_path: Path) -> None:
    collection, whole = make(tmp_path), make(None)
    for each in (collection, whole):
        train(each, 0, 4)
    expected = state_of(whole)
    tables = collection.manager.host_tables
    for table in tables:
        assert table.directory is not None
        table.directory.fail_after(1, errno.ENOSPC)
    with pytest.raises(DiskFullError, match="'item'"):
        collection.manager.close()
    assert [table.closed for table in tables] == [False, False]
    collection.manager.close()
    collection.manager.close()
    again = make(tmp_path)
    assert state_of(again) == expected
    again.manager.close()


@pytest.mark.parametrize("broken", TABLES)
@pytest.mark.parametrize("how", ["sync failed", "sync fails", "deleted", "full"])
def test_one_bad_directory_keeps_no_other_table_open(tmp_path: Path, how: str, broken: str) -> None:
    """The other table is left clean, with what has trained; the error is said once, and a full disk can be tried again."""
    collection, whole = make(tmp_path), make(None)
    for each in (collection, whole):
        train(each, 0, 4)
    expected = rows_of(whole.manager.table("user" if broken == "item" else "item"))
    manager = collection.manager
    first, second = batches(4, 2)
    info = manager.plan(first)
    manager.swap_out(info)
    manager.plan(second)  # plans at two stages, which close ends
    at = TABLES.index(broken)
    bad, good = manager.host_tables[at], manager.host_tables[1 - at]
    assert bad.directory is not None
    if how == "deleted":
        shutil.rmtree(tmp_path / broken)
    elif how == "full":
        bad.directory.fail_after(1, errno.ENOSPC)
    else:
        for calls in range(50):  # up to the first sync
            bad.directory.fail_after(calls, errno.EIO)
            with pytest.raises(StorageError):
                bad.flush()
            if bad.directory.failed:
                break
            if how == "sync fails":
                bad.directory.fail_after(calls + 2, errno.EIO)
                break
        assert bad.directory.failed == (how == "sync failed")
    with pytest.raises(StorageError, match=f"'{broken}'"):
        manager.close()
    assert good.closed
    if how == "full":
        assert not bad.closed
    manager.close()
    assert good.closed and (bad.closed or how == "sync fails")
    manager.close()
    with ec.EmbTable(
        good.name, 8, state_dim=good.state_dim, initializer=ec.Uniform(-0.05, 0.05), directory=tmp_path / good.name
    ) as table:
        found = table.lookup_rows(list(expected))
        for key, weights in zip(expected, found[0], strict=True):
            if key in table:
                assert weights.tobytes() == np.asarray(expected[key][0]).tobytes()
        assert sum(key in table for key in expected) > len(expected) // 2


def test_a_manager_that_cannot_be_made_says_why_though_a_table_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(manager: Any) -> None:
        for table in manager.host_tables:
            table.insert(np.arange(5))
            table.directory.fail_after(0, errno.ENOSPC)
        raise RuntimeError("the first error")

    monkeypatch.setattr(ec.EmbCacheManager, "_recall_filters", refuse)
    with pytest.raises(RuntimeError, match="the first error"):
        ec.EmbCacheManager([ec.TableConfig("a", 8, directory=tmp_path / "a")])


def test_a_manager_that_cannot_be_made_lets_go_of_the_directories(tmp_path: Path) -> None:
    make(tmp_path).manager.close()
    with ec.EmbTable("other", 4, directory=tmp_path / "third"):
        tables = [
            ec.TableConfig("a", 8, directory=tmp_path / "first"),
            ec.TableConfig("other", 4, directory=tmp_path / "third"),
        ]
        with pytest.raises(LockedError):
            ec.EmbCacheManager(tables)
    shared = [
        ec.TableConfig("a", 8, directory=tmp_path / "first"),
        ec.TableConfig("b", 8, directory=tmp_path / "first"),
    ]
    with pytest.raises((LockedError, ConfigError)):
        ec.EmbCacheManager(shared)
    with pytest.raises(ConfigError, match="policy"):
        ec.EmbCacheManager(tables[:1], policy="none such")
    ec.EmbCacheManager(tables[:1]).close()
    with pytest.raises(ConfigError, match="state_dim = 8, not 16"):
        ec.EmbCacheManager(tables[:1], optimizer=ec.Adam())
    with pytest.raises(ConfigError, match="initial_state"):
        ec.EmbCacheManager(tables[:1], optimizer=ec.Adagrad(initial_accumulator_value=0.1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"admit_seed": 8}, "admit_seed = 7, not 8"),
        ({"admit_threshold": 300}, r"counter \(by admit_threshold\) = 1, not 2"),
        ({"sketch_bytes": 8192}, "sketch_bytes = 4096, not 8192"),
        ({"sketch_bytes": 0}, "sketch_bytes = 4096, not 0"),
        ({"time_source": "step"}, "time_source = 'timestamps', not 'step'"),
    ],
    ids=repr,
)
def test_a_filter_whose_counters_mean_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    rules = {"admit_threshold": 200, "sketch_bytes": 4096, "admit_seed": 7}
    collection = make(tmp_path, **rules)
    train(collection, 0, 2)
    collection.manager.close()
    with pytest.raises(ConfigError, match=f"'item'.*{words}"):
        make(tmp_path, **(rules | change))
    make(tmp_path, **(rules | {"admit_threshold": 100, "evict_threshold": 90})).manager.close()


def test_the_seed_of_a_filter_without_a_sketch_may_change(tmp_path: Path) -> None:
    make(tmp_path).manager.close()
    make(tmp_path, admit_seed=5, admit_threshold=300).manager.close()


def test_stats_show_the_files_of_each_table(tmp_path: Path) -> None:
    collection = make(tmp_path)
    train(collection, 0, 2)
    stats = collection.manager.stats()
    assert stats["file_bytes"] == sum(entry["file_bytes"] for entry in stats["tables"].values()) > 100_000
    assert stats["host_bytes"] < stats["file_bytes"]
    collection.manager.close()
    memory = make(None)
    assert memory.manager.stats()["file_bytes"] == 0


@pytest.mark.parametrize("directory", ["", 5, b"bytes", object()], ids=repr)
def test_a_directory_that_is_no_path_is_named(directory: Any) -> None:
    with pytest.raises(ConfigError, match="directory"):
        ec.TableConfig("t", 4, directory=directory)
