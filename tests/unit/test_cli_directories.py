"""`embcache save` and `embcache restore`: a table directory to a checkpoint and back, and what stands in their way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache.checkpoint import Reader, TableDescription, Writer
from embcache.cli import main
from embcache.config import Adagrad, Uniform
from embcache.errors import UncleanDirectoryError
from embcache.filterfile import merged_numbers
from embcache.table import EmbTable


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def make(path: Path, name: str = "items", rows: int = 3000, dtype: str = "float32", seed: int = 1) -> dict[int, bytes]:
    """A closed table directory, and each key's row as bytes."""
    rng = np.random.default_rng(seed)
    keys = np.concatenate([rng.integers(-(2**63), 2**63 - 1, rows), [0, -1, 2**63 - 1, -(2**63)]])
    with EmbTable(name, 5, state_dim=3, dtype=dtype, directory=path, seed=7, initializer=Uniform(-1, 1)) as table:
        weights, state = rng.standard_normal((len(keys), 5)), rng.random((len(keys), 3))
        table.assign(keys, weights.astype(np.float32), state.astype(np.float32))
        table.erase(keys[:10])
        return content(table)


def content(table: EmbTable) -> dict[int, bytes]:
    """Each key's row as bytes."""
    found = {}
    for keys, weights, state, _, _ in table.items():
        for at, key in enumerate(keys.tolist()):
            found[key] = weights[at].tobytes() + state[at].tobytes()
    return found


def reopened(path: Path, name: str = "items", dtype: str = "float32") -> dict[int, bytes]:
    with EmbTable(name, 5, state_dim=3, dtype=dtype, directory=path, seed=7, initializer=Uniform(-1, 1)) as table:
        table.check()
        return content(table)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_directory_comes_back_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    rows = make(tmp_path / "one", dtype=dtype)
    code, result = run(capsys, "save", tmp_path / "one", tmp_path / "saved")
    assert (code, result["generation"], result["tables"]) == (0, 1, {"items": len(rows)})
    assert run(capsys, "verify", tmp_path / "saved")[0] == 0
    code, result = run(capsys, "restore", tmp_path / "saved", tmp_path / "two")
    assert (code, result["table"], result["rows"]) == (0, "items", len(rows))
    assert reopened(tmp_path / "two", dtype=dtype) == rows == reopened(tmp_path / "one", dtype=dtype)
    assert sorted(os.listdir(tmp_path)) == ["one", "saved", "two"]
    assert "generation 1" in (tmp_path / "one" / "checkpoint").read_text()


def test_an_empty_table_and_several_in_one_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EmbTable("none", 5, state_dim=3, directory=tmp_path / "none", seed=7, initializer=Uniform(-1, 1)).close()
    rows = make(tmp_path / "one")
    assert run(capsys, "save", tmp_path / "one", tmp_path / "none", tmp_path / "saved", "--module", "a.b")[0] == 0
    with Reader(tmp_path / "saved") as reader:
        assert sorted(reader.tables) == ["a.b/items", "a.b/none"]
        assert reader.table_metadata("a.b/items")[0]["module"] == "a.b"
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "back")[0] == 2  # which table?
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "back", "--table", "a.b/items")[0] == 0
    assert reopened(tmp_path / "back") == rows
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "nothing", "--table", "a.b/none")[0] == 0
    assert reopened(tmp_path / "nothing", "none") == {}
    assert run(capsys, "save", tmp_path / "one", tmp_path / "one", tmp_path / "twice")[0] == 3  # it is open already
    make(tmp_path / "same")
    assert run(capsys, "save", tmp_path / "one", tmp_path / "same", tmp_path / "twice")[0] == 2
    assert not (tmp_path / "twice").exists()


def test_an_older_generation_and_a_damaged_newest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description = TableDescription("items", 5, 3, initializer=["uniform", -1.0, 1.0], seed=7)
    for step in range(2):
        with Writer(tmp_path / "saved") as writer:
            writer.begin(parent=step or None)
            n = 1000 if step == 0 else 10
            writer.write_rows(
                description, np.arange(n), np.full((n, 5), step, np.float32), np.full((n, 3), step, np.float32)
            )
            if step:
                writer.write_erased(description, np.arange(500, 510))
            writer.commit()
            writer.publish()
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "new")[1]["rows"] == 990
    code, result = run(capsys, "restore", f"{tmp_path / 'saved'}@1", tmp_path / "old")
    assert (code, result["rows"], result["generation"]) == (0, 1000, 1)
    assert np.frombuffer(reopened(tmp_path / "new")[3], np.float32).tolist() == [1.0] * 8
    assert np.frombuffer(reopened(tmp_path / "old")[3], np.float32).tolist() == [0.0] * 8
    segment = tmp_path / "saved" / "rank-0000" / "segment-0000000000000002-0000"
    damaged = bytearray(segment.read_bytes())
    damaged[4096 + 300] ^= 1
    segment.write_bytes(damaged)
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "none")[0] == 1
    assert not (tmp_path / "none").exists()
    (tmp_path / "saved" / "MANIFEST-0000000000000002").write_bytes(b"EMBCKPT\n" + bytes(200))
    code, result = run(capsys, "restore", tmp_path / "saved", tmp_path / "fallback")
    assert (code, result["generation"], result["rows"]) == (1, 1, 1000)  # restored, and the damage is a finding


