"""Reading beside a trainer that saves and prunes: what is pruned between two steps is no damage; and what is no damage is not passed over."""

from __future__ import annotations

import importlib
import logging
import os
import resource
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import embcache as ec
from embcache.checkpoint import Reader, generations, level, verify
from embcache.cli import main
from embcache.config import Constant
from embcache.errors import ConfigError, CorruptionError, FormatVersionError, StorageError
from embcache.table import EmbTable

KEYS = np.arange(4000)


def fresh() -> EmbTable:
    return EmbTable("t", 4, initializer=Constant(0.0))


def change(table: EmbTable, value: float) -> None:
    """All rows but for a full one get the value in a twentieth of them, so that a delta pays."""
    some = KEYS if value == 1 else KEYS[::20]
    table.assign(some, np.full((len(some), 4), value, np.float32))


def trained(path: Path) -> EmbTable:
    """Generations 1 (full), 2 and 3 (deltas)."""
    table = fresh()
    for value in (1, 2, 3):
        change(table, value)
        table.save(path, delta=True)
    assert [one.kind for one in generations(path)] == ["full", "delta", "delta"]
    return table


def newest_of(path: Path) -> float:
    """The value that the newest generation gave, read through a restore."""
    with fresh() as table:
        report = table.restore(path)
        assert report.skipped == [] and report.rows == {"t": len(KEYS)}
        return float(table.lookup(KEYS[:1])[0, 0])


STEPS: list[tuple[str, str]] = [
    ("embcache.checkpoint.reader.published", ""),
    ("embcache.checkpoint.reader.stamp_of", ""),
    ("embcache.checkpoint.verify.published", ""),
    ("embcache.checkpoint.verify.stamp_of", ""),
    ("embcache.checkpoint.generations.published", ""),
    ("embcache.checkpoint.generations.stamp_of", ""),
    ("embcache.checkpoint.generations.read_manifest", ""),
    ("embcache.checkpoint.level.read_manifest", ""),
    ("embcache.checkpoint.level.records_of", ""),
    ("embcache.checkpoint.level.CatalogueReader", ""),
    ("embcache.checkpoint.level.SegmentReader", ""),
    ("embcache.checkpoint.manifest.RankPart", "check_lengths"),
    ("embcache.checkpoint.segment.SegmentReader", "read_into"),
]


def between(monkeypatch: pytest.MonkeyPatch, at: int, action: Callable[[], object]) -> list[int]:
    """Before step `at` of whoever reads, somebody does `action`; the list's element counts the steps."""
    done = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            if done[0] >= 0:
                now, done[0] = done[0], -1
                if now == at:
                    action()
                done[0] = now + 1
            return call(*given, **named)

        return step

    for place, method in STEPS:
        module, name = place.rsplit(".", 1)
        owner = importlib.import_module(module)
        if method:
            owner, name = getattr(owner, name), method
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return done


def listed(path: Path) -> None:
    found = generations(path)
    assert [one.problem for one in found] == [None] * len(found)


def verified(path: Path) -> None:
    assert [one.what for one in verify(path) if one.severity == "damage"] == []


def read(path: Path) -> None:
    with Reader(path) as one:
        assert one.skipped == [] and sum(len(rows.keys) for rows in one.rows("t")) == len(KEYS)


@pytest.mark.parametrize("replaced", [False, True], ids=["pruned", "compacted"])
@pytest.mark.parametrize("look", [newest_of, read, listed, verified])
def test_a_pruning_between_any_two_steps_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object], replaced: bool
) -> None:
    """The trainer saves a full generation and prunes all others, or somebody compacts, before each step in turn."""
    for at in count():
        path = tmp_path / str(at)
        table = trained(path)

        def meanwhile(path: Path = path, table: EmbTable = table) -> None:
            if replaced:
                assert main(["compact", str(path), "--force"]) == 0
                return
            change(table, 4)
            table.save(path, keep=1)

        with monkeypatch.context() as patch:
            done = between(patch, at, meanwhile)
            value = look(path)
        if look is newest_of:
            assert value in ((3,) if replaced or done[0] <= at else (3, 4)), at
        table.close()
        if done[0] <= at:
            break
    assert at >= 10


def test_what_is_open_is_read_to_its_end_though_it_is_pruned(tmp_path: Path) -> None:
    table = trained(tmp_path)
    with Reader(tmp_path, check="catalogue") as one:
        table.save(tmp_path, keep=1)
        assert [info.generation for info in generations(tmp_path)] == [4]
        values = {float(rows.weights[0, 0]) for rows in one.rows("t")}
        assert one.generation == 3 and values == {1, 3}
        with pytest.raises(ConfigError, match="no generation 3; published there: 4"):
            Reader(tmp_path, 3)


