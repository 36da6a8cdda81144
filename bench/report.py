"""Makes bench/report.md and its picture from the outcomes of one or more sessions of the bench.

    python bench/report.py OUTCOMES... [--to bench/report.md]

A case that was run more than once counts with its last outcome.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from machine import facts
from race import Outcome, outcome_from
from standings import HEADINGS, NOTE, cells, means
from targets import Standing, standings

COLOURS = {"stretch": "#1a7f37", "floor": "#4c72b0", "missed": "#c44e52"}


def load(paths: Sequence[Path]) -> list[Outcome]:
    """Outcomes of the files, the last of each case, group by group in the order in which groups first ran."""
    found: dict[tuple[str, str, int], Outcome] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            outcome = outcome_from(json.loads(line))
            found[outcome.group, outcome.case, outcome.threads] = outcome
    groups = list(dict.fromkeys(group for group, _, _ in found))
    return sorted(found.values(), key=lambda outcome: groups.index(outcome.group))


def _shown(standing: Standing, value: float | None) -> str:
    if value is None:
        return "-"
    if not standing.target.is_time:
        return f"{value:.2f}x"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(outcomes: list[Outcome], picture: str) -> str:
    """The report as a Markdown page."""
    rows = [
        (
            s.target.text,
            str(s.target.threads),
            _shown(s, s.value),
            f"{_shown(s, s.target.floor)} / {_shown(s, s.target.stretch)}",
            s.verdict,
        )
        for s in standings(outcomes)
    ]
    lines = [
        "# Bench report",
        "",
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}. How it measures, and who the peers are: [README.md](README.md).",
        "",
        *(f"{fact}  " for fact in facts()),
        "",
        f"![What we mean to reach, and what was measured]({picture})",
        "",
        "## Against what we mean to reach",
        "",
        "Measured is the least of the cases that a line names (for a time: the most), unless it says mean.",
        "",
        *_table(("what", "threads", "measured", "floor / stretch", "reached"), rows),
        "",
        "## Every case",
        "",
        NOTE + ".",
        "",
        *_table(HEADINGS, cells(outcomes)),
        "",
        *(f"- {line}" for line in means(outcomes)),
        "",
    ]
    return "\n".join(lines)


def draw(outcomes: list[Outcome], path: Path) -> None:
    """One line a target, measured value over floor; times are turned round, so that right of 1 is good everywhere."""
    shown = [s for s in standings(outcomes) if s.value is not None]
    figure = Figure(figsize=(9, 0.28 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    for at, s in enumerate(reversed(shown)):
        assert s.value is not None
        of_floor = s.target.floor / s.value if s.target.is_time else s.value / s.target.floor
        stretch = s.target.floor / s.target.stretch if s.target.is_time else s.target.stretch / s.target.floor
        axes.plot([1, stretch], [at, at], color="#d0d0d0", linewidth=7, solid_capstyle="butt")
        axes.plot([of_floor], [at], "o", color=COLOURS[s.verdict])
        axes.annotate(_shown(s, s.value), (of_floor, at), (6, -3), textcoords="offset points", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [s.target.text for s in reversed(shown)], fontsize=7)
    axes.set_xlabel("measured / floor (grey: from the floor to the stretch)", fontsize=8)
    axes.margins(x=0.12)
    with rc_context(
        {"svg.hashsalt": "embcache", "svg.fonttype": "none"}
    ):  # the same picture for the same figures; text as text
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the arguments and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outcomes", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name("report.md"))
    arguments = parser.parse_args()
    outcomes = load(arguments.outcomes)
    arguments.to.parent.mkdir(parents=True, exist_ok=True)
    picture = arguments.to.with_suffix(".svg")
    draw(outcomes, picture)
    arguments.to.write_text(markdown(outcomes, picture.name))
    print(f"{arguments.to} and {picture.name}: {len(outcomes)} cases")


if __name__ == "__main__":
    main()
