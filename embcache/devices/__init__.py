"""Devices: the only package that knows cpu, cuda and npu.

A `Backend` is everything the rest of the package asks of a device: memory, copies, streams, and the row kernels on
tensors. (``backend.py``). There are two: `CpuBackend` runs the compiled kernels (``cpu.py``), `TorchBackend` stock torch
operators, anywhere (``stock.py``). `Emulated` is the first with the times of a device, for tests and benches (``emulated.py``).

Invariants. Every result is a pure function of its arguments on a given backend and machine: no thread count, placement
of rows or earlier call shows in it. Copies from a staging block are ordered before its memory is used again.
``torch_npu`` is imported only when an NPU is asked for; merely installed, without its runtime, it breaks ``import torch``.

Thread safety: a backend may be used from several threads; the caller orders calls that touch the same rows.
"""

from __future__ import annotations

import importlib

import torch

from .._core.kernels import UpdateRule
from ..errors import ConfigError
from ..hostmemory import StagingBlock
from ..lookup import GroupLookup
from .backend import Backend, update_rule
from .cpu import CpuBackend
from .emulated import Emulated
from .stock import TorchBackend

__all__ = [
    "Backend",
    "CpuBackend",
    "Emulated",
    "GroupLookup",
    "StagingBlock",
    "TorchBackend",
    "UpdateRule",
    "backend_for",
    "update_rule",
]


def backend_for(
    device: str | torch.device | Emulated, kernels: str = "auto", num_threads: int | None = None
) -> Backend:
    """The backend of a device.

    Parameters
    ----------
    device : str, torch.device or Emulated
        ``"cpu"``, ``"cuda"`` or ``"npu"``, the latter two with an optional index; an emulated device is its own backend.
    kernels : {"auto", "torch"}
        ``"torch"`` asks for `TorchBackend` on CPU as well.
    num_threads : int, optional
        Of the compiled kernels; None: the CPUs this process may use.

    Raises
    ------
    ConfigError
        For a device that is unknown or not there; says what would help.
    """
    if kernels not in ("auto", "torch"):
        raise ConfigError(f'kernels = {kernels!r}; give "auto" or "torch"')
    if isinstance(device, Emulated):
        return device
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda", "npu") or (index and not index.isdigit()):
        raise ConfigError(f'device = {str(device)!r}; give "cpu", "cuda", "cuda:N", "npu" or "npu:N"')
    if kind == "cpu":
        return TorchBackend(torch.device("cpu")) if kernels == "torch" else CpuBackend(num_threads)
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise ConfigError(
                f'device = {str(device)!r}, but torch_npu cannot be imported ({error}); install it with Ascend CANN, or use "cpu"'
            ) from error
    module = getattr(torch, kind)
    if not module.is_available():
        raise ConfigError(
            f'device = {str(device)!r}, but torch {torch.__version__} finds no {kind} device here; install a build and a driver for it, or use "cpu"'
        )
    count = module.device_count()
    if index and int(index) >= count:
        raise ConfigError(
            f"device = {str(device)!r}, but there are {count} {kind} devices; give an index below {count}"
        )
    return TorchBackend(torch.device(kind, int(index) if index else module.current_device()))
