"""`embcache compact`, `reshard` and `diff`: the same rows in another shape, and what differs between two of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache.checkpoint import FilterState, Reader, TableDescription, Writer, generations, publish, vshards_of
from embcache.cli import main
from embcache.commands import copies, differences
from embcache.commands.sources import vshards_of_keys, windows_of
from embcache.errors import ConfigError, LockedError
from embcache.table import EmbTable

ITEMS = TableDescription("items", 4, 2, with_filter=True)
WORDS = TableDescription("words", 3, dtype="bfloat16")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def write(path: Path, world: int = 1, steps: int = 4, rows: int = 4000) -> None:
    """A full generation and deltas on it, each with changed, new and erased rows, filter state and the caller's bytes."""
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows))
    for step in range(steps):
        picked = keys if step == 0 else rng.permutation(keys)[:500]
        erased = rng.permutation(np.setdiff1d(keys, picked))[:50]
        ranks = vshards_of_keys(np.ascontiguousarray(picked)), vshards_of_keys(np.ascontiguousarray(erased))
        writers = [Writer(path, rank, world, chunk_bytes=1 << 16) for rank in range(world)]
        for writer in writers:
            writer.begin(step + 1, parent=step or None, metadata={"step": step, "rank": writer.rank})
            low, high = vshards_of(writer.rank, world)
            mine, gone = ((one >= low) & (one < high) for one in ranks)
            n = int(mine.sum())
            writer.table(ITEMS, metadata={"table": "items"})
            weights, state = rng.standard_normal((n, 4)).astype(np.float32), rng.random((n, 2)).astype(np.float32)
            counters = rng.integers(0, 10**6, n), rng.integers(0, 10**6, n)
            writer.write_rows(ITEMS, np.ascontiguousarray(picked[mine]), weights, state, *counters)
            if step:
                writer.write_erased(ITEMS, np.ascontiguousarray(erased[gone]))
            waiting = np.arange(writer.rank * 1000, writer.rank * 1000 + 300)
            waiting = np.ascontiguousarray(
                waiting[(vshards_of_keys(waiting) >= low) & (vshards_of_keys(waiting) < high)]
            )
            numbers = {"newest": 100 * step + writer.rank, "cutoff": -writer.rank}
            writer.write_filter(ITEMS, waiting, waiting + 1, waiting + 2, waiting[:5], numbers)
            if writer.rank == 0:
                writer.write_rows(WORDS, np.arange(100), rng.integers(0, 99, (100, 3)).astype(np.int16))
                writer.write_state("dense", bytes([step]) * 200_000)
                writer.write_state("empty", b"")
            writer.commit()
        publish(str(path), step + 1, world)
        for writer in writers:
            writer.close()


def content(path: Path, generation: int | None = None, world: int = 1) -> dict[str, Any]:
    """All that a generation holds, read by `world` readers."""
    found: dict[str, Any] = {"items": {}, "words": {}, "filter": [], "states": {}}
    for rank in range(world):
        with Reader(path, generation, rank, world) as reader:
            for name in ("items", "words"):
                for rows in reader.rows(name):
                    for at, key in enumerate(rows.keys.tolist()):
                        assert key not in found[name]
                        parts = [rows.weights[at].tobytes(), rows.state[at].tobytes()]
                        if rows.frequencies is not None and rows.timestamps is not None:
                            parts += [int(rows.frequencies[at]), int(rows.timestamps[at])]
                        found[name][key] = parts
            state = reader.filter("items")
            assert isinstance(state, FilterState)
            found["filter"] += zip(state.keys.tolist(), state.counts.tolist(), state.last.tolist(), strict=True)
            found["filter"] += state.late.tolist()
            if rank == 0:
                found["states"] = {name: reader.state(name) for name in reader.state_names}
                found["tables"] = reader.tables
    found["filter"] = sorted(map(str, found["filter"]))
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_compacting_merges_deltas_and_keeps_every_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(copies, "_FILTER_KEYS", 100)
    write(tmp_path / "one", world)
    before, older = content(tmp_path / "one"), content(tmp_path / "one", 2)
    code, result = run(capsys, "compact", tmp_path / "one", tmp_path / "two")
    assert (code, result["generation"], result["chain"], result["writers"]) == (0, 4, [1, 2, 3, 4], world)
    assert content(tmp_path / "two") == before == content(tmp_path / "two", world=2)
    with Reader(tmp_path / "two") as reader:
        assert reader.chain == [4]
        assert [one["rank"] for one in reader.metadata] == list(range(world))
        no_sketch = {"sketch_blocks": 0, "sketch_first": 0}
        numbers = [{"newest": 300 + rank, "cutoff": -rank} | no_sketch for rank in range(world)]
        assert reader.filter("items").numbers == numbers
    assert run(capsys, "verify", tmp_path / "two")[0] == 0
    # An older one takes a number that nobody has had.
    code, result = run(capsys, "compact", f"{tmp_path / 'one'}@2", tmp_path / "old")
    assert (code, result["generation"]) == (0, 5) and content(tmp_path / "old") == older
    size = result["bytes"]["before"]
    code, result = run(capsys, "compact", tmp_path / "one", "--force")
    assert (code, result["generation"]) == (0, 4) and result["bytes"]["after"] < size
    assert content(tmp_path / "one") == before
    assert sorted(os.listdir(tmp_path)) == ["old", "one", "two"]
    assert run(capsys, "diff", tmp_path / "one", tmp_path / "two")[0] == 0


