"""`embcache inspect`: counts, bytes, histograms, top keys and rows, against NumPy over the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache.checkpoint import TableDescription, Writer
from embcache.cli import main
from embcache.commands.contents import key_number
from embcache.commands.histogram import Integers, Largest, Sizes, bars
from embcache.commands.sources import DirectoryTable, vshards_of_keys
from embcache.table import EmbTable

MANY = np.array([0, 1, -1, 2, -2, 3, -3, 4, 2**62, 2**63 - 1, -(2**63), -(2**62) - 1], np.int64)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def test_a_histogram_of_integers_counts_every_value_in_the_bin_that_holds_it() -> None:
    histogram = Integers()
    histogram.add(MANY)
    histogram.add(MANY[:5])
    bins = histogram.bins()
    assert [bin[0] for bin in bins] == sorted(bin[0] for bin in bins)
    values = np.concatenate([MANY, MANY[:5]]).tolist()
    for low, high, count in bins:
        assert count == sum(low <= value <= high for value in values) > 0
    assert sum(count for _, _, count in bins) == len(values)


def test_a_histogram_of_sizes_counts_zeros_tiny_huge_and_no_numbers() -> None:
    histogram = Sizes()
    histogram.add(np.array([0.0, 1.0, 1.5, 2.0, 3.9, 0.25, np.inf, np.nan]))
    assert histogram.not_finite == 2
    assert histogram.bins() == [(0.0, 0.0, 1), (0.25, 0.5, 1), (1.0, 2.0, 2), (2.0, 4.0, 2)]
    histogram.add(np.array([1e-300, 1e300]))
    assert sum(count for _, _, count in histogram.bins()) == 8
    assert any("2 to 4" in line for line in bars("norms", histogram.bins()))
    assert bars("nothing", []) == ["nothing: none"]


@pytest.mark.parametrize("most", [0, 1, 10, 5000])
def test_the_largest_are_those_of_a_sort_whatever_the_pieces(most: int) -> None:
    rng = np.random.default_rng(3)
    keys = rng.permutation(4000).astype(np.int64)
    values = rng.integers(0, 50, 4000)
    largest = Largest(most)
    for at in range(0, 4000, 613):
        largest.add(keys[at : at + 613], values[at : at + 613])
    expected = sorted(zip(keys.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))[:most]
    assert largest.pairs() == expected


@pytest.mark.parametrize(("text", "key"), [("7", 7), ("-1", -1), ("0xffffffffffffffff", -1), (str(-(2**63)), -(2**63))])
def test_keys_are_read_as_users_write_them(text: str, key: int) -> None:
    assert key_number(text) == key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A full generation and a delta that changes 500 rows and erases 100; and what they come to."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    description = TableDescription("items", 4, 1, with_filter=True)
    rng = np.random.default_rng(1)
    keys = np.unique(np.concatenate([MANY, rng.integers(-(2**40), 2**40, 5000)]))
    weights = rng.standard_normal((len(keys), 4)).astype(np.float32)
    weights[100:600] += 5
    weights[5] = np.nan
    columns = {
        "weights": weights,
        "state": rng.random((len(keys), 1)).astype(np.float32),
        "frequencies": rng.integers(1, 10_000, len(keys)),
        "timestamps": rng.integers(0, 10**6, len(keys)),
    }
    columns["timestamps"][3] = -(2**63)
    for step in range(2):
        with Writer(path, chunk_bytes=1 << 16) as writer:
            writer.begin(parent=step or None, metadata={"step": step})
            part = slice(100, 600) if step else slice(None)
            first = {name: array[part] for name, array in columns.items()}
            if step == 0:
                first["weights"] = first["weights"].copy()
                first["weights"][100:600] = 0
            else:
                writer.write_erased(description, keys[1000:1100])
                writer.write_state("dense", b"1234")
            writer.write_rows(description, keys[part], **first)
            writer.commit()
            writer.publish()
    left = np.r_[0:1000, 1100 : len(keys)]
    return path, {"keys": keys[left], **{name: array[left] for name, array in columns.items()}}


def test_inspect_tells_what_numpy_tells(
    saved: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, columns = saved
    code, result = run(capsys, "inspect", path, "--top", 5)
    (one,) = result["tables"]
    count = len(columns["keys"])
    assert (code, result["generation"], result["chain"], result["states"]) == (0, 2, [1, 2], {"dense": 4})
    assert (one["rows"], one["not_finite"], one["newest_timestamp"]) == (count, 1, columns["timestamps"].max())
    assert one["bytes"] == {
        "keys": 8 * count,
        "weights": 16 * count,
        "state": 4 * count,
        "frequencies": 8 * count,
        "timestamps": 8 * count,
    }
    for field, values in (("keys", columns["keys"]), ("frequencies", columns["frequencies"])):
        for low, high, found in one[field]:
            assert found == np.count_nonzero((values >= low) & (values <= high))
        assert sum(found for _, _, found in one[field]) == count
    assert one["ages"][-1] == [2**62, 2**63 - 1, 1]  # the key that never had a timestamp
    order = np.lexsort((columns["keys"], -columns["frequencies"]))[:5]
    assert one["top_frequencies"] == [[int(columns["keys"][i]), int(columns["frequencies"][i])] for i in order]
    norms = np.linalg.norm(columns["weights"].astype(np.float64), axis=1)
    assert [key for key, _ in one["top_norms"]] == columns["keys"][np.argsort(-np.nan_to_num(norms))[:5]].tolist()
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "table 'items'" in text and "#####" in text and "1 rows have NaN" in text


def test_inspect_of_an_older_generation_and_without_reading_rows(
    saved: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, columns = saved
    code, result = run(capsys, "inspect", f"{path}@1", "--quick")
    assert (code, result["generation"], result["tables"][0]["rows"]) == (0, 1, len(columns["keys"]) + 100)
    assert "norms" not in result["tables"][0]
    assert run(capsys, "inspect", f"{path}@7")[0] == 2
    assert run(capsys, "inspect", path, "--table", "absent")[0] == 2


def test_one_keys_row(saved: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]) -> None:
    path, columns = saved
    for at in (0, 4, 150, 999, -1):
        code, result = run(capsys, "inspect", path, "--key", columns["keys"][at])
        row = result["tables"]["items"]
        assert code == 0 and row["frequency"] == columns["frequencies"][at]
        assert np.array_equal(np.float32(row["weights"]), columns["weights"][at])
        assert np.array_equal(np.float32(row["state"]), columns["state"][at])
    code, result = run(capsys, "inspect", path, "--key", 2**50 + 1)
    assert (code, result["tables"]) == (1, {})
    code, result = run(capsys, "inspect", path, "--key", columns["keys"][5])
    assert result["tables"]["items"]["weights"] == ["nan"] * 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_table_directory_is_inspected_like_a_checkpoint_and_left_as_it_was(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table"
    with EmbTable("t", 8, dtype=dtype, state_dim=2, directory=path) as table:
        table.insert(np.arange(-1000, 1000))
        row = table.lookup([7], insert=False)[0]
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}
    code, result = run(capsys, "inspect", path)
    (one,) = result["tables"]
    assert (code, one["rows"], one["dtype"], one["stats"]["rows"]) == (0, 2000, dtype, 2000)
    assert run(capsys, "inspect", path, "--key", 7)[1]["tables"]["t"]["weights"] == row.tolist()
    assert run(capsys, "inspect", path, "--key", 5000)[0] == 1
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"} == before


def test_a_directory_gives_its_rows_by_vshards(tmp_path: Path) -> None:
    path = tmp_path / "table"
    keys = np.random.default_rng(5).permutation(np.arange(150_000, dtype=np.int64))
    with EmbTable("t", 2, directory=path) as table:
        table.insert(keys)
        table.erase(keys[::7])
    source = DirectoryTable(str(path))
    found = []
    for window in ((0, 5), (5, 4000), (4000, 4096)):
        pieces = [rows.keys.copy() for rows in source.rows(window)]
        got = np.concatenate(pieces)
        shards = vshards_of_keys(got)
        assert shards.min() >= window[0] and shards.max() < window[1]
        found.append(got)
    assert np.array_equal(np.sort(np.concatenate(found)), np.sort(np.setdiff1d(keys, keys[::7])))
    source.close()
