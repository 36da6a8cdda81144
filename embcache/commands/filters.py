"""A filter's state, on its way between a table directory and a checkpoint, where they keep it in different forms.

A directory has it as one block of bytes (``filterfile``); a checkpoint as chunks of waiting keys, numbers, and bytes for the
sketches. All of it is in memory meanwhile, as it is while training: 24 bytes for a waiting key there, 30 on the way from a directory,
about 60 on the way to one, so that six million of them fit into 512 MiB beside the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checkpoint import Reader, TableDescription, Writer
from ..errors import CorruptionError
from ..filterfile import CLOCKS, SKETCHES, pack_as, sketch_name
from ..filterparts import filter_state

__all__ = ["filter_bytes", "write_filter"]

_ARRAYS = ("keys", "counts", "last", "late")


def write_filter(writer: Writer, description: TableDescription, state: dict[str, Any]) -> None:
    """Write what a directory's filter holds (`filterfile.take_apart`)."""
    for which in (*SKETCHES, CLOCKS):
        if len(state.get(which, ())):
            writer.write_state(sketch_name(description.name, which), state[which].view(np.uint8).data)
    numbers = {name: value for name, value in state.items() if name not in (*_ARRAYS, *SKETCHES, CLOCKS)}
    writer.write_filter(description, state["keys"], state["counts"], state["last"], state["late"], numbers)


def filter_bytes(reader: Reader, name: str) -> bytes | None:
    """What a directory keeps of a table's filter; None where the checkpoint has none of it."""
    about = reader.table_metadata(name)[0]
    try:
        state = filter_state(reader, name)
        if state is None or "filter" not in about:
            return None
        steps = [int(one["steps"].get(about.get("module", ""), 0)) for one in reader.metadata if "steps" in one]
        return pack_as(state, max(steps, default=0), dict(about["filter"]))
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"generation {reader.generation}, table {name!r}: the state of its filter is not what this version writes ({error})",
            generation=reader.generation,
            table=name,
        ) from None
