"""What all ranks must have alike, checked once, when a collection is made: versions, tables, filters, optimizer, and how it is exchanged."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, shown
from ..table import initializer_spec

if TYPE_CHECKING:
    from .collections import ShardedCollection

__all__ = ["check_alike"]

HEADER = 1  # of what travels; goes up with its form


def _facts(collection: ShardedCollection, accumulate: int) -> dict[str, Any]:
    """Name -> value of everything that ranks must have alike."""
    manager, exchange = collection.manager, collection.exchange
    facts: dict[str, Any] = {
        "the version of embcache": sys.modules["embcache"].__version__,
        "the version of torch": torch.__version__.split("+", maxsplit=1)[0],
        "the form of the exchange": HEADER,
        "the number of collections made so far": exchange.number,
        "the kind of collection": type(collection).__name__,
        "the optimizer": {"kind": manager.spec.kind, **asdict(manager.spec)},
        "reduction": collection.reduction,
        "average": collection.average,
        "wire_rows": exchange.wire.rows,
        "wire_gradients": exchange.wire.gradients,
        "accumulate": accumulate,
        "the names of the tables": manager.layout.names,
    }
    for table in manager.layout.tables:
        rule = table.admit_and_evict
        about = {
            "embedding_dim": table.embedding_dim,
            "feature_names": table.feature_names,
            "pooling": table.pooling,
            "dtype": table.dtype,
            "initializer": initializer_spec(table.initializer),
            "seed": table.seed,
            "admit_and_evict": None if rule is None else asdict(rule),
            "in files": table.directory is not None,
        }
        facts.update({f"{name} of table {table.name!r}": value for name, value in about.items()})
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def check_alike(collection: ShardedCollection, accumulate: int) -> None:
    """`ConfigError` on all ranks where one differs from rank 0. Collective."""
    mine = _facts(collection, accumulate)
    said = collection.ranks.train.gather_bytes("the making of a collection", json.dumps(mine).encode())
    first = json.loads(said[0])
    for rank, content in enumerate(said[1:], 1):
        other = json.loads(content)
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"ranks differ in {name}: rank 0 has {shown(first.get(name))}, rank {rank} {shown(other.get(name))}; make the collection "
                    "alike on all ranks"
                )
