"""What the members of a crew are told to do."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import torch
from sharded_cases import Case, batch_of, features_of, state_of, train

import embcache as ec
from embcache.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, owners, together


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
    module = make(case, "rank", **more)
    for name, state in before.items():
        mine = owners(state["keys"], world) == rank
        module.manager.table(name).assign(state["keys"][mine], state["weights"][mine], state["state"][mine])
    train(case, module, rank, world, range(step, step + 1))
    after = state_of(module.manager)
    module.close()
    return after


def save_part_way(rank: int, world: int, case: Case, path: str, at: int, delta: bool, background: bool) -> Any:
    """Train, save after `at` steps (twice, where a delta is wanted), train on; returns the state at the save, and at the end."""
    module = make(case)
    train(case, module, rank, world, range(at - 1))
    if delta:
        module.save(path)
    train(case, module, rank, world, range(at - 1, at))
    saved = state_of(module.manager)
    if background:
        generation = module.save(path, delta=delta, background=True, state={"done": at}).result(60)
    else:
        generation = module.save(path, delta=delta, state={"done": at})
    train(case, module, rank, world, range(at, case.steps))
    after = state_of(module.manager)
    module.close()
    return generation, saved, after


def save_again_at_once(rank: int, world: int, case: Case, path: str) -> Any:
    """Two deltas of which the first is being written when the second begins; returns the state at the second."""
    module = make(case)
    train(case, module, rank, world, range(3))
    module.save(path)
    train(case, module, rank, world, range(3, 5))
    module.save(path, delta=True, background=True, state={"done": 5})
    train(case, module, rank, world, range(5, 6))
    saved = state_of(module.manager)
    module.save(path, delta=True, state={"done": 6})
    module.close()
    return saved


def go_on(rank: int, world: int, case: Case, path: str) -> Any:
    """Restore the newest generation, and train to the end."""
    module = make(case)
    report = module.restore(path)
    restored = state_of(module.manager)
    train(case, module, rank, world, range(report.state["done"], case.steps))
    after = state_of(module.manager)
    updates = module.optimizer.step_count
    module.close()
    return report.generation, restored, after, updates


class Model(torch.nn.Module):
    """A pooled and a sequence collection, a plain table, and a dense part."""

    def __init__(self, case: Case, reduction: str = "exact") -> None:
        super().__init__()
        self.pooled = make(replace(case, pooled=True), reduction)
        self.values = make(replace(case, pooled=False, kind="none"), reduction)
        self.plain = torch.nn.EmbeddingBag(150, 4, mode="sum")
        torch.manual_seed(7)
        torch.nn.init.normal_(self.plain.weight)
        self.top = torch.nn.Linear(self.pooled.manager.layout.output_width + 4, 1)

    def forward(self, batch: Any) -> Any:
        features, count = batch
        pooled = self.pooled(features).values()
        rows = self.values(features)
        plain = self.plain(features.lengths().view(5, count)[0], torch.arange(count))
        hidden = self.top(torch.cat([pooled, plain], dim=1)).sum()
        return hidden + sum((one.values().square().sum() for one in rows.values()), torch.zeros(())), pooled


def pipeline(rank: int, world: int, case: Case, depth: int, steps: int, delays: bool, wrapped: bool) -> Any:
    """Train a model through a pipeline; returns losses and states."""
    model = Model(case)
    dice = random.Random(1000 * rank + depth)

    def batches() -> Any:
        for step in range(steps + 2 * rank):  # some ranks have more: all stop together
            if delays:
                time.sleep(dice.random() * 0.004)
            part = batch_of(case, step, world)[rank]
            yield features_of(case, part), part["rows"][1] - part["rows"][0]

    net: Any = (
        torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        if wrapped and world > 1
        else model
    )
    losses = []
    with ec.TrainPipeline(net, torch.optim.SGD(model.parameters(), lr=0.01), depth=depth) as pipe:
        source = batches()
        while True:
            try:
                loss, _ = pipe.progress(source)
            except StopIteration:
                break
            losses.append(loss.item())
            if delays:
                time.sleep(dice.random() * 0.004)
        done = pipe.batches_done
    states = state_of(model.pooled.manager), state_of(model.values.manager)
    dense = [value.detach().clone() for value in model.parameters()]
    model.pooled.close()
    model.values.close()
    return done, losses, states, dense


def fall(rank: int, world: int, case: Case, how: str, piped: bool) -> Any:
    """Train until the last rank fails in step 4; returns what the others hear, and after how many seconds."""
    module = make(case)
    began = time.monotonic()

    def step_of(batch: Any) -> Any:
        nonlocal began
        step, features = batch
        out = module(features).values()
        began = time.monotonic()
        if step == 4 and rank == world - 1:
            if how == "killed":
                os.kill(os.getpid(), 9)
            raise ArithmeticError("the loss is odd")
        out.sum().backward()
        return out.sum(), out

    batches = ((step, features_of(case, batch_of(case, step, world)[rank])) for step in range(8))
    error: BaseException | None = None
    try:
        if piped:
            with ec.TrainPipeline(module, None, depth=3, step=step_of) as pipe:
                while True:
                    pipe.progress(batches)
        else:
            for batch in batches:
                step_of(batch)
    except BaseException as failure:
        error = failure
    if isinstance(error, ArithmeticError):
        module.ranks.fail(error)
        time.sleep(5)  # it lives on: nobody hears of a closed connection
    return type(error).__name__, str(error), time.monotonic() - began


def bad_batch(rank: int, world: int, case: Case) -> Any:
    """One rank's batch lacks a feature in step 2: all pass it over, and go on."""
    module = make(case)
    heard = []
    for step in range(5):
        features: Any = features_of(case, batch_of(case, step, world)[rank])
        if step == 2 and rank == 1:
            features = ec.JaggedFeatures(["a"], torch.tensor([1]), torch.tensor([1]))
        try:
            out = module(features).values()
        except ec.EmbCacheError as error:
            heard.append((step, type(error).__name__, str(error)))
            continue
        out.sum().backward()
    return heard, state_of(module.manager), module.manager.planner.step


