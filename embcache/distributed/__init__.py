"""Tables that many ranks share, on ``torch.distributed``: gloo on CPU. With nccl or hccl nobody has run them yet.

::

    torch.distributed.init_process_group("gloo")
    ebc = ec.distributed.ShardedEmbeddingBagCollection(tables, optimizer=ec.Adagrad(lr=0.01))
    for batch in ec.distributed.together(loader):        # until one rank has no more
        loss = model(ebc(batch.features), batch)
        loss.backward()                                  # the owners' rows are updated here

Rows are placed by vshard: rank r of w owns the keys whose hash, in its top 12 bits, is from ``ceil(r * 4096 / w)`` on. Each rank's
distinct keys travel to their owners once, with occurrence counts, newest timestamps and clicks; the owner counts, admits, inserts,
evicts and trains, once for the batch of all ranks.

Rooms: `collections` (the modules), `lookup` (autograd), `exchange` (what travels when), `parcels` (what lies where), `selection`
(sweeps that depend on the whole table), `wire` (16 bits), `ranks` (process groups, and ranks that are gone), `fingerprint` (what must be
alike), `turns` (who is at the end of its data). Nothing here knows TorchRec.
"""

from __future__ import annotations

from .collections import ShardedCollection, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from .ranks import Ranks
from .turns import owners, together

__all__ = [
    "Ranks",
    "ShardedCollection",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "owners",
    "together",
]
