"""Small files that are whole or damaged, never half right: a header of 64 bytes, then JSON.

=======  ======  =====================================================================================================
offset   bytes   header (little-endian)
=======  ======  =====================================================================================================
0        8       magic ``EMBCKPT\\n``
8        2       format version
10       2       kind: 1 manifest, 2 commit of a rank, 3 segment
12       4       incompatible features: a reader that does not know one of them must refuse
16       8       compatible features: may be ignored
24       8       bytes of the body
32       16      XXH3-128 of header and body, taken with these 16 bytes zero
48       16      zeros
=======  ======  =====================================================================================================

These 64 bytes keep their places in every version, so that a newer file can be told from a damaged one.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from typing import Any

import xxhash

from ..errors import CorruptionError, FormatVersionError

__all__ = [
    "COMMIT",
    "FILTER_CHANGES",
    "FORMAT_VERSION",
    "MANIFEST",
    "SEALED_BYTES",
    "SEGMENT",
    "SKETCH_BLOCKS",
    "digest128",
    "read",
    "seal",
    "unseal",
]

FORMAT_VERSION = 1
FILTER_CHANGES = 1  # a delta has of a filter what has changed since its parent
SKETCH_BLOCKS = 2  # a filter's sketch lies in blocks, each with clocks of its own
FEATURES = FILTER_CHANGES | SKETCH_BLOCKS  # those that this version knows
MANIFEST, COMMIT, SEGMENT = 1, 2, 3

_MAGIC = b"EMBCKPT\n"
_HEADER = struct.Struct("<8sHHIQQ16s16x")
SEALED_BYTES = _HEADER.size
_MOST_BYTES = 256 << 20


def digest128(*pieces: Any) -> bytes:
    """XXH3-128 of the pieces, one behind the other: 16 bytes, most significant first."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def seal(kind: int, body: dict[str, Any], total_bytes: int = 0, features: int = 0) -> bytes:
    """The bytes of `body`; with `total_bytes`, padded with spaces to that length. `features`: the incompatible ones that it uses."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * max(total_bytes - SEALED_BYTES - len(text), 0)
    blank = _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, features, 0, len(text), bytes(16))
    digest = digest128(blank, text)
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, features, 0, len(text), digest) + text


def unseal(kind: int, content: bytes, path: str) -> dict[str, Any]:
    """The body of what `seal` gave.

    Raises
    ------
    CorruptionError
        Not every bit is as it was written, or it is another kind of file; the message names `path`.
    FormatVersionError
        Whole, and of a newer version than this one reads.
    """
    if len(content) < SEALED_BYTES or content[:8] != _MAGIC:
        raise CorruptionError(f"{path}: not a file of a checkpoint, or its first bytes are damaged")
    _, version, found_kind, features, _, length, digest = _HEADER.unpack_from(content)
    found = digest128(content[:32], bytes(16), content[48:])
    if length != len(content) - SEALED_BYTES or found != digest:
        raise CorruptionError(
            f"{path}: its {len(content)} bytes do not match their digest", expected=digest.hex(), found=found.hex()
        )
    if version > FORMAT_VERSION or features & ~FEATURES:
        raise FormatVersionError(
            f"{path}: written in format {version} (features {features:#x}); this version reads formats up to {FORMAT_VERSION}: "
            "use the version of embcache that wrote it, or a newer one"
        )
    if found_kind != kind:
        raise CorruptionError(f"{path}: a file of kind {found_kind} where kind {kind} belongs")
    try:
        body = json.loads(content[SEALED_BYTES:])
    except ValueError as error:
        raise CorruptionError(f"{path}: its body is no JSON ({error})") from None
    if not isinstance(body, dict):
        raise CorruptionError(f"{path}: its body is no JSON object")
    return body


def read(kind: int, path: str) -> dict[str, Any]:
    """The body of the sealed file at `path`; `CorruptionError` also where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                raise CorruptionError(f"{path}: no file of a checkpoint")
            content = os.pread(descriptor, about.st_size, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CorruptionError(f"{path}: cannot be read ({error.strerror})") from error
    return unseal(kind, content, path)
