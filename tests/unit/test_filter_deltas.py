"""Deltas of filters: of keys that wait, and of sketches, what has changed since the parent; whole where that is not known or does not pay."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache import cli
from embcache import manager as manager_module
from embcache.checkpoint import Reader, TableDescription, Writer, verify
from embcache.errors import ConfigError, CorruptionError, FormatVersionError
from embcache.filterfile import SKETCHES, sketch_name
from embcache.filterparts import filter_state, sketch_of

EXACT = ec.AdmitAndEvictConfig(admit_threshold=3)
SKETCH = ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 18)
SWEEPS = ec.AdmitAndEvictConfig(admit_threshold=3, evict_threshold=6, evict_step_interval=3, time_source="step")
NONE = np.empty(0, np.int64)


def make(rule: ec.AdmitAndEvictConfig) -> ec.EmbCacheManager:
    return ec.EmbCacheManager([ec.TableConfig("t", 4, ["t"], hbm_rows=256, admit_and_evict=rule)])


def train(manager: ec.EmbCacheManager, *keys: int) -> None:
    given = torch.tensor(keys, dtype=torch.int64)
    info = manager.plan(ec.JaggedFeatures(["t"], given, torch.tensor([len(keys)])))
    manager.swap_out(info)
    manager.swap_in(info)
    manager.finish(info)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else value.tolist() for name, value in state.items()}


def is_saved(path: Path, manager: ec.EmbCacheManager, changes: bool) -> int:
    """The newest generation has the filter as the manager has it, by what has changed or whole; returns its bytes."""
    with Reader(path) as reader:
        found = filter_state(reader, "t")
        assert found is not None
        assert plain(found) == plain(manager.planner.export_filter(0)) | {"sweeping": 0}
        assert (sketch_name("t", "sketch_changes") in reader.state_names) == (
            changes and len(found["sketch_young"]) > 0
        )
    features = int.from_bytes((path / f"MANIFEST-{reader.generation:016d}").read_bytes()[12:16], "little")
    assert features == int(changes) + 2 * bool(found["sketch_blocks"])
    assert verify(path) == []
    return ec.generations(path)[-1].bytes


@pytest.mark.parametrize("rule", [EXACT, SKETCH])
def test_a_delta_has_of_a_filter_what_has_changed(tmp_path: Path, rule: ec.AdmitAndEvictConfig) -> None:
    path = tmp_path / "c"
    with make(rule) as manager:
        train(manager, *range(10_000))
        manager.save(path)
        full = is_saved(path, manager, False)
        train(manager, *range(100), *range(40), *range(40))  # 40 are admitted, 60 counted on, others come
        train(manager, *range(50_000, 50_050))
        manager.table("t").erase([70, 9_000, 50_001, 5])
        manager.save(path, delta=True)
        assert is_saved(path, manager, True) < full / 4
        manager.save(path, delta=True)  # nothing has changed
        assert is_saved(path, manager, True) < full / 4
        train(manager, 70, 9_000, 80, 80)  # come again, and one is admitted
        manager.save(path, delta=True)
        assert is_saved(path, manager, True) < full / 4
        assert cli.main(["compact", str(path), str(tmp_path / "compact")]) == 0
        is_saved(tmp_path / "compact", manager, False)
        assert cli.main(["diff", str(path), str(tmp_path / "compact")]) == 0
        with make(rule) as other:
            other.restore(path)
            for each in (manager, other):
                train(each, *range(60, 120))
            other.save(path, delta=True)
            is_saved(path, other, True)
            is_saved(path, manager, True)


@pytest.mark.parametrize("rule", [EXACT, SKETCH])
def test_what_a_save_that_failed_was_to_have_the_next_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: ec.AdmitAndEvictConfig
) -> None:
    with make(rule) as manager:
        train(manager, *range(3_000))
        manager.save(tmp_path)
        train(manager, *range(10), *range(10), 5_000)
        manager.table("t").erase([2_000])
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "commit", lambda self: (_ for _ in ()).throw(OSError(5, "refused")))
            with pytest.raises(OSError, match="refused"):
                manager.save(tmp_path, delta=True)
        train(manager, *range(8, 12))
        manager.save(tmp_path, delta=True)
        is_saved(tmp_path, manager, True)


def test_keys_that_a_sweep_has_killed_are_gone_before_it_has_come_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "SwapManager", functools.partial(manager_module.SwapManager, sweep_rows=2))
    with make(SWEEPS) as manager:
        parts = 0
        train(manager, *range(1_000, 1_400))
        manager.save(tmp_path)
        for step in range(24):
            train(manager, *range(step * 5, step * 5 + 12), *(range(1_000, 1_060) if step % 2 else ()))
            manager.save(tmp_path, delta=True)
            with Reader(tmp_path) as reader, make(SWEEPS) as other:
                parts += bool(reader._levels[0].tables["t"].filter_changes)
                other.restore(tmp_path)
                assert plain(other.planner.filter_state(0)) == plain(manager.planner.filter_state(0)), step
        assert parts > 8


def test_blocks_of_a_sketch_that_have_turned_are_written_and_many_of_them_whole(tmp_path: Path) -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 13)  # 16 blocks, which turn at 32 occurrences
    with make(rule) as manager:
        train(manager, *range(400))
        manager.save(tmp_path)
        before = manager.planner.export_filter(0)["sketch_clocks"].reshape(-1, 3)
        train(manager, *([0] * 40))
        train(manager, 1)
        train(manager, 0)  # its block had turned before it came
        turned = (manager.planner.export_filter(0)["sketch_clocks"].reshape(-1, 3)[:, 1] != before[:, 1]).sum()
        assert 0 < turned < 4
        manager.save(tmp_path, delta=True)
        is_saved(tmp_path, manager, True)
        for step in range(4):
            train(manager, *range(1_000 * step, 1_000 * step + 400))
        manager.save(tmp_path, delta=True)
        is_saved(tmp_path, manager, False)
        train(manager, *range(3))
        manager.save(tmp_path, delta=True)
        is_saved(tmp_path, manager, True)


def write(path: Path, parent: int | None, *parts: dict[str, Any]) -> int:
    """A generation of as many writers, each with its part of a filter."""
    description = TableDescription("t", 2, with_filter=True)
    generation = 1 if parent is None else parent + 1
    writers = [Writer(path, rank, len(parts)) for rank in range(len(parts))]
    for writer, part in zip(writers, parts, strict=True):
        writer.begin(generation, parent)
        keys = np.array(part.pop("keys"), np.int64)
        writer.write_filter(
            description, keys, keys % 7 + generation, keys * 0 + generation, numbers={"newest": generation}, **part
        )
        writer.commit()
    writers[0].publish()
    for writer in writers:
        writer.close()
    return generation


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_one_writer_has_changes_and_another_all_of_it(tmp_path: Path, readers: int) -> None:
    write(tmp_path, None, {"keys": range(0, 100, 2)}, {"keys": range(1, 100, 2)})
    write(tmp_path, 1, {"keys": [0, 200], "changes": True, "gone": np.array([2, 4, 0])}, {"keys": [1, 3, 301]})
    write(tmp_path, 2, {"keys": [4], "changes": True, "gone": np.array([200])}, {"keys": [5], "changes": True})
    counts = (
        {key: key % 7 + 1 for key in range(6, 100, 2)} | {key: key % 7 + 2 for key in (0, 1, 3, 301)} | {4: 7, 5: 8}
    )
    found: dict[int, int] = {}
    for rank in range(readers):
        with Reader(tmp_path, rank=rank, world=readers) as reader:
            held = reader.filter("t")
            assert held is not None and held.numbers == [{"newest": 3}] * 2 and held.writers == [0, 1]
            assert len(held.keys) <= reader.waiting_expected("t") == 50 + 2 + 3 + 1 + 1
            found |= dict(zip(held.keys.tolist(), held.counts.tolist(), strict=True))
    assert found == counts


def test_changes_of_nothing_are_refused_where_they_are_written(tmp_path: Path) -> None:
    description = TableDescription("t", 2, with_filter=True)
    with Writer(tmp_path) as writer:
        writer.begin()
        with pytest.raises(ConfigError, match="written whole"):
            writer.write_filter(description, NONE, NONE, NONE, changes=True)
        with pytest.raises(ConfigError, match="do not wait"):
            writer.write_filter(description, NONE, NONE, NONE, gone=NONE)
        writer.write_filter(description, NONE, NONE, NONE)
        writer.commit()
        writer.publish()
    with Writer(tmp_path) as writer:
        writer.begin(parent=1)
        writer.write_filter(description, NONE, NONE, NONE, changes=True, gone=NONE)
        with pytest.raises(ConfigError, match="written whole"):
            writer.write_filter(description, NONE, NONE, NONE)


def test_changes_without_a_parent_that_has_the_filter_are_damage(tmp_path: Path) -> None:
    description = TableDescription("t", 2, with_filter=True)
    for parent in (None, 1):
        with Writer(tmp_path) as writer:
            writer.begin(parent=parent)
            writer.table(description)
            if parent:
                writer.write_filter(description, NONE, NONE, NONE, changes=True)
            writer.commit()
            writer.publish()
    with (
        Reader(tmp_path) as reader,
        pytest.raises(CorruptionError, match="generation 1: lacks the filter of table 't'"),
    ):
        reader.filter("t")


@pytest.mark.parametrize("content", [b"\0" * 7, b"\xff\xff\0\0\1", b"\xc8\0\0\0\1", b"\0\0\0\0\1"])
def test_changes_of_a_sketch_that_do_not_fit_are_damage(tmp_path: Path, content: bytes) -> None:
    description = TableDescription("t", 2, with_filter=True)
    for parent in (None, 1):
        with Writer(tmp_path) as writer:
            writer.begin(parent=parent)
            writer.table(description)
            if parent:
                writer.write_state(sketch_name("t", "sketch_changes"), content)
            elif content[0] or len(content) > 5:
                for which in SKETCHES:
                    writer.write_state(sketch_name("t", which), bytes(100))
            writer.commit()
            writer.publish()
    with Reader(tmp_path) as reader, pytest.raises(CorruptionError, match="writer 0 has changes of a sketch that"):
        sketch_of(reader, "t", 0, 1)


def test_a_version_that_does_not_know_of_changes_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(EXACT) as manager:
        train(manager, *range(10_000))
        manager.save(tmp_path)
        train(manager, 1)
        manager.save(tmp_path, delta=True)
    monkeypatch.setattr("embcache.checkpoint.sealed.FEATURES", 0)
    with pytest.raises(FormatVersionError, match="features 0x1"):
        Reader(tmp_path)
    assert Reader(tmp_path, 1).generation == 1
