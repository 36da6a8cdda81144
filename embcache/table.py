"""`EmbTable`: the table as a storage backend, NumPy in and NumPy out, no torch.

Owns the public doors: it turns whatever integer arrays a user has into int64 keys, checks shapes and dtypes, and calls
the compiled table. It must never hand out memory of the table: every result is the caller's own.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.arrays import is_plain_keys
from ._core.digest import hash_strings as _hash_strings
from ._core.table import Table
from .config import MAX_EMBEDDING_DIM, Constant, Initializer, LinearRamp, Normal, TruncatedNormal, Uniform, Zeros
from .errors import (
    ChangedError,
    ClosedError,
    ConfigError,
    ForkError,
    HostMemoryError,
    ShapeError,
    StorageError,
    shown,
    whole_number,
)
from .rowtypes import ROW_TYPES, RowType, row_type

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._core.table import TableStats
    from .checkpoint import RestoreReport, TableDescription

__all__ = ["EmbTable", "hash_strings", "initializer_spec"]

DEFAULT_INITIALIZER = Uniform(-0.05, 0.05)

_MAX_STATE_DIM = 4 * MAX_EMBEDDING_DIM
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def initializer_spec(initializer: Initializer) -> tuple[str, float, float]:
    """Return `(kind, a, b)` of an initializer, as the compiled table takes it.

    Parameters
    ----------
    initializer : Initializer

    Returns
    -------
    tuple of (str, float, float)

    Raises
    ------
    ConfigError
        If it is not one of embcache's initializers.
    """
    if isinstance(initializer, Zeros):
        return "zeros", 0.0, 0.0
    if isinstance(initializer, Constant):
        return "constant", initializer.value, 0.0
    if isinstance(initializer, Uniform):
        return "uniform", initializer.low, initializer.high
    if isinstance(initializer, TruncatedNormal):
        return "truncated_normal", initializer.mean, initializer.std
    if isinstance(initializer, Normal):
        return "normal", initializer.mean, initializer.std
    if isinstance(initializer, LinearRamp):
        return "linear_ramp", initializer.start, initializer.stop
    raise ConfigError(
        f"initializer = {initializer!r}; give one of Zeros, Constant, Uniform, Normal, TruncatedNormal, LinearRamp"
    )


def hash_strings(values: Iterable[str | bytes], salt: int = 0) -> npt.NDArray[np.int64]:
    """Turn strings into keys: XXH3-64 of the UTF-8 bytes, as int64.

    Parameters
    ----------
    values : iterable of str or bytes
        A list, a NumPy array of strings, a pandas column ... Empty strings are values like any other.
    salt : int
        Seed of the hash, any 64-bit integer; use different salts for features that share a table.

    Returns
    -------
    ndarray of int64, (n,)
        For salt 0, ``xxhash.xxh3_64_intdigest(value.encode())`` reinterpreted as a signed number.

    Raises
    ------
    ShapeError
        If `values` is itself a string, has more than one dimension, or holds something else than strings (None, NaN).
    ConfigError
        If `salt` is not an integer of 64 bits.

    Examples
    --------
    >>> import embcache.table
    >>> embcache.table.hash_strings(["AA", "UA"]).dtype
    dtype('int64')
    """
    if isinstance(values, (str, bytes)):
        raise ShapeError(f"hash_strings: values = {values!r} is one string; give a sequence of strings")
    seed = whole_number(salt)
    if seed is None or not _INT64_MIN <= seed < 2**64:
        raise ConfigError(f"hash_strings: salt = {shown(salt)}; give an integer from {_INT64_MIN} to {2**64 - 1}")
    if getattr(values, "ndim", 1) != 1:
        raise ShapeError(f"hash_strings: values has {values.ndim} dimensions; give one")  # type: ignore[attr-defined]
    try:
        items = values.tolist() if isinstance(values, np.ndarray) else list(values)
    except TypeError:
        raise ShapeError(f"hash_strings: values = {values!r}; give a sequence of strings") from None
    return _hash_strings(items, seed % 2**64)


def _reopen(kind: type[EmbTable], name: str, dim: int, options: dict[str, Any]) -> EmbTable:
    """What a pickled file-backed table is: how to open it again, and not how to make a new one in its place."""
    place = options["directory"]
    if not os.path.lexists(os.path.join(place, "header")):
        raise ConfigError(
            f"table {name!r}: directory {place!r} holds no table: the one that was pickled lies on another machine, or was "
            "moved or deleted; copy its directory there, or make a new table with EmbTable"
        )
    return kind(name, dim, **options)


def _close_dropped(core: Table) -> None:
    """The end of a file-backed table that nobody closed; in a forked child it is the parent's."""
    try:
        core.close()
    except ForkError:
        pass
    except (StorageError, HostMemoryError) as error:
        warnings.warn(f"dropped without close, and closing failed: {error}", RuntimeWarning, stacklevel=2)


