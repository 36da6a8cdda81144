"""The torch-side containers: a batch of jagged features in, keyed or jagged embeddings out.

They stand in for TorchRec's ``KeyedJaggedTensor``, ``KeyedTensor`` and ``JaggedTensor`` (same method names, same
layout) so that nothing here needs TorchRec; a real ``KeyedJaggedTensor`` is accepted wherever a `JaggedFeatures` is,
by its methods, not by its type. This file owns the checks of a batch. It never looks at tables.

A ``KeyedJaggedTensor`` may have another batch size per feature, and inverse indices that say which of a feature's examples
each example of the batch is (TorchRec's variable batch). As `JaggedFeatures` such a feature has empty bags at its end, as many as
it has fewer examples than the largest; `stride_of` and `inverse_of` are what outputs are cut and spread by.

Layout: feature-major. ``lengths[f * B + b]`` is the number of values of feature ``f`` in example ``b``; the values of
feature 0 come first, example by example, then those of feature 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch

from ._core.batch import lengths_fit
from .errors import ShapeError

__all__ = ["JaggedFeatures", "JaggedTensor", "KeyedTensor", "as_jagged_features"]


LABEL_DTYPES = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def _names(owner: str, keys: Any) -> tuple[str, ...]:
    """`keys` as a tuple of strings, or `ShapeError`."""
    try:
        names = () if isinstance(keys, str) else tuple(keys)
    except TypeError:  # not iterable
        names = (None,)
    if isinstance(keys, str) or not all(isinstance(name, str) for name in names):
        raise ShapeError(f"{owner}: keys = {keys!r}; give a list of feature names")
    return names


def _as_tensor(owner: str, name: str, value: Any) -> torch.Tensor:
    """Return `value` (tensor, array or sequence) as a one-dimensional tensor, or raise `ShapeError`."""
    if isinstance(value, np.ma.MaskedArray):
        raise ShapeError(f"{owner}: {name} is a masked array; give a plain one: filled(...) or compressed()")
    if not isinstance(value, torch.Tensor):
        try:
            array = np.asarray(value)
            # torch shares memory with the array and cannot express read-only, unaligned or negative strides: copy those.
            plain = array.flags.carray
            if array.size == 0 and not isinstance(value, np.ndarray):
                array = array.astype(np.int64)  # an empty list is float64 to NumPy, but has no dtype of its own
            value = torch.from_numpy(array if plain else array.copy())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(
                f"{owner}: {name} = {value!r} is not an array of numbers; give a tensor or a NumPy array"
            ) from error
    if value.is_nested or value.layout is not torch.strided:
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise ShapeError(f"{owner}: {name} is {kind}; give a dense one (to_dense() of a sparse tensor)")
    if value.is_meta:
        raise ShapeError(f"{owner}: {name} is a meta tensor, which has no data; give one on a real device")
    if value.dim() != 1:
        raise ShapeError(f"{owner}: {name} has shape {tuple(value.shape)}; give one dimension")
    # A lazily negated or conjugated view: NumPy and the kernels read memory, which holds the other sign.
    return value.resolve_neg().resolve_conj()


def _as_int64(owner: str, name: str, value: Any) -> torch.Tensor:
    """Return `value` as a contiguous int64 tensor; int32 is widened, anything else refused."""
    tensor = _as_tensor(owner, name, value)
    if tensor.dtype is torch.int32:
        tensor = tensor.to(torch.int64)
    elif tensor.dtype is not torch.int64:
        raise ShapeError(f"{owner}: {name} has dtype {tensor.dtype}; give int64 (or int32, which is widened)")
    return tensor.contiguous()


def check_lengths(owner: str, lengths: np.ndarray, value_count: int) -> None:
    """Raise `ShapeError` unless `lengths` are >= 0 and sum to `value_count`.

    Lengths near 2**63 that would wrap round to the right sum do not pass.
    """
    if not lengths_fit(lengths, value_count):
        refuse_lengths(owner, lengths, value_count)


def refuse_lengths(owner: str, lengths: np.ndarray, value_count: int) -> NoReturn:
    """Raise the `ShapeError` of `check_lengths` for lengths that do not fit."""
    low, high = int(lengths.min(initial=0)), int(lengths.max(initial=0))
    if low < 0:
        raise ShapeError(f"{owner}: lengths[{int(lengths.argmin())}] = {low}; a length is >= 0")
    if high > value_count:
        raise ShapeError(
            f"{owner}: lengths[{int(lengths.argmax())}] = {high}, but there are {value_count} values in all"
        )
    total = int(lengths.sum())
    raise ShapeError(f"{owner}: lengths sum to {total}, but there are {value_count} values; they must agree")


class JaggedFeatures:
    """A batch of sparse features: for each feature and example, any number of int64 keys.

    Parameters
    ----------
    keys : sequence of str
        Feature names, each once.
    values : int64 tensor, shape (n,)
        Keys of embedding rows, feature-major. Every int64 is legal. int32 is widened.
    lengths : int64 tensor, shape (len(keys) * B,)
        Number of values of each (feature, example); int32 is widened.
    weights : float tensor, shape (n,), optional
        Per-sample weights; converted to float32. They receive a gradient if they require one.
    timestamps : int64 tensor, shape (n,), optional
        Event time of each value, for tables with time eviction.
    labels : tensor, shape (B,), optional
        Of each example; above 0 is a click of all its keys, for tables with the show/click policy. bool, int8 to int64,
        uint8, float16, bfloat16, float32 or float64; planning for such a table refuses NaN.

    Raises
    ------
    ShapeError
        A dtype or shape is wrong, a length is negative, or the lengths do not sum to the number of values.

    Notes
    -----
    The tensors are held, not copied: do not change them while a plan of this batch is being made. Not thread-safe to
    mutate, safe to share between threads for reading.

    Examples
    --------
    >>> import torch
    >>> batch = JaggedFeatures(["user", "genre"], torch.tensor([7, 9, 1, 2, 3]), torch.tensor([1, 1, 2, 1]))
    >>> batch.batch_size
    2
    >>> batch["genre"].lengths().tolist()
    [2, 1]
    """

    __slots__ = ("_batch_size", "_keys", "_labels", "_lengths", "_offsets", "_timestamps", "_values", "_weights")

    def __init__(
        self,
        keys: Sequence[str],
        values: Any,
        lengths: Any,
        weights: Any = None,
        timestamps: Any = None,
        labels: Any = None,
    ) -> None:
        owner = "JaggedFeatures"
        self._keys = _names(owner, keys)
        if len(set(self._keys)) != len(self._keys):
            raise ShapeError(f"{owner}: keys = {list(keys)!r} has a name twice; list each feature once")
        self._values = _as_int64(owner, "values", values)
        self._lengths = _as_int64(owner, "lengths", lengths)
        count, features = self._values.numel(), len(self._keys)
        if features == 0 and self._lengths.numel():
            raise ShapeError(f"{owner}: {self._lengths.numel()} lengths but no keys; give the feature names")
        if features and self._lengths.numel() % features:
            raise ShapeError(
                f"{owner}: {self._lengths.numel()} lengths for {features} features; give features * batch size of them"
            )
        self._batch_size = self._lengths.numel() // features if features else 0
        check_lengths(owner, self._lengths.detach().cpu().numpy(), count)
        self._weights = None
        if weights is not None:
            weights = _as_tensor(owner, "weights", weights)
            if not weights.is_floating_point() and weights.numel():
                raise ShapeError(f"{owner}: weights have dtype {weights.dtype}; give float32")
            self._weights = weights.to(torch.float32).contiguous()
        self._timestamps = None if timestamps is None else _as_int64(owner, "timestamps", timestamps)
        for name, tensor in (("weights", self._weights), ("timestamps", self._timestamps)):
            if tensor is not None and tensor.numel() != count:
                raise ShapeError(f"{owner}: {tensor.numel()} {name} for {count} values; give one a value")
        self._labels = None
        if labels is not None:
            self._labels = _as_tensor(owner, "labels", labels)
            if self._labels.dtype not in LABEL_DTYPES:
                raise ShapeError(
                    f"{owner}: labels have dtype {self._labels.dtype}, which cannot be compared with 0 everywhere; "
                    "give bool, int8 to int64, uint8, float16, bfloat16, float32 or float64"
                )
            if self._labels.numel() != self._batch_size:
                raise ShapeError(
                    f"{owner}: {self._labels.numel()} labels for a batch of {self._batch_size}; give one an example"
                )
        self._offsets: list[int] | None = None

    def keys(self) -> list[str]:
        """Feature names, in order."""
        return list(self._keys)

    def values(self) -> torch.Tensor:
        """int64 (n,): the keys of embedding rows."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """int64 (features * B,)."""
        return self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """float32 (n,), or None."""
        return self._weights

    def weights(self) -> torch.Tensor:
        """float32 (n,); raises `ShapeError` if there are none."""
        if self._weights is None:
            raise ShapeError("JaggedFeatures: this batch has no weights; give weights=... when making it")
        return self._weights

    def timestamps_or_none(self) -> torch.Tensor | None:
        """int64 (n,), or None."""
        return self._timestamps

    def labels_or_none(self) -> torch.Tensor | None:
        """Shape (B,), or None."""
        return self._labels

    @property
    def batch_size(self) -> int:
        """Number of examples, B."""
        return self._batch_size

    def stride(self) -> int:
        """Number of examples, under TorchRec's name."""
        return self._batch_size

    def offsets(self) -> torch.Tensor:
        """int64 (features * B + 1,): where each bag starts."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._lengths.device)
        return torch.cat([zero, self._lengths.cumsum(0)])

    def _feature_offsets(self) -> list[int]:
        """Where each feature's values start, and the end."""
        if self._offsets is None:
            per_feature = self._lengths.view(len(self._keys), -1).sum(1).tolist() if self._keys else []
            self._offsets = [0, *accumulate(per_feature)]
        return self._offsets

    def __getitem__(self, key: str) -> JaggedTensor:
        try:
            f = self._keys.index(key)
        except ValueError:
            raise KeyError(f"JaggedFeatures: no feature {key!r}; there are {list(self._keys)!r}") from None
        start, stop = self._feature_offsets()[f : f + 2]
        lengths = self._lengths[f * self._batch_size : (f + 1) * self._batch_size]
        return JaggedTensor(
            self._values[start:stop], lengths, None if self._weights is None else self._weights[start:stop]
        )

    def _rebuilt(self, values: torch.Tensor, lengths: torch.Tensor, *others: torch.Tensor | None) -> JaggedFeatures:
        """A copy of self around other tensors of the same content, without checking them again."""
        copy = object.__new__(JaggedFeatures)
        copy._keys, copy._batch_size, copy._offsets = self._keys, self._batch_size, self._offsets
        copy._values, copy._lengths = values, lengths
        copy._weights, copy._timestamps, copy._labels = others
        return copy

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedFeatures:
        """Return this batch on `device`; tensors already there are shared."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        others = [
            None if tensor is None else move(tensor) for tensor in (self._weights, self._timestamps, self._labels)
        ]
        return self._rebuilt(move(self._values), move(self._lengths), *others)

    def pin_memory(self) -> JaggedFeatures:
        """Return this batch in page-locked host memory (a DataLoader with ``pin_memory=True`` calls this)."""
        others = [
            None if tensor is None else tensor.pin_memory()
            for tensor in (self._weights, self._timestamps, self._labels)
        ]
        return self._rebuilt(self._values.pin_memory(), self._lengths.pin_memory(), *others)

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = (self._values, self._lengths, self._weights, self._timestamps, self._labels)
        return (JaggedFeatures, (list(self._keys), *tensors))

    def __repr__(self) -> str:
        extras = [name for name in ("weights", "timestamps", "labels") if getattr(self, f"_{name}") is not None]
        return f"JaggedFeatures(keys={list(self._keys)!r}, batch_size={self._batch_size}, values={self._values.numel()}, with={extras!r})"


def as_jagged_features(batch: Any) -> JaggedFeatures:
    """Return `batch` as `JaggedFeatures`; a TorchRec ``KeyedJaggedTensor`` is recognized by its methods.

    Raises
    ------
    ShapeError
        `batch` is neither, or fails the checks of `JaggedFeatures`.
    """
    if isinstance(batch, JaggedFeatures):
        return batch
    methods = ("keys", "values", "lengths", "weights_or_none")
    if not all(callable(getattr(batch, name, None)) for name in methods):
        raise ShapeError(
            f"features have type {type(batch).__name__}; give a JaggedFeatures or a torchrec KeyedJaggedTensor"
        )
    lengths, strides = batch.lengths(), stride_of(batch)
    if strides is not None:
        inverse_of(batch)  # checked before anything is planned
        lengths = _even(lengths, list(strides.values()))
    timestamps = getattr(batch, "timestamps_or_none", getattr(batch, "timestamps", None))
    timestamps = timestamps() if callable(timestamps) else timestamps
    labels = getattr(batch, "labels_or_none", None)
    labels = labels() if callable(labels) else None
    return JaggedFeatures(list(batch.keys()), batch.values(), lengths, batch.weights_or_none(), timestamps, labels)


def stride_of(batch: Any) -> dict[str, int] | None:
    """Number of examples of each feature, where `batch` says one per feature; else None."""
    variable = getattr(batch, "variable_stride_per_key", None)
    if not callable(variable) or not variable():
        return None
    strides = [int(stride) for stride in batch.stride_per_key()]
    if len(strides) != len(batch.keys()) or min(strides, default=0) < 0 or sum(strides) != batch.lengths().numel():
        raise ShapeError(
            f"this KeyedJaggedTensor has {len(batch.keys())} features of {strides!r} examples and {batch.lengths().numel()} lengths; give one "
            "length for each feature and example"
        )
    return dict(zip(batch.keys(), strides, strict=True))


def inverse_of(batch: Any) -> dict[str, torch.Tensor] | None:
    """For each feature which of its examples every example of the batch is, int64 (B,); None where `batch` does not say.

    Raises
    ------
    ShapeError
        A number is none of the feature's examples, or the shape is not (features, B).
    """
    found = getattr(batch, "inverse_indices_or_none", None)
    found = found() if callable(found) else None
    if found is None:
        return None
    names, numbers = found
    numbers = torch.as_tensor(numbers)
    if numbers.dim() != 2 or len(numbers) != len(names) or numbers.is_floating_point():
        raise ShapeError(
            f"inverse_indices: {len(names)} features and a {numbers.dtype} tensor of shape {tuple(numbers.shape)}; give integers, "
            "(features, batch size)"
        )
    sizes = stride_of(batch) or dict.fromkeys(batch.keys(), int(batch.stride()))
    for name, row in zip(names, numbers, strict=True):
        low, high = (int(row.min()), int(row.max())) if row.numel() else (0, -1)
        if low < 0 or high >= sizes.get(name, 2**63):
            raise ShapeError(
                f"inverse_indices of feature {name!r} go from {low} to {high}, and it has {sizes[name]} examples; give 0 to "
                f"{sizes[name] - 1}"
            )
    return dict(zip(names, numbers.to(torch.int64), strict=True))


def inverse_for(batch: Any, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """`inverse_of` for pooled outputs of these features, which stand side by side.

    Raises
    ------
    ShapeError
        Also where the features have several batch sizes and no inverse indices, or these lack one of them.
    """
    if isinstance(batch, JaggedFeatures):  # of one batch size
        return None
    inverse = inverse_of(batch)
    if inverse is None:
        strides = stride_of(batch) or {}
        if len({strides[name] for name in names if name in strides}) > 1:
            raise ShapeError(
                f"this KeyedJaggedTensor has another batch size per feature ({strides!r}), and pooled outputs stand side by side; give it "
                "inverse_indices"
            )
        return None
    missing = sorted(set(names) - set(inverse))
    if missing:
        raise ShapeError(f"inverse_indices have no feature {missing[0]!r}; they have {list(inverse)!r}")
    return inverse


def spread(
    values: torch.Tensor, inverse: Mapping[str, torch.Tensor], names: Sequence[str], dims: Sequence[int]
) -> torch.Tensor:
    """Pooled values (B', sum of dims) of these features with row ``inverse[name][b]`` of each block in row b, (B, sum of dims)."""
    blocks = torch.split(values, list(dims), dim=1)
    return torch.cat(
        [block.index_select(0, inverse[name].to(values.device)) for name, block in zip(names, blocks, strict=True)],
        dim=1,
    )


def _even(lengths: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """`lengths` of features with `strides` examples each, filled up with empty bags to the largest."""
    most = max(strides, default=0)
    parts = torch.split(lengths, strides)
    return torch.cat([part for one in parts for part in (one, one.new_zeros(most - len(one)))]) if parts else lengths


class JaggedTensor:
    """Rows of one feature, a variable number an example.

    Parameters
    ----------
    values : tensor, shape (n, ...)
    lengths : int64 tensor, shape (B,)
    weights : tensor, shape (n,), optional

    Examples
    --------
    >>> import torch
    >>> JaggedTensor(torch.ones(3, 2), torch.tensor([1, 2])).to_padded_dense().shape
    torch.Size([2, 2, 2])
    """

    __slots__ = ("_lengths", "_values", "_weights")

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self) -> torch.Tensor:
        """Shape (n, ...): the rows, example by example."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """int64 (B,): rows of each example."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """int64 (B + 1,): where each example's rows start."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._lengths.device)
        return torch.cat([zero, self._lengths.cumsum(0)])

    def weights_or_none(self) -> torch.Tensor | None:
        """Shape (n,), or None."""
        return self._weights

    def to_dense(self) -> list[torch.Tensor]:
        """The rows of each example as a list of B tensors."""
        return list(torch.split(self._values, self._lengths.tolist()))

    def to_padded_dense(self, length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """Shape (B, length, ...): each example's rows, cut or padded to `length` (default: the longest)."""
        longest = int(self._lengths.max()) if self._lengths.numel() else 0
        length = longest if length is None else length
        column = torch.arange(length, device=self._values.device)
        lengths = self._lengths.to(self._values.device)
        present = column < lengths.unsqueeze(1)
        out = self._values.new_full((len(lengths), length, *self._values.shape[1:]), padding_value)
        source = (self.offsets()[:-1].to(self._values.device).unsqueeze(1) + column)[present]
        return out.index_put((present,), self._values[source])

    def __repr__(self) -> str:
        return f"JaggedTensor(values={tuple(self._values.shape)}, lengths={tuple(self._lengths.shape)})"


class KeyedTensor:
    """Pooled embeddings: one (B, dim) block a feature, side by side in one (B, sum of dims) tensor.

    Parameters
    ----------
    keys : sequence of str
    dims : sequence of int
        Width of each key's block.
    values : tensor, shape (B, sum(dims))

    Examples
    --------
    >>> import torch
    >>> pooled = KeyedTensor(["a", "b"], [2, 3], torch.zeros(4, 5))
    >>> pooled["b"].shape
    torch.Size([4, 3])
    """

    __slots__ = ("_blocks", "_dims", "_keys", "_values")

    def __init__(self, keys: Sequence[str], dims: Sequence[int], values: torch.Tensor) -> None:
        if len(keys) != len(dims) or values.dim() != 2 or values.shape[1] != sum(dims):
            raise ShapeError(
                f"KeyedTensor: {len(keys)} keys, dims {list(dims)!r} and values of shape {tuple(values.shape)} do not fit"
            )
        self._keys, self._dims, self._values = list(keys), list(dims), values
        self._blocks: dict[str, torch.Tensor] | None = None

    def keys(self) -> list[str]:
        """Names of the blocks, in column order."""
        return list(self._keys)

    def values(self) -> torch.Tensor:
        """Shape (B, sum of dims)."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Width of each block."""
        return list(self._dims)

    def offset_per_key(self) -> list[int]:
        """First column of each block, and the end."""
        return [0, *accumulate(self._dims)]

    def to_dict(self) -> Mapping[str, torch.Tensor]:
        """Name -> (B, dim) block. The blocks are views of `values`."""
        if self._blocks is None:
            # One split for all: its backward is one concatenation, where a slice each would pad a full-width gradient each.
            self._blocks = (
                dict(zip(self._keys, torch.split(self._values, self._dims, dim=1), strict=True)) if self._keys else {}
            )
        return self._blocks

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self.to_dict()[key]
        except KeyError:
            raise KeyError(f"KeyedTensor: no key {key!r}; there are {self._keys!r}") from None

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys!r}, dims={self._dims!r}, values={tuple(self._values.shape)})"
