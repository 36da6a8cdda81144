"""`embcache export` and `embcache import`: what goes out comes back bit by bit, and foreign files are read, or refused by name."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanged import content, expected, run

from embcache.checkpoint import Reader, TableDescription, Writer
from embcache.commands import gathering, importing, ordering, sources
from embcache.commands import parquet as module_of_parquet
from embcache.commands.outgoing import npy_header, safetensors_header
from embcache.table import EmbTable

N, DIM, STATE = 3000, 5, 3
FORMATS = ["npz", "safetensors", "parquet"]


def arrays(rows: int = N, dim: int = DIM, state: int = STATE, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "keys": np.concatenate([rng.integers(-(2**63), 2**63 - 1, rows - 4), [0, -1, 2**63 - 1, -(2**63)]]),
        "weights": rng.standard_normal((rows, dim)).astype(np.float32),
        "state": rng.random((rows, state)).astype(np.float32),
    }


def safetensors(path: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    kinds = {"int64": "I64", "float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32", "uint64": "U64"}
    entries = {name: (kinds[str(one.dtype)], one.shape, one.nbytes) for name, one in tensors.items()}
    path.write_bytes(safetensors_header(entries, None) + b"".join(one.tobytes() for one in tensors.values()))
    return path


@pytest.fixture(params=FORMATS)
def ending(request: pytest.FixtureRequest) -> str:
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("filtered", [False, True])
def test_what_goes_out_comes_back_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, dtype: str, filtered: bool
) -> None:
    description = TableDescription(
        "a/b", DIM, STATE, dtype, ["constant", 0.5, 0.0], 9, filtered, {"kind": "adam", "lr": 0.5}
    )
    given = arrays()
    rng = np.random.default_rng(1)
    weights = given["weights"].astype(description.storage if dtype != "bfloat16" else np.float32)
    if dtype == "bfloat16":
        weights = (given["weights"].view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    counters = [rng.integers(0, 2**62, N), rng.integers(-(2**62), 2**62, N)] if filtered else [None, None]
    with Writer(tmp_path / "one", chunk_bytes=1 << 16) as writer:
        for step in range(2):  # a delta too, so that the number of rows has to be counted
            writer.begin(parent=step or None) if step == 0 else None
            if step == 0:
                writer.write_rows(description, given["keys"], weights, given["state"], *counters)
                writer.commit()
                writer.publish()
    with Writer(tmp_path / "one", chunk_bytes=1 << 16) as writer:
        writer.begin(parent=1)
        part = [None if one is None else one[:7] + 1 for one in counters]
        writer.write_rows(description, given["keys"][:7], weights[:7] + 0, given["state"][:7] + 1, *part)
        writer.write_erased(description, given["keys"][10:20])
        writer.commit()
        writer.publish()
    code, result = run(capsys, "export", tmp_path / "one", tmp_path / f"file.{ending}")
    assert (code, result["rows"]) == (0, N - 10)
    code, result = run(capsys, "import", tmp_path / f"file.{ending}", tmp_path / "two")
    assert (code, result["tables"]["a/b"]["rows"]) == (0, N - 10)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    with Reader(tmp_path / "two") as reader:
        assert reader.tables["a/b"] == description
    assert sorted(os.listdir(tmp_path)) == [f"file.{ending}", "one", "two"]


def test_numpys_own_files_and_a_table_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arrays()
    np.savez(tmp_path / "plain.npz", **given)
    np.savez_compressed(tmp_path / "packed.npz", **given)
    odd = {"id": given["keys"].astype(">i8"), "w": given["weights"].astype(np.float64), "m": given["state"][:, :2]}
    np.savez(tmp_path / "odd.npz", v=given["state"][:, 2], **odd)
    names = ("--keys", "id", "--weights", "w", "--state", "m+v", "--name", "odd", "--seed", "3")
    for name, options in (("plain", ()), ("packed", ()), ("odd", names)):
        code, result = run(capsys, "import", tmp_path / f"{name}.npz", tmp_path / name, *options)
        assert (code, list(result["tables"])) == (0, [name]), result
        assert content(tmp_path / name) == expected(given)
    assert run(capsys, "import", tmp_path / "plain.npz", tmp_path / "table", "--to", "directory")[0] == 0
    with EmbTable("plain", DIM, state_dim=STATE, directory=tmp_path / "table") as table:
        table.check()
        weights, state = table.lookup_rows(given["keys"])
        assert weights.tobytes() + state.tobytes() == given["weights"].tobytes() + given["state"].tobytes()
    assert run(capsys, "export", tmp_path / "table", tmp_path / "again.npz")[0] == 0
    with np.load(tmp_path / "again.npz", allow_pickle=False) as file:
        assert expected({name: file[name] for name in given}) == expected(given)


def test_other_readers_of_safetensors_and_parquet_see_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arrays()
    np.savez(tmp_path / "plain.npz", **given)
    assert run(capsys, "import", tmp_path / "plain.npz", tmp_path / "one")[0] == 0
    files = pytest.importorskip("safetensors.numpy")
    assert run(capsys, "export", tmp_path / "one", tmp_path / "file.safetensors")[0] == 0
    assert expected(files.load_file(tmp_path / "file.safetensors")) == expected(given)
    files.save_file(given, tmp_path / "theirs.safetensors")
    assert run(capsys, "import", tmp_path / "theirs.safetensors", tmp_path / "two")[0] == 0
    assert content(tmp_path / "two") == expected(given)


def test_parquet_of_others_and_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    given = arrays()
    lists = {name: arrow.array(list(given[name])) for name in ("weights", "state")}
    whole = {"keys": arrow.array(given["keys"])} | lists
    parquet.write_table(arrow.table(whole), tmp_path / "good.parquet", row_group_size=700)
    assert run(capsys, "import", tmp_path / "good.parquet", tmp_path / "good")[0] == 0
    assert content(tmp_path / "good") == expected(given)
    few = {"keys": arrow.array([1, 2]), "weights": arrow.array([[1.0, 2.0], [3.0, 4.0]])}
    wrong = {
        "lacks": {"weights": few["weights"]},
        "null": few | {"keys": arrow.array([1, None])},
        "ragged": few | {"weights": arrow.array([[1.0, 2.0], [3.0]])},
        "hole": few | {"weights": arrow.array([[1.0, 2.0], [3.0, None]])},
        "text": few | {"weights": arrow.array(["a", "b"])},
        "keys": few | {"keys": arrow.array([1.5, 2.5])},
        "twice": few | {"keys": arrow.array([1, 1])},
    }
    for name, columns in wrong.items():
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")
        code, result = run(capsys, "import", tmp_path / f"{name}.parquet", tmp_path / "bad")
        assert (code, result["error"]["type"]) == (2, "ConfigError"), (name, result)
    good = (tmp_path / "good.parquet").read_bytes()
    for name, damaged in (("cut", good[:-100]), ("none", b"PAR1"), ("garbage", good[:4] + bytes(4000) + good[4004:])):
        (tmp_path / f"{name}.parquet").write_bytes(damaged)
        code, result = run(capsys, "import", tmp_path / f"{name}.parquet", tmp_path / "bad")
        assert code in (1, 2) and result["error"]["type"] in ("CorruptionError", "ConfigError"), (name, result)
    assert not (tmp_path / "bad").exists()


def test_groups_of_a_parquet_file_are_larger_where_there_are_more_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is in memory as a whole, some kilobytes for each group."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(module_of_parquet, "_GROUP_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    groups = []
    for rows in (2000, 32_000):
        np.savez(tmp_path / "plain.npz", keys=np.arange(rows), weights=np.ones((rows, 4), np.float32))
        assert run(capsys, "import", tmp_path / "plain.npz", tmp_path / "one", "--force", "--to", "directory")[0] == 0
        monkeypatch.setattr(module_of_parquet, "_ENDING_BYTES", 100)
        assert run(capsys, "export", tmp_path / "one", tmp_path / "file.parquet", "--force")[0] == 0
        groups.append(parquet.ParquetFile(tmp_path / "file.parquet").metadata.num_row_groups)
    assert groups[0] > 10 and groups[1] < 6 * groups[0]


# ---------------------------------------------------------------------------------------------------------------- dense


def test_a_dense_tensor_out_and_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    keys = rng.permutation(2000)[:1500]
    weights = rng.standard_normal((1500, 4)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        with EmbTable("items", 4, dtype=dtype, seed=5, directory=tmp_path / dtype) as table:
            table.assign(keys, weights)
            whole = table.lookup(np.arange(2100), insert=False)
        code, result = run(capsys, "export", tmp_path / dtype, tmp_path / f"{dtype}.npy", "--rows", 2100)
        assert (code, result["rows"], result["tensor_rows"]) == (0, 1500, 2100)
        assert np.load(tmp_path / f"{dtype}.npy").tobytes() == whole.tobytes()
        options = ("--rows", 2100, "--dense")
        assert run(capsys, "export", tmp_path / dtype, tmp_path / f"{dtype}.safetensors", *options)[0] == 0
        for kind in ("npy", "safetensors"):
            back = tmp_path / f"{dtype}-{kind}"
            options = ("--dense", "--first-key", "-50", "--dtype", dtype)
            assert run(capsys, "import", tmp_path / f"{dtype}.{kind}", back, *options)[0] == 0
            stored = whole if dtype == "float32" else (whole.view(np.uint32) >> 16).astype(np.uint16)
            assert content(back) == {key - 50: stored[key].tobytes() for key in range(2100)}
    assert run(capsys, "export", tmp_path / "float32", tmp_path / "a.npy", "--rows", 1000)[0] == 2
    assert run(capsys, "export", tmp_path / "float32", tmp_path / "a.npz", "--dense")[0] == 2
    assert run(capsys, "export", tmp_path / "float32", tmp_path / "a.npz", "--rows", 5)[0] == 2
    with EmbTable("items", 4, directory=tmp_path / "float32", seed=5) as table:
        table.assign([10**15], np.ones((1, 4), np.float32))
    code, result = run(capsys, "export", tmp_path / "float32", tmp_path / "a.npy")
    assert code == 2 and "--rows" in result["error"]["message"]
    assert run(capsys, "export", tmp_path / "float32", tmp_path / "a.npy", "--rows", 10**15 + 1)[0] == 3  # no such disk
    assert not (tmp_path / "a.npy").exists()


# -------------------------------------------------------------------------------------------------------------- hostile


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/embcache-was-unpickled",)


def test_files_that_lie_or_are_cut_short_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays(200)

    def attempt(name: str, code: int, kind: str, *options: object) -> str:
        got, result = run(capsys, "import", tmp_path / name, tmp_path / "target", *options)
        assert (got, result.get("error", {}).get("type")) == (code, kind), (name, result)
        assert sorted(one for one in os.listdir(tmp_path) if one.startswith("target")) == []
        return str(result["error"]["message"])

    np.savez(tmp_path / "good.npz", **given)
    good = (tmp_path / "good.npz").read_bytes()
    for length in (0, 3, 100, len(good) // 2, len(good) - 1):
        (tmp_path / "cut.npz").write_bytes(good[:length])
        attempt("cut.npz", 1, "CorruptionError")
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    (tmp_path / "flipped.npz").write_bytes(flipped)
    attempt("flipped.npz", 1, "CorruptionError")
    np.savez(tmp_path / "object.npz", **(given | {"weights": np.array([Trap()] * 200, object)}))
    assert "unpickled" in attempt("object.npz", 2, "ConfigError")
    np.save(tmp_path / "object.npy", np.array([Trap()], object))
    attempt("object.npy", 2, "ConfigError")
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Trap()))
    attempt("pickle.npy", 1, "CorruptionError")
    assert not os.path.exists("/tmp/embcache-was-unpickled")
    changes: dict[str, dict[str, Any]] = {
        "keys of floats": {"keys": given["keys"].astype(np.float64)},
        "keys in a square": {"keys": given["keys"].reshape(20, 10)},
        "too few keys": {"keys": given["keys"][:-1]},
        "too large keys": {"keys": np.arange(2**63, 2**63 + 200, dtype=np.uint64)},
        "whole weights": {"weights": np.ones((200, 5), np.int32)},
        "flat weights": {"weights": np.ones(200, np.float32)},
        "deep weights": {"weights": np.ones((200, 5, 1), np.float32)},
        "no columns": {"weights": np.ones((200, 0), np.float32)},
        "Fortran": {"weights": np.asfortranarray(given["weights"])},
        "complex": {"weights": np.ones((200, 5), np.complex64)},
        "text": {"weights": np.full((200, 5), "1.5")},
        "records": {"weights": np.zeros(200, [("a", np.float32)])},
        "beyond float32": {"weights": np.full((200, 5), 1e300)},
        "half a filter": {"timestamps": given["keys"]},
        "state of integers": {"state": np.ones((200, 3), np.int64)},
    }
    for name, change in changes.items():
        np.savez(tmp_path / "wrong.npz", **(given | change))
        attempt("wrong.npz", 2, "ConfigError")
        assert name
    for what in ("keys", "weights"):
        np.savez(tmp_path / "lacks.npz", **{name: one for name, one in given.items() if name != what})
        assert repr(what) in attempt("lacks.npz", 2, "ConfigError")
    attempt("good.npz", 2, "ConfigError", "--state", "absent")
    attempt("good.npz", 2, "ConfigError", "--table", "t")
    attempt("good.npz", 2, "ConfigError", "--optimizer", "adam")
    for value, options in ((np.nan, ()), (np.inf, ()), (-np.inf, ("--dtype", "float16"))):
        weights = given["weights"].copy()
        weights[123, 2] = value
        np.savez(tmp_path / "nan.npz", **(given | {"weights": weights}))
        assert "row 123" in attempt("nan.npz", 2, "ConfigError", *options)
    weights[123, 2] = 70000.0
    np.savez(tmp_path / "wide.npz", **(given | {"weights": weights}))
    assert "row 123" in attempt("wide.npz", 2, "ConfigError", "--dtype", "float16", "--allow-nan")
    with zipfile.ZipFile(tmp_path / "lies.npz", "w") as archive:
        archive.writestr("keys.npy", npy_header(np.dtype(np.int64), (10**14,)) + bytes(100))
        archive.writestr("weights.npy", npy_header(np.dtype(np.float32), (10**14, 5)) + bytes(100))
    attempt("lies.npz", 3, "DiskFullError")  # no disk has room for what it says
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as archive:
        archive.writestr("keys.npy", npy_header(np.dtype(np.int64), (1000,)) + bytes(100))
        archive.writestr("weights.npy", npy_header(np.dtype(np.float32), (1000, 5)) + bytes(100))
    attempt("short.npz", 1, "CorruptionError")
    (tmp_path / "short.npy").write_bytes(npy_header(np.dtype(np.float32), (1000, 5)) + bytes(100))
    attempt("short.npy", 1, "CorruptionError")
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"(" * 9000)
    attempt("deep.npy", 1, "CorruptionError")
    (tmp_path / "unknown.bin").write_bytes(good)
    attempt("unknown.bin", 2, "ConfigError")
    attempt("absent.npz", 2, "ConfigError")
    (tmp_path / "folder").mkdir()
    attempt("folder", 2, "ConfigError")
    os.mkfifo(tmp_path / "pipe.npz")  # to open it would wait for a writer
    assert "is a pipe" in attempt("pipe.npz", 2, "ConfigError")


def test_damaged_safetensors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = safetensors(tmp_path / "good.safetensors", arrays(200)).read_bytes()
    assert run(capsys, "import", tmp_path / "good.safetensors", tmp_path / "good")[0] == 0
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def with_header(change: Any) -> bytes:
        body = json.loads(json.dumps(header))
        change(body)
        text = json.dumps(body).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    bad = {
        "empty": b"",
        "length": (2**63).to_bytes(8, "little") + good[8:],
        "cut": good[:-1],
        "cut header": good[: 8 + length // 2],
        "not JSON": good[:8] + b"{" * length + good[8 + length :],
        "a list": with_header(lambda body: None)[:8] + b"[" + b" " * (length - 2) + b"]" + good[8 + length :],
        "negative": with_header(lambda body: body["keys"].update(data_offsets=[-8, 1592])),
        "beyond": with_header(lambda body: body["state"].update(data_offsets=[0, 10**12])),
        "swapped": with_header(lambda body: body["keys"].update(data_offsets=[1600, 0])),
        "shape": with_header(lambda body: body["keys"].update(shape=[10**18])),
        "shape of text": with_header(lambda body: body["keys"].update(shape=["2"])),
        "no offsets": with_header(lambda body: body["keys"].pop("data_offsets")),
        "true": with_header(lambda body: body["keys"].update(shape=[True])),
        "about": with_header(lambda body: body.update(__metadata__={"embcache": "{}"})),
        "deep": (300_000).to_bytes(8, "little") + b'{"a":' * 60_000,
    }
    for name, content_ in bad.items():
        (tmp_path / "bad.safetensors").write_bytes(content_)
        code, result = run(capsys, "import", tmp_path / "bad.safetensors", tmp_path / "target")
        assert (code, result["error"]["type"]) == (1, "CorruptionError"), (name, result)
    for name, change in (("F8", {"dtype": "F8_E4M3"}), ("scalar", {"shape": [], "data_offsets": [0, 8]})):
        (tmp_path / "bad.safetensors").write_bytes(with_header(lambda body, change=change: body["keys"].update(change)))
        assert run(capsys, "import", tmp_path / "bad.safetensors", tmp_path / "target")[0] == 2, name
    assert not (tmp_path / "target").exists()


# ------------------------------------------------------------------------------------------------------------- ordering


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("duplicates", ["refuse", "first", "last"])
def test_a_key_that_comes_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: bool, duplicates: str
) -> None:
    if small:  # several passes over the temporary file, and a key that alone exceeds a bucket
        monkeypatch.setattr(ordering, "_BUCKET_BYTES", 1000)
        monkeypatch.setattr(ordering, "_HELD_BYTES", 2000)
        monkeypatch.setattr(ordering, "_READ_BYTES", 500)
    rng = np.random.default_rng(0)
    keys = np.concatenate([rng.integers(0, 500, 3000), np.full(200, 77)])
    weights = np.arange(len(keys) * 2, dtype=np.float32).reshape(-1, 2)
    np.savez(tmp_path / "file.npz", keys=keys, weights=weights)
    code, result = run(capsys, "import", tmp_path / "file.npz", tmp_path / "one", "--duplicates", duplicates)
    if duplicates == "refuse":
        assert code == 2 and "comes more than once" in result["error"]["message"]
        return
    wanted: dict[int, bytes] = {}
    for key, row in zip(keys.tolist(), weights, strict=True):
        if duplicates == "last" or key not in wanted:
            wanted[key] = row.tobytes()
    assert content(tmp_path / "one") == wanted
    assert result["tables"]["file"]["dropped"] == len(keys) - len(wanted)


def test_rows_come_in_the_order_of_vshards_whatever_the_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "_BUCKET_BYTES", 20_000)
    monkeypatch.setattr(ordering, "_HELD_BYTES", 20_000)
    given = arrays(20_000, 8)
    safetensors(tmp_path / "file.safetensors", given)
    assert run(capsys, "import", tmp_path / "file.safetensors", tmp_path / "one")[0] == 0
    assert content(tmp_path / "one") == expected(given)
    with Reader(tmp_path / "one") as reader:
        ranges = [(p.vshard_from, p.vshard_to) for level in reader._levels for p in level.chunks()]
    assert ranges == sorted(ranges) and all(
        one[1] <= other[0] + 1 for one, other in zip(ranges, ranges[1:], strict=False)
    )


def test_a_table_larger_than_a_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks hold some of the vshards each, and readers of some vshards read little else; keys of two windows are compared."""
    monkeypatch.setattr(gathering, "_WINDOW_BYTES", 400_000)
    monkeypatch.setattr(ordering, "_BUCKET_BYTES", 100_000)
    monkeypatch.setattr(ordering, "_HELD_BYTES", 20_000)
    monkeypatch.setattr(importing, "Writer", partial(Writer, chunk_bytes=1 << 16))
    given = arrays(20_000, 8)
    safetensors(tmp_path / "file.safetensors", given)
    assert run(capsys, "import", tmp_path / "file.safetensors", tmp_path / "one")[0] == 0
    assert os.listdir(tmp_path / "one") and content(tmp_path / "one") == expected(given)
    monkeypatch.setattr(sources, "_MOST_MAPPED_BYTES", 600_000)
    with Reader(tmp_path / "one") as reader:
        widths = [p.vshard_to - p.vshard_from for level in reader._levels for p in level.chunks()]
        assert len(widths) > 12 and max(widths) < 2000
        (name,) = reader.tables
        windows = sources.windows_of(reader, name, sources.ALL)
        assert len(windows) > 2 and windows == list(sources.split(sources.ALL, len(windows)))
    assert run(capsys, "restore", tmp_path / "one", tmp_path / "back")[0] == 0
    assert run(capsys, "diff", tmp_path / "one", tmp_path / "back")[0] == 0
    assert run(capsys, "import", tmp_path / "file.safetensors", tmp_path / "two", "--duplicates", "last")[0] == 0
    with Reader(tmp_path / "two") as reader:
        assert sources.windows_of(reader, name, sources.ALL) == [sources.ALL]
    given["keys"][-1] = given["keys"][0]
    safetensors(tmp_path / "file.safetensors", given)
    code, result = run(capsys, "import", tmp_path / "file.safetensors", tmp_path / "three")
    assert code == 2 and f"key {given['keys'][0]} comes more than once" in result["error"]["message"]
