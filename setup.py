"""Builds the compiled core; everything else about the package is in pyproject.toml.

``EMBCACHE_CHECKED=1`` turns on bounds checks and the core's own assertions; ``EMBCACHE_SANITIZE=address,undefined``
(or ``thread``) adds sanitizers. Both are for test builds, never for wheels.
"""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

CORE = Path("embcache/_core")
CHECKED = os.environ.get("EMBCACHE_CHECKED") == "1"
SANITIZE = os.environ.get("EMBCACHE_SANITIZE", "")

# -ffp-contract=off: a fused multiply-add would make a row's initial value depend on the CPU (promise I8).
# -fno-math-errno: sqrtf is one (vector) instruction, rounded the same; nobody here reads errno after it.
COMPILE = "-O3 -std=gnu11 -pthread -ffp-contract=off -fno-math-errno -fno-strict-aliasing".split()
COMPILE += ["-Wall", "-Wno-unused-function"]
LINK = ["-pthread"]
if not CHECKED and not SANITIZE:
    COMPILE += ["-g0"]  # Python's own flags ask for debug information: a quarter of the build time, most of the wheel
if SANITIZE:
    COMPILE += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g", "-O1"]
    LINK += [f"-fsanitize={SANITIZE}"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": CHECKED,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": False,
    # They would point at the bounds checks of a checked build.
    "show_performance_hints": not CHECKED,
}


def extensions() -> list[Extension]:
    """One extension per ``.pyx`` of the core; headers are dependencies of all."""
    headers = [str(path) for path in sorted((CORE / "include").glob("*.h"))]
    return [
        Extension(
            f"embcache._core.{source.stem}",
            [str(source)],
            include_dirs=[str(CORE / "include")],
            depends=headers,
            define_macros=[("EC_CHECKED", "1")] if CHECKED else [],
            extra_compile_args=COMPILE,
            extra_link_args=LINK,
        )
        for source in sorted(CORE.glob("*.pyx"))
    ]


def c_folder() -> str:
    """Where the generated C goes: one folder per set of directives, as Cython does not notice when those change."""
    return "build/cython-checked" if CHECKED else "build/cython"


if __name__ == "__main__":
    setup(
        ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES, build_dir=c_folder(), quiet=True),
        options={"build_ext": {"parallel": min(len(os.sched_getaffinity(0)), 8)}},
    )
