"""The bytes of a checkpoint: pinned by files that were written once, and none of them may change unnoticed."""

from __future__ import annotations

import shutil
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xxhash

from embcache._core.digest import hash_keys
from embcache.checkpoint import Reader, TableDescription, Writer, verify
from embcache.checkpoint.chunk import CHUNK_BYTES, ROWS, ChunkBuffer, Header, columns_of, open_chunk, rows_per_chunk
from embcache.checkpoint.sealed import MANIFEST, SEGMENT, read, seal, unseal
from embcache.errors import CorruptionError, EmbCacheError, FormatVersionError
from embcache.filterparts import numbers_of, sketch_of

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-1"
DESCRIPTION = TableDescription(
    "items", 3, 2, "bfloat16", ["constant", 0.5, 0.0], 7, True, {"kind": "adagrad", "lr": 0.1}, {"policy": "count"}
)


def golden_rows(step: int, keys: np.ndarray) -> dict[str, np.ndarray]:
    n = len(keys)
    weights = (np.arange(n * 3, dtype=np.int16) + 1000 * step).reshape(n, 3)
    state = (np.arange(n * 2, dtype=np.float32) / 8 + step).reshape(n, 2)
    return {"keys": keys, "weights": weights, "state": state, "frequencies": keys + step, "timestamps": keys * 2 - step}


def write_golden(path: Path) -> None:
    """What wrote the golden files. A change of the format writes new ones beside these, which must stay readable."""
    keys = np.array([0, -1, 2**62, -(2**63), 5, 17])
    for step in (1, 2):
        with Writer(path, clock=lambda: 1_700_000_000.0) as writer:
            writer.begin(parent=None if step == 1 else 1, metadata={"step": step})
            writer.table(DESCRIPTION, metadata={"optimizer_step": 10 * step})
            if step == 2:
                writer.write_erased(DESCRIPTION, keys[4:5])
            writer.write_rows(DESCRIPTION, **golden_rows(step, keys if step == 1 else keys[:2]))
            writer.write_filter(DESCRIPTION, keys[:3] + 100, keys[:3], keys[:3] * 0 + step, keys[:1], {"newest": step})
            writer.table(TableDescription("empty", 1))
            writer.write_state("loader.json", b'{"at":%d}' % step)
            writer.commit()
            writer.publish()


def write_golden_of_ranks(path: Path) -> None:
    """Two ranks: a full generation, and a delta in which rank 0 erases a key; filters whole. As any version 1 reads it."""
    for step in (1, 2):
        writers = [Writer(path, rank, 2, clock=lambda: 1_700_000_000.0) for rank in range(2)]
        for rank, writer in enumerate(writers):
            keys = np.arange(rank, 40, 2)
            keys = keys[np.argsort(hash_keys(keys))]
            writer.begin(step, None if step == 1 else 1, metadata={"step": step, "rank": rank})
            if step == 2 and rank == 0:
                writer.write_erased(DESCRIPTION, keys[9:10])
            writer.write_rows(DESCRIPTION, **golden_rows(step + 2 * rank, keys if step == 1 else keys[:3]))
            writer.write_filter(
                DESCRIPTION, keys + 100, keys + step, keys * 0 + step, None, {"newest": step, "rank": rank}
            )
            writer.write_state("loader.json", b'{"rank":%d}' % rank)
            writer.commit()
        writers[0].publish()
        for writer in writers:
            writer.close()


