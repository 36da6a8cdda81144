"""TrainPipeline: batches are loaded, planned and moved while earlier ones are computed, and nothing about the result changes.

This file owns what the caller's thread does: the training step, evaluation, and what reaches the caller from other threads.
The threads behind it are in `embcache.stages`.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ._core.doors import Steps
from ._core.threads import process_number_of, this_process
from .batches import Chooser, to_device
from .errors import ClosedError, ConfigError, EmbCacheError, ForkError, PlanError, shown, whole_number
from .modules import CachedCollection
from .stages import Batch, Flow, Source, not_the_end
from .timeline import STAGES, WAITS, Timeline
from .traces import write_trace

__all__ = ["TrainPipeline"]

MAX_DEPTH = 16
PATIENCE_S = 10.0  # with the user's iterator, at close()
PATIENCE_AT_EXIT_S = 1.0

_flows: weakref.WeakSet[Flow] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Threads that run into the end of the interpreter may die anywhere, also inside foreign code that cannot bear it."""
    for flow in list(_flows):
        if flow.process == this_process():
            if (
                flow.others is not None and flow.alive
            ):  # a process that an exception ends, say: nobody else has told them
                flow.others.fail(ClosedError("its process ends with an open pipeline"))
            flow.stop(PATIENCE_AT_EXIT_S)


atexit.register(_stop_at_exit)