def _refuse_masked(what: str, value: Any, owner: str) -> None:
    """Raise `ShapeError` for a masked array: NumPy would drop the mask, and what lies under it is no data."""
    # Who holds a masked array has it; imported here it might meet a full table of descriptors.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise ShapeError(f"{owner}: {what} is a masked array; give a plain one: filled(...) or compressed()")


def as_keys(keys: Any, owner: str) -> npt.NDArray[np.int64]:
    """Return `keys` as an aligned, C-contiguous int64 array of one dimension, copying only where needed.

    Parameters
    ----------
    keys : array-like of integers
        Any integer dtype, stride and alignment, read-only or not; an empty list is an empty batch.
    owner : str
        Who asks, for the message.

    Returns
    -------
    ndarray of int64, (n,)

    Raises
    ------
    ShapeError
        If the keys are not integers (floats and booleans are refused), not one-dimensional, or leave int64.
    """
    if is_plain_keys(keys):
        plain: npt.NDArray[np.int64] = keys
        return plain  # nothing to do, and small calls feel every check
    _refuse_masked("keys", keys, owner)
    try:
        array = np.asarray(keys)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ShapeError(
            f"{owner}: keys is not an array of integers ({error}); give a one-dimensional integer array"
        ) from None
    if array.ndim != 1:
        raise ShapeError(f"{owner}: keys has shape {array.shape}; give one dimension")
    if array.dtype == np.int64:
        array = np.ascontiguousarray(array)
        return array if array.flags.aligned else array.copy()
    if array.size == 0 and not isinstance(keys, np.ndarray):
        return np.empty(0, dtype=np.int64)
    if array.dtype == np.uint64:
        high = array > np.uint64(_INT64_MAX)
        if high.any():
            value = int(array[int(high.argmax())])
            raise ShapeError(
                f"{owner}: key {value} exceeds {_INT64_MAX}; keys are int64: view the array as int64, or hash it"
            )
    elif array.dtype == object:
        for value in array.tolist():
            if isinstance(value, bool) or not isinstance(value, int) or not _INT64_MIN <= value <= _INT64_MAX:
                raise ShapeError(
                    f"{owner}: key {shown(value)} is no int64; give integers from {_INT64_MIN} to {_INT64_MAX}"
                )
    elif array.dtype.kind not in "iu":
        raise ShapeError(f"{owner}: keys has dtype {array.dtype}; give an integer dtype, int64 at best")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_rows(
    what: str, values: npt.ArrayLike, count: int, width: int, owner: str, kind: RowType = ROW_TYPES["float32"]
) -> npt.NDArray[Any]:
    """Return `values` as an aligned, C-contiguous (count, width) array of float32, or of the dtype of `kind` if they have it.

    An empty list is a batch of no rows. `what` and `owner` are for the message.

    Raises
    ------
    ShapeError
        For another shape; a dtype that NumPy cannot safely cast to float32; a finite number that is none in `kind`.
    """
    _refuse_masked(what, values, owner)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ShapeError(f"{owner}: {what} is not an array of numbers ({error}); give a float32 array") from None
    if array.size == 0 and array.dtype == np.float64 and not isinstance(values, np.ndarray):
        array = array.astype(np.float32)  # an empty list has no dtype of its own
    if not np.can_cast(array.dtype, np.float32, casting="safe"):
        raise ShapeError(
            f"{owner}: {what} has dtype {array.dtype}; give float32 (cast it yourself if losing digits is meant)"
        )
    if array.shape == (0,) and count == 0:
        array = array.reshape(0, width)
    if array.shape != (count, width):
        raise ShapeError(f"{owner}: {what} has shape {array.shape}; give {(count, width)}")
    rows = np.ascontiguousarray(array, dtype=kind.door if array.dtype == kind.door else np.float32)
    if not rows.flags.aligned:
        rows = rows.copy()
    if rows.dtype == np.float32 and kind.bytes < 4:
        _refuse_overflow(what, rows, owner, kind)
    return rows


