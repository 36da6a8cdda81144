"""The same rows through other ways to put them on disk and get them back: each is made durable before it counts as saved."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch

__all__ = ["PEERS", "Rows", "plain_write", "record_per_row", "safetensors_or_why"]

PIECE_BYTES = 4 << 20
COMMIT_BYTES = 64 << 20

Rows = dict[str, torch.Tensor]  # "keys" int64 (n,), "weights" float32 (n, dim)


def _sync(path: Path) -> None:
    for one in [path, *path.rglob("*"), path.parent]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def plain_write(path: Path, rows: Rows, total_bytes: int) -> Path:
    """So many bytes of rows by `write` in pieces of 4 MiB, then `fsync`: what the medium takes, no less."""
    views = [memoryview(one.numpy().reshape(-1).view(np.uint8)) for one in rows.values()]
    left = total_bytes
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    while left > 0:  # a chunk's header and padding are bytes too
        for view in views:
            for begin in range(0, len(view), PIECE_BYTES):
                piece = view[begin : min(begin + PIECE_BYTES, begin + left, len(view))]
                left -= os.write(descriptor, piece) if len(piece) else 0
    os.fsync(descriptor)
    os.close(descriptor)
    return path


def _torch_save(path: Path, rows: Rows) -> None:
    torch.save(rows, path)
    _sync(path)


def _torch_load(path: Path, rows: Rows) -> Rows:
    found: Rows = torch.load(path, weights_only=True)
    return found


def _distributed_save(path: Path, rows: Rows) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(rows), checkpoint_id=path, no_dist=True)
    _sync(path)


def _distributed_load(path: Path, rows: Rows) -> Rows:
    import torch.distributed.checkpoint as dcp

    found = {name: torch.empty_like(one) for name, one in rows.items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def safetensors_or_why() -> str:
    """Why safetensors cannot take part; empty where it can."""
    folder = os.environ.get("BENCH_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install safetensors"
    return ""


def _safetensors_save(path: Path, rows: Rows) -> None:
    from safetensors.torch import save_file

    save_file(rows, path)
    _sync(path)


def _safetensors_load(path: Path, rows: Rows) -> Rows:
    from safetensors.torch import load_file

    return {name: one.clone() for name, one in load_file(path).items()}  # else a mapping, of which nothing is read


PEERS: dict[str, tuple[Callable[[Path, Rows], None], Callable[[Path, Rows], Rows]]] = {
    "torch.save": (_torch_save, _torch_load),
    "torch.distributed.checkpoint": (_distributed_save, _distributed_load),
    "safetensors": (_safetensors_save, _safetensors_load),
}


def record_per_row(path: Path, rows: Rows, count: int) -> None:
    """The first `count` rows as LMDB records, key -> bytes of the row, as py-lmdb's users do it: sorted keys, appended."""
    keys = rows["keys"][:count].numpy().view(np.uint64) ^ np.uint64(1 << 63)  # as bytes they sort as int64 do
    weights = rows["weights"][:count].numpy()
    order = np.argsort(keys)
    shutil.rmtree(path, ignore_errors=True)
    options: dict[str, Any] = {"map_size": 4 * weights.nbytes + (1 << 30), "lib_version": 0}
    with lmdb.open(str(path), **options) as environment:
        step = COMMIT_BYTES // weights[0].nbytes
        for begin in range(0, count, step):
            some = order[begin : begin + step]
            texts, values = keys[some].astype(">u8").tobytes(), weights[some].tobytes()
            size = len(values) // len(some)
            items = [(texts[8 * i : 8 * i + 8], values[size * i : size * i + size]) for i in range(len(some))]
            with environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(items, append=True)