def test_a_newer_generation_is_taken_where_all_others_were_damaged_or_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest is found damaged while it is filled in; meanwhile the trainer saves another one and prunes all before it."""
    table = trained(tmp_path)
    damage(tmp_path / "rank-0000" / "segment-0000000000000003-0000", 5000)
    real = level.Level.read

    def read(self: Any, *given: Any) -> Any:
        try:
            return real(self, *given)
        except CorruptionError:
            change(table, 4)
            table.save(tmp_path, keep=1)
            raise

    monkeypatch.setattr(level.Level, "read", read)
    with fresh() as other, caplog.at_level(logging.WARNING, "embcache"):
        report = other.restore(tmp_path)
        assert report.generation == 4 and other.lookup(KEYS[:1])[0, 0] == 4
    assert [number for number, _ in report.skipped] == [3]
    assert "generation 3 is damaged and was passed over: generation 3, table 't'" in caplog.text


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("at", [70, 5000], ids=["the header", "a chunk"])
def test_damage_that_a_restore_passes_over_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int) -> None:
    trained(tmp_path / "table")
    damage(tmp_path / "table" / "rank-0000" / "segment-0000000000000003-0000", at)
    with fresh() as table, caplog.at_level(logging.WARNING, "embcache"):
        report = table.restore(tmp_path / "table")
    ((number, reason),) = report.skipped
    assert (report.generation, number) == (2, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        f"{tmp_path / 'table'}: generation 3 is damaged and was passed over: {reason}",
    ]


def test_damage_that_the_restore_of_a_collection_passes_over_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bags = ec.EmbeddingBagCollection([ec.TableConfig("t", 4, ["f"])], optimizer=ec.SGD(lr=0.1))
    for _ in range(2):
        bags.save(tmp_path)
    damage(tmp_path / "rank-0000" / "segment-0000000000000002-0000", 5000)
    with caplog.at_level(logging.WARNING, "embcache"):
        report = bags.restore(tmp_path)
    assert report.generation == 1 and [number for number, _ in report.skipped] == [2]
    assert caplog.messages == [f"{tmp_path}: generation 2 is damaged and was passed over: {report.skipped[0][1]}"]


def make_newer(path: Path) -> None:
    """As a later version would have written it."""
    content = bytearray(path.read_bytes())
    content[8] = 2
    content[32:48] = bytes(16)
    content[32:48] = xxhash.xxh3_128_digest(bytes(content[:4096] if path.name.startswith("segment") else content))
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["MANIFEST-{}", "rank-0000/segment-{}-0000"])
@pytest.mark.parametrize("parent", [False, True])
def test_r13_a_newest_generation_of_a_newer_format_is_refused_and_not_passed_over(
    tmp_path: Path, name: str, parent: bool
) -> None:
    """Or one whose parent is. An older one can be had by its number."""
    table = trained(tmp_path)
    table.save(tmp_path)
    change(table, 5)
    table.save(tmp_path, delta=True)
    make_newer(tmp_path / name.format(f"{4 if parent else 5:016d}"))
    with pytest.raises(FormatVersionError, match=r"formats up to 1.*number of an older generation.* 1, 2, 3, 4, 5"):
        Reader(tmp_path)
    with fresh() as other:
        other.assign(KEYS, np.full((len(KEYS), 4), 9.0, np.float32))
        with pytest.raises(FormatVersionError, match="formats up to 1"):
            other.restore(tmp_path)
        assert (other.lookup(KEYS) == 9).all()  # nothing has changed
        assert other.restore(tmp_path, generation=3).generation == 3
    for command in (["restore", str(tmp_path), str(tmp_path / "out")], ["inspect", str(tmp_path)]):
        assert main(command) == 1


def test_a_chain_of_more_files_than_may_be_open_is_no_damage(tmp_path: Path) -> None:
    table = fresh()
    table.insert(np.arange(20_000))
    for value in range(1, 39):
        table.save(tmp_path, delta=True)
        table.assign(KEYS[:1], np.full((1, 4), value, np.float32))
    assert [one.kind for one in generations(tmp_path)] == ["full"] + ["delta"] * 37
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        with Reader(tmp_path, check="catalogue") as one, pytest.raises(StorageError, match="limit of open files"):
            list(one.rows("t"))
        with fresh() as other, pytest.raises(StorageError, match="limit of open files"):
            other.restore(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with fresh() as other:
        assert other.restore(tmp_path).skipped == [] and other.lookup(KEYS[:1])[0, 0] == 37
