"""What a batch of a pipeline holds: which objects in it are features, for which collection, and how the rest gets to a device.

A batch may be anything: tuples, lists, dicts, dataclasses and plain objects of them are looked into; a `JaggedFeatures` or a
TorchRec ``KeyedJaggedTensor`` in it is features, known by its methods. Features stay on the host, where plans are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .errors import ConfigError, ShapeError
from .features import JaggedFeatures

__all__ = ["features_of", "is_features", "to_device", "wanted"]

METHODS = ("keys", "values", "lengths", "weights_or_none")
DEEPEST = 8
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.nn.Module)


def is_features(value: Any) -> bool:
    """Whether `value` is a batch of jagged features, ours or TorchRec's."""
    if isinstance(value, JaggedFeatures):
        return True
    return not isinstance(value, (PLAIN, Mapping, type)) and all(
        callable(getattr(value, name, None)) for name in METHODS
    )


def features_of(batch: Any) -> list[Any]:
    """The features objects in a batch, each once, in the order in which they lie there."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for value in _walk(batch, seen, 0):
        found.setdefault(id(value), value)
    return list(found.values())


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, PLAIN) or depth > DEEPEST or id(value) in seen:
        return
    if is_features(value):
        yield value
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _walk(part, seen, depth + 1)


def _parts(value: Any) -> list[Any]:
    """What `value` holds, where it is a container or a plain object."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return list(value)
    names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    held = [getattr(value, name) for name in names if hasattr(value, name)]
    return held + list(getattr(value, "__dict__", {}).values())


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`; features stay where they are. On the CPU it is the batch itself.

    An object of a type that is not known moves itself, by its ``to``; without one it stays as it is.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if is_features(batch) or isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, tuple):
        parts = [to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [to_device(part, device) for part in batch]
    if isinstance(batch, dict):
        return {name: to_device(part, device) for name, part in batch.items()}
    if callable(getattr(batch, "to", None)):
        try:
            return batch.to(device, non_blocking=True)
        except TypeError:  # a `to` of the user's own that knows no such word
            return batch.to(device)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **{name: to_device(part, device) for name, part in fields.items()})
    return batch


Chooser = Callable[[Any], Any]


def wanted(batch: Any, needs: Mapping[str, Sequence[str]], choose: Chooser | None) -> list[tuple[str, Any]]:
    """Which features objects which collection is going to see, in the order in which they are to be planned.

    Parameters
    ----------
    batch
    needs : mapping
        Path of a collection in the model -> names of its features.
    choose : callable, optional
        The user's ``features=``: gives an object, several in order, or a dict from the path of a collection to either.

    Returns
    -------
    list of (path, object)

    Raises
    ------
    ConfigError
        Several objects of the batch have all the features that a collection needs, or `choose` gave something else.
    """
    if choose is None:
        objects = features_of(batch)
        names = [set(value.keys()) for value in objects]
        pairs = []
        for path, features in needs.items():
            fitting = [value for value, has in zip(objects, names, strict=True) if has.issuperset(features)]
            if len(fitting) > 1:
                raise ConfigError(
                    f"{len(fitting)} objects of the batch have all the features {list(features)!r} of collection {path!r}; say with "
                    "TrainPipeline(features=...) which of them go into its forward, in order"
                )
            pairs += [(path, value) for value in fitting]
        return pairs
    chosen = choose(batch)
    if isinstance(chosen, Mapping) and not is_features(chosen):
        unknown = sorted(set(map(str, chosen)) - set(needs))
        if unknown:
            raise ConfigError(f"features(batch) names {unknown!r}; the model's collections are {sorted(needs)!r}")
        return [(path, value) for path, values in chosen.items() for value in _objects(values)]
    objects = _objects(chosen)
    return [
        (path, value) for path, features in needs.items() for value in objects if set(value.keys()).issuperset(features)
    ]


def _objects(chosen: Any) -> list[Any]:
    """One features object or a sequence of them, as a list."""
    objects = [chosen] if is_features(chosen) else list(chosen) if isinstance(chosen, (tuple, list)) else [chosen]
    for value in objects:
        if not is_features(value):
            raise ShapeError(
                f"features(batch) gave a {type(value).__name__}; give a JaggedFeatures, a torchrec KeyedJaggedTensor, or a list of them"
            )
    return objects
