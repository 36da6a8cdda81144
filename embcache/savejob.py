"""A save in progress: the cut, what training is about to change, and the sweep that writes the rest.

At the cut, between two steps and inside the doors of all managers, a save copies the flags of the host rows (a byte a row), which say
what is in it, copies what is small (erased keys, the optimizers' numbers), and has the tables count changes anew. Then training goes
on. Which residents have changed since the last save a delta finds out afterwards, slot by slot. Rows
are known by their place in the host table, which they keep while they live, wherever their values are at the moment. A row is
as it was at the cut until a batch that uses it may train, and that is not before its plan has brought its rows in; or until its key
is evicted or changed by hand. So when a plan comes in, rows that it concerns and that have not been written are copied out first:
what is copied is at most what training touches while the save goes on. The sweep takes the door for some rows at a time.

Memory: one byte a row, a bit a slot (whose row needs no look any more: `ec_cache.h`, settled), and the copies, which are written first. Above `KEPT_BYTES` of them the next batch waits to be planned.
Should the save fail, the tables get their changes back, and the next delta has them.

Ctrl-C may come between any two statements. So whatever has an effect comes behind a statement that would end the save (`SaveJob.end`,
which may be called again where it was interrupted itself), locks are taken by ``with`` on compiled locks alone, and a generation is
published only if as many rows were written as were listed at the cut: a row that was read and not written is missed.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.cut import FilterCut, next_period, settle, trained_step, unsettle
from ._core.doors import Latch
from .checkpoint import Writer, created_of, prune_after
from .errors import ChangedError, EmbCacheError, StorageError
from .filterfile import meaning, sketch_name
from .pace import Pace
from .savepart import Part, room_for

if TYPE_CHECKING:
    from ._core.plan import Plan
    from .manager import EmbCacheManager

__all__ = ["LOOK_S", "SaveJob"]

LOG = logging.getLogger("embcache")

KEPT_BYTES = 256 << 20
PIECE_ROWS = 1024  # about half a millisecond inside the door
PIECE_SLOTS = 1 << 16  # that are looked through for changes at a time: the same
PIECE_ENTRIES = 1 << 15  # waiting keys that are read at a time: the same
PIECE_SKETCH = 1 << 20  # bytes of each generation
LOOK_S = 1.0  # who waits for a save looks so often whether the thread that writes is alive
STALLED_LOOKS = 600  # looks in a row that find no copy written: then the medium is taken to have failed


class SaveJob:
    """One generation, from the cut to the manifest.

    Parameters
    ----------
    path : str
        Of the checkpoint.
    parts : list of Part
        Of `managers`, whose doors the caller holds until `start` has returned.
    managers : mapping of str to EmbCacheManager
        By module path.
    keep : int, optional
        Prune all but this many generations in the end.
    background : bool
        Whether training goes on meanwhile.
    others : Ranks, optional
        Who writes parts of the same generation, whose number is `generation` then.

    Notes
    -----
    `start` and `begin` in one thread, then `run` in one thread, and `end` wherever one of them may have been left by a signal. `comes_in` and
    `changes` are called inside a manager's door.

    Attributes
    ----------
    done : Latch
        Open from the end on, whichever it is.
    unclaimed : lock
        Free until a thread has taken charge of `run`.
    thread : Thread
        Who is to bring it to its end: whoever waits for that looks whether it is alive.
    not_pruned : Exception or None
        Why older generations could not be removed after this one was saved.
    """

    def __init__(
        self,
        path: str,
        managers: Mapping[str, EmbCacheManager],
        parts: list[Part],
        keep: int | None,
        background: bool,
        others: Any = None,
        generation: int = 0,
    ) -> None:
        self.path, self.managers, self.parts, self.keep = path, managers, parts, keep
        self.background = background
        self.writer: Writer | None = None
        self.others = others
        self.generation = generation
        self.begun = self._settled = False
        self._writes = others is None  # whether the copies become fewer without other ranks
        self.rows_written = 0
        self.not_pruned: Exception | None = None
        self.done = Latch()
        self.unclaimed = threading.Lock()
        self.thread = threading.current_thread()
        self._pace = Pace()
        self._steps: dict[str, int] = {}
        self._values: dict[str, tuple[bytes, bytes]] = {}
        self._counting = False  # whether the tables may count changes from this cut on
        self._room = threading.Lock()  # guards what follows
        self._less = Latch()  # opens when the copies have become fewer, or nobody needs to wait for it
        self._held = 0
        self._failure: BaseException | None = None
        self._mending = threading.Lock()  # of who ends a save whose thread has died

    # ---------------------------------------------------------------------------------------------------------- the cut

    def start(self, partial: set[str], values: dict[str, tuple[bytes, bytes]]) -> None:
        """Make the cut. Where it raises, nothing has changed.

        Parameters
        ----------
        partial : set of str
            Names of tables of which only changes are written.
        values : dict
            Name -> (JSON, safetensors), as `embcache.values.encode` gives them.
        """
        self._steps = {module: trained_step(manager.planner) for module, manager in self.managers.items()}
        for part in self.parts:
            part.cut(part.description.name not in partial)
        self._values = values
        try:
            for manager in self.managers.values():
                manager.door.saving = self
            for manager in self.managers.values():
                settle(manager.planner)
                for plan in manager.planner.outstanding:
                    if plan.state == "swapped_in":  # its batch may be training
                        self._keep_plan(manager, plan)
            self._counting = True
            for part in self.parts:
                part.core.mark_saved()
                if part.filter is not None:
                    part.filter.take()
            for manager in self.managers.values():
                next_period(manager.planner)
        except BaseException:
            self.end()
            raise

    @property
    def rows(self) -> int:
        """How many are to be written, as far as that is known."""
        return sum(part.listed for part in self.parts)

    def begin(self, parent: int | None, expected_bytes: int) -> None:
        """Take the place on disk, after the cut and outside of the doors, since that waits for the medium. Where it raises, `end` is due.

        Parameters
        ----------
        parent : int, optional
            The generation that this one changes.
        expected_bytes : int
        """
        rank, world = (0, 1) if self.others is None else (self.others.rank, self.others.world)
        self.writer = Writer(self.path, rank, world)
        metadata = {"steps": self._steps}
        self.generation = self.writer.begin(
            self.generation or None, parent=parent, metadata=metadata, expected_bytes=expected_bytes
        )
        for part in self.parts:
            about: dict[str, Any] = {"table": part.core.name, "module": part.module}
            rule = part.manager.layout.tables[part.t].admit_and_evict
            if rule is not None:
                about["filter"] = meaning(rule)
            self.writer.table(part.description, whole=part.whole, metadata=about)
        self.begun = True
        if self.others is not None:
            self.others.settle("save", "a save", None)
            self._writes = True

    # ----------------------------------------------------------------------------------------------- ahead of training

    def comes_in(self, manager: EmbCacheManager, plan: Plan) -> None:
        """The rows of a plan are in their slots, and its batch is about to train: copy out what it concerns."""
        self._pace.note_step()
        if self._failure is None:
            self._aside(lambda: self._keep_plan(manager, plan))

    def changes(self, manager: EmbCacheManager, t: int, keys: np.ndarray) -> None:
        """Keys of a table, which no unfinished plan uses, are about to be changed by hand: copy out their rows."""
        if self._failure is None:
            self._aside(lambda: self._keep_keys(manager, t, keys))

    def _aside(self, keep: Callable[[], None]) -> None:
        """Copy out. What goes wrong is the save's trouble, not the trainer's; a signal is everybody's."""
        try:
            keep()
        except (EmbCacheError, MemoryError) as error:
            self.fail(error)
        except BaseException as error:
            self.spoil(error)
            raise

    def spoil(self, error: BaseException) -> None:
        """Give the save up, as a thread that was to copy rows out has been interrupted and may have lost some."""
        failure = ChangedError(
            f"generation {self.generation} at {self.path}: {type(error).__name__} came while rows were copied out that a batch was about to "
            "change; save again"
        )
        failure.__cause__ = error
        self.fail(failure)

    def _keep_keys(self, manager: EmbCacheManager, t: int, keys: np.ndarray) -> None:
        for part in self.parts:
            if part.manager is not manager or part.t != t:
                continue
            if part.filter is not None:
                part.filter.keep(np.ascontiguousarray(keys, np.int64))
            if part.left or part.unlisted:
                rows = part.core.find(np.unique(keys))
                self._keep(part, part.take(part.ahead(rows[rows >= 0])))

    def _keep_plan(self, manager: EmbCacheManager, plan: Plan) -> None:
        for part in self.parts:
            if part.manager is not manager:
                continue
            if part.filter is not None:
                part.filter.look()
            if part.left or part.unlisted:
                self._keep(part, part.concerned(plan))

    def _keep(self, part: Part, rows: np.ndarray) -> None:
        """Copy out rows that `Part.take` or `Part.concerned` has given."""
        if not len(rows):
            return
        arrays = room_for(part.description, len(rows))
        part.read(rows, arrays)
        with self._room:
            part.kept.append(arrays)
            self._held += sum(array.nbytes for array in arrays.values())

    def wait_for_room(self) -> None:
        """Wait while the copies are too many: to be called before a batch is planned, outside of the door.

        Ctrl-C ends the wait. Where nothing is written for minutes, the save is given up, and training goes on.
        """
        looks, held = 0, -1
        while True:
            with self._room:
                if self._held <= KEPT_BYTES or self._failure is not None or self.done.is_open:
                    return
                if not self._writes:  # others may be behind a plan that waits for this one
                    return
                less, looks, held = self._less, 0 if self._held != held else looks, self._held
            if less.wait(LOOK_S):
                continue
            self.look_after()
            looks += 1  # counted, not timed: a process that is stopped for an hour has waited one look
            if looks >= STALLED_LOOKS:
                self.fail(
                    StorageError(
                        errno.ETIMEDOUT,
                        f"generation {self.generation} was given up: for {looks * LOOK_S:.0f} s nothing was written, while training waited for "
                        f"{held} bytes of copies to be; see what the system's log says of the medium, or give another path",
                        self.path,
                    )
                )

    def wait(self) -> None:
        """Wait until it is over, whichever way. Ctrl-C ends the wait; a save whose thread has died is ended here."""
        while not self.done.wait(LOOK_S):
            self.look_after()

    def look_after(self) -> None:
        """End the save where the thread that was to do so has died: the tables get their changes back, and nobody waits any more."""
        if self.thread.is_alive() or self.done.is_open:
            return
        with self._mending:
            if not self.done.is_open:
                self.fail(
                    StorageError(
                        errno.EIO,
                        f"generation {self.generation} was given up: the thread that wrote it ({self.thread.name}) has died; save again",
                        self.path,
                    )
                )
                self.end()

    @property
    def failure(self) -> BaseException | None:
        """Why it was given up, where it was."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Give the save up; `run` raises `error`."""
        with self._room:
            self._failure = self._failure or error
            self._less.open()

    # --------------------------------------------------------------------------------------------------------- writing

    def run(self) -> int:
        """Write everything and publish it; returns the generation."""
        try:
            if self.others is None:
                self._write()
            else:
                self._write_together()
            created = created_of(self.path, self.generation)
            for module, manager in self.managers.items():
                with manager.door:
                    manager.note_saved(self.path, self.generation, created, module)
            for manager in self.managers.values():
                manager.note_in_directories(self.path, self.generation)
            if self.others is None:
                self.not_pruned = prune_after(self.path, self.keep, self.generation)
            return self.generation
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.end()

    def end(self) -> None:
        """The end, either way: nobody waits for it any more. Where it is not saved, the tables get their changes back.

        Again does nothing, and what an interrupted call has left.
        """
        if self.writer is not None:
            try:
                self.writer.close()
            except (EmbCacheError, OSError, MemoryError) as error:  # nobody is to wait for ever because of that
                LOG.warning("generation %d at %s: its writer was not closed: %s", self.generation, self.path, error)
        for manager in self.managers.values():
            with manager.door.lock:
                if manager.door.saving is not self:
                    continue
                unsettle(manager.planner)
                if self._counting and (manager.saved is None or manager.saved[:2] != (self.path, self.generation)):
                    self._give_back(manager)
                manager.door.saving = None
        with self._room:
            for part in self.parts:
                part.kept, part.members, part.unlisted, part.filter = [], np.empty(0, np.uint8), False, None
            self._held = 0
            self._less.open()
        self.done.open()

    def _give_back(self, manager: EmbCacheManager) -> None:
        """The tables of a manager get their changes back; where memory is short, the next save is a full one. Inside the door."""
        try:
            for part in self.parts:
                if part.manager is manager:
                    part.give_back()
        except (EmbCacheError, MemoryError) as error:
            manager.saved = None
            LOG.warning("what has changed since the last save is not known any more (%s): the next one is full", error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        """All of it, up to the manifest."""
        assert self.writer is not None
        with self.writer as writer:
            for part in self.parts:
                self._list_slots(part)
            for part in self.parts:
                if part.filter is not None:
                    self._write_filter(writer, part, part.filter)
            for part in self.parts:
                self._write_table(writer, part)
            for name, (text, tensors) in self._values.items():
                writer.write_state(f"{name}.json", text)
                if tensors:
                    writer.write_state(f"{name}.safetensors", tensors)
            self._check()
            for part in self.parts:
                if part.written != part.listed:
                    raise AssertionError(
                        f"table {part.core.name!r}: {part.written} rows were written of {part.listed} in the cut"
                    )
            writer.commit()
            if self.others is None:
                writer.publish()
            else:
                self._publish_together(writer)

    def _write_together(self) -> None:
        """`_write` of one rank of several: the generation is there when all have committed, and rank 0 has said so."""
        try:
            self._write()
        except BaseException as error:
            if not self._settled:
                self._settled = True
                self.others.settle("save", "a save", error)
            raise

    def _publish_together(self, writer: Writer) -> None:
        self._settled = True
        self.others.settle("save", "a save", None)
        failure: BaseException | None = None
        if self.others.rank == 0:
            try:
                writer.publish()
                self.not_pruned = prune_after(self.path, self.keep, self.generation)
            except BaseException as error:
                failure = error
        self.others.settle("save", "a save", failure)

    def _list_slots(self, part: Part) -> None:
        at = 0
        while part.unlisted:
            with part.manager.door:
                at = part.list_slots(at, PIECE_SLOTS)
            self._rest()

    def _rest(self) -> None:
        if self.background:
            self._pace.pause(hurry=self._held > KEPT_BYTES // 2)

    def _write_table(self, writer: Writer, part: Part) -> None:
        if len(part.erased):
            writer.write_erased(part.description, part.erased)
        most = writer.rows_per_chunk(part.description)
        arrays = room_for(part.description, min(most, part.left)) if self.background else {}
        for rows in part.batches(most):
            self._check()
            if self._held > KEPT_BYTES // 2:
                for other in self.parts:
                    self._write_kept(writer, other)
            if self.background:
                self._write_in_pieces(writer, part, rows, arrays)
                continue
            with part.manager.door:
                rows = part.take(rows)
                if len(rows):
                    part.read(rows, writer.rows_to_fill(part.description, len(rows)))
            if len(rows):
                writer.write_filled(part.description, len(rows))
                self._count(part, len(rows))
        self._check()
        with part.manager.door:  # whoever has read rows in there has put them down by now
            left = part.left
        self._write_kept(writer, part)
        if left:
            raise AssertionError(f"table {part.core.name!r}: {left} rows of the cut were not found again")

    def _write_in_pieces(self, writer: Writer, part: Part, rows: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """One chunk, read a little at a time into `arrays`, so that nobody waits long at the door; who does gets in between."""
        count = 0
        for begin in range(0, len(rows), PIECE_ROWS):
            with part.manager.door:
                piece = part.take(rows[begin : begin + PIECE_ROWS])
                if len(piece):
                    part.read(piece, {name: array[count : count + len(piece)] for name, array in arrays.items()})
            count += len(piece)
            self._rest()
        if count:
            columns: dict[str, Any] = {name: array[:count] for name, array in arrays.items()}
            writer.write_rows(part.description, **columns)
            self._count(part, count)

    def _write_kept(self, writer: Writer, part: Part) -> None:
        """Write the copies: small ones together, so that they make whole chunks."""
        with self._room:
            kept, part.kept = part.kept, []
        most = writer.rows_per_chunk(part.description)
        at = 0
        while at < len(kept):
            begin, count = at, 0
            while at < len(kept) and (at == begin or count + len(kept[at]["keys"]) <= most):
                count += len(kept[at]["keys"])
                at += 1
            some = kept[begin:at]
            columns: dict[str, Any] = some[0]
            if len(some) > 1:
                columns = {name: np.concatenate([arrays[name] for arrays in some]) for name in some[0]}
            writer.write_rows(part.description, **columns)
            self._count(part, count)
            with self._room:
                self._held -= sum(array.nbytes for arrays in some for array in arrays.values())
                self._less.open()
                self._less = Latch()
            self._pace.pause(hurry=self._held > KEPT_BYTES // 2)

    def _count(self, part: Part, rows: int) -> None:
        part.written += rows
        self.rows_written += rows

    def _write_filter(self, writer: Writer, part: Part, state: FilterCut) -> None:
        """The sketch, which changes the fastest, then the keys that wait. Before the rows: what is read need not be kept."""
        more = True
        while more:
            with part.manager.door:
                self._check()  # in here: once it has failed nobody keeps what is about to be freed
                more = state.read_sketch(PIECE_SKETCH)
            self._rest()
        for name, cells in state.sketches.items():
            writer.write_state(sketch_name(part.description.name, name), cells.data)
        state.sketches.clear()
        none = np.empty(0, np.int64)

        def write(keys: np.ndarray, counts: np.ndarray, last: np.ndarray, **more: Any) -> None:
            writer.write_filter(part.description, keys, counts, last, changes=not state.whole, **more)

        once: dict[str, Any] = {"late": none, "numbers": state.numbers}
        while once or not state.waiting_read:
            with part.manager.door:
                self._check()
                keys, counts, last = state.read(PIECE_ENTRIES)
            if once or len(keys):
                write(keys, counts, last, **once)
            once = {}
            self._rest()
        if not state.whole:
            with part.manager.door:
                self._check()
                gone = state.gone()
            write(none, none, none, gone=gone)
