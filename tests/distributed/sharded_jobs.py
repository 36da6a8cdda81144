"""What the members of a crew are told to do."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import Case, batch_of, features_of, state_of, train, train_piped
from sharded_cases import same as assert_same

import embcache as ec
from embcache.checkpoint import Files
from embcache.distributed import Ranks, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, owners, together
from embcache.distributed.ranks import Channel
from embcache.manager import EmbCacheManager


def make(case: Case, reduction: str = "exact", **more: Any) -> Any:
    kind = ShardedEmbeddingBagCollection if case.pooled else ShardedEmbeddingCollection
    return kind(
        case.tables(),
        optimizer=case.make_optimizer(),
        accumulate=case.accumulate,
        policy=case.policy,
        reduction=reduction,
        **{"average": False, "timeout_s": 240.0, **more},
    )


def train_case(rank: int, world: int, case: Case, reduction: str, more: dict[str, Any], depth: int = 0) -> Any:
    """Train a case, through a pipeline where a depth is given; returns outputs, state and evictions of this rank, and its last step."""
    module = make(case, reduction, **more)
    steps = range(case.steps)
    outputs = train_piped(case, module, rank, world, steps, depth) if depth else train(case, module, rank, world, steps)
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


def freeze(rank: int, world: int, case: Case, depth: int) -> tuple[list[str], Any]:
    """Freeze a collection within an epoch, which is refused; put it back, train to the end; an epoch with it frozen."""
    model = Model(case)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch(first: int) -> Any:
        for step in range(first, first + 6):
            part = batch_of(case, step, world)[rank]
            yield features_of(case, part), part["rows"][1] - part["rows"][0]

    said = []
    with ec.TrainPipeline(model, dense, depth=depth) as pipe:
        source = epoch(0)
        for step in range(6):
            if step == 3:
                model.values.eval()
                try:
                    pipe.progress(source)
                except ec.PlanError as error:
                    said.append(str(error))
                model.values.train()
            pipe.progress(source)
        said.append("ended" if _progress(pipe, source) is None else "more")
        model.values.eval()
        source = epoch(6)
        while _progress(pipe, source) is not None:
            pass
        done = pipe.batches_done
    states = state_of(model.pooled.manager), state_of(model.values.manager)
    model.pooled.close()
    model.values.close()
    return [*said, str(done)], states


def _progress(pipe: Any, source: Any) -> Any:
    """A step; None at the end."""
    try:
        return pipe.progress(source)
    except StopIteration:
        return None


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
    heard, seconds = dist.distributed_c10d._get_default_store(), time.monotonic() - began
    if isinstance(error, ArithmeticError):
        module.ranks.fail(error)
        heard.wait([f"heard by {one}" for one in range(world - 1)])  # it lives on: nobody hears of a closed connection
    else:
        heard.set(f"heard by {rank}", "")
    return type(error).__name__, str(error), seconds


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


def note(path: str, life: int, rank: int, what: str, value: Any) -> None:
    """Leave a value for the parent that outlives this process."""
    name = os.path.join(path, f"{life}-{rank}-{what}")
    with open(f"{name}.new", "wb") as file:
        pickle.dump(value, file)
    os.replace(f"{name}.new", name)


def die_in(place: Any, name: str, left: int, last_words: Callable[[], Any] = lambda: None) -> None:
    """End this process by SIGKILL where ``place.name`` is called for the time that comes after `left` more."""
    real = getattr(place, name)

    def call(*given: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            last_words()
            os.kill(os.getpid(), 9)
        return real(*given, **options)

    setattr(place, name, call)


def live(
    rank: int, world: int, case: Case, path: str, notes: str, life: int, victim: int, how: str, left: int
) -> tuple[str, str]:
    """Restore what is there, train and save until one rank dies: before a call that changes files, or before a collective.

    Returns what the others hear.
    """
    module = make(case)
    done = 0
    try:
        report = module.restore(path) if ec.generations(path) else None
        done = 0 if report is None else report.state["done"]
        note(
            notes, life, rank, "restored", (0 if report is None else report.generation, done, state_of(module.manager))
        )
        if rank == victim:
            die_in(*((Files, "point") if how == "call" else (Channel, "_wait")), left)
        saving: Any = None
        for step in range(done, done + 100):
            train(case, module, rank, world, range(step, step + 1))
            if saving is not None:
                note(notes, life, rank, "acknowledged", (saving[1].result(), saving[0]))
            saving = step + 1, module.save(path, delta=step % 5 != 0, background=True, state={"done": step + 1}, keep=2)
            if step % 2:
                note(notes, life, rank, "acknowledged", (saving[1].result(), saving[0]))
                saving = None
    except ec.EmbCacheError as error:
        return type(error).__name__, str(error)
    return "", ""


def collectives(rank: int, world: int, case: Case, path: str) -> list[tuple[str, bool, bool]]:
    """What a rank has waited for others for, in all that it does; and whether it was inside its manager's door then, by lock."""
    module = make(case)
    module.update.grad_scale = 2.0
    seen = []
    door, real = module.manager.door, Channel._wait

    def wait(self: Channel, what: str, *more: Any, **options: Any) -> None:
        seen.append((what, door.lock._is_owned(), door.rows._is_owned()))
        real(self, what, *more, **options)

    Channel._wait = wait  # type: ignore[method-assign]
    try:
        train(case, module, rank, world, range(6))
        module.save(path, state={"done": 6})
        train(case, module, rank, world, range(6, 8))
        module.save(path, delta=True, state={"done": 8})
        module.restore(path)
        module.eval()
        module(features_of(case, batch_of(case, 9, world)[rank]))
    finally:
        Channel._wait = real  # type: ignore[method-assign]
    return seen


def restore_refused(rank: int, world: int, case: Case, path: str) -> Any:
    """Restores that the last rank refuses, as a plan is outstanding there, and as it cannot take over; then one that all do."""
    module = make(case)
    train(case, module, rank, world, range(4))
    module.save(path, state={"done": 4})
    saved = state_of(module.manager)
    train(case, module, rank, world, range(4, 6))
    heard: list[tuple[str, str]] = []
    open_forwards = [module(features_of(case, batch_of(case, 6, world)[rank]))]
    if rank < world - 1:
        module.optimizer.step()  # its pins end
    for refuses in (True, True, False):
        before = state_of(module.manager) if heard else None
        real = EmbCacheManager.take_over
        if heard and refuses and rank == world - 1:
            setattr(EmbCacheManager, "take_over", out_of_memory)  # noqa: B010
        try:
            module.restore(path)
        except ec.EmbCacheError as error:
            heard.append((type(error).__name__, str(error)))
        finally:
            EmbCacheManager.take_over = real  # type: ignore[method-assign]
        module.optimizer.step()
        open_forwards.clear()
        if before is not None and refuses:
            assert_same(state_of(module.manager), before)
    restored = state_of(module.manager)
    train(case, module, rank, world, range(4, case.steps))
    return heard, saved, restored, state_of(module.manager)


def out_of_memory(*_: Any) -> None:
    raise ec.HostMemoryError("there is no more")


def begin_again(rank: int, world: int, case: Case, store: str) -> Any:
    """Train in a process group that is destroyed, and in the next one."""
    make(case).close()
    first = Ranks.of()
    first.fail(ec.RankError("this life is over"))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    module = make(case)
    train(case, module, rank, world, range(case.steps))
    return module.ranks is not first, len(Ranks._known), state_of(module.manager)
