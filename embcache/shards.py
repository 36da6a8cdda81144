"""Tensors of which each rank holds parts, as torch shows them: saved part by part, and put together again from whatever parts there are.

TorchRec's own sharded tables are in ``state_dict()`` as ``ShardedTensor`` (or ``DTensor``), and their optimizer's state in the
``state_dict()`` of their fused optimizer. Both show the memory that trains, not copies of it. Each rank writes the parts that it
holds, with their places in the whole: ``shards/<rank>.json`` says which and where, ``parts/<rank>.*`` holds them. A restore copies from all parts that
overlap those which are wanted here. So ranks and plans may be others than they were, as long as the whole has the same shape.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint import Reader
from .errors import ConfigError
from .values import decode, encode

__all__ = ["SavedParts", "Sharded", "encode_parts", "sharded"]

Place = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the whole, and its shape


@dataclass(frozen=True)
class Sharded:
    """A tensor of which this process holds parts.

    Attributes
    ----------
    size : tuple of int
        Of the whole.
    parts : list of (tuple of int, Tensor)
        Where each begins in the whole, and the part itself: the memory that trains.
    """

    size: tuple[int, ...]
    parts: list[tuple[tuple[int, ...], torch.Tensor]]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Sharded:
        """A plain tensor, as its only part."""
        return cls(tuple(tensor.shape), [((0,) * tensor.dim(), tensor.detach())])


def sharded(value: Any, name: str) -> Sharded | None:
    """`value`, which messages call `name`, as parts; None where it is not spread over processes.

    Raises
    ------
    ConfigError
        It is spread in a way in which no part is the value of any element: as sums that are yet to be made.
    """
    if _is(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
        shards = value.local_shards()
        return Sharded(
            tuple(value.metadata().size), [(tuple(one.metadata.shard_offsets), one.tensor.detach()) for one in shards]
        )
    if not _is(value, "torch.distributed.tensor", "DTensor"):
        return None
    local: Any = value.to_local()
    if hasattr(local, "local_shards"):  # TorchRec's, of several parts
        pairs = zip(local.local_offsets(), local.local_shards(), strict=True)
        return Sharded(tuple(value.shape), [(tuple(offsets), one.detach()) for offsets, one in pairs])
    if any(placement.is_partial() for placement in value.placements):
        raise ConfigError(
            f"{name} is a DTensor with the placements {value.placements}; redistribute it before it is saved"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    parts = [(tuple(offsets), local.detach())] if local.numel() else []
    return Sharded(tuple(value.shape), parts)


def _is(value: Any, module: str, kind: str) -> bool:
    """Whether it is one of these; where nobody has imported the module there is none, and importing it takes a second."""
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(value, found)


def encode_parts(
    rank: int, found: Mapping[str, Sharded], rates: Mapping[str, list[float]]
) -> dict[str, tuple[bytes, bytes]]:
    """What a rank writes of its parts, by the name of the value: copies, as of now. `rates` are learning rates that go with them."""
    tensors: dict[str, torch.Tensor] = {}
    index: dict[str, Any] = {}
    for name, one in found.items():
        places = []
        for offsets, part in one.parts:
            key = str(len(tensors))
            tensors[key] = part
            places.append([list(offsets), list(part.shape), str(part.dtype), key])
        index[name] = [list(one.size), places]
    about = {"tensors": index, "rates": {path: list(each) for path, each in rates.items()}}
    # Names of its own: whoever copies a generation for another number of ranks carries all of them over.
    return {f"shards/{rank}": encode(about, "the shards"), f"parts/{rank}": encode(tensors, "the model's shards")}


class SavedParts:
    """The parts that a generation holds, of all its writers.

    Attributes
    ----------
    sizes : dict of str to tuple of int
        Size of the whole, by name.
    rates : dict of str to list of float
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.rates: dict[str, list[float]] = {}
        self._places: dict[str, dict[Place, tuple[str, str, str]]] = {}
        self._read: dict[str, dict[str, torch.Tensor]] = {}
        for blob in reader.state_names:
            if not blob.startswith("shards/"):
                continue
            writer = blob.removeprefix("shards/").removesuffix(".json")
            about = decode(reader.state(blob), b"", self._owner)
            self.rates |= about["rates"]
            for name, (size, places) in about["tensors"].items():
                self.sizes[name] = tuple(size)
                held = self._places.setdefault(name, {})
                for offsets, shape, dtype, key in places:  # of copies of one part the first will do
                    held.setdefault((tuple(offsets), tuple(shape)), (writer, dtype, key))

    @property
    def _owner(self) -> str:
        return f"generation {self._reader.generation}, shards"

    def fill(self, name: str, wanted: Sharded) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (memory of `wanted`, what belongs there). Nothing is copied yet.

        Raises
        ------
        ConfigError
            The whole has another size or type of elements, or some of it is not in the generation.
        CorruptionError
        """
        if self.sizes[name] != wanted.size:
            raise ConfigError(
                f"{name} is {wanted.size} here, in the checkpoint {self.sizes[name]}; build the model as it was saved, for as many ranks "
                "where its sharding makes the shape depend on them"
            )
        pairs = []
        for start, part in wanted.parts:
            missing = part.numel()
            for (other, shape), (writer, dtype, key) in self._places[name].items():
                low = [max(a, b) for a, b in zip(start, other, strict=True)]
                high = [min(a + n, b + m) for a, n, b, m in zip(start, part.shape, other, shape, strict=True)]
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                if dtype != str(part.dtype):
                    raise ConfigError(
                        f"{name} is {part.dtype} here, in the checkpoint {dtype}; build the model as it was saved"
                    )
                here, there = (
                    tensor[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, begin, strict=True))]
                    for tensor, begin in ((part, start), (self._tensors(writer)[key], other))
                )
                pairs.append((here, there))
                missing -= here.numel()
            if missing:
                raise ConfigError(
                    f"{name}: the checkpoint lacks {missing} elements of what this rank holds; it was saved by too few ranks of those that "
                    "trained"
                )
        return pairs

    def together(self, name: str) -> torch.Tensor:
        """The whole, on the CPU.

        Raises
        ------
        ConfigError, CorruptionError
        """
        kinds = {getattr(torch, dtype.removeprefix("torch.")) for _, dtype, _ in self._places[name].values()}
        made = torch.empty(self.sizes[name], dtype=kinds.pop() if kinds else torch.float32)
        for here, there in self.fill(name, Sharded.whole(made)):
            here.copy_(there)
        return made

    def _tensors(self, writer: str) -> dict[str, torch.Tensor]:
        """All parts of a writer, read once."""
        if writer not in self._read:
            reader = self._reader
            names = (f"parts/{writer}.json", f"parts/{writer}.safetensors")
            text, content = (reader.state(name) if name in reader.state_names else b"" for name in names)
            self._read[writer] = decode(text, content, self._owner)
        return self._read[writer]
