"""`embcache import` of what RecSDK's embedding cache has saved: rows, and of its filter all that a save holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanged import content, expected, run

from embcache.checkpoint import Reader
from embcache.commands import counters, ordering

NO_TIME = -(2**63)


def recsdk(folder: Path, given: dict[str, np.ndarray], words: bool = True) -> None:
    """Write a table as its saver does."""
    rows, dim = given["embedding"].shape
    for name, one in given.items():
        (folder / name).mkdir(parents=True)
        one.astype("<i8" if name == "key" else "<f4").tofile(folder / name / "slice.data")
        numbers = [8, rows] if name == "key" else [4, rows, dim] if words or name == "embedding" else [4, rows * dim]
        np.array(numbers, "<i8").tofile(folder / name / "slice.attribute")


@pytest.mark.parametrize("words", [True, False])
def test_a_recsdk_save_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: bool) -> None:
    rng = np.random.default_rng(0)
    save: dict[str, dict[str, np.ndarray]] = {}
    for name, dim, rows in (("users", 8, 500), ("items", 16, 1), ("none", 8, 0)):
        save[name] = {"key": rng.permutation(10**6)[:rows]}
        for what in ("embedding", "momentum1", "momentum2")[: 3 if name != "items" else 2]:
            save[name][what] = rng.standard_normal((rows, dim)).astype(np.float32)
        recsdk(tmp_path / "save" / name, save[name], words or name == "none")
    (tmp_path / "save" / "meta.ini").write_text("[meta]\n")
    (tmp_path / "save" / "users" / "other").mkdir()
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one")
    assert (code, {name: about["rows"] for name, about in result["tables"].items()}) == (
        0,
        {"users": 500, "items": 1, "none": 0},
    ), result
    assert result["left_out"] == {"items": [], "none": [], "users": ["other"]}
    with Reader(tmp_path / "one") as reader:
        assert (reader.tables["users"].state_dim, reader.tables["items"].state_dim) == (16, 16)
        (rows,) = reader.rows("users")
        order, wanted = np.argsort(rows.keys), np.argsort(save["users"]["key"])
        assert np.array_equal(rows.keys[order], save["users"]["key"][wanted])
        assert np.array_equal(rows.weights[order], save["users"]["embedding"][wanted])
        both = np.concatenate([save["users"]["momentum1"], save["users"]["momentum2"]], axis=1)
        assert np.array_equal(rows.state[order], both[wanted])
    options = ("--table", "users", "--optimizer", "adam", "--to", "directory")
    assert run(capsys, "import", tmp_path / "save", tmp_path / "users", *options)[0] == 0
    assert run(capsys, "import", tmp_path / "save" / "users", tmp_path / "alone")[0] == 0
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no", "--to", "directory")[0] == 2
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no", "--table", "absent")[0] == 2
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no", "--optimizer", "rowwise_adagrad")[0] == 2
    for what, change in {
        "key/slice.data": lambda content: content[:-3],
        "embedding/slice.data": lambda content: content + b"1234",
        "embedding/slice.attribute": lambda content: content[:10],
        "momentum1/slice.attribute": lambda content: b"\xff" * 24,
    }.items():
        path = tmp_path / "save" / "users" / what
        good = path.read_bytes()
        path.write_bytes(change(good))
        code, result = run(capsys, "import", tmp_path / "save", tmp_path / "no")
        assert (code, result["error"]["type"]) == (1, "CorruptionError"), (what, result)
        path.write_bytes(good)
    (tmp_path / "save" / "users" / "embedding" / "slice.data").unlink()
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no")[0] == 2
    assert not (tmp_path / "no").exists()


def test_a_recsdk_save_that_was_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    keys, weights = rng.permutation(1000), rng.standard_normal((1000, 8)).astype(np.float32)
    for rank in range(3):
        mine = keys % 3 == rank
        recsdk(tmp_path / "save" / "t" / f"rank{rank}", {"key": keys[mine], "embedding": weights[mine]})
    recsdk(tmp_path / "save" / "t" / "rank4", {"key": keys[:0], "embedding": weights[:0]})
    (tmp_path / "save" / "t" / "rank10").mkdir()  # a rank without a row of this table
    assert run(capsys, "import", tmp_path / "save", tmp_path / "one")[0] == 0
    assert content(tmp_path / "one") == expected({"keys": keys, "weights": weights})
    (tmp_path / "save" / "t" / "rank1" / "key" / "slice.data").unlink()
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "two")
    assert (code, result["error"]["type"]) == (2, "ConfigError") and "rank1/key/slice.data: does not exist" in result[
        "error"
    ]["message"]
    assert not (tmp_path / "two").exists()


# --------------------------------------------------------------------------------------------------------------- filters


def numbers(folder: Path, what: str, **arrays: np.ndarray) -> None:
    """Write arrays of a filter as its saver does: data of one element is left out."""
    (folder / what).mkdir()
    (count,) = {len(one) for one in arrays.values()}
    np.array([8, count], "<i8").tofile(folder / what / "slice.attribute")
    for name, one in arrays.items():
        if count != 1:
            one.astype("<i8").tofile(folder / what / f"{name}.data")


def counted(path: Path, name: str) -> dict[int, tuple[int, int]]:
    """Frequency and timestamp of each key of a checkpoint's table."""
    with Reader(path) as reader:
        found = {}
        for rows in reader.rows(name):
            assert rows.frequencies is not None and rows.timestamps is not None
            pairs = zip(rows.frequencies.tolist(), rows.timestamps.tolist(), strict=True)
            found |= dict(zip(rows.keys.tolist(), pairs, strict=True))
    return found


