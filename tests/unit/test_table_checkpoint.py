"""`EmbTable.save` and `restore`, and what the compiled table counts as changed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from embcache._core.digest import hash_keys
from embcache._core.table import Table, refuse_memory
from embcache.checkpoint import (
    Reader,
    TableDescription,
    Writer,
    emb_table,
    fill,
    generations,
    prune_after,
    row_batches,
    save_table,
    verify,
)
from embcache.cli import main
from embcache.config import Constant
from embcache.errors import ChangedError, ConfigError, CorruptionError, HostMemoryError, ShapeError, StorageError
from embcache.table import EmbTable

Model = dict[int, tuple[bytes, bytes]]


def content(table: EmbTable) -> Model:
    model: Model = {}
    for keys, weights, state, _, _ in table.items():
        for i, key in enumerate(keys.tolist()):
            model[key] = (weights[i].tobytes(), state[i].tobytes())
    return model


def test_changes_are_counted_from_the_last_mark() -> None:
    table = Table("t", 3, state_dim=1, with_filter=True, split_above=500)
    keys = np.arange(2000)
    rows = table.insert(keys)
    assert table.changed() == 2000 and not table.tracked and table.erased_keys() is None
    assert not table.mark_saved(table.version + 1) and table.changed() == 2000
    assert table.mark_saved(table.version) and table.changed() == 0 and table.tracked
    before = table.version
    table.lookup(keys, np.empty((2000, 3), np.float32))
    table.find(keys)
    table.insert(keys)
    assert table.changed() == 0 and table.version == before
    table.write_from(rows[10:20], np.ones((10, 3), np.float32), None, [np.ones((10, 1), np.float32)])
    table.write_columns(rows[15:25], rows[15:25], rows[15:25])
    table.assign(keys[30:31], np.ones((1, 3), np.float32))
    table.insert(np.array([-5]))
    assert table.changed() == 15 + 1 + 1
    extents, starts = table.save_order()
    assert starts[0] and len(starts) == len(extents)
    assert sorted(table.rows_of(extents, True).tolist()) == sorted(
        [*rows[10:25], rows[30], table.find(np.array([-5]))[0]]
    )
    table.erase(np.array([0, 1, 2, -5, 77777]))
    table.insert(np.array([1]))
    assert table.erased_keys() is not None and table.erased_keys().tolist() == [-5, 0, 2]  # type: ignore[union-attr]
    detached = table.detach(np.array([3, 4]))
    assert 3 not in table.erased_keys()  # type: ignore[operator]
    table.attach(np.array([3]), detached[:1])
    table.free(np.array([4]), detached[1:])
    assert table.erased_keys().tolist() == [-5, 0, 2, 4]  # type: ignore[union-attr]
    table.check()
    assert table.mark_saved() and table.erased_keys().tolist() == [] and table.changed() == 0  # type: ignore[union-attr]
    table.close()


def test_a_list_of_erased_keys_that_does_not_pay_or_fit_is_given_up() -> None:
    table = Table("t", 1)
    keys = np.arange(100_000)
    table.insert(keys)
    table.mark_saved()
    table.erase(keys[:90_000])
    assert table.tracked
    table.insert(keys[:90_000])
    table.erase(keys)
    assert not table.tracked and table.erased_keys() is None
    table.mark_saved()
    assert table.tracked
    table.insert(keys[:10])
    refuse_memory(0)
    assert table.erase(keys[:5]) == 5  # which cannot fail
    assert refuse_memory(-1) == -1 and not table.tracked
    table.check()


def test_room_in_advance_changes_nothing_but_the_cost() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    table, other = (Table("t", 2, split_above=1000, index_seed=1) for _ in range(2))
    table.reserve(0)
    table.reserve(20_000)
    version, index_bytes = table.version, table.stats()["index_bytes"]
    for begin in range(0, 20_000, 500):
        table.insert(keys[begin : begin + 500])
        other.insert(keys[begin : begin + 500])
    assert version == 0 and index_bytes <= table.stats()["index_bytes"] < 1.25 * index_bytes
    assert (table.lookup_rows(keys)[0] == other.lookup_rows(keys)[0]).all() and len(table) == len(other)
    table.check()
    table.reserve(5)
    with pytest.raises(ShapeError, match="-1 rows"):
        table.reserve(-1)
    refuse_memory(0)
    with pytest.raises(HostMemoryError):
        table.reserve(200_000)
    assert refuse_memory(-1) == -1
    table.check()


def test_rows_are_read_once_in_the_order_of_vshards_as_far_as_they_lie_so() -> None:
    rng = np.random.default_rng(0)
    table = Table("t", 1, split_above=3000)
    for _ in range(60):  # small batches: extents are shared by many partitions
        table.insert(rng.integers(-(2**63), 2**63 - 1, 1000))
    table.erase(rng.permutation(np.concatenate([table.columns(rows)[0] for rows in row_batches(table, 999)]))[:20_000])
    table.insert(rng.integers(-(2**63), 2**63 - 1, 3000))
    batches = list(row_batches(table, 1500))
    rows = np.concatenate(batches)
    assert len(rows) == len(table) == len(np.unique(rows)) and max(map(len, batches)) <= 1500
    spans = []
    for batch in batches:
        vshards = hash_keys(table.columns(batch)[0]) >> np.uint64(52)
        spans.append(int(vshards.max()) - int(vshards.min()))
    assert np.median(spans) < 400 < max(spans)  # most chunks are of one partition
    with pytest.raises(ShapeError, match="extent"):
        table.rows_of(np.array([10**6]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("file_backed", [False, True])
def test_a_table_comes_back(tmp_path: Path, dtype: str, file_backed: bool) -> None:
    options = {"state_dim": 5, "dtype": dtype, "initializer": Constant(0.25), "seed": 3}
    one = EmbTable("t", 9, directory=tmp_path / "one" if file_backed else None, **options)
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 5000)
    one.assign(
        keys, rng.standard_normal((5000, 9)).astype(np.float32), rng.standard_normal((5000, 5)).astype(np.float32)
    )
    assert one.saved is None
    assert one.save(tmp_path / "checkpoint", state={"a": b"x"}) == 1
    two = EmbTable("t", 9, directory=tmp_path / "two" if file_backed else None, **options)
    report = two.restore(tmp_path / "checkpoint")
    assert (report.generation, report.matched, report.rows, report.state) == (1, ["t"], {"t": 5000}, {"a": b"x"})
    assert content(two) == content(one)
    two.check()
    if file_backed:
        with pytest.raises(ConfigError, match="holds 5000 rows; restore into a new directory"):
            two.restore(tmp_path / "checkpoint")
        assert (tmp_path / "one" / "checkpoint").read_text().startswith("generation 1 of ")
    one.close()
    two.close()


def test_i10_a_table_that_is_saved_and_restored_at_any_time_follows_a_dict(tmp_path: Path) -> None:
    """Random changes, deltas and fulls at random; each generation is restored and compared, the last ones twice."""
    rng = np.random.default_rng(1)
    table = EmbTable("t", 3, state_dim=2)
    kept: dict[int, Model] = {}
    kinds = []
    for step in range(40):
        keys = rng.integers(0, 3000, int(rng.integers(1, 200)))
        table.assign(
            keys, rng.standard_normal((len(keys), 3)).astype(np.float32), np.ones((len(keys), 2), np.float32) * step
        )
        table.erase(rng.integers(0, 3000, int(rng.integers(0, 60))))
        table.lookup(rng.integers(0, 3000, 20))
        if rng.random() < 0.2 and kept:  # go on from an older generation: the next delta is one of it
            generation = int(rng.choice(list(kept)[-3:]))
            table.restore(tmp_path, generation)
            assert content(table) == kept[generation]
            table.erase(rng.integers(0, 3000, 40))
        generation = table.save(tmp_path, delta=bool(rng.random() < 0.9))
        kept[generation] = content(table)
        kinds.append(generations(tmp_path)[-1].kind)
    fresh = EmbTable("t", 3, state_dim=2)
    for generation, model in kept.items():
        fresh.restore(tmp_path, generation)
        assert content(fresh) == model
    assert kinds.count("delta") > 10 and kinds.count("full") > 3  # some because deltas had come to a full one
    assert verify(tmp_path) == []


def test_deltas_with_much_beside_their_rows_give_way_before_the_disk_is_full_of_it(tmp_path: Path) -> None:
    """A chain is kept as a whole, the caller's state in each of its deltas too; what this save writes of it, it writes either way."""
    table, state = EmbTable("t", 8), {"dense": bytes(400_000)}
    table.insert(np.arange(20_000))
    full_bytes = 20_000 * table.description.row_bytes + 400_000
    kinds = []
    for step in range(12):
        table.assign(np.arange(200), np.full((200, 8), step, np.float32))
        table.save(tmp_path, delta=True, state=state, keep=1)
        kinds.append(generations(tmp_path)[-1].kind)
        assert sum(one.bytes for one in generations(tmp_path)) < 2.1 * full_bytes
    assert kinds == ["full", "delta", "delta"] * 4


