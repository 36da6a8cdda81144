"""Compiles the C++ half of the peers when a bench needs it, once per source text and set of options."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
from pathlib import Path

import numpy as np

__all__ = ["NotBuilt", "address", "build"]

HERE = Path(__file__).parent
OBJECTS = HERE.parents[1] / "build" / "bench"


class NotBuilt(Exception):
    """A library could not be made; the message says why and what to install."""


def _needs_header(compiler: str, header: str, package: str) -> None:
    """Raise `NotBuilt` unless the preprocessor finds the header."""
    probe = subprocess.run(
        [compiler, "-E", "-x", "c++", "-"], input=f"#include <{header}>", capture_output=True, text=True
    )
    if probe.returncode:
        raise NotBuilt(f"no <{header}>; apt-get install {package}")


def _link_options(module: str) -> list[str]:
    """What pkg-config says about a module."""
    if shutil.which("pkg-config") is None:
        raise NotBuilt("no pkg-config; apt-get install pkg-config")
    asked = subprocess.run(["pkg-config", "--libs", module], capture_output=True, text=True)
    if asked.returncode:
        raise NotBuilt(f"pkg-config does not know {module}")
    return asked.stdout.split()


@functools.cache
def build(
    source: str,
    options: tuple[str, ...] = ("-O3", "-march=native", "-std=c++17"),
    *,
    include: str = "",
    header: str = "",
    package: str = "",
    module: str = "",
) -> ctypes.CDLL:
    """Compile a C or C++ file and load it.

    Parameters
    ----------
    source : str
        Path, relative to this folder.
    include : str
        Folder of headers, whose text decides as well whether there is anything to compile.
    header, package : str
        A header the source needs, and the Debian package that brings it, for the message.
    module : str
        Name of a pkg-config module to link.

    Raises
    ------
    NotBuilt
    """
    path = HERE / source
    compiler = shutil.which("gcc" if path.suffix == ".c" else "g++")
    if compiler is None:
        raise NotBuilt("no compiler; apt-get install g++")
    if header:
        _needs_header(compiler, header, package)
    folders = [f"-I{include}"] if include else []
    links = _link_options(module) if module else []
    command = [compiler, "-shared", "-fPIC", "-pthread", *options, *folders, str(path), *links]
    texts = [path, *(sorted(Path(include).glob("*.h")) if include else [])]
    digest = hashlib.sha256(" ".join(command).encode() + b"".join(text.read_bytes() for text in texts)).hexdigest()[:16]
    target = OBJECTS / f"{path.stem}-{digest}.so"
    if not target.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        made = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
        if made.returncode:
            raise NotBuilt(f"{compiler} failed on {source}: {made.stderr.strip().splitlines()[0]}")
    return ctypes.CDLL(str(target))


def address(array: np.ndarray) -> ctypes.c_void_p:
    """Pointer to the data of a C-contiguous array."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
