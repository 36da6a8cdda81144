"""The sdist holds all that a build needs, and the wheel that is built from it all that a user needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The core is compiled once more, unless CI has done that already.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it: CI's (EMBCACHE_DIST), else built now."""
    if given := os.environ.get("EMBCACHE_DIST"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return folder


def sources(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "embcache").rglob(pattern)}


def test_the_sdist_holds_every_source_and_nothing_generated(dist: Path) -> None:
    (archive,) = dist.glob("embcache-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd", "*.h", "py.typed"):
        expected = sources(pattern)
        assert expected, pattern
        assert expected <= names
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    # C that Cython made lies beside its .pyx; other C is a source.
    made = [name for name in names if name.endswith(".c") and name.removesuffix(".c") + ".pyx" in names]
    assert [name for name in names if name.endswith((".so", ".pyc"))] + made == []


def test_the_wheel_holds_the_core_its_stubs_its_contract_and_the_licence(dist: Path) -> None:
    (archive,) = dist.glob("embcache-*.whl")
    with zipfile.ZipFile(archive) as file:
        names = set(file.namelist())
        metadata = file.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    for pattern in ("*.py", "*.pyi", "*.pxd", "*.h", "py.typed"):
        assert sources(pattern) <= names
    compiled = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {source.removesuffix(".pyx") for source in sources("*.pyx")}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"embcache"}
    assert [name for name in names if name.endswith((".c", ".pyx", ".pyc"))] == []
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch==2.13.0" in metadata
