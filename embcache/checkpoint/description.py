"""What a table in a checkpoint is: enough to make it again, and to refuse rows that would mean something else."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .._core.digest import hash_strings
from ..errors import ConfigError, CorruptionError, shown
from ..rowtypes import ROW_TYPES, row_type

__all__ = ["TableDescription"]

_MOST_DIM = 1 << 20


@dataclass(frozen=True)
class TableDescription:
    """One table of a checkpoint.

    Attributes
    ----------
    name : str
        Unique in the checkpoint.
    dim, state_dim : int
        Weights, and floats of optimizer state, of a row.
    dtype : str
        Of the weights: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    initializer : list
        ``[kind, a, b]`` as the compiled table takes it.
    seed : int
    with_filter : bool
        Whether rows have a frequency and a timestamp.
    optimizer : dict, optional
        ``{"kind": ..., hyper-parameters}``; the kind decides what the state means.
    filter : dict, optional
        The rule of the filter, for the reader to compare.
    """

    name: str
    dim: int
    state_dim: int = 0
    dtype: str = "float32"
    initializer: list[Any] = field(default_factory=lambda: ["uniform", -0.05, 0.05])
    seed: int = 0
    with_filter: bool = False
    optimizer: dict[str, Any] | None = None
    filter: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        owner = "TableDescription"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"{owner}: name = {self.name!r}; give a non-empty string")
        for what, value, low in (("dim", self.dim, 1), ("state_dim", self.state_dim, 0)):
            if type(value) is not int or not low <= value <= 8 * _MOST_DIM:
                raise ConfigError(
                    f"{owner} of {self.name!r}: {what} = {shown(value)}; give an integer from {low} to {8 * _MOST_DIM}"
                )
        row_type(f"{owner} of {self.name!r}", self.dtype)

    @property
    def storage(self) -> np.dtype[Any]:
        """NumPy dtype of weights as they lie in a file: int16 for bfloat16."""
        return ROW_TYPES[self.dtype].storage

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a chunk: key, weights, state, and with a filter frequency and timestamp."""
        return 8 + self.dim * self.storage.itemsize + 4 * self.state_dim + (16 if self.with_filter else 0)

    @property
    def digest(self) -> int:
        """XXH3-64 of the name, which binds chunks to their table."""
        encoded = self.name.encode("utf-8", "surrogatepass")
        return int(hash_strings([encoded], 0)[0]) & 0xFFFFFFFFFFFFFFFF

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, body: Any) -> TableDescription:
        """What `to_json` gave; `CorruptionError` where it is something else. Fields of later versions are passed over."""
        try:
            return cls(**{one.name: body[one.name] for one in fields(cls) if one.name in body})
        except (ConfigError, TypeError, KeyError) as error:
            raise CorruptionError(f"the description of a table is not what this version writes ({error})") from None

    def changes(self, wanted: TableDescription) -> list[str]:
        """What differs in `wanted` and only concerns rows to come: seed, initializer, hyper-parameters, the filter's rule."""
        changed = []
        for what in ("seed", "initializer", "with_filter", "optimizer", "filter"):
            old, new = getattr(self, what), getattr(wanted, what)
            if isinstance(old, dict) and isinstance(new, dict):
                parts = [part for part in sorted({*old, *new}) if old.get(part) != new.get(part)]
                changed += [f"{what} {part}: {old.get(part)!r} -> {new.get(part)!r}" for part in parts]
            elif what == "initializer":
                if _as_kept(old) != _as_kept(new):
                    changed.append(f"{what}: {list(old)!r} -> {list(new)!r}")
            elif old != new:
                changed.append(f"{what}: {old!r} -> {new!r}")
        return changed

    def refuse_change(self, wanted: TableDescription) -> None:
        """Raise `ConfigError` where rows of this table cannot be rows of `wanted`: another dim, dtype or optimizer.

        The message says what to do.
        """
        old_kind, new_kind = (one.optimizer.get("kind") if one.optimizer else None for one in (self, wanted))
        differing = [
            f"{what} {old!r}, not {new!r}"
            for what, old, new in (
                ("dim", self.dim, wanted.dim),
                ("dtype", self.dtype, wanted.dtype),
                ("optimizer", old_kind, new_kind),
                ("state_dim", self.state_dim, wanted.state_dim),
            )
            if old != new and not (what == "optimizer" and (old is None or new is None))
        ]
        if differing:
            raise ConfigError(
                f"table {self.name!r}: the checkpoint has {', '.join(differing)}: its rows mean something else. Describe the table "
                "as it was saved; or give it another name, which starts it anew; or export the rows, convert them, and assign them"
            )


def _as_kept(initializer: Any) -> list[Any]:
    """An initializer with its numbers as a table keeps them: float32, which is what a table's directory gives back."""
    try:
        kind, *numbers = initializer
        with np.errstate(over="ignore"):
            return [kind, *(float(np.float32(number)) for number in numbers)]
    except (TypeError, ValueError):
        return [initializer]  # of a version that has others
