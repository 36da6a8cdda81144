"""R5, R6, R21: whichever call of the system fails, what was published is intact and the next save succeeds."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
from children import folder_in_memory

from embcache.checkpoint import Files, Reader, TableDescription, Writer, generations, prune, segment, verify
from embcache.errors import DiskFullError, StorageError

DESCRIPTION = TableDescription("t", 4, 2, with_filter=True)
KEYS = np.arange(3000)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


class Failing(Files):
    """Refuses the call that comes after `calls` more, once; or all of one kind, from then on."""

    def __init__(self, calls: int, error: int, only: str = "", lasting: bool = False) -> None:
        self.calls, self.error, self.only, self.lasting = calls, error, only, lasting
        self.failed: list[str] = []
        self.names: list[str] = []

    def point(self, name: str, path: str) -> None:
        self.names.append(name)
        if self.only and name != self.only:
            return
        self.calls -= 1
        if self.calls < 0 and (self.lasting or not self.failed):
            self.failed.append(name)
            raise OSError(self.error, os.strerror(self.error))


class Short(Files):
    """Writes at most 1000 bytes a call."""

    def write_some(self, descriptor: int, views: Sequence[memoryview], offset: int, path: str) -> int:
        return os.pwrite(descriptor, views[0][:1000], offset)


def save(path: Path, step: int, parent: int | None = None, files: Files | None = None, keep: int | None = None) -> int:
    """Rows that say which step they are of, in chunks of 64 KiB and segments of 256."""
    with Writer(path, files=files, chunk_bytes=1 << 16, most_segment_bytes=1 << 18) as writer:
        generation = writer.begin(parent=parent, metadata={"step": step})
        keys = KEYS if parent is None else KEYS[::3]
        ones = np.ones((len(keys), 1), np.float32) * step
        writer.write_rows(DESCRIPTION, keys, ones.repeat(4, 1), ones.repeat(2, 1), keys, keys)
        if parent is not None:
            writer.write_erased(DESCRIPTION, KEYS[1::3])
        writer.write_state("note", b"x" * 100)
        writer.commit()
        writer.publish()
    if keep is not None:
        prune(path, keep, files=files)
    return generation


def holds(path: Path, generation: int | None = None) -> tuple[int, int]:
    """(generation, step) of what can be restored; the rows are looked at."""
    with Reader(path, generation) as reader:
        step = reader.metadata[0]["step"]
        rows = {int(key): float(w[0]) for one in reader.rows("t") for key, w in zip(one.keys, one.weights, strict=True)}
        assert len(rows) == (3000 if len(reader.chain) == 1 else 2000)
        assert all(rows[int(key)] == step for key in KEYS[::3])
        return reader.generation, step


@pytest.mark.parametrize(
    ("error", "parent", "behind"),
    [
        *product([errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR], [None, 2], [False]),
        (errno.ENOSPC, 2, True),
        (errno.EIO, None, True),
    ],
)
def test_r5_every_call_of_a_save_fails_in_turn(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, parent: int | None, behind: bool
) -> None:
    """With `behind` chunks are written in threads, as those of large files are."""
    if behind:
        monkeypatch.setattr(segment, "_BEHIND_FROM", 0)
    seen = set()
    for calls in count():
        path = memory_path / str(calls)
        save(path, 1)
        save(path, 2)
        files = Failing(calls, error)
        try:
            save(path, 3, parent, files, keep=1)
        except StorageError as refusal:
            assert isinstance(refusal, DiskFullError) == (error in (errno.ENOSPC, errno.EDQUOT))
            assert refusal.errno == error and str(path) in str(refusal.filename)
        else:
            if not files.failed:
                break
            assert files.failed[0] in ("allocate", "unlink")  # a smaller step, and what the next writer removes
        seen |= set(files.failed)
        generation, step = holds(path)
        assert (generation, step) in ((2, 2), (3, 3))
        if step == 2:
            assert len([name for name in os.listdir(path) if "MANIFEST" in name]) == 2
        if generation == 2 and files.failed != ["unlink"]:
            assert not any("0000000000000003" in name for name in os.listdir(path / "rank-0000"))
        assert [one for one in verify(path) if one.severity == "damage"] == []
        again = save(path, 4, 2 if parent and generations(path)[0].generation <= 2 else None)
        assert again > generation and holds(path) == (again, 4)
        prune(path, 1)
        assert verify(path) == []  # nothing strange is left
        shutil.rmtree(path)
    assert {"lock", "create", "allocate", "write", "sync", "sync_folder", "commit", "rename", "truncate"} <= seen
    assert ("bypass_cache" in seen) == behind


def test_r5_writes_may_be_short(tmp_path: Path) -> None:
    save(tmp_path, 1, files=Short())
    save(tmp_path, 2, 1, files=Short())
    assert holds(tmp_path) == (2, 2) and verify(tmp_path) == []


@pytest.mark.parametrize("only", ["sync", "sync_folder", "commit"])
def test_r21_a_failed_sync_is_never_tried_again(tmp_path: Path, only: str) -> None:
    """The writer is finished; the next one takes a new number, and so new files."""
    save(tmp_path, 1)
    with Writer(tmp_path, files=Failing(0, errno.EIO, only)) as writer:
        assert writer.begin() == 2
        writer.write_rows(DESCRIPTION, KEYS, np.ones((3000, 4), np.float32), np.ones((3000, 2), np.float32), KEYS, KEYS)
        with pytest.raises(StorageError):
            writer.commit()
        for call in (writer.commit, writer.publish, writer.begin):
            with pytest.raises(StorageError, match="generation 2 failed and is not tried again"):
                call()
    assert holds(tmp_path) == (1, 1)
    save(tmp_path, 2)
    assert holds(tmp_path)[1] == 2


def test_a_disk_that_fails_for_good_leaves_what_was_published(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for only in ("write", "allocate", "sync", "rename", "create"):
        with pytest.raises(StorageError):
            save(tmp_path, 2, files=Failing(0, errno.EIO, only, lasting=True))
        assert holds(tmp_path) == (1, 1)
    save(tmp_path, 3)
    assert holds(tmp_path)[1] == 3 and verify(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("first", [True, False])
def test_r6_a_really_full_disk_at_every_size(small_disk: Path, first: bool) -> None:
    """Filled up to so many bytes before the save: it raises `DiskFullError`, or succeeds; never anything else."""
    path = small_disk / "checkpoint"
    save(path, 1)
    refused = saved = 0
    for step, left in enumerate([0, 1, *range(2048, 600_000, 12_288)], start=1):
        filler = small_disk / "filler"
        with open(filler, "wb") as file:
            status = os.statvfs(small_disk)
            os.posix_fallocate(file.fileno(), 0, max(status.f_bavail * status.f_frsize - left, 1))
        if first:  # everything has yet to be made: folders, locks, the catalogue
            place = small_disk / str(step)
        else:
            place = path
        try:
            save(place, step)
            saved += 1
        except DiskFullError as error:
            refused += 1
            assert error.errno in (errno.ENOSPC, errno.EDQUOT) and "free some space" in str(error)
        filler.unlink()
        if first:
            shutil.rmtree(place, ignore_errors=True)
        before = holds(path)
        assert [one for one in verify(path) if one.severity == "damage"] == []
        save(path, 1000 + step)
        assert holds(path)[0] > before[0]
        prune(path, 1)
    assert refused > 15 and saved > 3
    assert verify(path) == []
