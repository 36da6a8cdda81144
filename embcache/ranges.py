"""Ranges in torch's profiler for the stages of a pipeline: ``embcache.plan``, ``embcache.compute`` and so on.

Costs a look at a flag while no profiler runs. Stages of the pipeline's own threads show where the profiler records all threads
(``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``); the caller's always do.
"""

from __future__ import annotations

import torch.autograd.profiler as profiler

__all__ = ["profiler_range"]


def profiler_range(stage: str) -> profiler.record_function | None:
    """An open range of the stage, to be left by the same thread; None while no profiler runs."""
    if not getattr(profiler, "_is_profiler_enabled", False):
        return None
    opened = profiler.record_function(f"embcache.{stage}")
    opened.__enter__()
    return opened
