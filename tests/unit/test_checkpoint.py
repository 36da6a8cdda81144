"""Writer and Reader: what goes in comes out, for every kind of table, any number of writers and readers."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache._core.digest import hash_keys
from embcache.checkpoint import (
    Files,
    Reader,
    TableDescription,
    Writer,
    created_of,
    delta_pays,
    generations,
    next_generation,
    prune,
    publish,
    segment,
    verify,
    vshards_of,
)
from embcache.errors import ClosedError, ConfigError, CorruptionError, LockedError, ShapeError, StorageError

Model = dict[int, tuple[bytes, ...]]


def keys_of(seed: int, n: int) -> np.ndarray:
    """Distinct keys, the extreme ones among them."""
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 2 * n)
    special = np.array([0, -1, 2**63 - 1, -(2**63)])
    keys = np.unique(np.concatenate([special, drawn]))
    return (
        np.random.default_rng(seed + 1).permutation(keys)[:n]
        if n < 4
        else np.concatenate([special, np.setdiff1d(keys, special)[: n - 4]])
    )


def columns_for(description: TableDescription, keys: np.ndarray, seed: int) -> dict[str, Any]:
    """Random bits, NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    n, dim = len(keys), description.dim
    weights = rng.integers(0, 256, (n, dim * description.storage.itemsize), np.uint8).view(description.storage)
    columns: dict[str, Any] = {"keys": keys, "weights": weights.reshape(n, dim)}
    if description.state_dim:
        columns["state"] = rng.standard_normal((n, description.state_dim)).astype(np.float32)
    if description.with_filter:
        columns["frequencies"] = rng.integers(0, 2**62, n)
        columns["timestamps"] = rng.integers(-(2**63), 2**62, n)
    return columns


def remember(model: Model, columns: dict[str, Any]) -> None:
    names = [name for name in ("weights", "state", "frequencies", "timestamps") if name in columns]
    for i, key in enumerate(columns["keys"].tolist()):
        model[key] = tuple(columns[name][i].tobytes() for name in names)


def read_all(path: Path, name: str, world: int = 1, generation: int | None = None, ahead: bool = False) -> Model:
    model: Model = {}
    for rank in range(world):
        with Reader(path, generation, rank, world) as reader:
            for rows in reader.rows(name, ahead=ahead):
                for i, key in enumerate(rows.keys.tolist()):
                    assert key not in model
                    parts = [rows.weights[i].tobytes()]
                    parts += [rows.state[i].tobytes()] if rows.state.shape[1] else []
                    if rows.frequencies is not None and rows.timestamps is not None:
                        parts += [rows.frequencies[i].tobytes(), rows.timestamps[i].tobytes()]
                    model[key] = tuple(parts)
    return model


def save(path: Path, description: TableDescription, columns: dict[str, Any], **begin: Any) -> int:
    with Writer(path, chunk_bytes=1 << 16) as writer:
        generation = writer.begin(**begin)
        writer.write_rows(description, **columns)
        writer.commit()
        writer.publish()
    return generation


@pytest.mark.parametrize(
    ("dtype", "dim", "state_dim", "with_filter", "n"),
    [
        *product(["float32", "float16", "bfloat16"], [1, 7, 64], [0, 1, 64], [False, True], [1500]),
        ("float32", 8192, 3, True, 9),  # a row larger than half a chunk
        ("float32", 4, 0, False, 0),
        ("float32", 4, 4, True, 1),
    ],
)
def test_rows_come_back_bit_by_bit(
    tmp_path: Path, dtype: str, dim: int, state_dim: int, with_filter: bool, n: int
) -> None:
    description = TableDescription("t", dim, state_dim, dtype, with_filter=with_filter)
    columns = columns_for(description, keys_of(1, n), 2)
    model: Model = {}
    remember(model, columns)
    save(tmp_path, description, columns)
    assert read_all(tmp_path, "t") == model
    assert read_all(tmp_path, "t", world=3) == model
    assert verify(tmp_path) == []


