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


@functools.cache
def build(
    source: str, options: tuple[str, ...] = (), *, needs: str = "", package: str = "", libraries: str = ""
) -> ctypes.CDLL:
    """Compile `source` (a file beside this one) and load it.

    Parameters
    ----------
    needs : str
        A header the source includes.
    package : str
        The Debian package that brings it, for the message.
    libraries : str
        Name of a pkg-config module to link.

    Raises
    ------
    NotBuilt
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotBuilt("no g++; apt-get install g++")
    if (
        needs
        and subprocess.run(
            [compiler, "-E", "-x", "c++", "-std=c++17", "-"],
            input=f"#include <{needs}>",
            capture_output=True,
            text=True,
        ).returncode
    ):
        raise NotBuilt(f"no <{needs}>; apt-get install {package}")
    links = []
    if libraries:
        if shutil.which("pkg-config") is None:
            raise NotBuilt("no pkg-config; apt-get install pkg-config")
        links = subprocess.run(
            ["pkg-config", "--libs", libraries], check=True, capture_output=True, text=True
        ).stdout.split()
    command = [
        compiler,
        "-O3",
        "-march=native",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        *options,
        str(HERE / source),
        *links,
    ]
    name = hashlib.sha256((" ".join(command) + (HERE / source).read_text()).encode()).hexdigest()[:16]
    target = OBJECTS / f"{Path(source).stem}-{name}.so"
    if not target.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        made = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
        if made.returncode:
            raise NotBuilt(f"g++ failed on {source}: {made.stderr.strip().splitlines()[0]}")
    return ctypes.CDLL(str(target))


def address(array: np.ndarray) -> ctypes.c_void_p:
    """Pointer to the data of a C-contiguous array."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
