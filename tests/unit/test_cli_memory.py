"""No command's memory grows with the table: children work on a table of three times what they may take.

What they hold at a time is made a sixth of what it is, so that a small table shows it; the measured peaks of large tables
are in the README.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embcache._core.table import Table
from embcache.checkpoint import Reader, TableDescription, Writer
from embcache.commands.sources import Pages
from embcache.config import AdmitAndEvictConfig
from embcache.filterfile import meaning

MOST_BYTES = 120 << 20
ROWS, DIM = 180_000, 512

CHILD = """
import sys
from embcache.commands import differences, gathering, ordering, sources
for module, name in (
    (differences, "_WINDOW_BYTES"), (ordering, "_BUCKET_BYTES"), (ordering, "_HELD_BYTES"),
    (gathering, "_WINDOW_BYTES"), (sources, "_MOST_MAPPED_BYTES"),
):
    setattr(module, name, getattr(module, name) // 6)
from embcache.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
with open("/proc/self/status") as status:
    print(next(line for line in status if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table directory in it, of about 400 MB."""
    path = tmp_path_factory.mktemp("memory")
    table = Table("items", DIM, directory=path / "table")
    pages, rng = Pages(table), np.random.default_rng(0)
    keys = rng.permutation(ROWS)
    table.reserve(ROWS)
    weights = rng.random((2000, DIM), dtype=np.float32)
    for at in range(0, ROWS, 2000):
        table.write_from(table.insert(keys[at : at + 2000]), weights, None, [])
        pages.limit()
    table.close()
    return path


def peak(folder: Path, *arguments: str, code: int = 0) -> int:
    """Bytes that a command took at most."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return 1024 * int(done.stderr.split("VmHWM:")[1].split()[0])


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer's own memory is in the figure")
@pytest.mark.timeout(900)
def test_every_command_takes_a_third_of_the_table_at_most(folder: Path) -> None:
    steps: list[tuple[str, ...]] = [
        ("save", "table", "saved"),
        ("inspect", "table"),
        ("inspect", "saved"),
        ("verify", "saved"),
        ("restore", "saved", "back"),
        ("diff", "saved", "back"),
        ("compact", "saved", "--force"),
        ("reshard", "saved", "--writers", "2", "--force"),
        ("export", "saved", "file.npy"),
        ("import", "file.npy", "back", "--to", "directory", "--force"),
        ("export", "back", "file.npz"),
        ("import", "file.npz", "saved", "--force"),
        ("export", "saved", "file.safetensors"),
    ]
    assert sum(file.stat().st_size for file in (folder / "table").iterdir()) > 2.9 * MOST_BYTES
    peaks = {" ".join(step): peak(folder, *step) for step in steps}
    assert {step: size >> 20 for step, size in peaks.items() if size > MOST_BYTES} == {}
    assert sorted(os.listdir(folder)) == ["back", "file.npy", "file.npz", "file.safetensors", "saved", "table"]


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer's own memory is in the figure")
def test_a_waiting_key_takes_what_its_module_says(tmp_path: Path) -> None:
    """Keys that wait for admission are in memory as a whole: bytes for each, from few to a million."""
    description = TableDescription("t", 4, with_filter=True)
    about = {"table": "t", "module": "", "filter": meaning(AdmitAndEvictConfig(admit_threshold=3))}
    peaks: dict[str, list[int]] = {"restore": [], "save": [], "compact": []}
    counts = (1000, 1_000_000)
    for count in counts:
        place = tmp_path / str(count)
        keys = np.random.default_rng(0).permutation(count)
        with Writer(place / "saved") as writer:
            writer.begin()
            writer.table(description, metadata=about)
            writer.write_filter(description, keys, keys % 3, keys, numbers={"newest": 5})
            writer.commit()
            writer.publish()
        peaks["restore"].append(peak(place, "restore", "saved", "table"))
        peaks["save"].append(peak(place, "save", "table", "again"))
        peaks["compact"].append(peak(place, "compact", "again", "small"))
        with Reader(place / "small") as reader:
            held = reader.filter("t")
        assert held is not None and np.array_equal(held.keys, np.arange(count))
        assert np.array_equal(held.counts, held.keys % 3) and np.array_equal(held.last, held.keys)
    each = {what: (after - before) / (counts[1] - counts[0]) for what, (before, after) in peaks.items()}
    assert each["save"] < 40 and each["restore"] < 64 and each["compact"] < 64, each
