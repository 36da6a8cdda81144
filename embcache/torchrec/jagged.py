"""Jagged tensors whose values have timestamps, and whose examples may have labels.

TorchRec's ``KeyedJaggedTensor`` makes plain ones of itself in all its methods. These here carry the timestamps along: whatever reorders,
cuts or joins values does the same to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..errors import ShapeError

__all__ = ["JaggedTensorWithTimestamp", "KeyedJaggedTensorWithTimestamp"]


def _checked(owner: str, timestamps: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    """`timestamps` as int64, one a value."""
    if timestamps is None:
        return None
    if timestamps.dtype is torch.int32:
        timestamps = timestamps.to(torch.int64)
    if timestamps.dtype is not torch.int64 or timestamps.shape != values.shape:
        raise ShapeError(
            f"{owner}: timestamps are {timestamps.dtype} {tuple(timestamps.shape)}, values {tuple(values.shape)}; give one int64 a value"
        )
    return timestamps


class JaggedTensorWithTimestamp(JaggedTensor):
    """TorchRec's ``JaggedTensor`` with a timestamp for each value.

    Parameters
    ----------
    values, weights, lengths, offsets
        As there.
    timestamps : int64 tensor, shape of `values`, optional
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._timestamps = _checked("JaggedTensorWithTimestamp", timestamps, values)

    @property
    def timestamps(self) -> torch.Tensor | None:
        """int64, shape of the values, or None."""
        return self._timestamps

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensorWithTimestamp:
        """A copy on `device`."""
        moved = super().to(device, non_blocking)
        stamps = None if self._timestamps is None else self._timestamps.to(device, non_blocking=non_blocking)
        return JaggedTensorWithTimestamp(
            moved.values(), moved.weights_or_none(), moved.lengths_or_none(), moved.offsets_or_none(), stamps
        )

    def record_stream(self, stream: Any) -> None:
        """As TorchRec's."""
        super().record_stream(stream)
        if self._timestamps is not None:
            self._timestamps.record_stream(stream)