def test_a_filters_counters_and_its_initial_state_come_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    import embcache as ec

    def collection(directory: Path) -> Any:
        rule = ec.AdmitAndEvictConfig(2, evict_threshold=50, evict_step_interval=3, sketch_bytes=4096)
        table = ec.TableConfig("items", 4, ["f"], admit_and_evict=rule, directory=str(directory))
        return ec.EmbeddingBagCollection([table], optimizer=Adagrad(lr=0.1, initial_accumulator_value=0.25))

    def train(ebc: Any, steps: range) -> None:
        for step in steps:
            rng = np.random.default_rng(step)
            keys = torch.from_numpy(rng.integers(0, 200, 64))
            times = torch.full((64,), step * 10)
            out = ebc(ec.JaggedFeatures(["f"], keys, torch.ones(64, dtype=torch.int64), timestamps=times))
            (out.values() ** 2).sum().backward()

    for name in ("straight", "moved"):
        ebc = collection(tmp_path / name)
        train(ebc, range(7))
        ebc.manager.close()
    assert run(capsys, "save", tmp_path / "moved", tmp_path / "saved")[0] == 0
    assert run(capsys, "restore", tmp_path / "saved", tmp_path / "back")[0] == 0
    states = []
    for name in ("straight", "back"):
        ebc = collection(tmp_path / name)
        train(ebc, range(7, 15))
        ebc.manager.flush()
        filtered = {
            what: value.tolist() if isinstance(value, np.ndarray) else value
            for what, value in ebc.manager.planner.export_filter(0).items()
        }
        found = []
        for columns in ebc.manager.table("items").items():
            order = np.argsort(columns[0])
            found.append([column[order].tobytes() for column in columns])
        states.append((filtered, found))
        ebc.manager.close()
    assert states[0] == states[1]


def test_managers_and_table_directories_read_each_others_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    import embcache as ec

    def model(directory: Path | None = None) -> Any:
        rule = ec.AdmitAndEvictConfig(
            2, evict_threshold=5, evict_step_interval=2, time_source="step", sketch_bytes=1024
        )
        table = ec.TableConfig("items", 4, ["f"], admit_and_evict=rule, directory=directory and str(directory))
        ebc = ec.EmbeddingBagCollection([table], optimizer=Adagrad(lr=0.1, initial_accumulator_value=0.5))
        return torch.nn.ModuleDict({"deep": torch.nn.ModuleDict({"ebc": ebc})}), ebc

    def train(ebc: Any, steps: range) -> None:
        for step in steps:
            keys = torch.from_numpy(np.random.default_rng(step).integers(0, 60, 64))
            ebc(ec.JaggedFeatures(["f"], keys, torch.ones(64, dtype=torch.int64))).values().sum().backward()

    def state(ebc: Any) -> Any:
        ebc.manager.flush()
        order, columns = None, []
        for column in next(iter(ebc.manager.table("items").items(10**6))):
            order = np.argsort(column) if order is None else order
            columns.append(column[order].tolist())
        found = ebc.manager.planner.export_filter(0)
        return columns, {what: one.tolist() if isinstance(one, np.ndarray) else one for what, one in found.items()}

    whole, straight = model()
    train(straight, range(6))
    ec.save(whole, tmp_path / "of-model")
    assert run(capsys, "restore", tmp_path / "of-model", tmp_path / "table")[1]["table"] == "items"
    train(straight, range(6, 12))
    _, in_files = model(tmp_path / "table")
    train(in_files, range(6, 9))
    in_files.manager.close()
    assert run(capsys, "save", tmp_path / "table", tmp_path / "of-table", "--module", "deep.ebc")[0] == 0
    whole, back = model()
    ec.restore(whole, tmp_path / "of-table")
    train(back, range(9, 12))
    assert state(back) == state(straight)


def test_numbers_of_several_writers_become_the_furthest() -> None:
    one, two = {"newest": 5, "cutoff": -(2**63), "rule": "a"}, {"newest": 3, "cutoff": 2, "epoch": 1}
    assert merged_numbers([one, two]) == {"newest": 5, "cutoff": 2, "rule": "a", "epoch": 1}
    assert merged_numbers([]) == {}


def test_what_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "one")
    before = sorted(os.listdir(tmp_path))
    assert run(capsys, "save", tmp_path / "one", tmp_path / "one")[0] == 2
    assert run(capsys, "save", tmp_path / "one", tmp_path / "one" / "inside")[0] == 2
    assert run(capsys, "save", tmp_path / "absent", tmp_path / "saved")[0] == 2
    assert run(capsys, "save", tmp_path / "one", tmp_path / "no" / "folder")[0] == 2
    assert run(capsys, "restore", tmp_path / "one", tmp_path / "two")[0] == 2
    with EmbTable("items", 5, state_dim=3, directory=tmp_path / "one", seed=7, initializer=Uniform(-1, 1)) as table:
        assert run(capsys, "save", tmp_path / "one", tmp_path / "saved")[0] == 3
        table.assign(np.arange(3), np.ones((3, 5), np.float32))
    (tmp_path / "file").write_text("x")
    code, result = run(capsys, "save", tmp_path / "one", tmp_path / "file", "--force")
    assert (code, result["error"]["type"]) == (2, "ConfigError") and (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "file"])


def test_an_unclean_directory_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "one")
    pid = os.fork()
    if pid == 0:
        table = EmbTable("items", 5, state_dim=3, directory=tmp_path / "one", seed=7, initializer=Uniform(-1, 1))
        table.assign(np.arange(3), np.ones((3, 5), np.float32))
        os._exit(0)
    os.waitpid(pid, 0)
    code, result = run(capsys, "save", tmp_path / "one", tmp_path / "saved")
    assert (code, result["error"]["type"]) == (1, UncleanDirectoryError.__name__)