def write_golden_of_filters(path: Path) -> None:
    """A filter with a list and one with a sketch: whole, then by what has changed (incompatible feature 1)."""
    listed, sketched = (TableDescription(name, 1, with_filter=True) for name in ("listed", "sketched"))
    keys, young = np.array([3, -7, 2**40, 11]), np.arange(64, dtype=np.uint16)
    about = {"filter": {"bytes of a sketch's counter (by admit_threshold)": 2}}
    for step in (1, 2, 3):
        with Writer(path, clock=lambda: 1_700_000_000.0) as writer:
            writer.begin(parent=None if step == 1 else step - 1)
            writer.table(sketched, metadata=about)
            none, numbers = keys[:0], {"newest": step}
            if step == 1:
                writer.write_filter(listed, keys, keys * 0 + 1, keys * 0 + step, None, numbers)
                writer.write_state("filter/sketched/sketch_young", young.data)
                writer.write_state("filter/sketched/sketch_old", (young * 2).data)
            else:
                writer.write_filter(
                    listed, keys[:1] + step, keys[:1], keys[:1], None, numbers, changes=True, gone=keys[step:]
                )
                places, values = np.array([0, 60 + step], np.uint32), np.array([step, 999], np.uint16)
                writer.write_state("filter/sketched/sketch_changes", places.tobytes() + values.tobytes())
            writer.write_filter(sketched, none, none, none, None, numbers, changes=step > 1)
            writer.commit()
            writer.publish()


def write_golden_of_blocks(path: Path) -> None:
    """Two ranks' sketches of two blocks each, whole and then by what has changed of both generations (incompatible feature 2)."""
    sketched = TableDescription("sketched", 1, with_filter=True)
    about = {"filter": {"bytes of a sketch's counter (by admit_threshold)": 1}}
    none = np.empty(0, np.int64)
    for step in (1, 2):
        writers = [Writer(path, rank, 2, clock=lambda: 1_700_000_000.0) for rank in range(2)]
        for rank, writer in enumerate(writers):
            writer.begin(step, parent=None if step == 1 else 1)
            writer.table(sketched, metadata=about)
            cells = np.arange(8, dtype=np.uint8) + 8 * rank + 1
            if step == 1:
                writer.write_state("filter/sketched/sketch_young", cells.data)
                writer.write_state("filter/sketched/sketch_old", (2 * cells).data)
            else:
                places, values = np.array([1, 15], np.uint32), np.array([77, 88], np.uint8)
                writer.write_state("filter/sketched/sketch_changes", places.tobytes() + values.tobytes())
            clocks = (np.arange(6) + 6 * rank) * step
            writer.write_state("filter/sketched/sketch_clocks", clocks.tobytes())
            numbers = {"newest": step, "sketch_blocks": 4, "sketch_first": 2 * rank}
            writer.write_filter(sketched, none, none, none, None, numbers, changes=step > 1)
            writer.commit()
        writers[0].publish()
        for writer in writers:
            writer.close()


OTHERS = {
    "checkpoint-1-filters": write_golden_of_filters,
    "checkpoint-1-ranks": write_golden_of_ranks,
    "checkpoint-1-sketch-blocks": write_golden_of_blocks,
}


