"""The machine that a figure was taken on: its facts, and whether anything else was running meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import time
from pathlib import Path

__all__ = ["LoadMeter", "available_bytes", "facts", "is_quiet", "wait_until_quiet"]

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
QUIET_SHARE = 0.10  # of one CPU; more than this in other processes makes a round suspect
RESOLUTION_S = 0.03  # the kernel counts CPU time in ticks: below this nothing can be said


def _busy_seconds() -> float:
    """CPU seconds of all processes since boot, time taken by other guests of the host included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * TICK_S


def _own_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of all below it that live."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + _seconds_below(os.getpid())


def _seconds_below(pid: int) -> float:
    """CPU seconds of the living descendants of a process, and of those of them that have ended: ranks of a bench are some."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    below: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in below | {pid}} - below:
        below |= more
    return sum(ticks[one] for one in below) * TICK_S


class LoadMeter:
    """CPU time that other processes took between `start` and `stop`."""

    def start(self) -> None:
        """Begin a measurement."""
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def stop(self) -> tuple[float, float]:
        """Seconds of CPU that others used, and seconds that passed."""
        wall = time.perf_counter() - self._wall
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others), wall


def is_quiet(others: float, wall: float) -> bool:
    """Whether `others` CPU seconds within `wall` seconds are too few to matter, or to be told apart from none."""
    return others <= max(QUIET_SHARE * wall, RESOLUTION_S)


def wait_until_quiet(at_most_s: float) -> float:
    """Wait for 0.2 s in which others are quiet, `at_most_s` in all; returns the seconds waited beyond the first 0.2."""
    meter, began = LoadMeter(), time.perf_counter()
    while True:
        meter.start()
        time.sleep(0.2)
        others, wall = meter.stop()
        waited = time.perf_counter() - began
        if others <= QUIET_SHARE * wall or waited >= at_most_s:
            return max(0.0, waited - 0.25)


def available_bytes() -> int:
    """Memory that may be used without swapping, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = path.read_text() if path.exists() else ""
    return text[text.find("[") + 1 : text.find("]")] or "unknown"


def facts() -> list[str]:
    """Lines that say what the figures were taken on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    tunables = os.environ.get("GLIBC_TUNABLES", "none")
    return [
        f"{len(os.sched_getaffinity(0))} CPUs, {model}, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}",
        f"transparent huge pages: {_huge_pages()}; GLIBC_TUNABLES: {tunables} (the peers' malloc)",
    ]
