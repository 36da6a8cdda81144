"""In which form rows and gradients travel.

Rows travel as they are kept, gradients in float32, so that nothing is lost; or in 16 bits, for half of the bytes. What that costs:
each element is rounded to nearest even, once on its way, so its relative error is at most 2**-11 for float16 (absolute at most 2**-25
below 2**-14) and 2**-8 for bfloat16. float16 ends at 65,504: finite values beyond are sent as that, infinite ones and NaN as they are.
Sums are always in float32, and what the owner keeps is not rounded. Half-precision rows are what a forward reads, not what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import ConfigError, shown
from ..layout import DimGroup
from .ranks import Channel

__all__ = ["Wire"]

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MOST_FLOAT16 = 65504.0


class Wire:
    """Packs the rows, or gradients, of all dim groups into one collective.

    Parameters
    ----------
    rows, gradients : str
        ``"float32"`` (as they are), ``"float16"`` or ``"bfloat16"``.
    """

    def __init__(self, rows: str = "float32", gradients: str = "float32") -> None:
        for name, value in (("rows", rows), ("gradients", gradients)):
            if not isinstance(value, str) or value not in TYPES:
                raise ConfigError(f"wire_{name} = {shown(value)}; give one of {', '.join(map(repr, TYPES))}")
        self.rows, self.gradients = rows, gradients

    def type_of(self, what: str, group: DimGroup) -> torch.dtype:
        """How a dim group's rows or gradients travel: rows that are kept in 16 bits as they are kept."""
        if what == "rows":
            return TYPES[group.dtype if group.dtype != "float32" else self.rows]
        return TYPES[self.gradients]

    def exchange(
        self,
        channel: Channel,
        what: str,
        values: Sequence[torch.Tensor],
        sent: np.ndarray,
        received: np.ndarray,
        groups: Sequence[DimGroup],
    ) -> list[torch.Tensor]:
        """Send ``values[g]`` (n, dim), cut by ``sent[g]`` to the ranks; returns the same of what has come, float32.

        Parameters
        ----------
        sent, received : int64 (G, world)
            Rows of each group to, and from, each rank.
        """
        world = channel.ranks.world
        dims = np.array([group.dim for group in groups])
        types = [self.type_of(what, group) for group in groups]
        given = [_narrowed(value, kind) for value, kind in zip(values, types, strict=True)]
        if world == 1:
            return [value.to(torch.float32) for value in given]
        sizes = np.array([kind.itemsize for kind in types]) * dims
        out_bytes = (sent * sizes[:, None]).sum(axis=0).tolist()
        in_bytes = (received * sizes[:, None]).sum(axis=0).tolist()
        if len(groups) == 1:
            packed = given[0].reshape(-1).view(torch.uint8)
        else:
            cuts = [torch.split(value, sent[g].tolist()) for g, value in enumerate(given)]
            packed = torch.cat(
                [cuts[g][d].reshape(-1).view(torch.uint8) for d in range(world) for g in range(len(groups))]
            )
        answer = channel.all_to_all(f"{what} of a batch", packed, out_bytes, in_bytes)
        if len(groups) == 1:
            return [answer.view(types[0]).view(-1, int(dims[0])).to(torch.float32)]
        lengths = (received.T * sizes[None, :]).reshape(-1).tolist()
        blocks = torch.split(answer, lengths)
        whole = []
        for g, (kind, dim) in enumerate(zip(types, dims.tolist(), strict=True)):
            joined = torch.cat([blocks[s * len(groups) + g] for s in range(world)])
            whole.append(joined.view(kind).view(-1, dim).to(torch.float32))
        return whole


def _narrowed(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`values` as they travel, contiguous."""
    if kind is torch.float16 and values.dtype is torch.float32:
        finite = torch.isfinite(values)
        values = torch.where(finite, values.clamp(-MOST_FLOAT16, MOST_FLOAT16), values)
    return values.to(kind).contiguous()
