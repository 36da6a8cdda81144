"""Nested values (numbers, strings, containers, arrays, tensors) as bytes, and back: what users store beside their tables.

Two pieces: JSON for the structure, and for arrays and tensors one file in the safetensors format. Never pickle: reading a
checkpoint runs nobody's code.

JSON has neither tuples nor keys that are no strings, which the state of optimizers is full of. So containers are tagged:
``{"d": [[key, value], ...]}``, ``{"l": [...]}``, ``{"t": [...]}``; tensors ``{"x": name}``, arrays ``{"a": name}``, bytes
``{"b": base64}``; everything else is itself.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.nn.parameter import is_lazy

from .errors import ConfigError, CorruptionError

__all__ = ["decode", "encode"]

TENSORS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
    }
)
ARRAYS = frozenset(np.dtype(kind) for kind in "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 ? c8".split())
MOST_DEPTH = 200


class _Encoder:
    """Turns values into JSON, and keeps arrays by name."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.parts: dict[str, torch.Tensor] = {}

    def value(self, value: Any, where: str, depth: int = 0) -> Any:
        if depth > MOST_DEPTH:
            raise ConfigError(f"{self.owner}{where[:80]}: nested more than {MOST_DEPTH} deep, or in itself; flatten it")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            pairs = [
                [self.key(key, where), self.value(item, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()
            ]
            return {"d": pairs}
        if type(value) in (list, tuple):
            items = [self.value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
            return {"l" if type(value) is list else "t": items}
        if isinstance(value, torch.Tensor):
            return {"x": self.tensor(value, where)}
        if isinstance(value, (np.ndarray, np.generic)):
            return {"a": self.array(np.asanyarray(value), where)}
        if isinstance(value, (bytes, bytearray)):
            return {"b": base64.b64encode(value).decode()}
        raise ConfigError(
            f"{self.owner}{where}: a {type(value).__name__} cannot be saved; give numbers, strings, None, lists, tuples, dicts, bytes, "
            "NumPy arrays or tensors"
        )

    def key(self, key: Any, where: str) -> Any:
        if key is not None and type(key) not in (bool, int, float, str):
            raise ConfigError(
                f"{self.owner}{where}: key {key!r} is a {type(key).__name__}; give strings or numbers as keys"
            )
        return key

    def tensor(self, tensor: torch.Tensor, where: str) -> str:
        if is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(f"{self.owner}{where}: a tensor without values; run the model once, or leave it out")
        if tensor.dtype not in TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise ConfigError(
                f"{self.owner}{where}: a tensor of {tensor.dtype}, {layout}; give a dense one of a plain type"
            )
        return self.put(
            tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)
        )

    def array(self, array: np.ndarray, where: str) -> str:
        kind = array.dtype.newbyteorder("=")
        if isinstance(array, np.ma.MaskedArray):
            raise ConfigError(f"{self.owner}{where}: a masked array; give its data and its mask, as two arrays")
        if kind not in ARRAYS:
            raise ConfigError(f"{self.owner}{where}: an array of {array.dtype}; give one of numbers or booleans")
        return self.put(torch.from_numpy(np.array(array, kind, order="C")))

    def put(self, tensor: torch.Tensor) -> str:
        name = str(len(self.parts))
        self.parts[name] = tensor
        return name


def encode(value: Any, owner: str) -> tuple[bytes, bytes]:
    """Return (JSON, safetensors file, empty where there is no array) of `value`; `owner` is what messages call it.

    Raises
    ------
    ConfigError
        A part of it cannot be saved; the message says which.
    """
    encoder = _Encoder(owner)
    body = encoder.value(value, "")
    try:
        text = json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except ValueError as error:  # Python refuses to write integers of thousands of digits
        raise ConfigError(f"{owner}: an integer is too long ({error}); give it as bytes") from None
    return text, save_tensors(encoder.parts) if encoder.parts else b""


def _value(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without a tag")
        return value
    ((tag, item),) = value.items()
    if tag == "d":
        return {key: _value(one, tensors) for key, one in item}
    if tag in ("l", "t"):
        items = [_value(one, tensors) for one in item]
        return items if tag == "l" else tuple(items)
    if tag == "b":
        return base64.b64decode(item, validate=True)
    if tag == "a":
        return tensors[item].numpy()
    if tag == "x":
        return tensors[item]
    raise ValueError(f"tag {tag!r}")


def decode(text: bytes, tensors: bytes, owner: str) -> Any:
    """Return what `encode` was given; tensors are on the CPU.

    Raises
    ------
    CorruptionError
        The bytes are not what `encode` gave; `owner` is what the message calls them.
    """
    try:
        parts = load_tensors(tensors) if tensors else {}
        return _value(json.loads(text.decode("utf-8", "surrogatepass")), parts)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise CorruptionError(f"{owner}: is not what this version writes ({type(error).__name__}: {error})") from None