def unlike(rank: int, world: int, case: Case, what: str) -> str:
    """Make a collection that differs on rank 1; returns what is raised."""
    changed: Any = {
        "seed": replace(case, seed=case.seed + rank),
        "optimizer": replace(case, optimizer="SGD" if rank else "Adagrad"),
        "filter": replace(case, kind="count" if rank else "time"),
    }.get(what, case)
    more: dict[str, Any] = {"wire_rows": "float16" if rank else "float32"} if what == "wire" else {}
    try:
        make(changed, "rank", **more)
    except ec.EmbCacheError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def evaluate(rank: int, world: int, case: Case) -> Any:
    """Train, then evaluate other batches; returns outputs, and whether anything changed."""
    module = make(case)
    train(case, module, rank, world, range(5))
    before, step = state_of(module.manager), module.manager.planner.step
    module.eval()
    outputs = []
    for number in range(50, 54):
        features = features_of(case, batch_of(case, number, world)[rank])
        if case.weighted:
            features.weights_or_none().requires_grad_()
        out = module(features)
        outputs.append(out.values().detach().clone() if case.pooled else [one.values() for one in out.values()])
    same_as_before = step == module.manager.planner.step
    after = state_of(module.manager)
    module.close()
    return outputs, before, after, same_as_before


def wire_outputs(rank: int, world: int, case: Case, rows: str, gradients: str) -> Any:
    """One step from fresh rows with 16 bits on the wire."""
    module = make(case, "rank", wire_rows=rows, wire_gradients=gradients)
    sent = module.ranks.train.bytes_sent
    outputs = train(case, module, rank, world, range(1))
    return outputs, state_of(module.manager), module.ranks.train.bytes_sent - sent


def take_together(rank: int, world: int) -> list[int]:
    """Batches of unequal numbers."""
    return list(together(range(3 + 2 * rank)))