def save_with_filter(
    folder: Path, rng: np.random.Generator, ranks: int, rows: int = 3000
) -> dict[int, tuple[int, int]]:
    """A save of a table in as many parts, its filter met by all ranks; returns what a row's counters have to be."""
    keys = rng.choice(10**12, 2 * rows, replace=False)
    times = {int(key): int(rng.integers(-(10**9), 10**9)) for key in keys[rows // 10 :]}  # of waiting keys too
    counts = dict(zip(keys[:rows].tolist(), rng.integers(-1, 50, rows).tolist(), strict=True))
    newest = max(times.values())
    for rank in range(ranks):
        part = folder / f"rank{rank}" if ranks > 1 else folder
        mine = keys[:rows][keys[:rows] % ranks == rank]
        recsdk(part, {"key": mine, "embedding": mine[:, None].repeat(8, 1).astype(np.float32)})
        numbers(part, "admit_count", slice=np.array([counts[key] for key in mine.tolist()]))
        met = rng.permutation([key for key in times if ranks == 1 or rng.random() < 0.7 or key % ranks == rank])
        older = rng.integers(0, 1000, len(met)) * (met % ranks != rank)  # the owner has met it last
        numbers(
            part,
            "evict_timestamp",
            slice_evict_key=met,
            slice_evict_ts=np.array([times[k] for k in met.tolist()]) - older,
        )
    return {key: (max(count, 1), times.get(key, newest)) for key, count in counts.items()}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_counts_and_times_of_a_filter_come_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: int, small: bool
) -> None:
    if small:  # several passes, and pieces that end between any two keys
        for name, value in (("_BUCKET_BYTES", 20_000), ("_HELD_BYTES", 10_000), ("_READ_BYTES", 1000)):
            monkeypatch.setattr(ordering, name, value)
        monkeypatch.setattr(counters, "_PAIRS", 100)
    wanted = save_with_filter(tmp_path / "save" / "users", np.random.default_rng(0), ranks)
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one")
    assert code == 0 and counted(tmp_path / "one", "users") == wanted
    newest = max(last for _, last in wanted.values())
    about = result["tables"]["users"]["filter"]
    assert about == {"rows_with_time": 2700, "time_of_others": newest, "keys_that_waited": 3000}
    assert run(capsys, "import", tmp_path / "save", tmp_path / "back", "--to", "directory")[0] == 0
    assert run(capsys, "save", tmp_path / "back", tmp_path / "two")[0] == 0
    assert (
        counted(tmp_path / "two", "users") == wanted and run(capsys, "diff", tmp_path / "one", tmp_path / "two")[0] == 0
    )
    for path in ("one", "two"):
        with Reader(tmp_path / path) as reader:
            state = reader.filter("users")
            assert state is not None and len(state.keys) == 0 and state.numbers[0]["newest"] == newest


def test_a_key_that_all_ranks_have_met_has_its_newest_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of one key than a bucket holds, and no row of any other key that has a time."""
    monkeypatch.setattr(ordering, "_BUCKET_BYTES", 4000)
    monkeypatch.setattr(ordering, "_READ_BYTES", 500)
    folder, rng = tmp_path / "save" / "t", np.random.default_rng(0)
    recsdk(folder, {"key": np.array([7, 9]), "embedding": np.ones((2, 4))})
    times = rng.permutation(1000)
    numbers(folder, "evict_timestamp", slice_evict_key=np.full(1000, 7), slice_evict_ts=times)
    assert run(capsys, "import", tmp_path / "save", tmp_path / "one")[0] == 0
    assert counted(tmp_path / "one", "t") == {7: (1, 999), 9: (1, 999)}
    assert run(capsys, "import", tmp_path / "save", tmp_path / "two", "--time", "-5")[0] == 0
    assert counted(tmp_path / "two", "t") == {7: (1, 999), 9: (1, -5)}


def test_counts_without_times_are_taken_where_the_user_says_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "save" / "t"
    recsdk(folder, {"key": np.array([7, 9]), "embedding": np.ones((2, 4))})
    numbers(folder, "admit_count", slice=np.array([5, -1]))
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one")
    assert (code, result["left_out"]) == (0, {"t": ["admit_count"]})
    with Reader(tmp_path / "one") as reader:
        assert not reader.tables["t"].with_filter
    assert run(capsys, "import", tmp_path / "save", tmp_path / "two", "--time", "100")[0] == 0
    assert counted(tmp_path / "two", "t") == {7: (5, 100), 9: (1, 100)}
    np.savez(tmp_path / "plain.npz", keys=[1], weights=np.ones((1, 2)))
    assert run(capsys, "import", tmp_path / "plain.npz", tmp_path / "no", "--time", "1")[0] == 2
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no", "--time", str(NO_TIME))[0] == 2


def test_one_count_and_one_time_are_unknown_as_their_writer_leaves_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "save" / "t"
    recsdk(folder, {"key": np.array([7]), "embedding": np.ones((1, 4))})
    numbers(folder, "admit_count", slice=np.array([5]))
    numbers(folder, "evict_timestamp", slice_evict_key=np.array([7]), slice_evict_ts=np.array([3]))
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one")
    assert code == 0 and counted(tmp_path / "one", "t") == {7: (0, NO_TIME)}  # it stays until it has been used
    assert result["tables"]["t"]["filter"] == {"rows_with_time": 0, "time_of_others": None, "keys_that_waited": 0}


def test_rows_of_no_key_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank of a save may have one, of a slot whose key was evicted: their internal -1."""
    folder = tmp_path / "save" / "t"
    keys, weights = np.array([-1, 4, -1, 8, -1]), np.arange(10, dtype=np.float32).reshape(5, 2)
    recsdk(folder, {"key": keys, "embedding": weights})
    wanted = {4: weights[1].tobytes(), 8: weights[3].tobytes()}
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one")
    assert (code, result["tables"]["t"]["rows"], result["tables"]["t"]["without_key"]) == (0, 2, 3)
    assert content(tmp_path / "one") == wanted
    numbers(folder, "admit_count", slice=np.arange(5))
    numbers(folder, "evict_timestamp", slice_evict_key=keys, slice_evict_ts=np.array([99, 5, 98, 6, 97]))
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "two")
    assert code == 0 and counted(tmp_path / "two", "t") == {4: (1, 5), 8: (3, 6)}
    assert result["tables"]["t"]["filter"]["keys_that_waited"] == 0