def test_a_delta_that_is_not_known_to_be_one_is_a_full_generation(tmp_path: Path) -> None:
    table = EmbTable("t", 8)
    keys = np.arange(3000)
    table.insert(keys)

    def kind(path: Path, **options: object) -> str:
        table.lookup(np.random.default_rng(len(table)).integers(3000, 9000, 3))
        table.save(path, **options)  # type: ignore[arg-type]
        return generations(path)[-1].kind

    assert kind(tmp_path / "a", delta=True) == "full"
    assert kind(tmp_path / "a", delta=True) == "delta"
    assert kind(tmp_path / "b", delta=True) == "full"  # another path
    assert kind(tmp_path / "a", delta=True) == "full"
    assert kind(tmp_path / "a", delta=True) == "delta"
    assert kind(tmp_path / "a", delta=False) == "full"
    table.lookup(np.arange(10_000, 12_500))
    assert kind(tmp_path / "a", delta=True) == "delta"
    table.lookup(np.arange(20_000, 26_000))
    table.assign(np.arange(3000), np.ones((3000, 8), np.float32))
    assert kind(tmp_path / "a", delta=True) == "full"  # the deltas would have cost more
    table.erase(np.arange(100))
    restored = EmbTable("t", 8)
    restored.restore(tmp_path / "a")
    restored.erase([5])
    restored.save(tmp_path / "a", delta=True, keep=1)
    assert [one.kind for one in generations(tmp_path / "a")] == ["full", "delta"]
    with Reader(tmp_path / "a") as reader:
        assert reader.erased("t").tolist() == [5] and reader.stats["rows_read"] == 0


