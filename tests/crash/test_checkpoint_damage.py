"""R3, R4: whatever is done to the files of a checkpoint, a restore gives the right rows or a typed error, and `verify` says so."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Say, folder_in_memory, run_child

from embcache.checkpoint import Reader, TableDescription, Writer, generations, prune, verify
from embcache.errors import CorruptionError, EmbCacheError

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))
MUTATIONS, PER_CHILD = 600 * SOAK, 100
FLIPS = 400 * SOAK
DESCRIPTION = TableDescription("t", 3, 1, with_filter=True)
KEYS = np.arange(-200, 300)


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def make(path: Path) -> None:
    """A full generation, a delta, of the filter too, and a full one, by two ranks."""
    for step, parent in ((1, None), (2, 1), (3, None)):
        writers = [Writer(path, rank, 2) for rank in range(2)]
        for rank, writer in enumerate(writers):
            writer.begin(step, parent, metadata={"step": step})
            keys = KEYS[rank::2] if parent is None else KEYS[rank::6]
            n = len(keys)
            ones = np.full((n, 3), step, np.float32)
            writer.write_rows(DESCRIPTION, keys, ones, ones[:, :1].copy(), keys, keys)
            if parent:
                writer.write_erased(DESCRIPTION, KEYS[rank + 2 :: 6])
            changes = {} if parent is None else {"changes": True, "gone": KEYS[rank + 4 :: 6]}
            writer.write_filter(DESCRIPTION, keys, step * keys, keys, keys[:2], {"newest": step}, **changes)
            writer.write_state(f"loader {rank}", b"at %d" % step)
            writer.commit()
        writers[0].publish()
        for writer in writers:
            writer.close()


def rows_of(path: Path, generation: int) -> dict[int, bytes]:
    rows: dict[int, bytes] = {}
    with Reader(path, generation) as reader:
        for one in reader.rows("t"):
            for i, key in enumerate(one.keys.tolist()):
                rows[key] = one.weights[i].tobytes() + one.state[i].tobytes()
        held = reader.filter("t")
        assert held is not None
        rows[1 << 40] = held.keys.tobytes() + held.counts.tobytes()
        rows[1 << 41] = b"".join(reader.state(name) for name in reader.state_names)
    return rows


def mutate(path: Path, rng: random.Random) -> str:
    """Do one harmful thing to one file; returns what."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and "lock" not in p.name.lower())
    victim, other = rng.choice(files), rng.choice(files)
    kind = rng.choice(
        [
            "truncate",
            "extend",
            "zero page",
            "bits",
            "bits",
            "bytes",
            "swap",
            "copy over",
            "missing",
            "twice",
            "lengths",
            "odd",
        ]
    )
    content = bytearray(victim.read_bytes())
    size = len(content)
    if kind == "truncate":
        os.truncate(
            victim, rng.choice([0, 1, size // 2, max(size - 1, 0), size // 4096 * 4096 - 4096 if size > 4096 else 0])
        )
        return f"{kind} {victim.name}"
    if kind == "extend":
        content += rng.choice([b"\0", bytes(4096), rng.randbytes(4096)])
    elif kind == "zero page":
        at = rng.randrange(0, size, 512)
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    elif kind == "bits":
        for _ in range(rng.choice([1, 1, 1, 8])):
            content[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        at = rng.randrange(size)
        content[at : at + 64] = rng.randbytes(len(content[at : at + 64]))
    elif kind == "swap" and size >= 3 * 4096:
        one, two = (4096 * rng.randrange(size // 4096) for _ in range(2))
        content[one : one + 4096], content[two : two + 4096] = content[two : two + 4096], content[one : one + 4096]
    elif kind == "copy over":
        content = bytearray(other.read_bytes())
    elif kind == "missing":
        victim.unlink()
        return f"{kind} {victim.name}"
    elif kind == "twice":
        shutil.copy(
            victim, victim.with_name(rng.choice(["segment-0000000000000009-0000", "copy", "COMMIT-0000000000000003"]))
        )
        return f"{kind} {victim.name}"
    elif kind == "lengths":
        at = rng.randrange(0, max(size - 8, 1), 8)
        content[at : at + 8] = rng.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", (1 << 40).to_bytes(8, "little")])
    elif kind == "odd":
        victim.unlink()
        rng.choice([lambda: victim.mkdir(), lambda: os.mkfifo(victim), lambda: victim.symlink_to("nowhere")])()
        return f"{kind} {victim.name}"
    victim.write_bytes(content)
    return f"{kind} {victim.name}"


def truth_of(path: Path) -> dict[int, dict[int, bytes]]:
    return {generation: rows_of(path, generation) for generation in (1, 2, 3)}


def read_damaged(say: Say, place: Path, first: int, count: int) -> None:
    """Mutate copies of `good`, one after the other, and read all that is left."""
    good = place / "good"
    truth = truth_of(good)
    for seed in range(first, first + count):
        path = place / str(seed)
        shutil.copytree(good, path)
        what = mutate(path, random.Random(seed))
        say(f"seed {seed}: {what}")
        refused = []
        for generation in (1, 2, 3):
            try:
                assert rows_of(path, generation) == truth[generation], f"seed {seed}: wrong rows after {what}"
            except EmbCacheError as error:
                refused.append(generation)
                assert str(error)
        findings = verify(path)
        assert (
            not refused or any(one.severity == "damage" for one in findings) or what.startswith(("missing", "odd"))
        ), f"seed {seed}: verify has nothing to say after {what}, yet {refused} were refused"
        generations(path)
        try:
            with Reader(path, rank=1, world=3) as reader:
                assert reader.generation in truth
        except EmbCacheError:
            assert len(refused) == 3
        shutil.rmtree(path)
        say(f"done {len(refused)}")


def test_r4_no_mutated_directory_gives_wrong_rows_or_ends_the_process(place: Path) -> None:
    """In children with limits of time and memory: rows as written, or an error of ours; damage is found by `verify` too."""
    make(place / "good")
    refusals = 0
    for first in range(0, MUTATIONS, PER_CHILD):
        outcome = run_child(read_damaged, place, first, PER_CHILD, limit_s=120, memory_bytes=1 << 30)
        assert outcome.code == 0, f"{outcome.said[-1:]}, late: {outcome.late}"
        refusals += sum(line != "done 0" for line in outcome.said if line.startswith("done"))
    assert refusals > MUTATIONS // 2


def flip_bits(say: Say, path: Path, seed: int, count: int) -> None:
    """One bit after the other, each put right again."""
    truth = truth_of(path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and "lock" not in p.name.lower())
    kinds = {"manifest": "MANIFEST", "catalogue": "catalogue", "segment": "segment"}
    rng = random.Random(seed)
    for _ in range(count):
        kind, begin = rng.choice(list(kinds.items()))
        victim = rng.choice([one for one in files if one.name.startswith(begin)])
        at, bit = rng.randrange(victim.stat().st_size), 1 << rng.randrange(8)
        with open(victim, "r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ bit]), at)
            refused = 0
            for generation in truth:
                try:
                    assert rows_of(path, generation) == truth[generation], f"bit {bit} at {at} of {victim.name}"
                except CorruptionError:
                    refused += 1
            damage = [one for one in verify(path) if one.severity == "damage"]
            assert bool(damage) >= bool(refused) and (refused or not damage or kind == "catalogue")
            os.pwrite(file.fileno(), before, at)
        say(f"{kind} {refused}")
    assert verify(path) == []


def test_r3_a_flipped_bit_anywhere_is_found_or_means_nothing(place: Path) -> None:
    """One random bit of one file, through a whole restore in a child: the rows as written, or an error that names the place."""
    make(place / "good")
    said = []
    for first in range(0, FLIPS, PER_CHILD):
        outcome = run_child(flip_bits, place / "good", first, PER_CHILD, limit_s=120, memory_bytes=1 << 30)
        assert outcome.code == 0, f"{outcome.said[-1:]}, late: {outcome.late}"
        said += outcome.said
    assert len(said) == FLIPS
    for kind in ("manifest", "segment"):  # every bit of these counts, of a catalogue's pages many are unused
        assert f"{kind} 0" not in said and sum(line.startswith(kind) for line in said) > FLIPS // 5


def save_onto_damage(say: Say, place: Path, first: int, count: int) -> None:
    """Mutate copies of `good`, one after the other, and save to them."""
    for seed in range(first, first + count):
        path = place / str(seed)
        shutil.copytree(place / "good", path)
        what = mutate(path, random.Random(1000 + seed))
        say(f"seed {seed}: {what}")
        writers: list[Writer] = []
        try:
            writers = [Writer(path, rank, 2) for rank in range(2)]
            for rank, writer in enumerate(writers):
                keys = KEYS[rank::2]
                writer.begin(50)
                weights, state = (np.ones((len(keys), width), np.float32) for width in (3, 1))
                writer.write_rows(DESCRIPTION, keys, weights, state, keys, keys)
                writer.commit()
            writers[0].publish()
            for writer in writers:
                writer.close()
            with Reader(path) as reader:
                assert reader.generation == 50 and sum(len(rows.keys) for rows in reader.rows("t")) == 500
            prune(path, 1)
            with Reader(path) as reader:
                assert reader.generation == 50
            say("saved")
        except EmbCacheError as error:
            say(f"refused {error}")
        finally:
            for writer in writers:
                writer.close()
        shutil.rmtree(path)


def test_r4_writers_do_not_touch_what_is_damaged(place: Path) -> None:
    """A save on top of damage succeeds, or says that the catalogue is damaged and where else to save; in a child."""
    make(place / "good")
    saved = refused = 0
    for first in range(0, MUTATIONS // 3, PER_CHILD):
        outcome = run_child(save_onto_damage, place, first, PER_CHILD, limit_s=120, memory_bytes=1 << 30)
        assert outcome.code == 0, f"{outcome.said[-1:]}, late: {outcome.late}"
        saved += outcome.said.count("saved")
        refused += sum("refused" in line for line in outcome.said)
    assert saved > MUTATIONS // 6 and refused > MUTATIONS // 60


def test_r20_no_false_alarm(place: Path) -> None:
    for i in range(20):
        make(place / str(i))
        assert verify(place / str(i)) == []
