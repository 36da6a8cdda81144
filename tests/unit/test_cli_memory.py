"""No command's memory grows with the table: children work on a table of three times what they may take.

What they hold at a time is made a sixth of what it is, so that a small table shows it; the measured peaks of large tables
are in the README.
"""

from __future__ import annotations

import importlib.util
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
from embcache.commands import differences, gathering, ordering, parquet, sources
for module, name in (
    (differences, "_WINDOW_BYTES"), (ordering, "_BUCKET_BYTES"), (ordering, "_HELD_BYTES"),
    (gathering, "_WINDOW_BYTES"), (parquet, "_GROUP_BYTES"), (sources, "_MOST_MAPPED_BYTES"),
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
    make_recsdk(path / "theirs" / "items", keys, weights)
    return path


def make_recsdk(folder: Path, keys: np.ndarray, weights: np.ndarray) -> None:
    """The same as RecSDK would save it, each key with a time."""
    for what, head in (("key", [8, ROWS]), ("embedding", [4, ROWS, DIM]), ("evict_timestamp", [8, ROWS])):
        (folder / what).mkdir(parents=True)
        np.array(head, "<i8").tofile(folder / what / "slice.attribute")
    keys.astype("<i8").tofile(folder / "key" / "slice.data")
    for name in ("key", "ts"):
        keys[::-1].astype("<i8").tofile(folder / "evict_timestamp" / f"slice_evict_{name}.data")
    with open(folder / "embedding" / "slice.data", "wb") as file:
        for _ in range(0, ROWS, len(weights)):
            file.write(weights.tobytes())


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
        ("export", "saved", "file.parquet"),
        ("import", "file.parquet", "saved", "--force", "--duplicates", "last"),
        ("import", "theirs", "saved", "--force"),
    ]
    assert sum(file.stat().st_size for file in (folder / "table").iterdir()) > 2.9 * MOST_BYTES
    if importlib.util.find_spec("pyarrow") is None:
        steps = [step for step in steps if "file.parquet" not in step]
    peaks = {" ".join(step): peak(folder, *step) for step in steps}
    # pyarrow takes 60 MiB by itself, and keeps some of what it has used; two steps here do not become smaller.
    most = {step: 2 * MOST_BYTES if "parquet" in step else MOST_BYTES for step in peaks}
    assert {step: size >> 20 for step, size in peaks.items() if size > most[step]} == {}
    files = {"file.npy", "file.npz", "file.parquet", "file.safetensors"}
    assert set(os.listdir(folder)) - files == {"back", "saved", "table", "theirs"}


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