@pytest.mark.parametrize("what", ["other writers", "another checkpoint", "compacted", "cut short"])
def test_a_delta_is_a_full_one_where_its_parent_is_not_what_was_saved(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path holds a generation of the right number, and only the compacted one is still what the table has saved."""
    path, table = tmp_path / "a", EmbTable("t", 4)
    table.insert(np.arange(1000))
    table.save(path)
    if what == "other writers":
        assert main(["reshard", str(path), "--writers", "3", "--force"]) == 0
        table.restore(path)
    elif what == "another checkpoint":
        with EmbTable("t", 4) as other:
            other.insert(np.arange(5000, 6000))
            other.save(tmp_path / "b")
        os.rename(path, tmp_path / "c")
        os.rename(tmp_path / "b", path)
    elif what == "compacted":
        assert main(["compact", str(path), "--force"]) == 0
    else:
        (segment,) = (path / "rank-0000").glob("segment-*")
        os.truncate(segment, segment.stat().st_size - 4096)
    table.erase([3])
    assert table.save(path, delta=True) == 2
    assert generations(path)[-1].kind == ("delta" if what == "compacted" else "full")
    back = EmbTable("t", 4)
    back.restore(path)
    keys = np.arange(6000)
    assert np.array_equal(back.find(keys) >= 0, table.find(keys) >= 0)


def test_what_is_read_beyond_a_ranks_share_is_counted(tmp_path: Path) -> None:
    """Rows that were placed before partitions split share wide chunks; a share of each chunk is its rows'."""
    table = EmbTable("t", 16, num_threads=1)
    for first in range(0, 200_000, 10_000):
        table.insert(np.arange(first, first + 10_000))
    table.save(tmp_path)
    kept = []
    for rank in range(4):
        with Reader(tmp_path, rank=rank, world=4) as reader:
            rows = sum(len(one.keys) for one in reader.rows("t"))
            own = reader.stats["bytes"] - reader.stats["bytes_beyond"]
            assert abs(own / reader.stats["bytes"] - rows / reader.stats["rows_read"]) < 0.01
            assert reader.stats["bytes_beyond"] > 0
            kept.append(rows)
    assert sum(kept) == 200_000
    with EmbTable("t", 16) as whole:
        report = whole.restore(tmp_path)
        assert report.bytes_read > 200_000 * 72 and report.bytes_beyond == 0


def test_an_empty_table_and_one_before_its_first_step(tmp_path: Path) -> None:
    table = EmbTable("t", 4)
    table.save(tmp_path)
    other = EmbTable("t", 4)
    other.insert([1, 2])
    report = other.restore(tmp_path)
    assert len(other) == 0 and report.rows == {"t": 0}


def test_a_table_that_changes_meanwhile_is_not_saved(tmp_path: Path) -> None:
    table = EmbTable("t", 4)
    table.insert(np.arange(100))
    with Writer(tmp_path) as writer:
        writer.begin()
        original, done = writer.write_filled, threading.Event()

        def between(description: TableDescription, count: int) -> None:
            original(description, count)
            if not done.is_set():
                table.insert([-1])
                done.set()

        writer.write_filled = between  # type: ignore[method-assign]
        with pytest.raises(ChangedError, match="changed while it was saved"):
            save_table(writer, table.core, table.description)
    assert generations(tmp_path) == []


def test_a_refused_restore_changes_nothing(tmp_path: Path) -> None:
    saved = EmbTable("t", 4, state_dim=4)
    saved.insert(np.arange(500))
    saved.save(tmp_path)
    for table, message in (
        (EmbTable("t", 5, state_dim=4), "dim 4, not 5"),
        (EmbTable("t", 4, state_dim=4, dtype="float16"), "dtype 'float32', not 'float16'"),
        (EmbTable("t", 4, state_dim=8), "state_dim 4, not 8"),
        (EmbTable("u", 4, state_dim=4), "no table 'u'; it has 't'"),
    ):
        table.insert([1])
        with pytest.raises(ConfigError, match=message):
            table.restore(tmp_path)
        assert len(table) == 1 and table.saved is None
    table = EmbTable("t", 4, state_dim=4, seed=5, initializer=Constant(1.0))
    assert [change.split(":")[0] for change in table.restore(tmp_path).changed["t"]] == ["seed", "initializer"]
    with pytest.raises(ConfigError, match="no generation 7"):
        table.restore(tmp_path, 7)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        table.restore(tmp_path / "nowhere")


@pytest.mark.parametrize("file_backed", [False, True])
def test_a_damaged_generation_is_passed_over_and_named(tmp_path: Path, file_backed: bool) -> None:
    path = tmp_path / "checkpoint"
    table = EmbTable("t", 32)
    table.insert(np.arange(100_000))  # several chunks, so that some are in the table before the damage is met
    table.save(path)
    before = content(table)
    table.assign(np.arange(100_000), np.ones((100_000, 32), np.float32))
    table.save(path)
    segment = path / "rank-0000" / "segment-0000000000000002-0000"
    damaged = bytearray(segment.read_bytes())
    damaged[-5000] ^= 16
    segment.write_bytes(damaged)
    other = EmbTable("t", 32, directory=tmp_path / "rows" if file_backed else None)
    report = other.restore(path)
    assert report.generation == 1 and [number for number, _ in report.skipped] == [2]
    assert "generation 2, table 't', chunk 3 of rank 0: does not match its digest" in report.skipped[0][1]
    assert content(other) == before
    other.check()
    with pytest.raises(CorruptionError, match="chunk 3"):
        EmbTable("t", 32).restore(path, 2)
    (path / "rank-0000" / "segment-0000000000000001-0000").write_bytes(b"short")
    with pytest.raises(CorruptionError, match="no generation holds: 2: .*; .*1: .* 5 bytes long"):
        EmbTable("t", 32).restore(path)
    other.close()


def test_rows_with_frequencies_stay_so(tmp_path: Path) -> None:
    core = Table("t", 4, with_filter=True)
    rows = core.insert(np.arange(1000))
    core.write_columns(rows, rows * 3, rows - 7)
    description = TableDescription("t", 4, with_filter=True)
    with Writer(tmp_path) as writer:
        writer.begin()
        version = save_table(writer, core, description)
        writer.commit()
        writer.publish()
    assert core.mark_saved(version)
    other = Table("t", 4, with_filter=True)
    with Reader(tmp_path) as reader:
        assert reader.rows_expected("t") == 1000 and fill(reader, other, "t") == 1000
    for one in (core, other):
        keys, frequencies, timestamps = one.columns(one.find(np.arange(1000)))
        assert (keys == np.arange(1000)).all() and (frequencies == rows * 3).all() and (timestamps == rows - 7).all()
    table = EmbTable("t", 4)
    table.restore(tmp_path)
    assert all(frequency is not None for _, _, _, frequency, _ in table.items())
    with (
        EmbTable("t", 4, directory=tmp_path / "rows") as backed,
        pytest.raises(ConfigError, match="has no room for them"),
    ):
        backed.restore(tmp_path)


def test_a_parent_whose_time_is_not_known_is_not_built_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest could not be read right after the save: nobody can tell the generation from another of its number."""
    table = EmbTable("t", 4)
    table.insert(np.arange(1000))
    monkeypatch.setattr(emb_table, "created_of", lambda *_: None)
    table.save(tmp_path)
    table.erase([3])
    assert table.saved == (os.path.realpath(tmp_path), 1) and table.saved_created is None
    table.save(tmp_path, delta=True)
    assert [one.kind for one in generations(tmp_path)] == ["full", "full"]


@pytest.mark.parametrize("error", [OSError(5, "x"), MemoryError(), StorageError(5, "x"), CorruptionError("damaged")])
def test_trouble_with_older_generations_is_no_failure_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    table = EmbTable("t", 4)
    table.insert(np.arange(10))
    table.save(tmp_path)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setitem(prune_after.__globals__, "prune", refuse)
    assert table.save(tmp_path, keep=1) == 2
    (record,) = caplog.records
    assert record.levelname == ("ERROR" if isinstance(error, CorruptionError) else "WARNING")
    assert "generation 2 is saved, but older ones" in record.message
    monkeypatch.undo()
    assert table.save(tmp_path, keep=1) == 3
    assert [one.generation for one in generations(tmp_path)] == [3]


def test_how_many_to_keep_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep = 0"):
        EmbTable("t", 4).save(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())