@pytest.mark.parametrize(("world", "writers"), [(1, 4), (3, 2), (2, 1)])
def test_resharding_gives_each_writer_its_vshards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], world: int, writers: int
) -> None:
    write(tmp_path / "one", world, 2)
    before = content(tmp_path / "one")
    code, result = run(capsys, "reshard", tmp_path / "one", tmp_path / "two", "--writers", writers)
    assert (code, result["writers"]) == (0, writers)
    assert content(tmp_path / "two") == before
    for rank in range(writers):
        with Reader(tmp_path / "two", None, rank, writers) as reader:
            for _ in reader.rows("items"):
                pass
            assert reader.stats["rows_read"] == reader.stats["rows_kept"]  # nobody reads what is another's
            assert reader.world_written == writers
    assert run(capsys, "reshard", tmp_path / "one", "--writers", writers, "--force")[0] == 0
    assert content(tmp_path / "one") == before


def test_in_place_other_generations_go_only_where_that_was_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one")
    for command in (("compact",), ("reshard", "--writers", "2")):
        code, result = run(capsys, command[0], tmp_path / "one", *command[1:])
        assert (code, result["error"]["type"]) == (2, "ConfigError")
        assert "its 4 present ones would go" in result["error"]["message"] and "--force" in result["error"]["message"]
        assert len(generations(tmp_path / "one")) == 4 and sorted(os.listdir(tmp_path)) == ["one"]
    assert run(capsys, "reshard", tmp_path / "one", "--writers", "2", "--force")[0] == 0
    assert [one.generation for one in generations(tmp_path / "one")] == [4]


def test_chunks_of_a_compacted_checkpoint_hold_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description, keys = TableDescription("t", 64), np.arange(60_000)
    with Writer(tmp_path / "one", chunk_bytes=1 << 16) as writer:
        writer.begin()
        order = keys[np.argsort(vshards_of_keys(keys), kind="stable")]
        writer.write_rows(description, order, np.zeros((len(keys), 64), np.float32))
        writer.commit()
        writer.publish()
    with Writer(tmp_path / "one", chunk_bytes=1 << 16) as writer:
        writer.begin(parent=1)
        writer.write_rows(description, keys[:900], np.ones((900, 64), np.float32))
        writer.commit()
        writer.publish()
    assert run(capsys, "compact", tmp_path / "one", tmp_path / "two")[0] == 0
    with Reader(tmp_path / "two") as reader:
        ranges = [(place.vshard_from, place.vshard_to) for place in reader._levels[0].chunks()]
    assert ranges == sorted(ranges) and len(ranges) >= 4
    assert sum(high - low for low, high in ranges) < 1.2 * 4096
    with Reader(tmp_path / "one") as reader:
        windows = windows_of(reader, "t", (0, 4096))
        assert len(windows) > 4 and windows[0][0] == 0 and windows[-1][1] == 4096
        assert sum(reader.bytes_of("t", window) for window in windows) <= 2 * reader.bytes_of("t", (0, 4096))


def test_what_is_damaged_or_in_use_is_not_compacted_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one", 1, 3)
    good = (tmp_path / "one" / "MANIFEST-0000000000000003").read_bytes()
    (tmp_path / "one" / "MANIFEST-0000000000000003").write_bytes(good[:100])
    code, result = run(capsys, "compact", tmp_path / "one", "--force")
    assert (code, result["error"]["type"]) == (1, "CorruptionError") and "@2" in result["error"]["message"]
    code, result = run(capsys, "compact", tmp_path / "one", tmp_path / "two")
    assert (code, result["generation"]) == (1, 4)
    (tmp_path / "one" / "MANIFEST-0000000000000003").write_bytes(good)
    with Writer(tmp_path / "one") as writer:
        writer.begin()
        code, result = run(capsys, "compact", tmp_path / "one", "--force")
        assert (code, result["error"]["type"]) == (3, LockedError.__name__)
    segment = tmp_path / "one" / "rank-0000" / "segment-0000000000000001-0000"
    damaged = bytearray(segment.read_bytes())
    damaged[4096 + 300] ^= 1
    segment.write_bytes(damaged)
    names = sorted(os.listdir(tmp_path / "one"))
    assert run(capsys, "compact", tmp_path / "one", "--force")[0] == 1
    assert sorted(os.listdir(tmp_path / "one")) == names
    for arguments in (
        ("reshard", tmp_path / "one", "--writers", 0),
        ("compact", tmp_path),
        ("compact", tmp_path / "no"),
    ):
        code, result = run(capsys, *arguments)
        assert (code, result["error"]["type"]) == (2, ConfigError.__name__)