class KeyedJaggedTensorWithTimestamp(KeyedJaggedTensor):
    """TorchRec's ``KeyedJaggedTensor`` with a timestamp for each value, and a label for each example where the show/click policy asks.

    Parameters
    ----------
    keys, values
        As there.
    timestamps : int64 tensor, shape of `values`, optional
        Event times; int32 is widened.
    weights, lengths, offsets, ...
        As there.
    labels : tensor, shape (B,), optional
        Above 0 is a click.

    Notes
    -----
    ``permute``, ``split``, ``concat``, ``to``, ``pin_memory``, ``record_stream``, ``copy_``, ``flatten_lengths``, ``to_dict``, ``[key]``
    and ``from_jt_dict`` keep the timestamps, and the labels where examples stay the same; pytree functions do too.

    Examples
    --------
    >>> import torch
    >>> from embcache.torchrec import KeyedJaggedTensorWithTimestamp
    >>> batch = KeyedJaggedTensorWithTimestamp(
    ...     ["user", "item"], torch.tensor([7, 1, 2]), torch.tensor([100, 101, 102]), lengths=torch.tensor([1, 0, 1, 1])
    ... )
    >>> batch.permute([1, 0]).timestamps.tolist(), batch["item"].timestamps.tolist()
    ([101, 102, 100], [101, 102])
    """

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        timestamps: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Any = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], torch.Tensor] | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        super().__init__(
            keys=keys,
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            stride_per_key=stride_per_key,
            length_per_key=length_per_key,
            lengths_offset_per_key=lengths_offset_per_key,
            offset_per_key=offset_per_key,
            index_per_key=index_per_key,
            jt_dict=jt_dict,
            inverse_indices=inverse_indices,
        )
        self._timestamps = _checked("KeyedJaggedTensorWithTimestamp", timestamps, values)
        self._labels = labels

    @property
    def timestamps(self) -> torch.Tensor | None:
        """int64, one a value, or None."""
        return self._timestamps

    def timestamps_or_none(self) -> torch.Tensor | None:
        """int64, one a value, or None."""
        return self._timestamps

    def labels_or_none(self) -> torch.Tensor | None:
        """Shape (B,), or None."""
        return self._labels

    # ------------------------------------------------------------------------------------------------ making them

    @classmethod
    def wrap(
        cls, batch: KeyedJaggedTensor, timestamps: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> KeyedJaggedTensorWithTimestamp:
        """`batch` with timestamps and labels; its tensors are shared."""
        return cls(
            keys=batch._keys,
            values=batch._values,
            timestamps=timestamps,
            weights=batch._weights,
            lengths=batch._lengths,
            offsets=batch._offsets,
            stride=batch._stride,
            stride_per_key_per_rank=batch._stride_per_key_per_rank,
            stride_per_key=batch._stride_per_key,
            length_per_key=batch._length_per_key,
            lengths_offset_per_key=batch._lengths_offset_per_key,
            offset_per_key=batch._offset_per_key,
            index_per_key=batch._index_per_key,
            inverse_indices=batch._inverse_indices,
            labels=labels,
        )

    @staticmethod
    def from_offsets_sync(  # type: ignore[override]
        keys: list[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        timestamps: torch.Tensor | None = None,
        **options: Any,
    ) -> KeyedJaggedTensorWithTimestamp:
        """As TorchRec's, with timestamps."""
        made = KeyedJaggedTensorWithTimestamp(keys, values, timestamps, offsets=offsets, **options)
        made.sync()
        return made

    @staticmethod
    def from_lengths_sync(  # type: ignore[override]
        keys: list[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        timestamps: torch.Tensor | None = None,
        **options: Any,
    ) -> KeyedJaggedTensorWithTimestamp:
        """As TorchRec's, with timestamps."""
        made = KeyedJaggedTensorWithTimestamp(keys, values, timestamps, lengths=lengths, **options)
        made.sync()
        return made

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensorWithTimestamp:
        """Of a jagged tensor for each feature, all of them with timestamps or none."""
        stamps = [getattr(part, "timestamps", None) for part in jt_dict.values()]
        return KeyedJaggedTensorWithTimestamp.wrap(
            KeyedJaggedTensor.from_jt_dict(jt_dict), _joined("from_jt_dict", stamps)
        )

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensorWithTimestamp:
        """The features of all, side by side: all with timestamps or none; labels, where there are any, are the same ones."""
        stamps = [getattr(one, "_timestamps", None) for one in kjt_list]
        labels = [found for one in kjt_list if (found := getattr(one, "_labels", None)) is not None]
        if any(not torch.equal(labels[0], other) for other in labels[1:]):
            raise ShapeError(
                "concat: the labels of these batches differ, and examples have one each; join equal examples"
            )
        return KeyedJaggedTensorWithTimestamp.wrap(
            KeyedJaggedTensor.concat(kjt_list), _joined("concat", stamps), labels[0] if labels else None
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensorWithTimestamp:
        """As TorchRec's: no values, or on `device` as many as `kjt` has."""
        made = KeyedJaggedTensor.empty_like(kjt, device)
        stamps, labels = getattr(kjt, "_timestamps", None), getattr(kjt, "_labels", None)
        if stamps is not None:
            stamps = torch.empty(made.values().shape, dtype=torch.int64, device=made.values().device)
        if labels is not None:
            labels = torch.empty_like(labels, device=device) if device is not None else labels[:0]
        return KeyedJaggedTensorWithTimestamp.wrap(made, stamps, labels)

    # ------------------------------------------------------------------------------------------- of one, others

    def _segments(self, places: Iterable[int]) -> torch.Tensor | None:
        """Timestamps of the features at these places, one after the other."""
        if self._timestamps is None:
            return None
        parts = torch.split(self._timestamps, self.length_per_key()) if self._keys else ()
        chosen = [parts[place] for place in places]
        return torch.cat(chosen) if chosen else self._timestamps[:0]

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensorWithTimestamp:
        """The features in another order."""
        return self.wrap(super().permute(indices, indices_tensor), self._segments(indices), self._labels)

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Parts of so many features each."""
        made: list[KeyedJaggedTensor] = []
        start = 0
        for part in super().split(segments):
            stop = start + len(part.keys())
            made.append(self.wrap(part, self._segments(range(start, stop)), self._labels))
            start = stop
        return made

    def flatten_lengths(self) -> KeyedJaggedTensorWithTimestamp:
        """As TorchRec's."""
        return self.wrap(super().flatten_lengths(), self._timestamps, self._labels)

    def __getitem__(self, key: str) -> JaggedTensorWithTimestamp:
        return self._with_stamps(super().__getitem__(key), self._key_indices()[key])

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """A `JaggedTensorWithTimestamp` for each feature."""
        plain = KeyedJaggedTensor.to_dict(self, compute_offsets)
        return {key: self._with_stamps(part, place) for place, (key, part) in enumerate(plain.items())}

    def _with_stamps(self, part: JaggedTensor, place: int) -> JaggedTensorWithTimestamp:
        return JaggedTensorWithTimestamp(
            part.values(),
            part.weights_or_none(),
            part.lengths_or_none(),
            part.offsets_or_none(),
            self._segments([place]),
        )

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensorWithTimestamp:
        """A copy on `device`; `dtype` is that of the weights."""
        stamps, labels = (
            None if one is None else one.to(device, non_blocking=non_blocking)
            for one in (self._timestamps, self._labels)
        )
        return self.wrap(super().to(device, non_blocking, dtype), stamps, labels)

    def pin_memory(self) -> KeyedJaggedTensorWithTimestamp:
        """A copy in page-locked memory."""
        stamps, labels = (None if one is None else one.pin_memory() for one in (self._timestamps, self._labels))
        return self.wrap(super().pin_memory(), stamps, labels)

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensorWithTimestamp:
        """Take over the contents of `kjt`, of the same shapes."""
        super().copy_(kjt, non_blocking)
        for name in ("_timestamps", "_labels"):
            own, other = getattr(self, name), getattr(kjt, name, None)
            if own is not None and other is not None:
                own.copy_(other, non_blocking=non_blocking)
        return self

    def record_stream(self, stream: Any) -> None:
        """As TorchRec's."""
        super().record_stream(stream)
        for one in (self._timestamps, self._labels):
            if one is not None:
                one.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of all its tensors."""
        others = [one for one in (self._timestamps, self._labels) if one is not None]
        return super().size_in_bytes() + sum(one.element_size() * one.numel() for one in others)

    def clear_storage(self) -> int:
        """Free the memory of all its tensors; returns how many bytes."""
        freed = self.size_in_bytes()
        super().clear_storage()
        for one in (self._timestamps, self._labels):
            if one is not None:
                one.untyped_storage().resize_(0)
        return freed


def _joined(what: str, stamps: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [one for one in stamps if one is not None]
    if present and len(present) < len(stamps):
        raise ShapeError(f"{what}: {len(present)} of {len(stamps)} parts have timestamps; give all of them, or none")
    return torch.cat(present) if present else None


_FIELDS = ("_values", "_weights", "_lengths", "_offsets", "_stride_per_key_per_rank", "_timestamps", "_labels")


def _flatten(batch: KeyedJaggedTensorWithTimestamp) -> tuple[list[torch.Tensor | None], Any]:
    inverse = batch._inverse_indices
    names = None if inverse is None else inverse[0]
    tensors = [getattr(batch, name) for name in _FIELDS]
    return [*tensors, None if inverse is None else inverse[1]], (batch._keys, names)


def _flatten_with_keys(batch: KeyedJaggedTensorWithTimestamp) -> tuple[list[tuple[Any, Any]], Any]:
    tensors, context = _flatten(batch)
    return [(GetAttrKey(name), one) for name, one in zip((*_FIELDS, "_inverse_indices"), tensors, strict=True)], context


def _unflatten(tensors: Iterable[Any], context: Any) -> KeyedJaggedTensorWithTimestamp:
    values, weights, lengths, offsets, strides, stamps, labels, inverse = tensors
    keys, names = context
    made = KeyedJaggedTensorWithTimestamp(
        keys,
        values,
        weights=weights,
        lengths=lengths,
        offsets=offsets,
        stride_per_key_per_rank=strides,
        inverse_indices=None if names is None else (names, inverse),
        labels=labels,
    )
    made._timestamps = stamps  # may be anything that a tree function has made of them
    return made


register_pytree_node(
    KeyedJaggedTensorWithTimestamp,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="embcache.torchrec.KeyedJaggedTensorWithTimestamp",
)
