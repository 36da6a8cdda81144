"""R4 for foreign files: whatever is done to what is imported, it is read, or refused by name, and the target is left as it was.

In children with limits of time and memory. An exit code of 1, 2 or 3 comes with a message that names the file; a traceback
would be a fault, and so would be anything left beside the target.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from children import Say, folder_in_memory, run_child

from embcache.checkpoint import Reader, verify
from embcache.cli import main
from embcache.commands.outgoing import safetensors_header

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))
MUTATIONS, PER_CHILD = 120 * SOAK, 120
ROWS = 50


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def make(good: Path) -> None:
    """A file, or a save directory, of the format that its name says."""
    rng = np.random.default_rng(0)
    keys = np.concatenate([rng.integers(-(2**63), 2**63 - 1, ROWS - 2), [0, -1]])
    weights, state = (rng.standard_normal((ROWS, width)).astype(np.float32) for width in (5, 3))
    given = {"keys": keys, "weights": weights, "state": state}
    if good.name == "good.npz":
        np.savez(good, **given)
    elif good.name == "packed.npz":
        np.savez_compressed(good, **given)
    elif good.name == "good.npy":
        np.save(good, weights)
    elif good.name == "good.safetensors":
        kinds = {"int64": "I64", "float32": "F32"}
        entries = {name: (kinds[str(one.dtype)], one.shape, one.nbytes) for name, one in given.items()}
        good.write_bytes(safetensors_header(entries, None) + b"".join(one.tobytes() for one in given.values()))
    elif good.name == "good.parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        lists = {name: arrow.array(list(given[name])) for name in ("weights", "state")}
        parquet.write_table(arrow.table({"keys": arrow.array(keys)} | lists), good)
    else:
        for name, one in (("key", keys), ("embedding", weights), ("momentum1", weights)):
            folder = good / "t" / name
            folder.mkdir(parents=True)
            (folder / "slice.data").write_bytes(one.tobytes())
            words = [one.itemsize, len(one), *one.shape[1:]]
            (folder / "slice.attribute").write_bytes(np.array(words, np.int64).tobytes())
        for name, files in (("admit_count", ["slice"]), ("evict_timestamp", ["slice_evict_key", "slice_evict_ts"])):
            folder = good / "t" / name
            folder.mkdir()
            for file in files:
                (folder / f"{file}.data").write_bytes((keys if file == "slice_evict_key" else keys // 3).tobytes())
            (folder / "slice.attribute").write_bytes(np.array([8, ROWS], np.int64).tobytes())


def mutate(source: Path, rng: random.Random) -> str:
    """Do harmful things to one file; returns what."""
    files = sorted(path for path in [source, *source.rglob("*")] if path.is_file())
    victim, content, done = rng.choice(files), bytearray(), []
    how = rng.choice(("missing", "odd", "over", *["bytes"] * 12))
    if how == "missing" and victim != source:
        victim.unlink()
        return f"missing {victim.name}"
    if how == "odd":
        victim.unlink()
        rng.choice([lambda: victim.mkdir(), lambda: os.mkfifo(victim), lambda: victim.symlink_to("nowhere")])()
        return f"odd {victim.name}"
    if how == "over":
        victim.write_bytes(rng.choice(files).read_bytes() if victim != source else rng.randbytes(rng.randrange(2000)))
        return f"over {victim.name}"
    content += victim.read_bytes()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) or 1)
        kind = rng.choice(("flip", "flip", "cut", "zero", "grow", "copy", "huge"))
        if kind == "flip" and content:
            content[min(at, len(content) - 1)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "zero":
            content[at : at + rng.randint(1, 64)] = bytes(rng.randint(1, 64))
        elif kind == "grow":
            content += rng.randbytes(rng.randint(1, 40))
        elif kind == "huge":
            content[at : at + 8] = rng.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"99999999", bytes(5) + b"\1\0\0"])
        else:
            begin = rng.randrange(len(content) or 1)
            content[at : at + 32] = content[begin : begin + 32]
        done.append(kind)
    victim.write_bytes(content)
    return f"{', '.join(done)} {victim.name}"


def copy(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fingerprint(path: Path) -> str:
    """Of all files below, but for locks."""
    files = sorted(one for one in path.rglob("*") if one.is_file() and "lock" not in one.name.lower())
    return hashlib.sha256(b"".join(str(one).encode() + one.read_bytes() for one in files)).hexdigest()


def import_damaged(say: Say, place: Path, name: str, first: int, count: int) -> None:
    """Mutate copies of a good source, and import each over the same checkpoint, to which only a success may do anything."""
    good, target, source = place / name, place / "target", place / "it" / name
    source.parent.mkdir()
    assert main(["import", str(good), str(place / "old")]) == 0
    shutil.copytree(place / "old", target)
    before = fingerprint(target)
    there = sorted(os.listdir(place))
    for seed in range(first, first + count):
        rng = random.Random(seed)
        copy(good, source)
        what = mutate(source, rng)
        say(f"seed {seed}: {what}")
        to = ["--to", "directory"] if rng.random() < 0.3 else []
        goal = place / "new" if to else target
        more = [option for option in ("--allow-nan", "--duplicates=last") if rng.random() < 0.3]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["import", str(source), str(goal), "--json", "--force", *to, *more])
        assert code in (0, 1, 2, 3), code
        if code == 0 and not to:
            assert verify(target) == []
            with Reader(target) as reader:
                assert sum(len(rows.keys) for table in reader.tables for rows in reader.rows(table)) <= ROWS
            shutil.rmtree(target)
            shutil.copytree(place / "old", target)
        elif code:
            message = json.loads(out.getvalue())["error"]["message"]
            assert str(source) in message and str(source) in err.getvalue(), message
            assert "Traceback" not in err.getvalue() and not (place / "new").exists()
        assert fingerprint(target) == before
        remove(source)
        remove(place / "new")
        assert sorted(os.listdir(place)) == there, os.listdir(place)
        say(f"done {code}")
    for one in (target, place / "old", place / "it"):
        shutil.rmtree(one)


SOURCES = ["good.npz", "packed.npz", "good.npy", "good.safetensors", "good.parquet", "recsdk"]


@pytest.mark.parametrize("name", SOURCES)
def test_r4_mutated_foreign_files_are_read_or_refused_by_name(place: Path, name: str) -> None:
    make(place / name)
    codes: list[str] = []
    for first in range(0, MUTATIONS, PER_CHILD):
        outcome = run_child(import_damaged, place, name, first, PER_CHILD, limit_s=120, memory_bytes=1 << 30)
        assert outcome.code == 0, f"{outcome.said[-1:]}, late: {outcome.late}"
        codes += [line for line in outcome.said if line.startswith("done")]
    assert len(codes) == MUTATIONS and {"done 0", "done 1"} < set(codes)
