"""docs/: its index names each page, links lead somewhere, docs/api.md is what the code says, and the code of docs/devices.md runs."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> object:
    """tools/api.py, on the package under test."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("api", None)
    return import_module("api")


def test_every_public_name_is_on_the_page_as_it_is_called(api: object) -> None:
    wanted, found = api.page().splitlines(), (DOCS / "api.md").read_text().splitlines()
    differ = [(one, other) for one, other in zip(wanted, found, strict=False) if one != other]
    assert wanted == found, f"run python tools/api.py; first difference: {(differ or ['length'])[0]}"


def test_every_line_of_the_page_says_something(api: object) -> None:
    """A public name without a docstring would leave its line empty."""
    lines = [line for line in api.page().splitlines() if line.lstrip().startswith("- ")]
    assert len(lines) > 200
    assert [line for line in lines if line.rstrip().endswith(":")] == []


def test_the_index_names_each_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")
    assert pages and [name for name in pages if f"]({name})" not in index] == []


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DOCS / target).exists(), target


def test_the_quick_start_on_a_device_runs_on_the_one_there_is() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "devices.md").read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "docs/devices.md", "exec"), {"__name__": "page"})
    assert printed.getvalue().splitlines() == re.findall(r"#> (.*)", block)