# ----------------------------------------------------------------------------------------------------------------- diff


@pytest.mark.parametrize(("window", "most"), [(96 << 20, 4096), (20_000, 4096), (20_000, 1)])
def test_diff_counts_what_a_dict_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, window: int, most: int
) -> None:
    monkeypatch.setattr(differences, "_WINDOW_BYTES", window)
    monkeypatch.setattr(differences, "_MOST_OF_VSHARDS", most)
    write(tmp_path / "one")
    one, other = content(tmp_path / "one", 2), content(tmp_path / "one", 4)
    code, result = run(capsys, "diff", f"{tmp_path / 'one'}@2", f"{tmp_path / 'one'}@4", "--top", 7)
    assert code == 1 and result["states"] == {"dense": "changed"}
    for name in ("items", "words"):
        about, before, after = result["tables"][name], one[name], other[name]
        both = sorted(set(before) & set(after))
        changed = [key for key in both if before[key] != after[key]]
        assert about["rows"] == [len(before), len(after)]
        assert about["added"] == len(set(after) - set(before)) and about["removed"] == len(set(before) - set(after))
        assert about["changed"] == len(changed) > 0
    deltas = {
        key: max(
            float(np.abs(np.frombuffer(before, np.float32).astype(float) - np.frombuffer(after, np.float32)).max())
            for before, after in zip(one["items"][key][:2], other["items"][key][:2], strict=True)
        )
        for key in set(one["items"]) & set(other["items"])
    }
    about = result["tables"]["items"]
    assert max(about["max_delta_weights"], about["max_delta_state"]) == max(deltas.values())
    assert about["top_changed"] == [
        [key, delta] for key, delta in sorted(deltas.items(), key=lambda pair: (-pair[1], pair[0]))[:7]
    ]
    assert set(about["some_removed"]) <= set(one["items"]) - set(other["items"]) and len(about["some_removed"]) == 7
    assert run(capsys, "diff", tmp_path / "one", f"{tmp_path / 'one'}@4")[0] == 0
    assert main(["diff", f"{tmp_path / 'one'}@2", str(tmp_path / "one")]) == 1
    assert "they differ" in capsys.readouterr().out


def test_diff_of_directories_of_other_names_shapes_and_odd_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "_WINDOW_BYTES", 30_000)
    rng = np.random.default_rng(0)
    keys, weights = rng.permutation(10_000)[:5000], rng.standard_normal((5000, 4)).astype(np.float32)
    weights[7] = np.nan
    for name, change in (("a", False), ("b", False), ("c", True)):
        with EmbTable(name, 4, directory=tmp_path / name) as table:
            table.assign(keys, weights)
            if change:
                row = weights[[0, 1]].copy()
                row[0, 2], row[1, 0] = row[0, 2] + 0.5, np.inf
                table.assign(keys[:2], row)
    with EmbTable("d", 3, directory=tmp_path / "d") as table:
        table.assign(keys[:10], np.ones((10, 3), np.float32))
    assert main(["save", str(tmp_path / "a"), str(tmp_path / "saved")]) == 0
    for one, other in (("a", "b"), ("saved", "b"), ("a", "saved")):
        code, result = run(capsys, "diff", tmp_path / one, tmp_path / other)
        assert code == 0 and result["tables"][("a")]["rows"] == [5000, 5000]
    code, result = run(capsys, "diff", tmp_path / "a", tmp_path / "c")
    about = result["tables"]["a"]
    assert (code, about["changed"], about["not_finite"], about["added"], about["removed"]) == (1, 2, 1, 0, 0)
    assert about["max_delta_weights"] == float(abs(np.float32(weights[0, 2] + np.float32(0.5)) - weights[0, 2]))
    code, result = run(capsys, "diff", tmp_path / "a", tmp_path / "d")
    about = result["tables"]["a"]
    assert (code, about["changed"], about["removed"], about["description"]) == (1, None, 4990, ["dim: 4 -> 3"])
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "a")[0] == 3  # it is open already
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--table", "a")[0] == 2
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--table", "a", "--other-table", "b")[0] == 0
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "absent")[0] == 2
