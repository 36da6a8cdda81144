"""Checkpoints: generations of tables on disk, each whole or absent. No torch.

The three steps of a save, on any number of ranks::

    writer = Writer(path, rank, world)                   # holds the rank's folder until it is closed
    generation = writer.begin(generation, parent=None)   # a delta names the generation that it changes
    writer.table(description, whole=None, metadata={})   # also of a table without rows
    writer.write_rows(description, keys, weights, state, frequencies, timestamps)   # in pieces, NumPy arrays
    writer.write_erased(description, keys)               # of a delta
    writer.write_filter(description, keys, counts, last, late, numbers)             # keys that wait for admission
    writer.write_state(name, content)                    # the caller's bytes: safetensors, JSON
    writer.commit()                                      # durable, not visible yet
    publish(path, generation, world)                     # one rank, after all have committed: now it exists
    writer.close()

and of a restore::

    with Reader(path, generation=None, rank, world) as reader:      # the newest generation that holds
        reader.generation, reader.skipped, reader.tables, reader.metadata
        for rows in reader.rows(name): ...               # each key of the rank's vshards once, with its newest row
        reader.filter(name); reader.state(name)

`save_table` and `fill` do both for a compiled table: `save_table(writer, core, description, changed=...)`, then, once published,
`core.mark_saved(version)`; `core.changed()`, `core.erased_keys()` and `core.tracked` say what a delta would hold, `delta_pays`
whether it is worth it.

`holding` yields readers from the newest generation to the oldest, for a restore that falls back when a chunk is damaged.

`generations`, `prune` and `verify` work on a whole directory. What lies where: docs/format.md.

Invariants: nothing that was published is ever changed in place; a generation exists from the moment its manifest appears
under its name; bytes that do not match their digest are named and never handed out; no number is used twice.
"""

from __future__ import annotations

from .description import TableDescription
from .emb_table import holding, restore_emb_table, save_emb_table
from .files import Files
from .generations import (
    GenerationInfo,
    Parent,
    created_of,
    delta_pays,
    generations,
    number_to_keep,
    parent_at,
    prune,
    prune_after,
)
from .manifest import publish
from .names import next_generation, vshards_of
from .reader import FilterState, Reader, Rows
from .snapshot import RestoreReport, batches_of_rows, empty_table, fill, put_rows, row_batches, save_table
from .verify import Finding, verify
from .writer import Writer

__all__ = [
    "Files",
    "FilterState",
    "Finding",
    "GenerationInfo",
    "Parent",
    "Reader",
    "RestoreReport",
    "Rows",
    "TableDescription",
    "Writer",
    "batches_of_rows",
    "created_of",
    "delta_pays",
    "empty_table",
    "fill",
    "generations",
    "holding",
    "next_generation",
    "number_to_keep",
    "parent_at",
    "prune",
    "prune_after",
    "publish",
    "put_rows",
    "restore_emb_table",
    "row_batches",
    "save_emb_table",
    "save_table",
    "verify",
    "vshards_of",
]
