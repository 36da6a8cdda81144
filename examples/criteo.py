"""Criteo's click logs as click data: a label, 13 integers and 26 hexadecimal categories a line.

Tabs or commas, with or without a header line; every field but the label may be empty, which is a value of its own.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from clicks import Clicks, standardize

__all__ = ["CATEGORIES", "INTEGERS", "load_criteo"]

INTEGERS = 13
CATEGORIES = 26
FIELDS = 1 + INTEGERS + CATEGORIES

HEXADECIMAL = re.compile("[0-9a-fA-F]{1,8}")

# A category is an unsigned 32-bit number, so no category has this key.
EMPTY_KEY = -1


def load_criteo(path: str | Path, train_share: float) -> Clicks:
    """Read the file at `path`; its lines are taken to be in time order, as Criteo's are.

    An integer x becomes sign(x) * log(1 + |x|) and, where empty, the mean of the training part. A wrong line is an
    error that names it.
    """
    labels: list[float] = []
    dense: list[list[float]] = []
    keys: list[list[int]] = []
    with open(path, encoding="ascii", newline="") as file:
        delimiter = "\t" if "\t" in file.readline() else ","
        file.seek(0)
        for number, fields in enumerate(csv.reader(file, delimiter=delimiter), start=1):
            if not fields or (number == 1 and fields[0] not in ("0", "1")):
                continue
            try:
                label, integers, categories = _parse(fields)
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from None
            labels.append(label)
            dense.append(integers)
            keys.append(categories)
    if not labels:
        raise SystemExit(f"{path}: no example in it; give a file with lines of {FIELDS} fields")

    numbers = np.array(dense, np.float64)
    numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
    train = numbers[: max(int(len(numbers) * train_share), 1)]
    seen = ~np.isnan(train)
    means = np.where(seen, train, 0.0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    return Clicks(
        features=[f"C{i}" for i in range(1, CATEGORIES + 1)],
        dense=standardize(np.where(np.isnan(numbers), means, numbers), train_share),
        keys=np.ascontiguousarray(np.array(keys, np.int64).T),
        labels=np.array(labels, np.float32),
    )


def _parse(fields: list[str]) -> tuple[float, list[float], list[int]]:
    if len(fields) != FIELDS:
        raise ValueError(f"{len(fields)} fields; a line has {FIELDS}: label, 13 integers, 26 categories")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"label {fields[0]!r}; give 0 or 1")
    integers = [float(field) if field else float("nan") for field in fields[1 : 1 + INTEGERS]]
    categories = [int(field, 16) if HEXADECIMAL.fullmatch(field) else EMPTY_KEY for field in fields[1 + INTEGERS :]]
    for field, key in zip(fields[1 + INTEGERS :], categories, strict=True):
        if field and key == EMPTY_KEY:
            raise ValueError(f"category {field!r}; give up to 8 hexadecimal digits, or nothing")
    return float(fields[0]), integers, categories
