"""Savable: what managers and collections have in common, `save` and `restore` of themselves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from .checkpoint import RestoreReport
from .restoring import restore_managers
from .saving import SaveOptions, Saving, save_managers

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["Savable"]


class Savable:
    """Something of managers that is saved and restored as one."""

    def saved_managers(self) -> dict[str, EmbCacheManager]:
        """The managers of it, by module path."""
        raise NotImplementedError

    @overload
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        background: Literal[False] = False,
        **options: Unpack[SaveOptions],
    ) -> int: ...

    @overload
    def save(
        self, path: str | os.PathLike[str], *, background: Literal[True], **options: Unpack[SaveOptions]
    ) -> Saving: ...

    @overload
    def save(
        self, path: str | os.PathLike[str], *, background: bool, **options: Unpack[SaveOptions]
    ) -> int | Saving: ...

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        delta: bool = False,
        background: bool = False,
        state: Any = None,
        keep: int | None = None,
    ) -> int | Saving:
        """Write a generation of a checkpoint: it is whole and durable when this returns, or absent.

        It holds everything as of the last finished training batch, wherever that is: weights, optimizer state and step count,
        learning rates, frequencies, timestamps, the filters with keys that wait. Batches that are planned and have not trained
        (a window of accumulation too) are in it with nothing: after `restore` they are to be trained again.

        Parameters
        ----------
        path : path
            The checkpoint's directory, made where it is absent. Each save adds a generation.
        delta : bool
            Write only rows that have changed since the generation that was last saved or restored here at `path`. A full
            one is written where there is none, and where the deltas since the last full one have come to as much as one costs.
        background : bool
            Return as soon as the state to be written is fixed, and write it in a thread while training goes on: as long as batches
            are trained, the thread works for a sixth of the time.
        state : optional
            Your own, for `RestoreReport.state`: numbers, strings, None, bytes, arrays and tensors, in lists, tuples and dicts. (A
            dense model's ``state_dict()``, the position in the data.) Or a function without arguments that gives it: it is called
            between two steps of a pipeline that trains in another thread (or of a loop with `embcache.training_step`), those after which
            and before which the tables are written.
        keep : int, optional
            Remove all but this many of the newest generations, and those that these need.

        Returns
        -------
        int or Saving
            The generation; in the background a future of it.

        Raises
        ------
        ConfigError
            `state` holds something that cannot be saved; nothing was written.
        PlanError
            A table has a filter, and a batch has finished before one that was planned earlier. Or the thread is inside a training
            step of a pipeline, or inside `embcache.training_step`.
        LockedError
            Somebody else is saving there.
        DiskFullError, StorageError
            What was saved before is intact, and everything here as it was; the next delta holds what this one was to hold.
        CorruptionError
            The catalogue at `path` is damaged: save to another path.

        Notes
        -----
        Batches may be planned and trained in other threads, and with `background` in this one, while it is written: what is
        written is the state at the call, or where a pipeline is inside a step, which begins and ends in its ``progress``, at the end of
        that: of all collections of a model the same step. A second save, `restore`, `rebalance` and `close` wait for it.

        Rows that training is about to change are copied out before, 256 MiB of them at most, then the next batch waits to be
        planned; besides a save takes one byte for each host row, and a bit for each slot. From the first save on, a filter has a bit for each waiting key and each counter of its sketch
        (and 8 bytes for each key that has ceased to wait since the last one), so that a delta has of it what has changed.
        """
        return save_managers(path, self.saved_managers(), delta=delta, background=background, state=state, keep=keep)

    def restore(self, path: str | os.PathLike[str], generation: int | None = None) -> RestoreReport:
        """Take over a generation: the newest that holds, unless one is given. What the tables held before is gone.

        A table that the checkpoint lacks starts anew, one that is not here is passed over; the report says so. Tables are
        filled beside the present ones and take their places in the end, so a failure leaves everything as it was. A table in files must
        hold no row.

        Raises
        ------
        ConfigError
            No such checkpoint; or a table has another dim, dtype or optimizer there, or a filter whose counters mean
            something else: the message says what to do.
        CorruptionError
            No generation, or not the given one, is as it was written.
        PlanError
            A plan is outstanding.
        HostMemoryError, DiskFullError, StorageError
        """
        return restore_managers(path, self.saved_managers(), generation)