def _refuse_overflow(what: str, rows: npt.NDArray[np.float32], owner: str, kind: RowType) -> None:
    """Raise `ShapeError` where storing would turn a finite number into an infinite one."""
    if rows.size == 0 or (rows.max() < kind.end and rows.min() > -kind.end):
        return
    sizes = np.abs(rows)
    lost = (sizes >= kind.end) & (sizes < np.inf)
    if lost.any():
        row, column = np.unravel_index(int(lost.argmax()), rows.shape)
        raise ShapeError(
            f"{owner}: {what}[{row}, {column}] = {float(rows[row, column])} is infinite in {kind.name}; give numbers below {kind.end:g} "
            "in size, clip them, or use a wider dtype (infinity and NaN themselves are data)"
        )


def check_out(what: str, out: Any, shape: tuple[int, ...], owner: str, *dtypes: Any) -> None:
    """Raise `ShapeError` unless `out` is a writeable, aligned, C-contiguous array of `shape` and one of `dtypes`."""
    _refuse_masked(what, out, owner)
    if not isinstance(out, np.ndarray) or out.dtype not in dtypes:
        found = out.dtype if isinstance(out, np.ndarray) else type(out).__name__
        raise ShapeError(f"{owner}: {what} is {found}; give a {' or '.join(str(np.dtype(d)) for d in dtypes)} array")
    if out.shape != shape:
        raise ShapeError(f"{owner}: {what} has shape {out.shape}; give {shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ShapeError(f"{owner}: {what} is read-only or not C-contiguous; give a writeable, C-contiguous array")
    if not out.flags.aligned:
        raise ShapeError(
            f"{owner}: {what} is not aligned to its dtype's size; give an aligned array: np.empty makes one"
        )


def apart(keys: npt.NDArray[np.int64], *outs: npt.NDArray[Any] | None) -> npt.NDArray[np.int64]:
    """`keys`, or a copy where an array that is about to be written shares their memory."""
    return keys.copy() if any(out is not None and np.may_share_memory(keys, out) for out in outs) else keys


def check_rows_out(
    out: Any, count: int, dim: int, state_dim: int, owner: str, kind: RowType
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """The (weights, state) arrays that `lookup_rows` shall fill: new ones for None, else those of `out`, checked."""
    if out is None:
        return np.empty((count, dim), dtype=kind.door), np.empty((count, state_dim), dtype=np.float32)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise ShapeError(f"{owner}: out is {type(out).__name__}; give a pair of arrays (weights, state)")
    weights, state = out
    check_out("out[0]", weights, (count, dim), owner, *dict.fromkeys((kind.door, np.dtype(np.float32))))
    check_out("out[1]", state, (count, state_dim), owner, np.dtype(np.float32))
    if np.may_share_memory(weights, state):
        raise ShapeError(f"{owner}: the two arrays of out share memory; give separate ones")
    return weights, state


class EmbTable:
    """One embedding table in host memory: any int64 key -> a row of `dim` weights and `state_dim` floats of state.

    Parameters
    ----------
    name : str
        Not empty. With `seed`, what initial values are made of.
    dim : int
        Weights of a row, 1 to 8192.
    state_dim : int
        Floats of optimizer state of a row, 0 to 32768.
    dtype : str
        How weights are kept: ``"float32"``, ``"float16"`` or ``"bfloat16"``; state is float32.
    initializer : Initializer
        Rule of the initial weights, ``Uniform(-0.05, 0.05)`` unless given; the state of a new row is zero.
    seed : int
        Any int64.
    directory : path, optional
        Where the table lies in files, which may exceed memory; default: in memory. The directory itself is made if it is
        absent. One that a table of the same description left clean (closed, or flushed and not changed since) is opened at
        once, whatever its size; any other refuses, and nothing in it is touched. One object at a time has it open.
    num_threads : int, optional
        Threads of a large call, 1 to 64; default: the CPUs available, at most 16. No result depends on it.

    Notes
    -----
    A float16 table reads and takes NumPy's float16; a bfloat16 table float32, as NumPy has no bfloat16. Both take float32,
    rounded to nearest even: a finite number that would become infinite is refused, NaN stays NaN. Initial values are
    rounded in the same way.

    Keys are integers of any dtype and stride; floats and booleans are refused. A call either succeeds or raises before
    anything changed: `ShapeError`, `ConfigError`, `HostMemoryError`, `ClosedError`, or `ForkError` in a forked child.
    No method touches frequencies or timestamps.

    A file-backed table adds `DiskFullError`, `StorageError`, and when it is opened `LockedError`, `UncleanDirectoryError` (a crash
    came before close or flush: restore a checkpoint), `CorruptionError` and `FormatVersionError`. It closes itself when it is
    dropped or the interpreter ends. Pickled, it is its description and its path: unpickling opens the directory, which must
    then be closed everywhere else; where it is gone, `ConfigError`.

    Thread safety: any thread may call at any time; reading calls run together, a changing call alone.

    Examples
    --------
    >>> import numpy as np
    >>> from embcache.table import EmbTable
    >>> with EmbTable("items", 4) as table:
    ...     table.assign([7, -1], np.ones((2, 4), dtype=np.float32))
    ...     float(table.lookup([7, 8])[0].sum()), len(table)
    (4.0, 3)
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        state_dim: int = 0,
        dtype: str = "float32",
        initializer: Initializer = DEFAULT_INITIALIZER,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"EmbTable: name = {name!r}; give a non-empty string")
        owner = f"table {name!r}"
        kind = row_type(owner, dtype)
        for option, value, low, high in (
            ("dim", dim, 1, MAX_EMBEDDING_DIM),
            ("state_dim", state_dim, 0, _MAX_STATE_DIM),
        ):
            number = whole_number(value)
            if number is None or not low <= number <= high:
                raise ConfigError(f"{owner}: {option} = {shown(value)}; give an integer from {low} to {high}")
        self.name = name
        self.initializer = initializer
        self._core = Table(
            name,
            dim,
            state_dim=state_dim,
            dtype=dtype,
            initializer=initializer_spec(initializer),
            seed=seed,
            num_threads=num_threads,
            directory=directory,
        )
        self._owner, self._kind = owner, kind
        # The generation that a delta would change: path, number, and when it was made.
        self._saved: tuple[str, int, float | None] | None = None
        if directory is not None:
            self._closer = weakref.finalize(self, _close_dropped, self._core)

    @property
    def core(self) -> Table:
        """The compiled table behind this one."""
        return self._core

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return self._core.dim

    @property
    def state_dim(self) -> int:
        """Floats of state of a row."""
        return self._core.state_dim

    @property
    def dtype(self) -> str:
        """How weights are kept: ``"float32"``, ``"float16"`` or ``"bfloat16"``."""
        return self._core.dtype

    @property
    def seed(self) -> int:
        """Seed of the initial values."""
        return self._core.seed

    @property
    def directory(self) -> str | None:
        """Absolute path of the directory of a file-backed table; None in memory."""
        place = self._core.directory
        return None if place is None else place.path

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    # ------------------------------------------------------------------------------------------------------------ rows

    def lookup(
        self, keys: npt.ArrayLike, out: npt.NDArray[Any] | None = None, *, insert: bool = True
    ) -> npt.NDArray[Any]:
        """Return the weights of each key.

        Parameters
        ----------
        keys : array-like of integers, (n,)
        out : ndarray, (n, dim), optional
            C-contiguous and writeable, of the dtype that the table reads, or float32; receives the result. A reused `out`
            saves the page faults of a new array.
        insert : bool
            True: absent keys are inserted with their initial value. False: they read it and stay absent.

        Returns
        -------
        ndarray, (n, dim)
            `out`, or a new array: float16 for a float16 table, else float32.
        """
        checked = as_keys(keys, self._owner)
        shape = (len(checked), self.dim)
        if out is None:
            out = np.empty(shape, dtype=self._kind.door)
        else:
            check_out("out", out, shape, self._owner, *dict.fromkeys((self._kind.door, np.dtype(np.float32))))
            checked = apart(checked, out)
        self._core.lookup(checked, out, bool(insert))
        return out

    def find(self, keys: npt.ArrayLike, out: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the row index of each key, -1 where absent: int64 (n,), in `out` if given."""
        if out is None:
            return self._core.find(as_keys(keys, self._owner))
        return self._rows_of(self._core.find, keys, out)

    def insert(self, keys: npt.ArrayLike, out: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Insert the absent keys with their initial values; return the row index of each key: int64 (n,), in `out` if given."""
        return self._rows_of(self._core.insert, keys, out)

    def _rows_of(self, door: Any, keys: npt.ArrayLike, out: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        checked = as_keys(keys, self._owner)
        if out is not None:
            check_out("out", out, checked.shape, self._owner, np.dtype(np.int64))
            checked = apart(checked, out)
        rows: npt.NDArray[np.int64] = door(checked, out)
        return rows

    def assign(self, keys: npt.ArrayLike, weights: npt.ArrayLike, state: npt.ArrayLike | None = None) -> None:
        """Insert or overwrite rows.

        Parameters
        ----------
        keys : array-like of integers, (n,)
            Of a repeated key the last row wins.
        weights : array-like, (n, dim)
            float32, or what NumPy calls a safe cast to it. NaN and infinity are data. A float16 or bfloat16 table rounds
            float32 to nearest even, and raises `ShapeError` for a finite number that would become infinite.
        state : array-like, (n, state_dim), optional
            Default: the state becomes zero.
        """
        checked = as_keys(keys, self._owner)
        rows = as_rows("weights", weights, len(checked), self.dim, self._owner, self._kind)
        states = None if state is None else as_rows("state", state, len(checked), self.state_dim, self._owner)
        self._core.assign(checked, rows, states)

    def lookup_rows(
        self, keys: npt.ArrayLike, out: tuple[npt.NDArray[Any], npt.NDArray[np.float32]] | None = None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return weights (n, dim) and state (n, state_dim) of each key; an absent key reads its initial values and stays absent.

        `out`, a pair of such arrays, receives the result; weights as in `lookup`, state float32.
        """
        checked = as_keys(keys, self._owner)
        weights, state = check_rows_out(out, len(checked), self.dim, self.state_dim, self._owner, self._kind)
        return self._core.lookup_rows(apart(checked, weights, state), weights, state)

    def erase(self, keys: npt.ArrayLike) -> int:
        """Remove keys and return how many were there; absent ones and repetitions are passed over."""
        return self._core.erase(as_keys(keys, self._owner))

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        delta: bool = False,
        state: dict[str, bytes] | None = None,
        keep: int | None = None,
    ) -> int:
        """Write a generation of a checkpoint: it is whole and durable when this returns, or absent.

        Parameters
        ----------
        path : path
            The checkpoint's directory, made where it is absent.
        delta : bool
            Write only what changed since this table was last saved at, or restored from, `path`. Where that is not known, or
            deltas have come to as much as a full generation costs, a full one is written all the same.
        state : dict of str to bytes, optional
            Your own, for `RestoreReport.state`.
        keep : int, optional
            Remove all but this many of the newest generations, and those that these need.

        Returns
        -------
        int
            The generation.

        Raises
        ------
        ChangedError
            The table was changed meanwhile.
        LockedError
            Somebody else is saving there.
        DiskFullError, StorageError
            What was saved before is intact.
        CorruptionError
            The catalogue at `path` is damaged: save to another path.
        """
        from . import checkpoint

        return checkpoint.save_emb_table(self, path, delta=bool(delta), state=state, keep=keep)

    def restore(self, path: str | os.PathLike[str], generation: int | None = None) -> RestoreReport:
        """Replace all rows by those of a generation: the newest that holds, unless one is given.

        The table is filled beside the present one and takes its place in the end; a failure leaves everything as it was. A
        file-backed table must be empty.

        Raises
        ------
        ConfigError
            No such checkpoint or table, or one of another dim, dtype or state; the message says what to do.
        CorruptionError
            No generation, or not the given one, is as it was written.
        HostMemoryError, DiskFullError, StorageError
        """
        from . import checkpoint

        return checkpoint.restore_emb_table(self, path, generation)

    @property
    def saved(self) -> tuple[str, int] | None:
        """(path, generation) that this table was last saved at or restored from; None before."""
        return None if self._saved is None else self._saved[:2]

    @property
    def saved_created(self) -> float | None:
        """When that generation was made; None where nobody knows."""
        return None if self._saved is None else self._saved[2]

    def note_saved(self, path: str, generation: int, created: float | None, core: Table | None = None) -> None:
        """For the checkpoint: these are what a delta would change; `core` takes the place of the rows."""
        if core is not None:
            self._saved = None  # should a signal come in between, the next delta is a full one
            self._core = core
        self._saved = path, generation, created

    @property
    def description(self) -> TableDescription:
        """What a checkpoint says of this table."""
        from .checkpoint import TableDescription

        return TableDescription(
            self.name,
            self.dim,
            self.state_dim,
            self.dtype,
            list(initializer_spec(self.initializer)),
            self.seed,
            self._core.with_filter,
        )

    # ------------------------------------------------------------------------------------------------------- the whole

    def items(
        self, batch_rows: int = 65536
    ) -> Iterator[
        tuple[
            npt.NDArray[np.int64],
            npt.NDArray[Any],
            npt.NDArray[np.float32],
            npt.NDArray[np.int64] | None,
            npt.NDArray[np.int64] | None,
        ]
    ]:
        """Iterate over all rows in row order, in batches.

        Parameters
        ----------
        batch_rows : int
            Most rows of a batch, >= 1.

        Yields
        ------
        (keys, weights, state, frequency, timestamp)
            int64 (k,), (k, dim) as in `lookup`, float32 (k, state_dim), and int64 (k,) each; frequency and timestamp are None
            unless the directory was made by a manager whose table has a filter. All are copies.

        Raises
        ------
        ChangedError
            If the table changed since the iteration began.
        """
        most = whole_number(batch_rows)
        if most is None or most < 1:
            raise ConfigError(f"{self._owner}: batch_rows = {shown(batch_rows)}; give an integer >= 1")
        return self._batches(most, self._core.version)

    def _batches(self, batch_rows: int, version: int) -> Iterator[Any]:
        cursor = 0
        while True:
            rows, cursor = self._core.scan(cursor, min(batch_rows, _INT64_MAX))
            if len(rows) == 0:
                self._check_version(version)
                return
            keys, frequency, timestamp = self._core.columns(rows)
            weights = np.empty((len(rows), self.dim), dtype=self._kind.door)
            state = np.empty((len(rows), self.state_dim), dtype=np.float32)
            self._core.read_into(rows, weights, None, [state] if self.state_dim else [])
            self._check_version(version)
            if self._core.with_filter:
                yield keys, weights, state, frequency, timestamp
            else:
                yield keys, weights, state, None, None

    def _check_version(self, version: int) -> None:
        if self._core.version != version:
            raise ChangedError(
                f"{self._owner}: changed during items(); collect the keys first, or change it afterwards"
            )

    def __len__(self) -> int:
        return len(self._core)

    def __contains__(self, key: object) -> bool:
        value = whole_number(key)
        if value is None:
            return False
        return _INT64_MIN <= value <= _INT64_MAX and int(self._core.find(np.array([value], dtype=np.int64))[0]) >= 0

    def stats(self) -> TableStats:
        """Return counts and bytes by part: see `embcache._core.table.Table.stats`."""
        return self._core.stats()

    def check(self) -> None:
        """Verify every invariant of the table, in time proportional to its size; `AssertionError` says what is broken."""
        self._core.check()

    def flush(self) -> None:
        """Make changes durable and the directory clean; reading calls go on meanwhile. In memory there is nothing to do.

        Raises
        ------
        DiskFullError, StorageError
            The directory is as unclean as it was; the table can be used on, and after a full disk flushed again.
        """
        self._core.flush()

    def close(self) -> None:
        """Flush and free once running calls have returned; later calls raise `ClosedError`. Closing twice is allowed.

        Raises
        ------
        DiskFullError, StorageError
            The flush failed, and the table stays open; where somebody deleted the directory, it is closed.
        """
        self._core.close()

    def __enter__(self) -> EmbTable:
        len(self._core)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._core.directory is None:
            raise ConfigError(
                "an EmbTable in memory cannot be copied or pickled: its rows are host memory of this process; make a new one, and "
                "copy rows with items() and assign()"
            )
        options = {
            "state_dim": self.state_dim,
            "dtype": self._core.dtype,
            "initializer": self.initializer,
            "seed": self.seed,
            "directory": self.directory,
            "num_threads": self._core.num_threads,
        }
        return _reopen, (type(self), self.name, self.dim, options)

    if not TYPE_CHECKING:  # for a type checker, only the attributes above exist

        def __getattr__(self, name: str) -> Any:
            """Reached only for what `__init__` would have set, or for what does not exist."""
            if name in ("_core", "_owner", "_kind", "name", "initializer"):
                raise ClosedError(f"{type(self).__name__}: never constructed; make one with EmbTable(name, dim)")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        rows = "closed" if self.closed else f"{len(self)} rows"
        kind = "" if self.dtype == "float32" else f", dtype={self.dtype!r}"
        return f"EmbTable({self.name!r}, dim={self.dim}, state_dim={self.state_dim}{kind}, {rows})"
