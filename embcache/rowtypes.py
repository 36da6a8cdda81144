"""The element types that a table's weights can have, and what each means for NumPy users.

Rows of every type are computed with in float32; a narrower type is a way to keep them, in half the memory. Widening is
exact; storing rounds to the nearest number of the type, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ConfigError, shown

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ROW_TYPES", "RowType", "row_type"]


@dataclass(frozen=True)
class RowType:
    """One element type of weights.

    Attributes
    ----------
    name : str
        What `dtype` of a table says.
    door : NumPy dtype
        What reads return, and writes take besides float32. NumPy has no bfloat16: there it is float32.
    storage : NumPy dtype
        Rows bit by bit: int16 for bfloat16.
    bytes : int
        Of an element.
    end : float
        Least size of a float32 that rounds to infinity.
    """

    name: str
    door: np.dtype[Any]
    storage: np.dtype[Any]
    bytes: int
    end: float

    def from_storage(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An array of `storage` as one of `door`."""
        if self.name != "bfloat16":
            return rows
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    def rounded(self, value: float) -> float:
        """What a row of this type holds after `value`, a number below `end` in size, was stored in it."""
        exact = np.array([value], dtype=np.float32)
        if self.name == "float16":
            return float(exact.astype(np.float16)[0])
        if self.name == "bfloat16":
            bits = exact.view(np.uint32)
            exact = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
                np.float32
            )
        return float(exact[0])


ROW_TYPES = {
    "float32": RowType("float32", np.dtype(np.float32), np.dtype(np.float32), 4, float("inf")),
    "float16": RowType("float16", np.dtype(np.float16), np.dtype(np.float16), 2, 65520.0),
    "bfloat16": RowType("bfloat16", np.dtype(np.float32), np.dtype(np.int16), 2, 3.39617752923046e38),
}


def row_type(owner: str, dtype: Any) -> RowType:
    """The type called `dtype`; `ConfigError` in the name of `owner` where there is none."""
    if not isinstance(dtype, str) or dtype not in ROW_TYPES:
        raise ConfigError(f"{owner}: dtype = {shown(dtype)}; give one of {', '.join(map(repr, ROW_TYPES))}")
    return ROW_TYPES[dtype]
