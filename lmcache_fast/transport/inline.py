"""Chunks as an envelope of raw bytes: what servers from 0.5.7 on exchange without shared memory.

The envelope is one msgpack map ``{version: 1, tensors: [{dtype, shape, data}]}`` and travels as a
byte string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from lmcache_fast.errors import PayloadError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.messages import Frame
from lmcache_fast.transport.payload import Part, assemble, contiguous_bytes, tensor_over

_EMPTY = b"\xc4\x00"  # msgpack: no bytes
_BYTES32 = b"\xc6"  # msgpack: bytes, after their big-endian uint32 length
_ARRAY32 = b"\xdd"  # msgpack: an array, after its big-endian uint32 length


class _Frame(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    tensors: list[_Frame]


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)


def chunk_parts(chunks: Sequence[torch.Tensor]) -> list[Part]:
    """Put ``chunks``, CPU tensors, into an envelope."""
    head = msgspec.msgpack.encode({"version": 1, "tensors": None})[:-1]
    parts: list[Part] = [head + _ARRAY32 + len(chunks).to_bytes(4, "big")]
    for chunk in chunks:
        frame = _Frame(str(chunk.dtype).removeprefix("torch."), tuple(chunk.shape), memoryview(b""))
        prefix = msgspec.msgpack.encode(frame).removesuffix(_EMPTY)
        parts.append(prefix + _BYTES32 + contiguous_bytes(chunk).to_bytes(4, "big"))
        parts.append(chunk)
    return parts


def encode_chunks(chunks: Sequence[torch.Tensor]) -> bytes:
    """Join the :func:`chunk_parts` of ``chunks``."""
    return assemble(chunk_parts(chunks))


def decode_chunks(
    data: Frame | Mapping[str, Any], layout: KVLayout, chunk_size: int
) -> list[torch.Tensor]:
    """Read an envelope's chunks as views of ``data``, not to be written to.

    Args:
        data: the envelope, or the map that it is once unpacked.
        layout: shape of the model's cache.
        chunk_size: tokens a chunk.

    Returns:
        CPU tensors ``[2, L, chunk, D]`` (``[L, chunk, D]`` for one plane).

    Raises:
        PayloadError: it is not an envelope of such tensors.
    """
    try:
        if isinstance(data, Mapping):
            frames = msgspec.convert(data, _Envelope).tensors
        else:
            frames = _ENVELOPE.decode(data).tensors
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError(f"inline: not an envelope of tensors: {error}") from error
    shape = layout.object_shape(chunk_size)
    for index, frame in enumerate(frames):
        fits = layout.is_object_shape(frame.shape, chunk_size)
        if frame.dtype != layout.dtype_name or not fits:
            raise PayloadError(
                f"inline: chunk {index} is {frame.dtype} {list(frame.shape)}; expected "
                f"{layout.dtype_name} {list(shape)}"
            )
        if len(frame.data) != layout.token_bytes * chunk_size:
            raise PayloadError(
                f"inline: chunk {index} has {len(frame.data)} bytes; expected "
                f"{layout.token_bytes * chunk_size}"
            )
    return [tensor_over(frame.data, layout.dtype, shape) for frame in frames]
