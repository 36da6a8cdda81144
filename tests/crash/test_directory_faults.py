"""I11 for file-backed tables: whichever call of the system fails, the table is as it was, and says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from embcache._core.table import Table
from embcache.errors import DiskFullError, HostMemoryError, StorageError, UncleanDirectoryError

F32 = np.float32
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def keys_from(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n)


def make(place: Path) -> Table:
    return Table("t", 5, state_dim=1, with_filter=True, split_above=500, directory=place, num_threads=1, index_seed=7)


def rows_of(table: Table, keys: np.ndarray) -> tuple[bytes, bytes]:
    weights, state = table.lookup_rows(keys)
    return weights.tobytes(), state.tobytes()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_i11_every_call_of_a_growing_insert_fails_in_turn(tmp_path: Path, error: int) -> None:
    """Columns one after another, indexes, splits: nothing has changed, and the same batch succeeds afterwards."""
    table = make(tmp_path / "rows")
    directory = table.directory
    assert directory is not None
    twin = Table("t", 5, state_dim=1, with_filter=True, split_above=500, num_threads=1, index_seed=7)
    known = keys_from(0, 1)
    for each in (table, twin):
        each.insert(known)
    failures = 0
    for part, n in enumerate((10, 700, 3000, 9000, 20_000, 20_000), start=1):
        batch = keys_from(part, n)
        before = rows_of(table, known)
        for calls in count():
            directory.fail_after(calls, error)
            try:
                rows = table.insert(batch)
            except (DiskFullError, StorageError, HostMemoryError) as refusal:
                failures += 1
                assert isinstance(refusal, HostMemoryError) or (isinstance(refusal, DiskFullError) == (error in FULL))
                if isinstance(refusal, StorageError):
                    assert refusal.errno == error and refusal.filename == str(tmp_path / "rows")
                directory.fail_after(-1, 0)
                table.check()
                assert len(table) == len(twin) and (table.find(batch) == twin.find(batch)).all()
                assert rows_of(table, known) == before
                size = os.path.getsize(tmp_path / "rows" / "data")
                assert (tmp_path / "rows" / "data").stat().st_blocks * 512 >= size  # never a hole
            else:
                directory.fail_after(-1, 0)
                break
        assert np.array_equal(rows, twin.insert(batch))
        known = np.concatenate([known, batch])[-5000:]
        table.check()
    assert failures > 30
    table.close()
    with_all = make(tmp_path / "rows")
    with_all.check()
    assert len(with_all) == len(twin) and np.array_equal(with_all.find(known), twin.find(known))
    with_all.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_i11_every_call_of_a_flush_fails_in_turn(tmp_path: Path, error: int) -> None:
    """A write that failed leaves a table that is dirty and alive; a sync that failed, one that can only be read."""
    keys = keys_from(1, 2000)
    outcomes = set()
    for calls in count():
        place = tmp_path / str(calls)
        table = make(place)
        assert table.directory is not None
        table.insert(keys)
        before = rows_of(table, keys)
        table.directory.fail_after(calls, error)
        try:
            table.flush(b"counters" * calls)
        except StorageError as refusal:
            assert refusal.errno == error
            assert rows_of(table, keys) == before and not table.directory.clean
            table.check()
            table.directory.fail_after(-1, 0)
            try:
                table.insert(keys[:10])
                table.flush(b"counters")
            except StorageError as dead:
                outcomes.add("dead")
                assert "no longer changed" in str(dead)
                with pytest.raises(StorageError, match="no longer changed"):
                    table.erase(keys)
                assert rows_of(table, keys) == before
                table.close()
                try:
                    again = make(place)
                except UncleanDirectoryError:
                    outcomes.add("refused")
                else:  # the last sync: all that "clean" vouches for had been synced, and nothing was changed since
                    outcomes.add("clean")
                    assert rows_of(again, keys) == before
                    again.check()
                    again.close()
            else:
                outcomes.add("alive")
                table.close()
                make(place).close()
        else:
            assert table.directory.clean
            assert error == errno.EINTR or calls > 8
            table.directory.fail_after(-1, 0)
            table.close()
            make(place).close()
            if calls > 20:
                break
    assert outcomes == (set() if error == errno.EINTR else {"dead", "alive", "refused", "clean"})


@pytest.mark.parametrize("change", ["insert", "erase", "write", "lookup", "attach"])
def test_i11_a_directory_that_cannot_be_marked_dirty_is_not_changed(tmp_path: Path, change: str) -> None:
    """The first store after a flush needs the header: without it nothing happens, and the directory stays clean."""
    keys, one = keys_from(1, 100), np.array([1], dtype=np.int64)
    out = np.empty((1, 5), dtype=F32)
    calls: dict[str, Callable[[Table], object]] = {
        "insert": lambda table: table.insert(one),
        "erase": lambda table: table.erase(keys),
        "write": lambda table: table.write_from(np.array([0]), out),
        "lookup": lambda table: table.lookup(one, out),
        "attach": lambda table: table.detach(keys),
    }
    table = make(tmp_path / "rows")
    assert table.directory is not None
    table.insert(keys)
    table.flush()
    version = table.version
    for step in range(2):  # the open, the write; the sync that follows is another matter
        table.directory.fail_after(step, errno.ENOSPC)
        with pytest.raises(DiskFullError, match="nothing has changed"):
            calls[change](table)
        assert table.directory.clean and table.version == version
    table.directory.fail_after(-1, 0)
    calls[change](table)
    assert not table.directory.clean
    table.close()


def in_small_file_system(body: str, size: str = "4m") -> None:
    """Run `body` in a child with its own tmpfs of that size in the variable `place`."""
    code = textwrap.dedent(
        f"""
        import os, subprocess, tempfile
        from pathlib import Path
        import numpy as np
        from embcache.errors import *
        from embcache.table import EmbTable
        base = tempfile.mkdtemp()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", base], check=True)
        place = Path(base) / "rows"
        """
    ) + textwrap.dedent(body)
    prefix = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    ran = subprocess.run(
        [*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_i11_a_full_disk_is_an_error_and_never_a_signal() -> None:
    in_small_file_system(
        """
        table = EmbTable("t", 16, directory=place)
        keys = np.arange(10_000_000)
        fitted = 0
        try:
            for at in range(0, len(keys), 1000):
                table.insert(keys[at : at + 1000])
                fitted = at + 1000
        except DiskFullError as error:
            assert error.errno == 28 and error.filename == str(place) and " bytes more" in str(error) and "are free there" in str(error), error
        else:
            raise SystemExit("4 MiB held everything")
        assert fitted > 10_000 and len(table) == fitted
        table.check()
        rows = table.lookup(keys[:fitted], insert=False)
        table.assign(keys[:fitted], rows + 1)  # rows that are there can be changed, and every page of them written
        table.erase(keys[: fitted // 2])
        table.insert(keys[: fitted // 2])      # their places are used again
        table.flush()
        table.close()
        with EmbTable("t", 16, directory=place) as again:
            assert len(again) == fitted
            assert (again.lookup(keys[fitted // 2 : fitted], insert=False) == rows[fitted // 2 :] + 1).all()
            again.check()
        """
    )


def test_i11_a_disk_that_others_fill_between_the_steps() -> None:
    """Making, growing and flushing at every amount of free space."""
    in_small_file_system(
        """
        filler = place.parent / "filler"
        def leave(free):
            filler.unlink(missing_ok=True)
            status = os.statvfs(place.parent)
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(status.f_bavail * status.f_frsize - free, 4096))
        outcomes = set()
        for pages in list(range(0, 40)) + [60, 100, 200]:
            leave(pages * 4096)
            try:
                table = EmbTable("t", 16, directory=place)
            except DiskFullError:
                outcomes.add("not made")
                assert not place.exists() or not (place / "header").exists()
                continue
            try:
                table.insert(np.arange(500))
                outcomes.add("grown")
            except DiskFullError:
                outcomes.add("not grown")
                assert len(table) == 0
            table.check()
            try:
                table.flush()
                outcomes.add("flushed")
            except DiskFullError:
                outcomes.add("not flushed")
                filler.unlink()
                table.flush()
            table.close()
            with EmbTable("t", 16, directory=place) as again:
                again.check()
            for path in place.iterdir():
                path.unlink()
            place.rmdir()
        assert outcomes >= {"not made", "not grown", "grown", "flushed"}, outcomes
        """
    )


def test_i11_the_limit_on_a_files_size_is_an_error_and_never_a_signal(tmp_path: Path) -> None:
    code = f"""
import resource, signal
import numpy as np
from embcache.errors import DiskFullError
from embcache.table import EmbTable
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
table = EmbTable("t", 16, directory={str(tmp_path / "rows")!r})
table.insert(np.arange(1000))
try:
    table.insert(np.arange(1_000_000))
except DiskFullError as error:
    assert "RLIMIT_FSIZE" in str(error), error
else:
    raise SystemExit("a file of 1 MiB held everything")
table.check()
assert len(table) == 1000
table.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
