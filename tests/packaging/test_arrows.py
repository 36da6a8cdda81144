"""Dependencies point one way, and torch stays in the upper half: read from the sources, not from what happens to run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import embcache

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "embcache"

# From the bottom up; a module may import what stands on an earlier line.
LAYERS = [
    ["errors"],
    ["rowtypes"],
    ["_core", "config"],
    ["checkpoint"],
    ["budget", "filterfile", "metrics", "table", "timeline"],
    ["filterparts", "traces"],
    ["commands"],
    ["cli"],
    ["features", "hostmemory", "lookup", "pace", "ranges", "replay", "unchanged"],
    ["batches", "devices", "layout"],
    ["buffer", "optim", "swapinfo", "values"],
    ["feed", "mover", "savepart", "shards", "view"],
    ["savejob"],
    ["saving"],
    ["restoring"],
    ["savable"],
    ["manager"],
    ["fused"],
    ["modules"],
    ["densepart", "stages"],
    ["whole"],
    ["pipeline"],
    ["distributed"],
    ["torchrec"],
]
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
# Packages: their files import each other and what is below the package.
FOLDERS = {"checkpoint", "commands", "devices", "distributed", "torchrec"}
TORCH = {
    "features",
    "hostmemory",
    "lookup",
    "ranges",
    "unchanged",
    "batches",
    "devices",
    "layout",
    "buffer",
    "mover",
    "optim",
    "values",
    "manager",
    "fused",
    "densepart",
    "shards",
    "modules",
    "stages",
    "pipeline",
    "whole",
    "distributed",
    "torchrec",
}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each imported module, relative ones resolved; and whether it is for types only."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level:
                yield module, id(node) in for_types
            else:  # relative to the package or to one of its folders
                above = path.relative_to(PACKAGE).parts[: -node.level]
                origin = ".".join(["embcache", *above, *([module] if module else [])])
                if module:
                    yield origin, id(node) in for_types
                else:
                    yield from ((f"{origin}.{alias.name}", id(node) in for_types) for alias in node.names)


def own_files() -> Iterator[tuple[str, Path]]:
    """Each Python file but the package's own ``__init__``, with the name of its layer."""
    yield from ((path.stem, path) for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    yield from ((folder, path) for folder in sorted(FOLDERS) for path in (PACKAGE / folder).glob("*.py"))


def test_every_module_has_its_layer() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == FOLDERS | {"_core"}
    assert {name for name, _ in own_files()} | {"_core"} == set(LAYER)


def test_imports_point_down() -> None:
    for name, path in own_files():
        for module, for_types in imports(path):
            if module.startswith("embcache.") and not for_types:
                used = module.split(".")[1]
                inside = used == name and name in FOLDERS
                assert inside or LAYER[used] < LAYER[name], f"{path} imports {module}"


def test_torch_is_imported_by_the_torch_half_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        uses = any(module.split(".")[0] == "torch" for module, _ in imports(path))
        assert not uses or path.stem in TORCH or path.parent.name in TORCH, path.name


def test_torchrec_is_imported_by_its_own_package_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        uses = any(module.split(".")[0] in ("torchrec", "fbgemm_gpu", "tensordict") for module, _ in imports(path))
        assert not uses or path.parent.name == "torchrec", path


def test_the_core_imports_nothing_of_the_package_but_errors_and_plain_configuration() -> None:
    pattern = re.compile(r"^\s*(?:from|import) +(embcache[.\w]*)(?: +(c?import))?", re.MULTILINE)
    for path in [*(PACKAGE / "_core").glob("*.pyx"), *(PACKAGE / "_core").glob("*.pxd")]:
        for module, _ in pattern.findall(path.read_text()):
            plain = module in ("embcache.errors", "embcache.config") or module.startswith("embcache._core")
            assert plain, f"{path.name} imports {module}"
        assert "torch" not in re.findall(r"^\s*(?:c?import|from) +(\w+)", path.read_text(), re.MULTILINE), path.name


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, embcache, embcache.table; assert 'torch' not in sys.modules; embcache.EmbeddingBagCollection"
    environment = os.environ | {"PYTHONPATH": str(Path(embcache.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