def test_damaged_counters_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "save" / "t"
    save_with_filter(folder, np.random.default_rng(0), 1, 50)
    for what, change in {
        "admit_count/slice.data": lambda content: content[:-8],
        "admit_count/slice.attribute": lambda content: content[:15],
        "evict_timestamp/slice_evict_key.data": lambda content: content + bytes(8),
        "evict_timestamp/slice_evict_ts.data": lambda content: b"",
        "evict_timestamp/slice.attribute": lambda content: b"\xff" * 16,
    }.items():
        path = folder / what
        good = path.read_bytes()
        path.write_bytes(change(good))
        code, result = run(capsys, "import", tmp_path / "save", tmp_path / "no")
        assert (code, result["error"]["type"]) == (1, "CorruptionError") and str(folder) in result["error"]["message"]
        path.write_bytes(good)
    (folder / "evict_timestamp" / "slice.attribute").unlink()
    assert run(capsys, "import", tmp_path / "save", tmp_path / "no")[0] == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["save"]


def test_a_trained_filter_goes_on_from_its_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of ours, written as theirs would be, and imported: the next sweeps take the same rows, at the same steps."""
    torch = pytest.importorskip("torch")
    import embcache as ec

    def collection() -> Any:
        rule = ec.AdmitAndEvictConfig(2, evict_threshold=120, evict_step_interval=3)
        table = ec.TableConfig("items", 4, ["f"], admit_and_evict=rule)
        return ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=0.1))

    def train(ebc: Any, steps: range) -> list[list[int]]:
        lives = []
        for step in steps:
            keys = torch.from_numpy(np.random.default_rng(step).integers(0, 400, 64))
            times = torch.full((64,), step * 10)
            out = ebc(ec.JaggedFeatures(["f"], keys, torch.ones(64, dtype=torch.int64), timestamps=times))
            (out.values() ** 2).sum().backward()
            lives.append(sorted(key for rows in ebc.manager.table("items").items() for key in rows[0].tolist()))
        return lives

    straight = collection()
    train(straight, range(30))
    straight.manager.flush()
    keys, weights, _, frequency, timestamp = (
        np.concatenate(one) for one in zip(*straight.manager.table("items").items(), strict=True)
    )
    waiting = straight.manager.planner.export_filter(0)
    recsdk(tmp_path / "save" / "items", {"key": keys, "embedding": weights})
    numbers(tmp_path / "save" / "items", "admit_count", slice=frequency)
    both = np.concatenate([keys, waiting["keys"]]), np.concatenate([timestamp, waiting["last"]])
    numbers(tmp_path / "save" / "items", "evict_timestamp", slice_evict_key=both[0], slice_evict_ts=both[1])
    code, result = run(capsys, "import", tmp_path / "save", tmp_path / "one", "--optimizer", "sgd")
    assert code == 0 and result["tables"]["items"]["filter"]["keys_that_waited"] == len(waiting["keys"]) > 20
    imported = collection()
    imported.restore(tmp_path / "one")
    imported.manager.planner.start_at(30)
    # Keys that waited start anew, so only those that had rows are compared.
    had = set(keys.tolist())
    lives = [[[key for key in one if key in had] for one in train(ebc, range(30, 45))] for ebc in (straight, imported)]
    assert lives[0] == lives[1] and len(lives[0][-1]) < len(keys)
    newest = [ebc.manager.planner.export_filter(0)["newest"] for ebc in (straight, imported)]
    assert newest[0] == newest[1]
