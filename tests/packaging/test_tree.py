"""What the repository holds: sources only, each compiled noun with its contract and its stub, nothing left undone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "embcache" / "_core"
GENERATED = re.compile(r"\.(so|o|a|pyc|pyd|whl|tar\.gz|egg-info)$|(^|/)(build|dist|__pycache__|\.venv)/")


def tracked() -> list[str]:
    """Every file that git knows in this checkout."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    return [
        name for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0") if name
    ]


def test_no_generated_file_is_tracked() -> None:
    names = tracked()
    assert "embcache/__init__.py" in names
    assert [name for name in names if GENERATED.search(name)] == []
    generated_c = [name for name in names if name.endswith(".c") and (ROOT / name).with_suffix(".pyx").exists()]
    assert generated_c == []


def test_no_tracked_file_is_big_or_binary() -> None:
    for name in tracked():
        content = (ROOT / name).read_bytes()
        assert len(content) < 200_000, name
        assert b"\0" not in content or name.endswith((".trace.xz", ".png")) or name.startswith("tests/golden/"), name


@pytest.mark.parametrize("source", sorted(path.stem for path in CORE.glob("*.pyx")))
def test_each_compiled_noun_is_three_files(source: str) -> None:
    assert (CORE / f"{source}.pxd").is_file()
    assert (CORE / f"{source}.pyi").is_file()


def test_nothing_is_left_undone() -> None:
    undone = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    sources = (".py", ".pyi", ".pyx", ".pxd", ".h", ".sh", ".toml", ".md")
    found = [
        f"{name}:{number}"
        for name in tracked()
        if name.endswith(sources) and name != "tests/packaging/test_tree.py"
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if undone.search(line)
    ]
    assert found == []
