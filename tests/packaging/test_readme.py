"""The README's examples run as they are printed, and the files it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import embcache

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_examples_of_about_20_lines() -> None:
    assert BLOCKS
    assert all(len(block.splitlines()) <= 24 for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_of_the_readme_runs(block: str, tmp_path: Path) -> None:
    # The package under test, wherever it was imported from.
    environment = os.environ | {"PYTHONPATH": str(Path(embcache.__file__).parents[1])}
    command = [sys.executable, "-c", block]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    expected = re.findall(r"#> (.*)", block)
    assert ran.stdout.splitlines() == expected


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/pipeline.md"])
def test_links_to_files_are_not_broken(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)  # code has brackets of its own
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
