"""Options and fixtures of the benches, and the table at the end of the session."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from race import Outcome, Race
from standings import lines

OUTCOMES: list[Outcome] = []
PATIENCE = [60.0]  # seconds that the session may spend waiting for a quiet machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where outcomes go; sizes come from BENCH_ROWS."""
    parser.addoption("--bench-outcomes", type=Path, default=None, help="add the outcomes to this file, for report.py")


def pytest_configure(config: pytest.Config) -> None:
    """One table is enough: ours has the peers in it."""
    config.option.benchmark_quiet = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The watchdog of the tests is too short for a peer that does the work in Python on a busy machine."""
    for item in items:
        item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def rows() -> int:
    """Keys of a table in the benches of find, look-up and insert."""
    return int(os.environ.get("BENCH_ROWS", "10000000"))


@pytest.fixture
def race(benchmark: Any) -> Race:
    """The stopwatch of one test."""
    return Race(benchmark, OUTCOMES, PATIENCE, cpu_clock=os.environ.get("BENCH_CLOCK") == "cpu")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Each case says how many threads it uses; torch's default would be all of them."""
    torch.set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A word about each case as it ends, since a session takes minutes."""
    if report.when == "call" and report.passed and OUTCOMES and sys.stderr.isatty():
        last = OUTCOMES[-1]
        print(f"  {last.case}: {last.unit.show(last.seconds, last.work)}", file=sys.stderr)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, and add the outcomes to the file that was asked for."""
    if not OUTCOMES:
        return
    terminalreporter.section("ours and peers")
    for line in lines(OUTCOMES):
        terminalreporter.write_line(line)
    path = config.getoption("--bench-outcomes")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in OUTCOMES)
