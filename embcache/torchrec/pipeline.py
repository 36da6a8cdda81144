"""EmbCacheTrainPipelineSparseDist: TorchRec's and RecSDK's way to call a train pipeline, on `embcache.TrainPipeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..batches import Chooser
from ..errors import ConfigError, shown
from ..modules import CachedCollection
from ..pipeline import TrainPipeline

__all__ = ["EmbCacheTrainPipelineSparseDist"]


class _Steps(TrainPipeline):
    """A `TrainPipeline` some of whose parts are the user's."""

    def __init__(
        self,
        *args: Any,
        custom_model_fwd: Callable[[Any], Any] | None,
        custom_model_zero_grad: Callable[[], Any] | None,
        custom_model_bwd: Callable[[Any], Any] | None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._forward, self._zero_grad, self._backward = custom_model_fwd, custom_model_zero_grad, custom_model_bwd

    def zero_grad(self) -> None:
        if self._zero_grad is None:
            super().zero_grad()
        else:
            self._zero_grad()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        if self._forward is None:
            return super().forward(batch)
        pair: tuple[Any, Any] = self._forward(batch)
        return pair

    def backward(self, loss: Any) -> None:
        if self._backward is None:
            super().backward(loss)
        else:
            self._backward(loss)


class EmbCacheTrainPipelineSparseDist:
    """TorchRec's ``TrainPipelineSparseDist`` for a model with cached tables: batches are planned and their rows moved ahead.

    Parameters
    ----------
    model : torch.nn.Module
        ``model(batch)`` returns ``(losses, output)``. The batch holds its ``KeyedJaggedTensor``s anywhere.
    optimizer : torch.optim.Optimizer
        Of the dense part, or TorchRec's ``CombinedOptimizer`` of that and the collections' ``fused_optimizer``.
    device : torch.device, optional
        Where the dense part is; default: that of the collections.
    npu_device : torch.device, optional
        RecSDK's call names the host's device before, ``(model, optimizer, cpu_device, npu_device)``: then this one counts.
    return_loss : bool
        Whether `progress` returns ``(losses, output)``, not the output alone.
    evict_step_interval : int, optional
        Of RecSDK's signature: it has to be what the tables' ``AdmitAndEvictConfig`` say.
    custom_model_fwd, custom_model_zero_grad, custom_model_bwd : callable, optional
        In place of ``model(batch)``, ``optimizer.zero_grad()`` and the backward through the losses.
    depth, lookahead, features
        As for `embcache.TrainPipeline`.
    execute_all_batches, apply_jit, context_type, pipeline_postproc
        Of TorchRec's signature; only their defaults are taken (``context_type`` is not looked at).

    Raises
    ------
    ConfigError

    Notes
    -----
    Results are those of a plain loop, at any depth. Before a checkpoint nothing has to be waited for: `embcache.save` may be called between
    two `progress`, and leaves out batches that have not trained.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    >>> from embcache.torchrec import EmbCacheEmbeddingBagCollection, EmbCacheTrainPipelineSparseDist
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         tables = [EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=100, feature_names=["item"])]
    ...         self.rows, self.top = EmbCacheEmbeddingBagCollection(tables), torch.nn.Linear(4, 1)
    ...     def forward(self, batch):
    ...         output = self.top(self.rows(batch).values())
    ...         return output.sum(), output
    >>> model = Model()
    >>> batches = iter([KeyedJaggedTensor.from_lengths_sync(["item"], torch.arange(8), torch.ones(8, dtype=torch.int32))] * 3)
    >>> pipe = EmbCacheTrainPipelineSparseDist(model, torch.optim.SGD(model.top.parameters(), lr=0.1), torch.device("cpu"))
    >>> pipe.progress(batches).shape, pipe.batches_done
    (torch.Size([8, 1]), 1)
    >>> pipe.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device | str | None = None,
        npu_device: torch.device | str | None = None,
        return_loss: bool = False,
        evict_step_interval: int | None = None,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        custom_model_zero_grad: Callable[[], Any] | None = None,
        custom_model_bwd: Callable[[Any], Any] | None = None,
        *,
        cpu_device: torch.device | str | None = None,
        depth: int = 6,
        lookahead: int = 0,
        features: Chooser | None = None,
    ) -> None:
        for name, value, default in (
            ("execute_all_batches", execute_all_batches, True),
            ("apply_jit", apply_jit, False),
            ("pipeline_postproc", pipeline_postproc, False),
        ):
            if value is not default:
                raise ConfigError(f"{name} = {shown(value)}; this pipeline knows {default!r} only")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        parts = {path: part for path, part in model.named_modules() if isinstance(part, CachedCollection)}
        if evict_step_interval is not None:
            _check_interval(parts, evict_step_interval)
        # The host's device is where batches come from, whatever it is called with.
        where = npu_device if npu_device is not None else device if device is not None else cpu_device
        if where is None and parts:
            where = next(iter(parts.values())).device
        self._return_loss = return_loss
        self._pipe = _Steps(
            model,
            optimizer,
            depth=depth,
            lookahead=lookahead,
            device="cpu" if where is None else where,
            features=features,
            custom_model_fwd=custom_model_fwd,
            custom_model_zero_grad=custom_model_zero_grad,
            custom_model_bwd=custom_model_bwd,
        )

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, or evaluate it with the model in ``eval()``; returns the output.

        Raises
        ------
        StopIteration
            The iterator has ended, and all its batches have trained.
        """
        losses, output = self._pipe.progress(dataloader_iter)
        return (losses, output) if self._return_loss else output

    def wait_pipeline_compute_swapinfo(self) -> None:
        """Nothing: RecSDK's users call it before a save in the middle of training, which here needs no preparation."""

    @property
    def pipeline(self) -> TrainPipeline:
        """What it runs on, with ``timeline``, ``stats()`` and ``trace()``."""
        return self._pipe

    @property
    def batches_done(self) -> int:
        """Batches that have trained: the position from which a run goes on after its checkpoint."""
        return self._pipe.batches_done

    def detach(self) -> nn.Module:
        """`close`; returns the model, which plans for itself again. Batches that were pulled and have not trained are gone."""
        self.close()
        return self._pipe.model

    def close(self) -> None:
        """End the threads; the collections' forwards plan for themselves again."""
        self._pipe.close()

    def __enter__(self) -> EmbCacheTrainPipelineSparseDist:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pipe.__exit__(kind, error, trace)


def _check_interval(parts: dict[str, CachedCollection], interval: int) -> None:
    """`interval` is what each table with sweeps says."""
    for path, part in parts.items():
        for table in part.manager.layout.tables:
            own = table.admit_and_evict.evict_step_interval if table.admit_and_evict is not None else 0
            if own and own != interval:
                raise ConfigError(
                    f"evict_step_interval = {interval!r}, and table {table.name!r} of collection {path!r} has {own}; leave it out, or give the "
                    "table's"
                )
