"""The storage half runs without torch, and the public names are all there. (Who may import whom: test_arrows.py.)"""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import embcache


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_import_and_the_table_leave_torch_out():
    code = """
import sys
import embcache as ec
assert "torch" not in sys.modules, "import embcache"
with ec.EmbTable("t", 4) as table:
    assert table.lookup([1, 2]).shape == (2, 4)
ec.TableConfig("t", 4, admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2))
ec.hash_strings(["a"])
assert "torch" not in sys.modules, "EmbTable"
ec.EmbeddingBagCollection
assert "torch" in sys.modules
print("ok")
"""
    assert run(code) == "ok"


@pytest.mark.parametrize("room", ["checkpoint", "devices", "distributed", "metrics"])
def test_rooms_are_found_without_an_import_of_their_own(room):
    code = f"import embcache as ec; print(ec.{room}.__name__, {room!r} in dir(ec))"
    assert run(code) == f"embcache.{room} True"


def test_the_table_works_where_torch_cannot_be_imported():
    code = """
import sys
sys.modules["torch"] = None
import embcache as ec
with ec.EmbTable("t", 4) as table:
    print(len(table.insert([5, 6])))
try:
    ec.JaggedFeatures
except ImportError:
    print("no torch")
"""
    assert run(code).split("\n") == ["2", "no torch"]


def test_importing_the_table_does_not_drag_in_what_it_hardly_uses():
    """Each of these costs more than the table itself; a worker of a DataLoader pays for it at every start."""
    code = """
import sys, numpy
before = set(sys.modules)
import embcache.table
print(*sorted((set(sys.modules) - before) & {"secrets", "random", "hashlib", "pathlib", "urllib.parse", "logging", "numpy.typing"}))
"""
    assert run(code) == ""


def test_public_names_are_complete_and_documented():
    for name in embcache.__all__:
        assert getattr(embcache, name).__doc__, name
    assert set(embcache.__all__) <= set(dir(embcache))
    assert embcache.__version__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        embcache.nonsense  # noqa: B018


def modules_with_examples():
    """All but those of the TorchRec face, whose own tests run them."""
    root = Path(embcache.__file__).parent
    found = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if ">>> " in path.read_text()]
    return sorted(".".join(path.parts) for path in found if path.parts[0] != "torchrec")


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(import_module(f"embcache.{module}"))
    assert result.attempted > 0 and result.failed == 0


def test_the_torchrec_face_says_what_to_install():
    code = """
import sys
sys.modules["torchrec"] = None
import embcache
try:
    import embcache.torchrec
except ImportError as error:
    print(error)
"""
    assert "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0" in run(code)


def test_importing_everything_else_leaves_torchrec_out():
    code = """
import sys
import embcache
for name in embcache.__all__:
    getattr(embcache, name)
print(any(name.split(".")[0] in ("torchrec", "fbgemm_gpu") for name in sys.modules))
"""
    assert run(code) == "False"
