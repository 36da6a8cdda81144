"""What the members of a crew are told to do."""

from __future__ import annotations

from typing import Any

from sharded_cases import Case, state_of, train

from embcache.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

__all__ = ["make", "train_case"]


def make(case: Case, reduction: str = "exact", **more: Any) -> Any:
    kind = ShardedEmbeddingBagCollection if case.pooled else ShardedEmbeddingCollection
    return kind(
        case.tables(),
        optimizer=case.make_optimizer(),
        accumulate=case.accumulate,
        reduction=reduction,
        **{"average": False, "timeout_s": 60.0, **more},
    )


def train_case(rank: int, world: int, case: Case, reduction: str, more: dict[str, Any]) -> Any:
    """Train a case; returns outputs, state and evictions of this rank, and what it has evaluated."""
    module = make(case, reduction, **more)
    outputs = train(case, module, rank, world, range(case.steps))
    stats = module.manager.stats()
    states = state_of(module.manager)
    step = module.manager.planner.step
    module.close()
    return outputs, states, stats["evicted"], step


def one_step(rank: int, world: int, case: Case, before: Any, step: int, more: dict[str, Any]) -> Any:
    """One step from a given state of rows, without filters; returns the state after it."""
    from embcache.distributed import owners

    module = make(case, "rank", **more)
    for name, state in before.items():
        mine = owners(state["keys"], world) == rank
        module.manager.table(name).assign(state["keys"][mine], state["weights"][mine], state["state"][mine])
    train(case, module, rank, world, range(step, step + 1))
    after = state_of(module.manager)
    module.close()
    return after
