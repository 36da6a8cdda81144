"""A save in progress: the cut, what training is about to change, and the sweep that writes the rest.

At the cut, between two steps and inside the doors of all managers, a save copies the flags of the host rows (a byte a row), which say
what is in it, copies what is small (erased keys, the optimizers' numbers), and has the tables count changes anew. Then training goes
on. Which residents have changed since the last save a delta finds out afterwards, slot by slot. Rows
are known by their place in the host table, which they keep while they live, wherever their values are at the moment. A row is
as it was at the cut until a batch that uses it may train, and that is not before its plan has brought its rows in; or until its key
is evicted or changed by hand. So when a plan comes in, rows that it concerns and that have not been written are copied out first:
what is copied is at most what training touches while the save goes on. The sweep takes the door for some rows at a time.

Memory: one byte a row, and the copies, which are written first. Above `KEPT_BYTES` of them the next batch waits to be planned.
Should the save fail, the tables get their changes back, and the next delta has them.

Ctrl-C may come between any two statements. So whatever has an effect comes behind a statement that would end the save (`SaveJob.end`,
which may be called again where it was interrupted itself), locks are taken by ``with`` on compiled locks alone, and a generation is
published only if as many rows were written as were listed at the cut: a row that was read and not written is missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.cut import (
    CHANGED,
    IN,
    LIVE,
    READ,
    Cut,
    FilterCut,
    changed_rows,
    filter_bytes,
    left_rows,
    list_slots,
    next_period,
    sweeping,
    touched_rows,
    trained_step,
    used_about,
)
from ._core.doors import Latch
from .checkpoint import TableDescription, Writer, batches_of_rows, created_of, prune_after
from .errors import ChangedError, EmbCacheError
from .filterfile import meaning, sketch_name
from .pace import Pace

if TYPE_CHECKING:
    from ._core.plan import Plan
    from .manager import EmbCacheManager

__all__ = ["Part", "SaveJob"]

KEPT_BYTES = 256 << 20
PIECE_ROWS = 1024  # about half a millisecond inside the door
PIECE_SLOTS = 1 << 16  # that are looked through for changes at a time: the same
PIECE_ENTRIES = 1 << 15  # waiting keys that are read at a time: the same
PIECE_SKETCH = 1 << 20  # bytes of each generation
EXTENT_ROWS = 1024


def _room_for(description: TableDescription, count: int) -> dict[str, np.ndarray]:
    """Arrays for rows as a chunk has them, by the name of the column."""
    arrays = {
        "keys": np.empty(count, np.int64),
        "weights": np.empty((count, description.dim), description.storage),
    }
    if description.with_filter:
        arrays["frequencies"], arrays["timestamps"] = np.empty(count, np.int64), np.empty(count, np.int64)
    if description.state_dim:
        arrays["state"] = np.empty((count, description.state_dim), np.float32)
    return arrays


class Part:
    """One table of a save.

    Attributes
    ----------
    manager, module, t
        Whose table, under which path of the model, and its place in the layout.
    description : TableDescription
    tracked : bool
        Whether the table knew what had changed since the last save.
    full_bytes : int
        About what all its rows and its filter take.
    whole : bool
        Whether all rows are written, not only those that have changed.
    members : uint8 (host rows,)
        `LIVE`: the row is in the cut; `IN`: it is to be written, and has not been read yet; `READ`: it has been; `CHANGED`: it had
        changed at the cut.
    left : int
        How many are to be written and have not been read.
    listed, written : int
        How many are to be written, and how many of them have been.
    unlisted : bool
        Whether there may be residents that have changed and are not among `IN` yet: of a delta, at first.
    """

    def __init__(self, manager: EmbCacheManager, module: str, t: int, description: TableDescription) -> None:
        self.manager, self.module, self.t, self.description = manager, module, t, description
        self.core = manager.host_tables[t]
        self.tracked, self.whole = self.core.tracked, True
        self.full_bytes = 0
        self.members = np.empty(0, np.uint8)
        self.left = self.listed = self.written = 0
        self.unlisted = False
        self.order: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, bool))
        self.log: np.ndarray | None = None
        self.erased = np.empty(0, np.int64)
        self.filter: FilterCut | None = None
        self.kept: list[dict[str, np.ndarray]] = []

    # ---------------------------------------------------------------------------------------------------------- the cut

    def note_changes(self) -> int:
        """About how many bytes a delta takes; `full_bytes` is known then."""
        self.log = self.core.erased_keys(absent=False)
        self.tracked = self.log is not None
        changed = self.core.changed() + used_about(self.manager.planner, self.t)
        of_filter, of_changes = filter_bytes(self.manager.planner, self.t)
        self.full_bytes = len(self.core) * self.description.row_bytes + of_filter
        return changed * self.description.row_bytes + (0 if self.log is None else 8 * len(self.log)) + of_changes

    def cut(self, whole: bool) -> None:
        """List what is to be written. Nothing changes."""
        self.whole, planner = whole, self.manager.planner
        self.unlisted = not whole
        if self.unlisted and sweeping(planner, self.t):  # which of them are dead must be seen now
            self.core.mark_changed(changed_rows(planner, self.t))
            self.unlisted = False
        cut = Cut(planner, self.t)
        self.members, self.listed = cut.members(changed=not whole)
        self.left = self.listed
        self.order = self.core.save_order()
        if not whole:
            assert self.log is not None
            visible = planner.peek(self.log, self.t)[1] >= 0 if len(self.log) else np.empty(0, bool)
            self.erased = np.union1d(self.log[~visible], cut.dead())
        if self.manager.layout.tables[self.t].admit_and_evict is not None:
            self.filter = FilterCut(planner, self.t, cut, whole)

    def give_back(self) -> None:
        """The save has failed: what had changed before it counts as changed again."""
        self.core.mark_changed(np.flatnonzero(self.members & CHANGED))
        self.core.mark_erased(self.log)
        if self.filter is not None:
            self.filter.give_back()

    def list_slots(self, begin: int, most: int) -> int:
        """List which residents have changed, of `most` slots from `begin` on; returns where to go on, -1 at the end. Inside the door.

        A row that has left its slot for a plan's is seen when that plan comes in (`ahead`), or here in the end.
        """
        planner = self.manager.planner
        begin, count = list_slots(planner, self.t, begin, most, self.members)
        self._list(count)
        for (
            plan
        ) in planner.outstanding:  # each time: one that is cancelled gives rows back to slots that were looked at
            self.ahead(left_rows(planner, plan, self.t))
        self.unlisted = begin >= 0
        return begin

    def _list(self, count: int) -> None:
        self.listed += count
        self.left += count

    def _unlisted(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` that are in the cut, and neither read nor to be written."""
        rows = rows[rows < len(self.members)]
        return rows[(self.members[rows] & (IN | LIVE | READ)) == LIVE]

    # --------------------------------------------------------------------------------------------------------- reading

    def ahead(self, rows: np.ndarray) -> np.ndarray:
        """Have rows, each given once, among those to be written where it is not known yet whether they have changed. Inside the door."""
        if self.unlisted:
            more = self._unlisted(rows)
            self.members[more] |= IN
            self._list(len(more))
        return rows

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows`, each given once, that are to be written and have not been read yet. Inside the door."""
        rows = rows[rows < len(self.members)]
        rows = rows[(self.members[rows] & IN) != 0]
        return np.ascontiguousarray(rows)

    def read(self, rows: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Copy rows that `take` gave into `arrays`, by column; they count as read then. Inside the door."""
        manager, description = self.manager, self.description
        if not np.all(self.members[rows] & IN):
            raise AssertionError(
                f"table {self.core.name!r}: rows of the cut were to be read that are not in it, or twice"
            )
        keys, slots, counts, last = Cut(manager.planner, self.t).read(rows)
        arrays["keys"][:] = keys
        if description.with_filter:
            arrays["frequencies"][:] = counts
            arrays["timestamps"][:] = last
        resident = np.flatnonzero(slots >= 0)
        if len(resident) == len(rows):
            ends = np.cumsum([0, *manager.spec.state_widths(description.dim)]).tolist()
            parts = [arrays["state"][:, low:high] for low, high in pairwise(ends)]
            manager.buffer.read(self.t, slots, [arrays["weights"], *parts])
        else:
            home = rows.copy()
            home[resident] = -1
            self.core.read_into(home, arrays["weights"], None, [arrays["state"]] if description.state_dim else [])
            weights, *parts = manager.buffer.read(self.t, slots[resident])
            arrays["weights"][resident] = weights
            if parts:
                arrays["state"][resident] = np.concatenate(parts, axis=1)
        self.members[rows] = self.members[rows] & (0xFF ^ IN) | READ
        self.left -= len(rows)

    def batches(self, most: int) -> Iterator[np.ndarray]:
        """Rows that had not been read when they were listed, a chunk's at a time, in the order of vshards."""
        return batches_of_rows(*self.order, self._rows_of, most)

    def _rows_of(self, extents: np.ndarray) -> np.ndarray:
        extents = extents[extents < len(self.members) // EXTENT_ROWS]  # others were made later
        marks = self.members.reshape(-1, EXTENT_ROWS)[extents]
        places = np.flatnonzero(marks & IN)
        rows: np.ndarray = extents[places // EXTENT_ROWS] * EXTENT_ROWS + places % EXTENT_ROWS
        return rows


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
        self._pace = Pace()
        self._steps: dict[str, int] = {}
        self._values: dict[str, tuple[bytes, bytes]] = {}
        self._counting = False  # whether the tables may count changes from this cut on
        self._room = threading.Lock()  # guards what follows
        self._less = Latch()  # opens when the copies have become fewer, or nobody needs to wait for it
        self._held = 0
        self._failure: BaseException | None = None

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
                for plan in manager.planner.outstanding:
                    if plan.state == "swapped_in":  # its batch may be training
                        self._keep_plan(manager, plan)
            for manager in self.managers.values():
                manager.door.saving = self
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
                self._keep(part, rows[rows >= 0])

    def _keep_plan(self, manager: EmbCacheManager, plan: Plan) -> None:
        for part in self.parts:
            if part.manager is not manager:
                continue
            if part.filter is not None:
                part.filter.look()
            if part.left or part.unlisted:
                if part.unlisted:  # noted and not read: what has left its slot may be on its way home yet
                    part.ahead(left_rows(manager.planner, plan, part.t))
                self._keep(part, touched_rows(manager.planner, plan, part.t))

    def _keep(self, part: Part, rows: np.ndarray) -> None:
        rows = part.take(part.ahead(rows))
        if not len(rows):
            return
        arrays = _room_for(part.description, len(rows))
        part.read(rows, arrays)
        with self._room:
            part.kept.append(arrays)
            self._held += sum(array.nbytes for array in arrays.values())

    def wait_for_room(self) -> None:
        """Wait while the copies are too many: to be called before a batch is planned, outside of the door."""
        while True:
            with self._room:
                if self._held <= KEPT_BYTES or self._failure is not None or self.done.is_open:
                    return
                if not self._writes:  # others may be behind a plan that waits for this one
                    return
                less = self._less
            less.wait()

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
            self.writer.close()
        for manager in self.managers.values():
            with manager.door.lock:
                if manager.door.saving is not self:
                    continue
                if self._counting and (manager.saved is None or manager.saved[:2] != (self.path, self.generation)):
                    for part in self.parts:
                        if part.manager is manager:
                            part.give_back()
                manager.door.saving = None
        with self._room:
            for part in self.parts:
                part.kept, part.members, part.unlisted, part.filter = [], np.empty(0, np.uint8), False, None
            self._held = 0
            self._less.open()
        self.done.open()

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
        arrays = _room_for(part.description, min(most, part.left)) if self.background else {}
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
