"""Opening a table's directory: what it costs, whatever the table's size; and tables that are pickled by their path."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import embcache as ec
from embcache.errors import ConfigError
from embcache.table import EmbTable


def bytes_read() -> int:
    """What this process has read from files so far."""
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def bytes_touched(place: Path) -> int:
    """Pages of the mapped data file that this process has touched."""
    parts = Path("/proc/self/smaps").read_text().split(f"{place}/data\n")[1:]
    assert parts, "the file is not mapped"
    return 1024 * sum(int(re.findall(r"^Rss: +(\d+) kB", part, re.MULTILINE)[0]) for part in parts)


@pytest.mark.parametrize("rows", [20_000, 800_000])
def test_a_clean_directory_opens_at_once_whatever_its_size(tmp_path: Path, rows: int) -> None:
    """Neither rows nor index nor free list are looked at: no page is touched, and a few bytes a thousand rows are read."""
    place = tmp_path / "rows"
    with EmbTable("t", 16, directory=place) as table:
        table.insert(np.arange(rows))
        table.erase(np.arange(0, rows, 2))
    before = bytes_read()
    with EmbTable("t", 16, directory=place) as table:
        read = bytes_read() - before
        assert bytes_touched(place) == 0
        assert read < 4096 + 20 * rows // 1000
        assert len(table) == table.stats()["free_rows"] == rows // 2
        assert (table.insert(np.arange(0, rows, 2)) < rows * 1.1).all()  # into the rows that were free
        assert table.stats()["free_rows"] == 0
        table.check()
        assert bytes_touched(place) > 64 * rows


ELSEWHERE = """
import pickle, sys
import numpy as np
from embcache.errors import LockedError

packed = bytes.fromhex(sys.argv[1])
try:
    pickle.loads(packed)
except LockedError as error:
    print(error.pid, flush=True)
sys.stdin.readline()
with pickle.loads(packed) as table:
    print(table.lookup([7, 8, 9], insert=False).tobytes().hex(), table.dtype, table.state_dim, table.seed)
    table.assign([7], np.zeros((1, 4), np.float16))
"""


def test_a_table_is_pickled_by_its_path_for_another_process(tmp_path: Path) -> None:
    """It opens the same rows as soon as they are closed here, and what it writes is read here."""
    place, initializer = tmp_path / "rows", ec.TruncatedNormal(0, 0.1)
    table = EmbTable("t", 4, dtype="float16", state_dim=2, seed=5, initializer=initializer, directory=place)
    rows = table.lookup([7, 8])
    packed = pickle.dumps(table)
    command = [sys.executable, "-c", ELSEWHERE, packed.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{os.getpid()}\n"
        table.close()
        assert pickle.dumps(table) == packed
        found, *kind = other.communicate("\n", timeout=60)[0].split()
    assert other.returncode == 0 and kind == ["float16", "2", "5"]
    fresh = EmbTable("t", 4, dtype="float16", seed=5, initializer=initializer)
    assert bytes.fromhex(found) == np.concatenate([rows, fresh.lookup([9])]).tobytes()
    with pickle.loads(packed) as again:
        assert not again.lookup([7], insert=False).any() and np.array_equal(again.lookup([8], insert=False), rows[1:])


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_pickled_table_whose_directory_is_gone_is_not_a_new_one(tmp_path: Path, how: str) -> None:
    place = tmp_path / "rows"
    with EmbTable("t", 4, directory=place) as table:
        packed = pickle.dumps(table)  # nothing was stored yet: that is a table all the same
    with pickle.loads(packed) as table:
        table.insert([1])
    shutil.rmtree(place)
    if how == "emptied":
        place.mkdir()
    with pytest.raises(ConfigError, match=f"'t': directory '{place}' holds no table.*copy"):
        pickle.loads(packed)
    assert not list(tmp_path.glob("rows/*")) and place.exists() == (how == "emptied")


CROWD = """
import os, resource, sys
from embcache import EmbTable, StorageError
place, tables = sys.argv[1], []
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    while True:
        tables.append(EmbTable("t", 4, directory=f"{place}/{len(tables)}"))
except StorageError as error:
    for table in tables:
        table.close()
    print(error.errno, len(tables), len(os.listdir(place)), "ulimit -n" in str(error))
"""


@pytest.mark.parametrize("most", [24, 25, 26, 27])
def test_a_table_for_which_no_descriptor_is_left_leaves_nothing(tmp_path: Path, most: int) -> None:
    command = [sys.executable, "-c", CROWD, str(tmp_path), str(most)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    number, made, there, remedy = found.stdout.split() or [found.stderr]
    assert (int(number), remedy) == (errno.EMFILE, "True")
    assert int(made) == int(there) > 0


MANY = """
import os, resource, sys
import numpy as np
from embcache import EmbTable, StorageError
place, count, hard = sys.argv[1], int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = lambda i: EmbTable(f"t{i}", 4, state_dim=4, directory=f"{place}/{i}")
keys = lambda i: np.arange(32) * count + i
values = lambda i: np.full((32, 4), i, np.float32)
tables = [opened(i) for i in range(count)]
for i, table in enumerate(tables):
    table.assign(keys(i)[:16], values(i)[:16])
assert sum(table.stats()["bytes"] for table in tables) < count * 256 * 2**10
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
last = []  # from here on no descriptor is left
try:
    while True:
        last.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
refusals = []
for tried in (lambda: opened(count), tables[0].flush, tables[1].close):
    try:
        tried()
    except StorageError as error:
        refusals.append((error.errno, "ulimit -n" in str(error)))
for i, table in enumerate(tables):
    table.assign(keys(i), values(i))
    assert (table.find(keys(i)) >= 0).all() and (table.find(keys(i) + 1) < 0).all()
for number in last:
    os.close(number)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
for table in tables:
    table.close()
for i in range(count):
    with opened(i) as table:
        weights, state = table.lookup_rows(keys(i))
        assert len(table) == 32 and (weights == i).all() and not state.any()
print(refusals, len(os.listdir(place)))
"""


def test_a_thousand_tables_in_files_also_where_no_descriptor_is_left(tmp_path: Path) -> None:
    """What is open goes on without one: rows come and are found. What needs one says so, and can be done afterwards."""
    count = 1000
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * count + 100:
        pytest.skip(f"{count} tables in files keep {2 * count} descriptors; this system gives fewer")
    memory = Path("/dev/shm")  # where it is, for speed: a disk syncs every one of them several times
    place = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**30 else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as base:
        command = [sys.executable, "-c", MANY, base, str(count)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.stdout.split("\n")[0] == f"{[(errno.EMFILE, True)] * 3} {count}", found.stderr[-2000:]
