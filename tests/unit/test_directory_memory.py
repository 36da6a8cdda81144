"""A file-backed table larger than the memory that its process may use: a cgroup far smaller than the files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT = 96 * MIB  # of which interpreter and NumPy take half

CODE = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
import numpy as np
from embcache.errors import HostMemoryError
from embcache.table import EmbTable

def fill(table):
    for start in range(0, 480_000, 20_000):
        keys = np.arange(start, start + 20_000)
        table.assign(keys, np.repeat(keys.astype(np.float32)[:, None], 64, axis=1))

try:
    fill(EmbTable("t", 64, num_threads=1))
except HostMemoryError:
    pass
else:
    sys.exit("130 MiB in memory did not meet the limit")
table = EmbTable("t", 64, directory=sys.argv[2], num_threads=1)
fill(table)
assert table.stats()["file_bytes"] > 120 << 20
table.flush()
keys = np.random.default_rng(0).permutation(480_000)[:2000]
assert (table.lookup(keys, insert=False) == keys[:, None]).all()
table.close()
table = EmbTable("t", 64, directory=sys.argv[2], num_threads=1)
assert (table.lookup(keys, insert=False) == keys[:, None]).all()
table.close()
"""


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup with that limit; skips the test where none can be made."""
    for root, name in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = root / f"embcache-test-{os.getpid()}"
        try:
            if not (root / "cgroup.procs").exists():
                continue
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit_bytes))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("memory cgroups cannot be made here")


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer's own memory would not fit")
def test_a_table_larger_than_memory_works(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    if status.f_bavail * status.f_frsize < 2048 * MIB:
        pytest.skip("less than 2 GiB of disk")
    with memory_cgroup(LIMIT) as group:
        command = [sys.executable, "-c", CODE, str(group / "cgroup.procs"), str(tmp_path / "rows")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
