"""Traces: the stages of a pipeline's newest batches as a file of Chrome trace events, which Perfetto opens, too.

Owns the file's form: ``traceEvents`` of complete events (``"ph": "X"``, times in microseconds), one thread a line: "loader",
"coordinator", "caller", as in "Trace Event Format" (the Chromium project). No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import ConfigError
from .timeline import STAGES, WAITS, Interval

__all__ = ["LANES", "read_trace", "write_trace"]

# Which thread a stage, or a wait, belongs to.
LANES = {
    "loader": ("load", "prepare", "wait_room"),
    "coordinator": ("plan", "swap_out", "swap_in", "wait_loaded", "wait_window"),
    "caller": ("compute", "evaluate", "wait_ready"),
}
_LANE_OF = {stage: number for number, stages in enumerate(LANES.values(), 1) for stage in stages}


def write_trace(path: str | os.PathLike[str], intervals: Iterable[Interval]) -> int:
    """Write intervals (`Timeline.intervals`) as trace events.

    Returns
    -------
    int
        Events written. The first one begins at 0.
    """
    ordered = sorted(intervals, key=lambda interval: interval[2])
    origin = ordered[0][2] if ordered else 0.0
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(LANES, 1)
    ]
    events += (
        {
            "name": stage,
            "cat": "wait" if stage in WAITS else "stage",
            "ph": "X",
            "ts": round((begin - origin) * 1e6, 3),
            "dur": round((end - begin) * 1e6, 3),
            "pid": process,
            "tid": _LANE_OF[stage],
            "args": {"batch": number},
        }
        for stage, number, begin, end in ordered
    )
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    return len(ordered)


def read_trace(path: str | os.PathLike[str]) -> Sequence[Interval]:
    """Intervals that `write_trace` wrote, by begin; other events are passed over.

    Raises
    ------
    ConfigError
        The file is not a trace, or none of a pipeline's stages is in it.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read()
    try:
        events = json.loads(content)["traceEvents"]
        found = [
            (
                str(event["name"]),
                int(event["args"]["batch"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
            )
            for event in events
            if event.get("ph") == "X" and event.get("name") in (*STAGES, *WAITS)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name!r} is no trace of a pipeline ({error}); give a file that pipe.trace() wrote"
        ) from error
    if not found:
        raise ConfigError(f"{name!r} holds no stage of a pipeline; give a file that pipe.trace() wrote")
    return sorted(found, key=lambda interval: interval[2])
