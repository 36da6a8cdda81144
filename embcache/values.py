"""Nested values (numbers, strings, containers, arrays, tensors) as bytes, and back: what users store beside their tables.

Two pieces: JSON for the structure, and for arrays and tensors one file in the safetensors format (a header of 8 bytes with the
length of a JSON object that says dtype, shape and place of each; then their bytes; github.com/huggingface/safetensors). Never
pickle: reading a checkpoint runs nobody's code.

JSON has neither tuples nor keys that are no strings, which the state of optimizers is full of. So containers are tagged:
``{"d": [[key, value], ...]}``, ``{"l": [...]}``, ``{"t": [...]}``; tensors ``{"x": name}``, arrays ``{"a": name}``, bytes
``{"b": base64}``; everything else is itself.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

import numpy as np
import torch

from .errors import ConfigError, CorruptionError

__all__ = ["decode", "encode"]

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
    "C64": np.dtype("<c8"),
}
NAME_OF_TORCH = {dtype: name for name, dtype in TORCH_TYPES.items()}
NAME_OF_NUMPY = {dtype: name for name, dtype in NUMPY_TYPES.items()}
MOST_DEPTH = 200


class _Encoder:
    """Turns values into JSON, and keeps arrays by name."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.parts: dict[str, tuple[str, list[int], bytes]] = {}

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
            return {"a": self.array(np.asarray(value), where)}
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
        dtype = NAME_OF_TORCH.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{self.owner}{where}: a tensor of {tensor.dtype}, {tensor.layout}; give a dense one of a plain type"
            )
        plain = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return self.put(dtype, list(tensor.shape), plain.numpy().tobytes())

    def array(self, array: np.ndarray, where: str) -> str:
        kind = array.dtype.newbyteorder("<")
        if kind not in NAME_OF_NUMPY:
            raise ConfigError(f"{self.owner}{where}: an array of {array.dtype}; give one of numbers or booleans")
        return self.put(NAME_OF_NUMPY[kind], list(array.shape), np.ascontiguousarray(array, kind).tobytes())

    def put(self, dtype: str, shape: list[int], content: bytes) -> str:
        name = str(len(self.parts))
        self.parts[name] = (dtype, shape, content)
        return name


def _pack(parts: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file."""
    header, at = {}, 0
    for name, (dtype, shape, content) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(content for _, _, content in parts.values())])


def encode(value: Any, owner: str) -> tuple[bytes, bytes]:
    """Return (JSON, safetensors file, empty where there is no array) of `value`; `owner` is what messages call it.

    Raises
    ------
    ConfigError
        A part of it cannot be saved; the message says which.
    """
    encoder = _Encoder(owner)
    text = json.dumps(encoder.value(value, ""), separators=(",", ":")).encode("utf-8", "surrogatepass")
    return text, _pack(encoder.parts) if encoder.parts else b""


class _Decoder:
    """Turns JSON into values, and takes arrays from a safetensors file."""

    def __init__(self, content: bytes) -> None:
        size = int.from_bytes(content[:8], "little") if content else 0
        self.header = json.loads(content[8 : 8 + size]) if content else {}
        self.data = memoryview(content)[8 + size :]

    def value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("a list without a tag")
            return value
        ((tag, item),) = value.items()
        if tag == "d":
            return {key: self.value(one) for key, one in item}
        if tag in ("l", "t"):
            items = [self.value(one) for one in item]
            return items if tag == "l" else tuple(items)
        if tag == "b":
            return base64.b64decode(item, validate=True)
        dtype, shape, content = self.part(item)
        if tag == "a":
            return np.frombuffer(content, NUMPY_TYPES[dtype]).reshape(shape).copy()
        if tag == "x":
            if not content:
                return torch.empty(shape, dtype=TORCH_TYPES[dtype])
            return torch.frombuffer(bytearray(content), dtype=TORCH_TYPES[dtype]).reshape(shape)
        raise ValueError(f"tag {tag!r}")

    def part(self, name: str) -> tuple[str, list[int], memoryview]:
        one = self.header[name]
        start, stop = one["data_offsets"]
        shape = [int(count) for count in one["shape"]]
        if not 0 <= start <= stop <= len(self.data):
            raise ValueError("offsets")
        if stop - start != math.prod(shape) * torch.empty(0, dtype=TORCH_TYPES[one["dtype"]]).element_size():
            raise ValueError("shape")
        return one["dtype"], shape, self.data[start:stop]


def decode(text: bytes, tensors: bytes, owner: str) -> Any:
    """Return what `encode` was given; tensors are on the CPU.

    Raises
    ------
    CorruptionError
        The bytes are not what `encode` gave; `owner` is what the message calls them.
    """
    try:
        return _Decoder(tensors).value(json.loads(text.decode("utf-8", "surrogatepass")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise CorruptionError(f"{owner}: is not what this version writes ({type(error).__name__}: {error})") from None
