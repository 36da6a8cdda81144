"""`embcache trace plot`: the stages of a few batches of a pipeline as a picture."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..timeline import STAGES, Interval
from ..traces import LANES, read_trace
from .output import FINE, Output
from .paths import FILE
from .targets import replacing

__all__ = ["add", "plot"]

_ABOUT = """\
Draw what the threads of a pipeline did, from a file that pipe.trace("FILE.json") wrote: a line for each thread, a bar
for each stage of a batch, a colour for each batch. The steps in the middle of the trace are drawn, or those from --first on."""


def add(commands: Any) -> None:
    """Describe the command."""
    top: argparse.ArgumentParser = commands.add_parser(
        "trace", help="look at a trace of a pipeline", description=f"Look at a trace of a pipeline.\n\n{_ABOUT}"
    )
    inner = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one: argparse.ArgumentParser = inner.add_parser("plot", help="draw the stages of a few batches", description=_ABOUT)
    one.add_argument("trace", metavar="FILE.json", help="a trace")
    one.add_argument("picture", metavar="OUT.png", help="the picture to make (.png, .svg or .pdf)")
    one.add_argument("--first", metavar="BATCH", type=int, help="number of the first batch to draw")
    one.add_argument("--steps", metavar="N", type=int, default=6, help="how many (6)")
    one.add_argument("--force", action="store_true", help="replace what is there, once the new one is whole")
    one.add_argument("--json", action="store_true", help="print the result as one JSON object")
    one.set_defaults(run=plot)


def plot(given: argparse.Namespace, output: Output) -> int:
    """Draw."""
    kind = os.path.splitext(given.picture)[1].lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ConfigError(f"{given.picture!r}: give a name that ends in .png, .svg or .pdf")
    if given.steps < 1:
        raise ConfigError(f"--steps {given.steps}; give 1 or more")
    chosen, first, last = _choose(read_trace(given.trace), given.first, given.steps)
    with replacing(os.path.abspath(given.picture), FILE, given.force) as content:
        _draw(chosen, content, kind)
    output.give(
        {"picture": given.picture, "first": first, "last": last, "stages": len(chosen)},
        [f"{given.picture}: batches {first} to {last}, {len(chosen)} stages"],
    )
    return FINE


def _choose(intervals: Sequence[Interval], first: int | None, steps: int) -> tuple[list[Interval], int, int]:
    """The stages to draw: all that lie within the computation of the batches, and the stages of these."""
    computed = sorted({number for stage, number, _, _ in intervals if stage == "compute"})
    if not computed:
        raise ConfigError("no batch was computed in this trace; train some before pipe.trace()")
    if first is None:
        first = computed[max(0, (len(computed) - steps) // 2)]
    drawn = [number for number in computed if number >= first][:steps]
    if not drawn:
        raise ConfigError(f"--first {first}: the trace has batches {computed[0]} to {computed[-1]}")
    spans = [(begin, end) for stage, number, begin, end in intervals if stage == "compute" and number in drawn]
    start, stop = min(begin for begin, _ in spans), max(end for _, end in spans)
    return (
        [one for one in intervals if one[0] in STAGES and (one[1] in drawn or (one[3] > start and one[2] < stop))],
        drawn[0],
        drawn[-1],
    )


def _draw(intervals: Sequence[Interval], path: str, kind: str) -> None:
    try:
        figures = importlib.import_module("matplotlib.figure")
        colours = importlib.import_module("matplotlib").colormaps["tab10"]
    except ImportError:
        raise ImportError("a picture needs the package matplotlib: pip install 'embcache[plot]'") from None
    lanes = {stage: (place, lane) for place, (lane, stages) in enumerate(LANES.items()) for stage in stages}
    figure = figures.Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.add_subplot()
    origin, span = min(one[2] for one in intervals), max(one[3] for one in intervals) - min(one[2] for one in intervals)
    for stage, number, begin, end in intervals:
        place, width = lanes[stage][0], (end - begin) * 1e3
        axes.barh(-place, width, left=(begin - origin) * 1e3, height=0.8, color=colours(number % 10), edgecolor="white")
        if end - begin > 0.04 * span:
            text = f"{stage.replace('_', ' ')}\n{number}"
            axes.text((begin - origin) * 1e3 + width / 2, -place, text, ha="center", va="center", fontsize=7)
    axes.set_yticks([0, -1, -2], list(LANES))
    axes.set_xlabel("ms")
    axes.set_title("stages of each batch, by thread; a colour a batch", fontsize=9)
    figure.savefig(path, format=kind, dpi=120)