def test_golden_files_of_two_ranks_are_read_by_any_number() -> None:
    path = GOLDEN.parent / "checkpoint-1-ranks"
    assert verify(path) == []
    for world in (1, 2, 3):
        rows: dict[int, list[int]] = {}
        waiting: list[int] = []
        for rank in range(world):
            with Reader(path, rank=rank, world=world) as reader:
                assert reader.chain == [1, 2] and reader.world_written == 2
                rows |= {
                    int(k): w.tolist()
                    for one in reader.rows("items")
                    for k, w in zip(one.keys, one.weights, strict=True)
                }
                held = reader.filter("items")
                assert held is not None and held.numbers == [{"newest": 2, "rank": 0}, {"newest": 2, "rank": 1}]
                waiting += held.keys.tolist()
        assert sorted(waiting) == list(range(100, 140)) and len(rows) == 39
        erased = set(range(40)) - set(rows)
        assert erased == {int(np.arange(0, 40, 2)[np.argsort(hash_keys(np.arange(0, 40, 2)))][9])}
        assert sorted(row[0] // 1000 for row in rows.values()) == [1] * 16 + [2] * 3 + [3] * 17 + [4] * 3


def test_golden_files_of_filters_are_read() -> None:
    path = GOLDEN.parent / "checkpoint-1-filters"
    assert verify(path) == []
    waits = [{3: 1, -7: 1, 2**40: 1, 11: 1}, {3: 1, -7: 1, 5: 3}, {3: 1, -7: 1, 5: 3, 6: 3}]
    young = np.arange(64, dtype=np.uint16)
    for generation in (1, 2, 3):
        if generation > 1:
            young[0], young[60 + generation] = generation, 999
        with Reader(path, generation) as reader:
            held = reader.filter("listed")
            assert held is not None and held.numbers == [{"newest": generation}]
            assert dict(zip(held.keys.tolist(), held.counts.tolist(), strict=True)) == waits[generation - 1]
            sketch = sketch_of(reader, "sketched", 0, 1)
            assert sketch["sketch_young"].view("<u2").tolist() == young.tolist()
            assert sketch["sketch_old"].view("<u2").tolist() == [2 * i for i in range(64)]
            assert sketch["sketch_clocks"].tolist() == [0, 0, 0]
            assert numbers_of(reader, "sketched", 0, 1) == {"newest": generation, "sketch_blocks": 1, "sketch_first": 0}


def test_golden_files_of_sketches_in_blocks_are_read() -> None:
    """By as many ranks as wrote them, by one, and by three, two of which have vshards of the same block."""
    path = GOLDEN.parent / "checkpoint-1-sketch-blocks"
    assert verify(path) == []
    for generation, world in product((1, 2), (1, 2, 3)):
        young = np.arange(16, dtype=np.uint8).reshape(4, 4) + 1
        if generation == 2:
            young[0, 1] = young[2, 1] = 77
        old, clocks = 2 * (np.arange(16, dtype=np.uint8).reshape(4, 4) + 1), np.arange(12).reshape(4, 3) * generation
        if generation == 2:
            old[1, 3] = old[3, 3] = 88
        for rank in range(world):
            with Reader(path, generation, rank=rank, world=world) as reader:
                sketch = sketch_of(reader, "sketched", rank, world)
                first = {1: [0], 2: [0, 2], 3: [0, 1, 2]}[world][rank]
                end = {1: [4], 2: [2, 4], 3: [2, 3, 4]}[world][rank]
                numbers = {"newest": generation, "sketch_blocks": 4, "sketch_first": first}
                assert numbers_of(reader, "sketched", rank, world) == numbers
            assert sketch["sketch_young"].reshape(-1, 4).tolist() == young[first:end].tolist()
            assert sketch["sketch_old"].reshape(-1, 4).tolist() == old[first:end].tolist()
            assert sketch["sketch_clocks"].reshape(-1, 3).tolist() == clocks[first:end].tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_is_written_today_of_ranks_and_filters(tmp_path: Path, name: str) -> None:
    OTHERS[name](tmp_path)
    files = [one.relative_to(tmp_path) for one in tmp_path.rglob("segment-*")]
    assert len(files) == (3 if "filters" in name else 4)
    for file in files:
        assert (tmp_path / file).read_bytes() == (GOLDEN.parent / name / file).read_bytes(), file
    for manifest in tmp_path.glob("MANIFEST-*"):
        now, then = (read(MANIFEST, str(folder / manifest.name)) for folder in (tmp_path, GOLDEN.parent / name))
        assert now == then


def test_golden_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "golden"
    shutil.copytree(GOLDEN, path)
    assert verify(path) == []
    with Reader(path) as reader:
        assert reader.chain == [1, 2] and reader.metadata == [{"step": 2}] and reader.created == 1_700_000_000.0
        assert reader.tables == {"items": DESCRIPTION, "empty": TableDescription("empty", 1)}
        assert reader.table_metadata("items") == [{"optimizer_step": 20}]
        assert reader.state("loader.json") == b'{"at":2}'
        held = reader.filter("items")
        assert held is not None and held.numbers == [{"newest": 2}]
        assert held.keys.tolist() == [99, 100, 2**62 + 100] and held.late.tolist() == [0]
        rows = {int(k): w.tolist() for one in reader.rows("items") for k, w in zip(one.keys, one.weights, strict=True)}
    assert rows == {
        0: [2000, 2001, 2002],
        -1: [2003, 2004, 2005],
        2**62: [1006, 1007, 1008],
        -(2**63): [1009, 1010, 1011],
        17: [1015, 1016, 1017],
    }


def test_the_same_is_written_today(tmp_path: Path) -> None:
    """All but LMDB's own file, byte by byte."""
    write_golden(tmp_path)
    names = ["rank-0000/segment-0000000000000001-0000", "rank-0000/segment-0000000000000002-0000"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    for generation in (1, 2):
        name = f"MANIFEST-{generation:016d}"
        now, then = (read(MANIFEST, str(folder / name)) for folder in (tmp_path, GOLDEN))
        assert now == then


def test_a_chunk_is_laid_out_as_the_page_says() -> None:
    buffer = ChunkBuffer()
    columns = columns_of(ROWS, DESCRIPTION)
    for name, view in buffer.lay_out(columns, 5).items():
        view[:] = golden_rows(1, np.arange(5))[name]
    content, digest = buffer.seal(Header(9, 2, 1, 3, ROWS, 17, 4096, 5, DESCRIPTION.digest, columns))
    data = content.tobytes()
    assert data[:8] == b"EMBCHNK\n" and len(data) == 4096
    assert struct.unpack_from("<HHIQIIBBHHHQQQ", data, 8) == (
        *(1, 192, 0, 9, 1, 3, 1, 5, 2, 17, 4096, 5, 4096),
        xxhash.xxh3_64_intdigest(b"items"),
    )
    assert data[64:80] == digest == xxhash.xxh3_128_digest(data[:64] + bytes(16) + data[80:])
    expected = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 4, 3), (5, 2, 2)]
    assert [struct.unpack_from("<BBHI", data, 96 + 8 * i)[::1] for i in range(5)] == [
        (a, b, 0, c) for a, b, c in expected
    ]
    assert data[136:192] == bytes(56)
    assert np.frombuffer(data, "<i8", 5, 192).tolist() == [0, 1, 2, 3, 4]
    assert np.frombuffer(data, "<i2", 15, 192 + 3 * 64).tolist() == list(range(1000, 1015))
    assert np.frombuffer(data, "<f4", 10, 192 + 4 * 64)[0] == 1.0


