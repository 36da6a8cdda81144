"""`embcache export`: a table to a file of NumPy's, safetensors' or Parquet's, or to a dense tensor."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from ..checkpoint import empty_table
from ..errors import ConfigError
from ..rowtypes import ROW_TYPES
from .directories import restored_name
from .importing import FORMATS, format_of
from .outgoing import DenseFile, NpzWriter, SafetensorsWriter, Writer, npy_header, safetensors_header
from .output import FINDINGS, FINE, Output, bytes_text
from .parquet import ParquetWriter
from .paths import FILE
from .sources import CheckpointTable, Source, batch_rows, open_sources
from .streams import BFLOAT16
from .targets import check_apart, replacing

__all__ = ["add"]

_ABOUT = """\
Write a table of a checkpoint (CHECKPOINT, CHECKPOINT@GENERATION) or of a table directory to a file:

  FILE.npz, FILE.safetensors   arrays keys (n,), weights (n, dim), and state, frequencies, timestamps where the table has them
  FILE.parquet                 columns of these names; weights and state are lists (needs pyarrow)
  FILE.npy                     a dense tensor: row i is the row of key i, for keys from 0 to --rows - 1

--dense makes such a tensor, named "weights", of a .safetensors file too. A key without a row is there with its initial value, as
a look-up gives it. Rows come in no particular order; keys that wait for admission have none. What `embcache import` needs to
make the table again is in the file, except in a dense tensor."""

_KINDS = {"float32": "F32", "float16": "F16", BFLOAT16: "BF16"}
_SPARE_ROWS = 1 << 20


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "export", help="a table to .npz, .safetensors, .parquet or a dense tensor", description=_ABOUT
    )
    one.add_argument("source", metavar="SOURCE", help="a checkpoint, CHECKPOINT@GENERATION, or a table directory")
    one.add_argument("target", metavar="FILE", help="the file to make")
    one.add_argument("--table", metavar="NAME", help="which table, where there are several")
    one.add_argument("--format", choices=sorted(set(FORMATS.values())), help="default: by the file's name")
    one.add_argument("--dense", action="store_true", help="a dense tensor")
    one.add_argument("--rows", metavar="N", type=int, help="of a dense tensor (default: the largest key + 1)")
    one.add_argument("--force", action="store_true", help="replace what is there, once the new one is whole")
    one.set_defaults(run=run)


def run(given: argparse.Namespace, output: Output) -> int:
    """Write the file."""
    kind = format_of(given.target, given.format, reading=False)
    dense = given.dense or kind == "npy"
    if dense and kind not in ("npy", "safetensors"):
        raise ConfigError(f"{given.target}: a dense tensor goes to .npy or .safetensors")
    if given.rows is not None and (not dense or given.rows < 0):
        raise ConfigError(f"--rows {given.rows}: is for a dense tensor; give a number >= 0")
    with open_sources(given.source) as opened:
        source = opened.one(given.table)
        path = opened.reader.path if opened.reader else source.where
        check_apart(path, given.target)
        for number, reason in opened.skipped:
            output.note(f"generation {number} is damaged and was passed over: {reason}")
        count = _largest(source, given.rows, output) if dense else _count(source, output)
        with replacing(given.target, FILE, given.force) as content:
            rows = (
                _dense(source, content, kind, count, output) if dense else _sparse(source, content, kind, count, output)
            )
            size = os.path.getsize(content)
    where = os.path.abspath(given.target)
    result = {"target": where, "format": kind, "dense": dense, "table": source.description.name, "rows": rows}
    result |= {"bytes": size} | ({"tensor_rows": count} if dense else {})
    tensor = f" in a tensor of {count:,}" if dense else ""
    output.give(result, [f"{where}: table {source.description.name!r}, {rows:,} rows{tensor}, {bytes_text(size)}"])
    return FINDINGS if opened.skipped else FINE


def _count(source: Source, output: Output) -> int:
    """How many rows there are: of a chain of deltas by reading it."""
    if not isinstance(source, CheckpointTable) or len(source.reader.chain) == 1:
        return source.rows_expected
    count = 0
    with output.progress(source.rows_expected, "count", "rows") as progress:
        for rows in source.rows():
            count += len(rows.keys)
            progress.add(len(rows.keys))
    return count


def _sparse(source: Source, content: str, kind: str, count: int, output: Output) -> int:
    description = source.description
    about = json.dumps(description.to_json())
    writer: Writer
    if kind == "parquet":
        writer = ParquetWriter(content, description, about, count)
    else:
        writer = (NpzWriter if kind == "npz" else SafetensorsWriter)(content, description, about, count)
    done = 0
    with output.progress(count * description.row_bytes, "export") as progress:
        for rows in source.rows():
            writer.add(rows)
            done += len(rows.keys)
            progress.add(len(rows.keys) * description.row_bytes)
    assert done == count, (done, count)
    writer.end()
    return done


# ---------------------------------------------------------------------------------------------------------------- dense


def _largest(source: Source, asked: int | None, output: Output) -> int:
    """Rows of the tensor; `ConfigError` where keys have no place in it."""
    least, most, count = 0, -1, 0
    with output.progress(source.rows_expected, "keys", "rows") as progress:
        for rows in source.rows():
            if len(rows.keys):
                least, most = min(least, int(rows.keys.min())), max(most, int(rows.keys.max()))
            count += len(rows.keys)
            progress.add(len(rows.keys))
    if least < 0 or (asked is not None and most >= asked):
        key = least if least < 0 else most
        raise ConfigError(
            f"table {source.description.name!r}: key {key} has no place in a dense tensor"
            + (f" of {asked} rows" if asked is not None else "")
            + "; export to .npz, .safetensors or .parquet, which hold keys"
        )
    if asked is None and most + 1 > 16 * count + _SPARE_ROWS:
        size = (most + 1) * source.description.dim * source.description.storage.itemsize
        raise ConfigError(
            f"table {source.description.name!r}: {count} rows with keys up to {most} make a dense tensor of {bytes_text(size)}; give --rows "
            f"{most + 1} if that is meant, or export to a file that holds keys"
        )
    return most + 1 if asked is None else asked


def _dense(source: Source, content: str, kind: str, count: int, output: Output) -> int:
    description = source.description
    row_type = ROW_TYPES[description.dtype]
    dtype = row_type.door if kind == "npy" else description.storage
    row_bytes = dtype.itemsize * description.dim
    shape = (count, description.dim)
    if kind == "npy":
        head = npy_header(dtype, shape)
    else:
        head = safetensors_header({"weights": (_KINDS[description.dtype], shape, count * row_bytes)}, None)
    name = restored_name(source) if isinstance(source, CheckpointTable) else description.name
    initial = empty_table(description, name=name, state_dim=0, with_filter=False)
    file = DenseFile(content, head, count, row_bytes)
    most, done = batch_rows(description), 0
    try:
        with output.progress(count * row_bytes + source.rows_expected * description.row_bytes, "export") as progress:
            for at in range(0, count, most):
                keys = np.arange(at, min(at + most, count), dtype=np.int64)
                rows = np.empty((len(keys), description.dim), description.storage)
                initial.init_rows(keys, rows)
                file.put(keys, row_type.from_storage(rows) if kind == "npy" else rows)
                progress.add(rows.nbytes)
            for piece in source.rows():
                weights = row_type.from_storage(piece.weights) if kind == "npy" else piece.weights
                file.put(piece.keys, weights)
                done += len(piece.keys)
                progress.add(len(piece.keys) * description.row_bytes)
    finally:
        file.close()
    return done