def test_i10_deltas_replace_and_remove_rows_and_replaying_changes_nothing(tmp_path: Path) -> None:
    """Against a dict: changed rows, erased keys, keys that are born again, tables that come, go and come again."""
    rng = np.random.default_rng(0)
    one = TableDescription("one", 5, 2, with_filter=True)
    two = TableDescription("two", 3, dtype="float16")
    states: list[dict[str, Model]] = []
    now: dict[str, Model] = {"one": {}, "two": {}}
    pool = keys_of(5, 4000)
    for step in range(8):
        with Writer(tmp_path, chunk_bytes=1 << 16) as writer:
            writer.begin(parent=None if step in (0, 5) else step)
            now = {name: dict(model) for name, model in now.items()}
            for description in (one, two):
                name = description.name
                if name == "two" and step in (3, 5):
                    now["two"] = {}
                    continue
                whole = writer.parent is None or name not in writer.parent.tables
                if whole and step:
                    now[name] = {}  # the caller writes it anew
                keys = rng.choice(pool, 1500 if whole else 150, replace=False)
                columns = columns_for(description, keys, step)
                erased = np.setdiff1d(rng.choice(pool, 200, replace=False), keys)
                if not whole:
                    writer.write_erased(description, erased)
                    for key in erased.tolist():
                        now[name].pop(key, None)
                writer.write_rows(description, **columns)
                remember(now[name], columns)
            writer.commit()
            writer.publish()
        states.append(now)
    for i, state in enumerate(states):
        present = {"one"} if i in (3, 5) else {"one", "two"}
        with Reader(tmp_path, i + 1) as reader:
            assert set(reader.tables) == present
            assert reader.chain == list(range(1 if i < 5 else 6, i + 2))
        for name in present:
            assert read_all(tmp_path, name, 1, i + 1) == state[name]
            assert read_all(tmp_path, name, 4, i + 1) == state[name]


def test_resolution_in_windows_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = TableDescription("t", 2)
    keys = keys_of(3, 3000)
    save(tmp_path, description, columns_for(description, keys, 1))
    with Writer(tmp_path) as writer:
        writer.begin(parent=1)
        writer.write_rows(description, **columns_for(description, keys[:1000], 2))
        writer.write_erased(description, keys[1000:1400])
        writer.commit()
        writer.publish()
    whole = read_all(tmp_path, "t")
    assert len(whole) == 2600
    monkeypatch.setattr("embcache.checkpoint.reader._WINDOW_KEYS", 100)
    assert read_all(tmp_path, "t") == whole
    assert read_all(tmp_path, "t", world=2) == whole