def test_full_chunks_stay_below_their_size() -> None:
    for description in (TableDescription("t", 64), TableDescription("t", 1, 1, "float16", with_filter=True)):
        columns = columns_of(ROWS, description)
        buffer = ChunkBuffer()
        buffer.lay_out(columns, rows_per_chunk(columns))
        assert len(buffer.bytes) == CHUNK_BYTES  # it was not enlarged


def test_r3_every_flipped_bit_of_64_kib_of_chunks_is_detected() -> None:
    """Header, columns and padding: 524,288 flips, none of which may pass."""
    buffer, columns = ChunkBuffer(), columns_of(ROWS, DESCRIPTION)
    rng = np.random.default_rng(0)
    for number in range(16):
        for view in buffer.lay_out(columns, 60).values():
            view[:] = rng.integers(-100, 100, view.shape)
        content, digest = buffer.seal(Header(1, 0, 0, number, ROWS, 0, 4096, 60, DESCRIPTION.digest, columns))
        assert len(content) == 4096
        damaged = content.copy()
        passed = 0
        for at in range(len(damaged)):
            before = damaged[at]
            for bit in range(8):
                damaged[at] = before ^ np.uint8(1 << bit)
                try:
                    open_chunk(damaged, digest)
                    passed += 1
                except (CorruptionError, FormatVersionError):
                    pass
            damaged[at] = before
        assert passed == 0
        open_chunk(damaged, digest)