class TrainPipeline:
    """Trains a model whose batches are prepared ahead, by two threads of its own.

    Parameters
    ----------
    model : torch.nn.Module
        ``model(batch)`` returns ``(loss, output)``. It holds at least one collection, at any depth.
    dense_optimizer : torch.optim.Optimizer, optional
        Of the dense part; None where there is none. The collections' own optimizers need not be given.
    depth : int
        Batches under way at a time, 1 to 16: the one that is computed, and those that are planned and whose rows are in HBM
        already. With 1 a batch is planned when the one before it has trained. A full buffer makes it less for a while.
    lookahead : int
        Batches that are pulled beyond those, so that their keys are known.
    device : str or torch.device
        Where batches are moved before the model sees them: the device of the collections.
    features : callable, optional
        ``features(batch)`` gives the features objects that the model's forward will pass to the collections: one, or
        several in the order of the forwards, or a dict from a collection's path in the model to either. Without it they are found
        in the batch by their type, and each collection gets the one that has all its features.
    step : callable, optional
        ``step(batch)`` returns ``(loss, output)`` and does all of a training step in place of `train_step`; loss scaling and
        gradient clipping of the dense part go there. Overriding `zero_grad`, `forward`, `backward` or `optimizer_step` does too.

    Attributes
    ----------
    batches_done : int
        Batches that have trained, not merely been pulled: the position from which a run goes on after its checkpoint. A run that
        goes on sets it to what the checkpoint says, and it counts from there.

    Raises
    ------
    ConfigError
        An argument does not fit, the model holds no collection, or another open pipeline trains one of them.

    Notes
    -----
    Results are bit for bit those of a loop that loads, plans and trains one batch after the other, at any depth (promise I9).
    While a pipeline is open its collections' training forwards take only features that it has planned; evaluation forwards go
    directly. `save` may be called between steps, and at any time in another thread: what is written is all of the model, as of the
    last step that has ended. ``save(..., state=lambda: {"batches": pipe.batches_done, "dense": optimizer.state_dict()})`` has these as of that, too.

    A collection may be frozen, and trained again, between any two steps, with ``eval()`` and ``train()``: as without a pipeline its keys
    count from the next batch on. Where ranks share it, between two epochs: within one it raises `PlanError`.

    One thread trains at a time, and no step trains another batch: a second ``progress`` raises `PlanError`. Context manager; `close`
    ends the threads, and may be called anywhere: inside a step it takes effect at its end.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rows, self.top = ec.EmbeddingBagCollection([ec.TableConfig("item", 4)]), torch.nn.Linear(4, 1)
    ...     def forward(self, batch):
    ...         features, labels = batch
    ...         logits = self.top(self.rows(features).values()).squeeze(1)
    ...         return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels), logits
    >>> def batches(count):
    ...     for _ in range(count):
    ...         keys = torch.randint(0, 100, (8,))
    ...         yield ec.JaggedFeatures(["item"], keys, torch.ones_like(keys)), (keys % 2).float()
    >>> model = Model()
    >>> with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), depth=3) as pipe:
    ...     source, losses = batches(10), []
    ...     try:
    ...         while True:
    ...             loss, output = pipe.progress(source)
    ...             losses.append(loss.item())
    ...     except StopIteration:
    ...         pass
    >>> len(losses), pipe.batches_done
    (10, 10)
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None,
        *,
        depth: int = 6,
        lookahead: int = 0,
        device: str | torch.device = "cpu",
        features: Chooser | None = None,
        step: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        if dense_optimizer is not None and not isinstance(dense_optimizer, torch.optim.Optimizer):
            raise ConfigError(f"dense_optimizer = {shown(dense_optimizer)}; give a torch.optim.Optimizer, or None")
        for name, value in (("features", features), ("step", step)):
            if value is not None and not callable(value):
                raise ConfigError(f"{name} = {shown(value)}; give a function of a batch, or None")
        most, ahead = whole_number(depth), whole_number(lookahead)
        if most is None or not 1 <= most <= MAX_DEPTH:
            raise ConfigError(f"depth = {shown(depth)}; give an integer from 1 to {MAX_DEPTH}")
        if ahead is None or not 0 <= ahead < 2**31:
            raise ConfigError(f"lookahead = {shown(lookahead)}; give a number of batches, 0 or more")
        collections = {path: part for path, part in model.named_modules() if isinstance(part, CachedCollection)}
        if not collections:
            raise ConfigError(
                f"the {type(model).__name__} holds no embedding collection; there is nothing to plan ahead"
            )
        where = _device_of(device, collections)
        for path, collection in collections.items():
            if collection.feed is not None:
                raise ConfigError(f"collection {path!r} is trained by another pipeline; close() that one first")
        self.model, self.dense_optimizer = model, dense_optimizer
        self.batches_done = 0
        self._step = step
        self._flow = Flow(collections, most, ahead, features, where)
        self._closed = self._closing = False
        self._trainer: int | None = None
        self._raised = 0  # id of what the last step has raised: other ranks know of it
        self._at_start = self._counters()
        self._steps = Steps(collection.manager.door for collection in collections.values())
        _flows.add(self._flow)
        # Whoever collects the garbage may be inside any lock, so nobody is waited for.
        weakref.finalize(self, _let_go, self._flow).atexit = False
        for path, collection in collections.items():  # last: from here on only this pipeline trains them
            collection.feed = self._flow.feeds[path]

    # -------------------------------------------------------------------------------------------------------- progress

    def progress(self, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Train on the next batch of `iterator`; returns ``(loss, output)``.

        Batches that an earlier iterator has given come first: ``depth + lookahead`` of them where it had as many. (To end an epoch early give
        ``itertools.islice(loader, batches)``, and go on until StopIteration.) With the model in ``eval()``, or gradients disabled, the
        next batch of `iterator` is evaluated, and batches that were prepared for training stay where they are.

        Raises
        ------
        StopIteration
            The iterator has ended and all its batches have trained. The next call tries it again, or another one.
        HbmCapacityError
            This batch alone does not fit. It is passed over; training can go on.
        ConfigError, ShapeError, PlanError, StorageError
            What is wrong with this batch, which is passed over.
        ClosedError, ForkError
        Exception
            What `iterator` or the training step has raised, with its traceback. A batch whose step has failed is not trained again.
            A `StopIteration` of anybody but the iterator becomes a `RuntimeError`, as in a generator.
        """
        self._check_open()
        if not callable(getattr(iterator, "__next__", None)):
            raise ConfigError(f"progress({shown(iterator)}): it is no iterator; give iter(...) of it")
        if not (self.model.training and torch.is_grad_enabled()):
            return self._evaluate(iterator)
        thread = threading.get_ident()
        inside = self._flow.runs(thread)
        if inside or self._trainer is not None:
            who = "inside a step, or by its iterator" if inside or self._trainer == thread else "by two threads at once"
            raise PlanError(f"progress() of a pipeline was called {who}; it trains one batch after the other")
        # No call lies between the look and the try: neither another thread nor an interrupt gets in between.
        self._trainer = thread
        try:
            return self._next_step(iterator)
        except BaseException as error:
            self._raised = id(error)
            raise
        finally:
            self._trainer = None
            if self._closing:
                self.close()

    def _next_step(self, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """`progress` of a training batch."""
        flow = self._flow
        self._end_given_up()
        self._freeze(frozenset(path for path, part in flow.collections.items() if not part.training))
        if flow.source is None or flow.source.iterator is not iterator:
            if flow.source is not None:
                self._fill(flow.source)
            flow.source = Source(iterator)
        flow.start()
        flow.load_bell.ring()
        flow.plan_bell.ring()
        while True:
            batch = self._next_batch()
            if not batch.last and batch.error is None:
                return self._train(batch)
            # In this order, so that an interruption anywhere leaves what the next call can go on from.
            current = batch.source is flow.source
            if batch.last and current:
                flow.source = None
            self._pass_over(batch)
            if batch.error is not None:
                raise batch.error
            if current:
                batch.source.iterator = None  # what it holds (workers, files) may go
                raise StopIteration

    def _freeze(self, frozen: frozenset[str]) -> None:
        """Have nothing planned for these collections from the next batch on, however many are ready already."""
        flow = self._flow
        if flow.others is not None:  # who plan together, and are ahead of their callers by different numbers of batches
            if frozen != flow.frozen and flow.source is not None:
                changed = sorted(frozen ^ flow.frozen)
                raise PlanError(
                    f"eval() or train() of {changed!r} within an epoch of a pipeline over ranks: some of the batches to come are planned as it was "
                    "before, on each rank others; put it back, and change it between two epochs, or train without a pipeline"
                )
            flow.frozen = frozen
            return
        while frozen != flow.frozen or flow.freeze is not None:  # another one, where an interrupt has left it
            if flow.freeze is None:
                flow.freeze = frozen
            flow.start()
            flow.plan_bell.ring()
            self._check_going()
            flow.ready_bell.wait()

    def _fill(self, source: Source) -> None:
        """Wait until all has been pulled from `source` that may be: what is trained must not depend on who was faster."""
        flow = self._flow
        flow.filling = True
        try:
            flow.start()  # an interrupt may have left a source that no thread knows of
            flow.load_bell.ring()
            while not flow.is_ahead(source):
                self._check_going()
                flow.ready_bell.wait()
        finally:
            flow.filling = False

    def _check_going(self) -> None:
        """Raise where nothing more is to be waited for."""
        flow = self._flow
        if flow.crash is not None:
            raise flow.crash
        if flow.closing:
            raise ClosedError("this pipeline was closed while progress() waited for a batch")

    def _next_batch(self) -> Batch:
        """The oldest batch that is ready; waits for it. It stays in its queue until it is done."""
        flow = self._flow
        if flow.ready:
            return flow.ready[0]
        start = flow.timeline.start("wait_ready", flow.done + 1)
        while not flow.ready:
            self._check_going()
            flow.ready_bell.wait()
        flow.timeline.stop("wait_ready", flow.done + 1, start)
        return flow.ready[0]

    def _train(self, batch: Batch) -> tuple[Any, Any]:
        with self._steps:  # a save sees all collections and the dense part before this step, or all after it
            return self._train_alone(batch)

    def _train_alone(self, batch: Batch) -> tuple[Any, Any]:
        flow = self._flow
        batch.started = True
        if flow.closing:  # by another thread or a signal's handler; what has not started is given up
            batch.started = False
            raise flow.crash or ClosedError("this pipeline was closed")
        start = flow.timeline.start("compute", batch.number)
        try:
            for path, value, info in batch.plans:
                flow.feeds[path].offer(value, batch.unchanged[id(value)], info)
            result = self.train_step(batch.data) if self._step is None else self._step(batch.data)
            pair = _pair(result, "step(batch)")
            self.batches_done += 1
            self._check_used()
            return pair
        except BaseException as error:
            if flow.others is not None:  # which wait for this rank's part of the step
                flow.others.fail(error)
            if isinstance(error, StopIteration):
                raise not_the_end(error, "the training step") from error
            raise
        finally:
            flow.timeline.stop("compute", batch.number, start)
            self._pass_over(batch)

    def _check_used(self) -> None:
        """`PlanError` where a step has left plans unused: their keys were counted, as they would not be without a pipeline."""
        for path, collection in self._flow.collections.items():
            left = self._flow.feeds[path].left
            if left and collection.training:
                raise PlanError(
                    f"a step has trained, but used {left} plan(s) of collection {path!r} fewer than there were, whose keys were counted; leave "
                    "what a forward does not train out of TrainPipeline(features=...), or keep that collection in eval()"
                )

    def _end_step(self, batch: Batch) -> None:
        for path, collection in self._flow.collections.items():
            collection.end_step([info for owner, _, info in batch.plans if owner == path])

    def _pass_over(self, batch: Batch) -> None:
        """The batch at the head of the queue is done, or was given up: the others may go on. Again is no harm."""
        flow = self._flow
        if batch.started:
            self._end_step(batch)
        elif batch.plans:  # of a batch that has failed
            for path, _, info in batch.plans:
                flow.collections[path].manager.finish_late(info)
            for collection in flow.collections.values():
                collection.manager.door.settle()
        flow.done = max(flow.done, batch.number)
        if flow.ready and flow.ready[0] is batch:
            flow.ready.popleft()
        flow.load_bell.ring()
        flow.plan_bell.ring()

    def _end_given_up(self) -> None:
        """Pass over a batch whose step was left without its end (Ctrl-C while it was being ended)."""
        ready = self._flow.ready
        if ready and ready[0].started:
            self._pass_over(ready[0])

    def _evaluate(self, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Evaluate the next batch of `iterator`, in this thread."""
        flow = self._flow
        if flow.source is not None and flow.source.iterator is iterator:
            raise PlanError(
                "this iterator's next batches are prepared for training already; evaluate with an iterator of its own"
            )
        batch = to_device(next(iterator), flow.device)
        start = flow.timeline.start("evaluate", flow.done)
        try:
            with torch.no_grad():
                return _pair(self.forward(batch), "model(batch)")
        except StopIteration as error:
            raise not_the_end(error, "model(batch)") from error
        except EmbCacheError as error:
            self._raised = id(error)  # a batch that all ranks have passed over
            raise
        finally:
            flow.timeline.stop("evaluate", flow.done, start)

    # ------------------------------------------------------------------------------------------------ the training step

    def train_step(self, batch: Any) -> tuple[Any, Any]:
        """One training step on a batch: `zero_grad`, `forward`, `backward`, `optimizer_step`; returns ``(loss, output)``."""
        self.zero_grad()
        loss, output = _pair(self.forward(batch), "model(batch)")
        self.backward(loss)
        self.optimizer_step()
        return loss, output

    def zero_grad(self) -> None:
        """Clear the gradients of the dense part."""
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """``(loss, output)`` of a batch; in evaluation too."""
        result: tuple[Any, Any] = self.model(batch)
        return result

    def backward(self, loss: Any) -> None:
        """Backward through `loss`, or through the sum of several; the collections' rows are updated here."""
        (loss if loss.dim() == 0 else loss.sum()).backward()

    def optimizer_step(self) -> None:
        """The dense update, and the end of the step for the collections' optimizers, so that schedulers may step."""
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        for collection in self._flow.collections.values():
            collection.optimizer.step()

    # ----------------------------------------------------------------------------------------------------- what it did

    @property
    def timeline(self) -> Timeline:
        """Begins and ends of the stages."""
        return self._flow.timeline

    def _counters(self) -> dict[str, int]:
        """Totals of the collections' managers."""
        names = ("hits", "misses", "swap_in_bytes", "swap_out_bytes")
        stats = [collection.manager.stats() for collection in self._flow.collections.values()]
        return {name: sum(one[name] for one in stats) for name in names}

    def stats(self) -> dict[str, Any]:
        """What the pipeline has done so far, as a plain dict.

        ``batches_done``; ``shortened`` (batches that waited since HBM was full); ``wall_s`` from the begin of the first computed
        batch to the end of the last; ``device_busy``, the share of it in which a batch was computed (as the caller's thread sees
        it); ``overlap``, the share of the host's work on later batches that was done meanwhile (of the newest batches);
        ``hit_rate`` of unique keys; ``swap_mb_per_s``; ``stage_s`` and ``wait_s``, mean seconds a batch of each stage
        and of each thread's waits.
        """
        flow, times = self._flow, self._flow.timeline
        counted = {name: count - self._at_start[name] for name, count in self._counters().items()}
        wall, looked_up = times.wall, counted["hits"] + counted["misses"]
        batches = max(times.counts["compute"], 1)
        return {
            "batches_done": self.batches_done,
            "shortened": flow.shortened,
            "wall_s": wall,
            "device_busy": times.seconds["compute"] / wall if wall > 0 else 0.0,
            "overlap": times.overlap(),
            "hit_rate": counted["hits"] / looked_up if looked_up else 0.0,
            "swap_mb_per_s": (counted["swap_in_bytes"] + counted["swap_out_bytes"]) / 1e6 / wall if wall > 0 else 0.0,
            "stage_s": {stage: times.seconds[stage] / max(times.counts[stage], 1) for stage in STAGES},
            "wait_s": {wait: times.seconds[wait] / batches for wait in WAITS},
        }

    def trace(self, path: str | os.PathLike[str]) -> int:
        """Write the stages of the newest batches as Chrome trace events, for Perfetto or ``embcache trace plot``.

        The newest 4,096 stages and waits are kept: some hundred batches. May be called at any time, and replaces the file.

        Returns
        -------
        int
            Stages and waits written.

        Raises
        ------
        OSError
        """
        return write_trace(path, self.timeline.intervals())

    # ------------------------------------------------------------------------------------------------------- its end

    def _check_open(self) -> None:
        flow = self._flow
        if flow.process != this_process():
            raise ForkError(
                f"this pipeline belongs to process {process_number_of(flow.process)}, not to its child "
                f"{process_number_of(this_process())}; make the model in the process that trains it"
            )
        if flow.crash is not None:
            raise flow.crash
        if flow.closing:
            raise ClosedError("this pipeline was closed; make a new one")

    def close(self) -> None:
        """End the threads, and undo what was planned and not trained. Idempotent. The collections plan for themselves again.

        Batches that were pulled and have not trained are lost to their iterator: go on from `batches_done`. An iterator that
        does not return is waited for `PATIENCE_S` seconds; its thread ends when it does. Inside a step (in a hook, in a signal's
        handler, in another thread) this says so and returns: `progress` closes the pipeline when the step has ended.
        """
        flow = self._flow
        if flow.process != this_process() or self._closed:
            return
        self._closing = True
        if self._trainer is not None:
            flow.close()
            return
        # Inside a lock of a collection (a handler that runs within its save, say) nobody may be waited for who wants it.
        if not any(collection.manager.door.held for collection in flow.collections.values()):
            flow.stop(PATIENCE_S)
            flow.give_up()  # what progress() had taken and put back while the coordinator did
            self._end_given_up()
            flow.ready.clear()
            flow.loaded.clear()
        _let_go(flow)
        self._closed = True

    def __enter__(self) -> TrainPipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        others = self._flow.others
        if (
            others is not None
            and error is not None
            and not isinstance(error, StopIteration)
            and id(error) != self._raised
        ):
            others.fail(error)  # else closing waits for ranks that wait for this one's next step
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a TrainPipeline cannot be copied or pickled: its threads belong to this process; make a new one"
        )

    def __repr__(self) -> str:
        flow = self._flow
        return f"TrainPipeline(depth={flow.depth}, lookahead={flow.lookahead}, batches_done={self.batches_done})"


def _let_go(flow: Flow) -> None:
    """The pipeline is gone or closed: its threads end, its collections plan for themselves."""
    flow.close()
    for path, collection in flow.collections.items():
        if collection.feed is flow.feeds[path]:
            collection.feed = None


def _pair(result: Any, what: str) -> tuple[Any, Any]:
    """`result` as (loss, output)."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ConfigError(f"{what} returned a {type(result).__name__}; it is to return (loss, output)")
    return result[0], result[1]


def _device_of(device: str | torch.device, collections: dict[str, CachedCollection]) -> torch.device:
    """`device`, where all collections are."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device = {shown(device)}; give the device of the collections, such as 'cpu'") from error
    for path, collection in collections.items():
        if collection.device.type != where.type:
            raise ConfigError(
                f"device = {str(where)!r}, but collection {path!r} is on {str(collection.device)!r}; give that one, or move the model"
            )
    return where