@pytest.mark.parametrize("refusing", ["nothing", "at once", "at the write", "threads"])
def test_chunks_that_are_written_in_threads_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    """Several segments, past the page cache or not, as the file system has it."""

    class Medium(Files):
        def bypass_cache(self, descriptor: int, path: str) -> bool:
            return refusing != "at once" and super().bypass_cache(descriptor, path)

        def write_some(self, descriptor: int, views: Sequence[memoryview], offset: int, path: str) -> int:
            # A part that is no whole page is what the medium refuses where it wants larger ones.
            return super().write_some(
                descriptor, [views[0][:1000]] if refusing == "at the write" else views, offset, path
            )

    monkeypatch.setattr(segment, "_BEHIND_FROM", 1 << 16)
    if refusing == "threads":
        monkeypatch.setattr("threading.Thread.start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    description = TableDescription("t", 16)
    keys = keys_of(3, 20_000)
    columns = columns_for(description, keys, 1)
    with Writer(tmp_path, chunk_bytes=1 << 16, most_segment_bytes=1 << 19, files=Medium()) as writer:
        writer.begin()
        for begin in range(0, len(keys), 700):
            writer.write_rows(description, **{what: array[begin : begin + 700] for what, array in columns.items()})
        writer.commit()
        writer.publish()
    assert verify(tmp_path) == []
    wanted: Model = {}
    remember(wanted, columns)
    assert read_all(tmp_path, "t") == wanted


def test_a_direct_write_that_is_refused_once_another_thread_has_given_up_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads write one file: the second to be refused finds the flag cleared, and has to try again all the same."""
    files = Files()
    path = str(tmp_path / "file")
    descriptor = files.create(path)
    write = os.pwritev
    refused = []

    def refuse_once(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if not refused:
            refused.append(offset)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, views, offset)

    monkeypatch.setattr("os.pwritev", refuse_once)
    try:
        files.bypass_cache(descriptor, path)
        files.write(descriptor, [b"12345"], 0, path)
        assert refused and Path(path).read_bytes() == b"12345"
        with pytest.raises(OSError, match="Invalid argument"):
            files.write_some(descriptor, [memoryview(b"1")], -2, path)  # never to be accepted: not tried for ever
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("threads", [True, False])
def test_reading_ahead_gives_the_same_rows_and_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    description = TableDescription("t", 16)
    keys = keys_of(3, 9000)
    save(tmp_path, description, columns_for(description, keys, 1))
    save(tmp_path, description, columns_for(description, keys[:5000], 2), parent=1)
    if not threads:
        monkeypatch.setattr("threading.Thread.start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    assert read_all(tmp_path, "t", ahead=True) == read_all(tmp_path, "t")
    with Reader(tmp_path) as reader:
        assert len(next(reader.rows("t", ahead=True)).keys)  # and the others are given up
    segment = tmp_path / "rank-0000" / "segment-0000000000000001-0000"
    content = bytearray(segment.read_bytes())
    content[-9000] ^= 1
    segment.write_bytes(content)
    errors = []
    for ahead in (False, True):
        count = 0
        with Reader(tmp_path, check="catalogue") as reader, pytest.raises(CorruptionError) as error:
            for rows in reader.rows("t", ahead=ahead):
                count += len(rows.keys)
        errors.append((count, str(error.value), reader.stats))
    assert errors[0] == errors[1] and errors[0][0] > 5000


def test_what_a_thread_may_do_beside_reading_is_asked_for_before_each_chunk(tmp_path: Path) -> None:
    description = TableDescription("t", 16)
    columns = columns_for(description, keys_of(3, 9000), 1)
    save(tmp_path, description, columns)
    asked, done, idle = [], [], threading.Event()

    def beside(rows: int) -> Callable[[], bool]:
        asked.append(rows)
        left = [3]
        idle.clear()

        def work() -> bool:
            left[0] -= 1
            done.append(threading.current_thread() is threading.main_thread())
            if not left[0]:
                idle.set()
            return left[0] > 0

        return work

    handed = []
    with Reader(tmp_path) as reader:
        for rows in reader.rows("t", ahead=True, beside=beside):
            handed.append(len(rows.keys))
            assert len(handed) > len(asked) or idle.wait(10)
    assert len(asked) > 3 and asked == handed[:-1] and done == [False] * 3 * len(asked)


@pytest.mark.parametrize(("writers", "readers"), list(product([1, 2, 4], [1, 3, 4])))
def test_n_writers_m_readers(tmp_path: Path, writers: int, readers: int) -> None:
    """Each reader opens only chunks that overlap its vshards, and gets each of its keys once."""
    description = TableDescription("t", 4, 4, with_filter=True)
    keys = keys_of(7, 4000)
    columns = columns_for(description, keys, 8)
    model: Model = {}
    remember(model, columns)
    vshard = (hash_keys(keys) >> np.uint64(52)).astype(int)
    order = np.argsort(vshard, kind="stable")
    generation = next_generation(tmp_path)
    open_writers = [Writer(tmp_path, rank, writers, chunk_bytes=1 << 16) for rank in range(writers)]
    for rank, writer in enumerate(open_writers):
        low, high = vshards_of(rank, writers)
        mine = order[(vshard[order] >= low) & (vshard[order] < high)]
        writer.begin(generation, metadata={"rank": rank})
        writer.write_rows(description, vshards=(low, high), **{name: array[mine] for name, array in columns.items()})
        writer.write_filter(
            description, keys[mine], keys[mine], keys[mine], late=keys[mine][:3], numbers={"rank": rank}
        )
        writer.write_state(f"of rank {rank}", bytes([rank]) * 100)
        with pytest.raises(ConfigError, match=r"has not committed generation 1"):
            publish(tmp_path, generation, writers)
        writer.commit()
    publish(tmp_path, generation, writers)
    for writer in open_writers:
        writer.close()
    assert read_all(tmp_path, "t", readers) == model
    waiting, read = [], 0
    for rank in range(readers):
        with Reader(tmp_path, rank=rank, world=readers, check="catalogue") as reader:
            assert [one["rank"] for one in reader.metadata] == list(range(writers))
            for rows in reader.rows("t"):
                assert len(rows.keys)
            read += reader.stats["chunks"]
            beyond = reader.stats["bytes_beyond"]
            assert (beyond == 0) == (writers % readers == 0) and beyond < reader.stats["bytes"]
            held = reader.filter("t")
            assert held is not None and len(held.numbers) == writers
            waiting += held.keys.tolist()
            assert reader.state_names == [f"of rank {rank}" for rank in range(writers)]
            assert reader.state("of rank 0") == bytes(100)
            assert reader.world_written == writers
    assert sorted(waiting) == sorted(keys.tolist())
    with Reader(tmp_path) as reader:
        chunks = len(list(reader.rows("t")))
    assert read <= chunks + readers * writers  # a chunk at a border is read twice
    assert verify(tmp_path) == []


def test_numbers_exceed_every_number_on_disk(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    save(tmp_path, description, columns_for(description, keys_of(0, 10), 0), generation=7)
    with Writer(tmp_path) as writer:
        assert writer.begin() == 8
        writer.write_rows(description, **columns_for(description, keys_of(0, 10), 0))
        writer.commit()  # and never published
    assert next_generation(tmp_path) == 9
    (tmp_path / "rank-0003").mkdir()
    (tmp_path / "rank-0003" / "segment-0000000000000040-0000").touch()
    (tmp_path / "MANIFEST-0000000000000050.tmp").touch()
    assert next_generation(tmp_path) == 51
    with Writer(tmp_path) as writer, pytest.raises(ConfigError, match=r"generation 8 is not above 8"):
        writer.begin(8)
    assert [one.generation for one in generations(tmp_path)] == [7]
    with Reader(tmp_path) as reader:
        assert reader.generation == 7
    with Writer(tmp_path) as writer:
        assert writer.begin() == 51
        writer.commit()
        writer.publish()
    assert not (tmp_path / "rank-0000" / "segment-0000000000000008-0000").exists()


def test_the_number_of_ranks_may_change_at_a_path(tmp_path: Path) -> None:
    """A rank that no generation has yet is no damage, nor is what a writer of it left that never got to its first one."""
    description = TableDescription("t", 2)
    for generation, world in enumerate((1, 2, 4, 1, 3), 1):
        writers = [Writer(tmp_path, rank, world) for rank in range(world)]
        for rank, writer in enumerate(writers):
            writer.begin(generation)
            writer.write_rows(description, **columns_for(description, np.arange(10) + 10 * rank, generation))
            writer.commit()
        writers[0].publish()
        for writer in writers:
            writer.close()
        with Reader(tmp_path) as reader:
            assert (reader.generation, reader.world_written) == (generation, world)
            assert sum(len(rows.keys) for rows in reader.rows("t")) == 10 * world
        if generation == 1:
            (tmp_path / "rank-0001").mkdir()
            (tmp_path / "rank-0001" / "catalogue.mdb").write_bytes(bytes(8192))
    assert [one.generation for one in generations(tmp_path)] == [1, 2, 3, 4, 5] and verify(tmp_path) == []


def test_an_unfinished_generation_leaves_nothing(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    columns = columns_for(description, keys_of(0, 10), 0)
    with Writer(tmp_path) as writer:
        writer.begin()
        writer.write_rows(description, **columns)
    assert sorted(os.listdir(tmp_path / "rank-0000")) == ["LOCK"]
    assert generations(tmp_path) == []
    with pytest.raises(ConfigError, match=r"holds no checkpoint"):
        Reader(tmp_path)
    with pytest.raises(ClosedError):
        writer.begin()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.begin()
        with Writer(tmp_path) as other, pytest.raises(LockedError, match=rf"process {os.getpid()}") as refusal:
            other.begin()
        assert refusal.value.pid == os.getpid()
    with Writer(tmp_path) as writer:
        writer.begin()


@pytest.mark.parametrize("below", ["", "deeper/still"])
@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_path_that_is_no_directory_is_named(tmp_path: Path, below: str, kind: str) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine") if kind == "file" else taken.symlink_to(tmp_path / "nothing")
    with Writer(taken / below) as writer, pytest.raises(ConfigError, match=rf"^{taken}: exists and is no directory"):
        writer.begin()
    assert os.listdir(tmp_path) == ["taken"]


def test_a_remote_file_system_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embcache.checkpoint.lock.file_system", lambda path: "nfs4")
    with Writer(tmp_path) as writer, pytest.raises(ConfigError, match=r"'nfs4'.*Writer\(path, force=True\)"):
        writer.begin()
    with Writer(tmp_path, force=True) as writer:
        assert writer.begin() == 1


def test_pruning_keeps_what_kept_deltas_need(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    columns = columns_for(description, keys_of(0, 100), 0)
    for parent in (None, 1, 2, None, 4, None, 6):
        save(tmp_path, description, columns, parent=parent)
    assert prune(tmp_path, 4) == [1, 2, 3]  # 4 to 7 are kept
    assert prune(tmp_path, 3) == []  # 5 needs 4
    assert prune(tmp_path, 2) == [4, 5]
    assert [one.generation for one in generations(tmp_path)] == [6, 7]
    assert verify(tmp_path) == []
    assert len(os.listdir(tmp_path / "rank-0000")) == 2 + 3
    for bad in (0, -1, True, "2", None):
        with pytest.raises(ConfigError, match="keep"):
            prune(tmp_path, bad)  # type: ignore[arg-type]
    six, seven = (created_of(str(tmp_path), number) for number in (6, 7))
    assert delta_pays(str(tmp_path), 6, 0, 10_000, created=six)
    assert not delta_pays(str(tmp_path), 7, 4096, 10_000, created=seven)
    assert not delta_pays(str(tmp_path), 6, 0, 10_000, created=None)  # which generation 6 was meant is not known


def test_the_catalogue_does_not_grow_with_pruned_generations(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    columns = columns_for(description, keys_of(0, 50), 0)
    sizes = []
    for _ in range(60):
        save(tmp_path, description, columns)
        prune(tmp_path, 2)
        sizes.append((tmp_path / "rank-0000" / "catalogue.mdb").stat().st_size)
    assert max(sizes[20:]) == max(sizes[:20])
    assert len(generations(tmp_path)) == 2 and verify(tmp_path) == []


def test_the_newest_generation_that_holds_is_read_and_the_others_named(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    for seed in range(3):
        save(tmp_path, description, columns_for(description, keys_of(0, 100), seed))
    newest = tmp_path / "rank-0000" / "segment-0000000000000003-0000"
    content = bytearray(newest.read_bytes())
    content[5000] ^= 1
    newest.write_bytes(content)
    (tmp_path / "rank-0000" / "segment-0000000000000002-0000").write_bytes(b"")
    with Reader(tmp_path) as reader:
        assert reader.generation == 1
        assert [number for number, _ in reader.skipped] == [3, 2]
        assert "generation 3, table 't', chunk 0" in reader.skipped[0][1]
        assert "0 bytes long" in reader.skipped[1][1]
    with pytest.raises(CorruptionError) as refusal:
        Reader(tmp_path, 3)
    error = refusal.value
    assert (error.generation, error.table, error.chunk) == (3, "t", 0) and error.expected != error.found
    with Reader(tmp_path, check="catalogue") as reader:  # what is read later raises later
        assert reader.generation == 3
        with pytest.raises(CorruptionError):
            list(reader.rows("t"))
    damaged = {finding.generation for finding in verify(tmp_path) if finding.severity == "damage"}
    assert damaged == {2, 3}
    infos = {one.generation: one.problem for one in generations(tmp_path)}
    assert infos[1] is None and infos[3] is None and "0 bytes long" in str(infos[2])


def test_a_delta_falls_with_its_parent(tmp_path: Path) -> None:
    description = TableDescription("t", 2)
    columns = columns_for(description, keys_of(0, 100), 0)
    save(tmp_path, description, columns)
    save(tmp_path, description, columns)
    save(tmp_path, description, columns, parent=2)
    (tmp_path / "rank-0000" / "segment-0000000000000002-0000").unlink()
    with Reader(tmp_path) as reader:
        assert reader.generation == 1
        assert reader.skipped[0][1].startswith("its parent 2: ")
    with Writer(tmp_path) as writer, pytest.raises(ConfigError, match=r"no generation 9; published there: 1, 2, 3"):
        writer.begin(parent=9)


def test_a_description_that_means_something_else_is_refused() -> None:
    saved = TableDescription("t", 8, 8, optimizer={"kind": "adagrad", "lr": 0.1})
    saved.refuse_change(replace(saved, seed=3, optimizer={"kind": "adagrad", "lr": 0.2}))
    changes = saved.changes(replace(saved, seed=3, optimizer={"lr": 0.2, "kind": "adagrad"}))
    assert changes == ["seed: 0 -> 3", "optimizer lr: 0.1 -> 0.2"]
    kept = replace(saved, initializer=["uniform", float(np.float32(-0.05)), float(np.float32(0.05))])
    assert saved.changes(kept) == [] and saved.changes(replace(saved, initializer=["zeros", 0.0, 0.0])) != []
    for other in (
        replace(saved, dim=9),
        replace(saved, dtype="float16"),
        replace(saved, optimizer={"kind": "adam"}),
        replace(saved, state_dim=16),
    ):
        with pytest.raises(ConfigError, match=r"'t': the checkpoint has .* another name"):
            saved.refuse_change(other)


def test_bad_arguments_are_named_before_anything_is_written(tmp_path: Path) -> None:
    description = TableDescription("t", 3, 2)
    keys, weights, state = np.arange(4), np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    with Writer(tmp_path) as writer:
        with pytest.raises(ConfigError, match="call begin first"):
            writer.commit()
        writer.begin()
        bad: list[dict[str, Any]] = [
            {"keys": keys.astype(np.int32), "weights": weights, "state": state},
            {"keys": keys, "weights": weights[:3], "state": state},
            {"keys": keys, "weights": weights.astype(np.float64), "state": state},
            {"keys": keys, "weights": weights},
            {"keys": keys, "weights": weights, "state": state, "frequencies": keys},
            {"keys": keys, "weights": weights, "state": state, "vshards": (0, 1)},
        ]
        for arguments in bad:
            with pytest.raises(ShapeError, match=r"table 't'"):
                writer.write_rows(description, **arguments)
        with pytest.raises(ConfigError, match="two tables of one name"):
            writer.write_rows(description, keys, weights, state)
            writer.table(replace(description, dim=4))
        with pytest.raises(ConfigError, match="is written whole"):
            writer.write_erased(description, keys)
        writer.write_state("s", b"")
        with pytest.raises(ConfigError, match="was written already"):
            writer.write_state("s", b"")
        with pytest.raises(ConfigError, match="no JSON"):
            writer.table(description, metadata={"a": {1, 2}})
        writer.commit()
        with pytest.raises(ConfigError, match="it is committed"):
            writer.begin()
        writer.publish()
        with pytest.raises(ConfigError, match="not above 1"):
            writer.publish()
    with Reader(tmp_path) as reader:
        assert reader.state("s") == b""
        with pytest.raises(ConfigError, match="no table 'u'; it has 't'"):
            list(reader.rows("u"))
        with pytest.raises(ConfigError, match="no state 'x'"):
            reader.state("x")
    for options in ({"rank": 1}, {"world": 0}, {"rank": -1, "world": 2}, {"rank": True}, {"chunk_bytes": 5}):
        with pytest.raises(ConfigError, match="Writer"):
            Writer(tmp_path, **options)
    with pytest.raises(ConfigError, match="next_generation"):
        Writer(tmp_path, 0, 2).begin()


def test_large_states_and_long_catalogues(tmp_path: Path) -> None:
    """Bytes over several chunks; more chunks than a record of the catalogue holds; several segment files."""
    content = np.random.default_rng(0).bytes(300_000)
    description = TableDescription("t", 2)
    with Writer(tmp_path, chunk_bytes=1 << 16, most_segment_bytes=1 << 20) as writer:
        writer.begin()
        writer.write_state("big", content)
        for key in range(1100):
            writer.write_rows(description, np.array([key]), np.full((1, 2), key, np.float32))
        writer.commit()
        writer.publish()
    names = sorted(os.listdir(tmp_path / "rank-0000"))
    assert sum(name.startswith("segment") for name in names) > 3
    assert all((tmp_path / "rank-0000" / name).stat().st_size <= 1 << 20 for name in names if "segment" in name)
    with Reader(tmp_path) as reader:
        assert reader.state("big") == content
        keys = [int(key) for rows in reader.rows("t") for key in rows.keys]
    assert keys == list(range(1100)) and verify(tmp_path) == []


def test_a_file_with_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer, pytest.raises(StorageError, match="does not fit"):
        writer.begin(expected_bytes=1 << 60)
    assert os.listdir(tmp_path / "rank-0000") == ["LOCK"]


def test_a_name_that_is_no_utf8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        Writer(os.fsencode(tmp_path) + b"/\xff")
    assert not list(tmp_path.iterdir())