@pytest.mark.parametrize("kind", [MANIFEST, SEGMENT])
def test_r3_every_flipped_bit_of_a_sealed_file_is_detected(kind: int) -> None:
    content = bytearray(seal(kind, {"generation": 3, "text": "ä" * 50, "numbers": list(range(50))}))
    assert unseal(kind, bytes(content), "f")["generation"] == 3
    for at in range(len(content)):
        for bit in range(8):
            content[at] ^= 1 << bit
            with pytest.raises(CorruptionError):
                unseal(kind, bytes(content), "f")
            content[at] ^= 1 << bit
    for length in range(len(content)):
        with pytest.raises(CorruptionError):
            unseal(kind, bytes(content[:length]), "f")
    with pytest.raises(CorruptionError, match="kind"):
        unseal(3 - kind // 2, bytes(content), "f")


def test_r13_a_newer_format_is_refused_and_named() -> None:
    content = bytearray(seal(MANIFEST, {"generation": 3}))
    for offset, value in ((8, 2), (12, 4)):
        newer = bytearray(content)
        newer[offset] = value
        newer[32:48] = bytes(16)
        newer[32:48] = xxhash.xxh3_128_digest(bytes(newer))
        with pytest.raises(FormatVersionError, match="formats up to 1"):
            unseal(MANIFEST, bytes(newer), "f")
    newer = bytearray(content)
    newer[16] = 1  # a compatible feature
    newer[32:48] = bytes(16)
    newer[32:48] = xxhash.xxh3_128_digest(bytes(newer))
    assert unseal(MANIFEST, bytes(newer), "f") == {"generation": 3}
    buffer, columns = ChunkBuffer(), columns_of(2)
    buffer.lay_out(columns, 1)["keys"][:] = 1
    chunk, _ = buffer.seal(Header(1, 0, 0, 0, 2, 0, 1, 1, 0, columns))
    chunk[8] = 2
    chunk[64:80] = 0
    digest = xxhash.xxh3_128_digest(chunk.tobytes())
    chunk[64:80] = np.frombuffer(digest, np.uint8)
    with pytest.raises(FormatVersionError, match="up to 1"):
        open_chunk(chunk, digest)


def test_r4_a_chunk_that_claims_to_be_larger_than_any_gets_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embcache.checkpoint.level.MOST_CHUNK_BYTES", 4095)
    monkeypatch.setattr(ChunkBuffer, "room", lambda self, length: pytest.fail(f"asked for {length} bytes"))
    with (
        Reader(GOLDEN, 1, check="catalogue") as reader,
        pytest.raises(CorruptionError, match="4096 bytes long, where one of"),
    ):
        next(reader.rows("items"))


def test_r3_flipped_bits_of_any_file_never_change_what_is_read(tmp_path: Path) -> None:
    """Through a whole restore: every 97th bit of every file but the locks (tests/crash flips in children, and more)."""
    write_golden(tmp_path / "good")
    good = restored(tmp_path / "good")
    assert good is not None
    flips = passed = 0
    for name in sorted(str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob("*") if p.is_file()):
        if "LOCK" in name or "lock" in name or "catalogue" in name:
            continue
        content = bytearray((tmp_path / "good" / name).read_bytes())
        for bit in range(flips % 97, 8 * len(content), 997):
            content[bit // 8] ^= 1 << bit % 8
            (tmp_path / "good" / name).write_bytes(content)
            content[bit // 8] ^= 1 << bit % 8
            flips += 1
            now = restored(tmp_path / "good")
            assert now is None or now == good
            passed += now is not None
            assert now is not None or verify(tmp_path / "good")
        (tmp_path / "good" / name).write_bytes(content)
    assert flips > 100 and passed == 0
    assert restored(tmp_path / "good") == good


def restored(path: Path) -> dict[int, bytes] | None:
    """All rows of generation 2, or None where that is refused."""
    try:
        with Reader(path, 2) as reader:
            return {
                int(key): weights.tobytes() + state.tobytes()
                for one in reader.rows("items")
                for key, weights, state in zip(one.keys, one.weights, one.state, strict=True)
            }
    except EmbCacheError:
        return None


if __name__ == "__main__":  # writes the golden files: python tests/unit/test_checkpoint_format.py FOLDER
    import sys

    for name, write in {"checkpoint-1": write_golden, **OTHERS}.items():
        write(Path(sys.argv[1]) / name)
        for lock in Path(sys.argv[1], name).glob("rank-*/*"):
            if lock.name in ("LOCK", "catalogue.mdb-lock"):
                lock.unlink()
