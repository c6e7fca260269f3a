"""Chunks as a pickle of a list of tensors: what servers up to 0.5.6 exchange without shared memory.

What we write loads with plain ``pickle.loads`` wherever torch is, and copies each chunk once. What
we read is never unpickled: :mod:`lmcache_fast.transport.opcodes` reads it as data, and only the few
calls that a CPU tensor's pickle is made of are understood, not made.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_fast.errors import PayloadError
from lmcache_fast.layout import CACHE_DTYPES, KVLayout
from lmcache_fast.protocol.messages import Frame
from lmcache_fast.transport.opcodes import PickleReader, Symbol
from lmcache_fast.transport.payload import Part, assemble, contiguous_bytes, tensor_over

#: torch's classes of typed storages, by which the pickles of older dtypes name the dtype.
_STORAGES: dict[str, torch.dtype | None] = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.storage.UntypedStorage": None,
    "torch.UntypedStorage": None,
}
_DTYPES = {f"torch.{name}": dtype for name, dtype in CACHE_DTYPES.items()}

# The header of torch's stream format for one storage.
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_TORCH_VERSION = 1001


def chunk_parts(chunks: Sequence[torch.Tensor]) -> list[Part]:
    """Pickle ``chunks``, CPU tensors of one dtype and shape, as a list of tensors.

    Each is ``torch.reshape(partial(torch.frombuffer, dtype=...)(bytearray), shape)``: public
    functions only, and the loader copies the bytes once.
    """
    parts: list[Part] = [pickle.PROTO + b"\x05" + pickle.EMPTY_LIST + pickle.MARK]
    for index, chunk in enumerate(chunks):
        if index == 0:
            names = _global("torch", "reshape") + _put(0) + _partial(chunk.dtype) + _put(1)
        else:
            names = _get(0) + _get(1)
        parts.append(names + pickle.BYTEARRAY8 + struct.pack("<Q", contiguous_bytes(chunk)))
        parts.append(chunk)
        shape = b"".join(pickle.BININT + struct.pack("<i", length) for length in chunk.shape)
        parts.append(
            pickle.TUPLE1 + pickle.REDUCE
            + pickle.MARK + shape + pickle.TUPLE
            + pickle.TUPLE2 + pickle.REDUCE
        )  # fmt: skip
    parts.append(pickle.APPENDS + pickle.STOP)
    return parts


def encode_chunks(chunks: Sequence[torch.Tensor]) -> bytes:
    """Join the :func:`chunk_parts` of ``chunks``."""
    return assemble(chunk_parts(chunks))


def decode_chunks(
    data: Frame | Mapping[str, Any], layout: KVLayout, chunk_size: int
) -> list[torch.Tensor]:
    """Read a list of chunks, ours or torch's own, as views of ``data``, not to be written to.

    Args:
        data: the pickle.
        layout: shape of the model's cache.
        chunk_size: tokens a chunk.

    Returns:
        CPU tensors ``[2, L, chunk, D]`` (``[L, chunk, D]`` for one plane).

    Raises:
        PayloadError: it is not a pickle of a list of such tensors; nothing in it was run.
    """
    if isinstance(data, Mapping):
        raise PayloadError("pickle: the chunks came as a map; expected bytes")
    view = memoryview(data)
    reader = PickleReader(view, reduce=_reduce)
    value = reader.read()
    if reader.position != len(view):
        raise PayloadError(f"pickle: {len(view) - reader.position} bytes behind its end")
    if not isinstance(value, list):
        raise PayloadError(f"pickle: {type(value).__name__}; expected a list of tensors")
    shape = layout.object_shape(chunk_size)
    for index, item in enumerate(value):
        if not isinstance(item, _Tensor):
            raise PayloadError(f"pickle: item {index} is {type(item).__name__}; expected a tensor")
        if item.dtype != layout.dtype or not layout.is_object_shape(item.shape, chunk_size):
            raise PayloadError(
                f"pickle: chunk {index} is {item.dtype} {list(item.shape)}; expected "
                f"{layout.dtype} {list(shape)}"
            )
        if len(item.data) != layout.token_bytes * chunk_size:
            raise PayloadError(
                f"pickle: chunk {index} has {len(item.data)} bytes; expected "
                f"{layout.token_bytes * chunk_size}"
            )
    return [tensor_over(item.data, item.dtype, shape) for item in value]


@dataclass(frozen=True)
class _Storage:
    data: memoryview
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Tensor:
    data: memoryview
    dtype: torch.dtype
    shape: tuple[int, ...]


class _FromBuffer(Symbol):
    """``functools.partial(torch.frombuffer, dtype=...)``: its name is the dtype's."""


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _put(index: int) -> bytes:
    return pickle.BINPUT + bytes([index])


def _get(index: int) -> bytes:
    return pickle.BINGET + bytes([index])


def _partial(dtype: torch.dtype) -> bytes:
    return (
        _global("functools", "partial")
        + _global("torch", "frombuffer") + pickle.TUPLE1
        + pickle.EMPTY_DICT
        + pickle.SHORT_BINUNICODE + b"\x05dtype"
        + _global("torch", str(dtype).removeprefix("torch."))
        + pickle.SETITEM
        + pickle.NEWOBJ_EX
    )  # fmt: skip


def _reduce(function: Symbol, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Say what a call in a tensor's pickle stands for."""
    if isinstance(function, _FromBuffer):
        (data,) = arguments
        dtype = _DTYPES[function.name]
        return _Tensor(_bytes(data), dtype, (len(data) // dtype.itemsize,))
    match function.name, arguments:
        case "functools.partial", (Symbol("torch.frombuffer"),):
            if set(keywords) != {"dtype"} or keywords["dtype"].name not in _DTYPES:
                raise PayloadError("pickle: torch.frombuffer without a cache's dtype")
            return _FromBuffer(keywords["dtype"].name)
        case _ if keywords:
            pass
        case "torch.reshape", (_Tensor() as tensor, shape):
            return _Tensor(tensor.data, tensor.dtype, _counts(shape))
        case "collections.OrderedDict", ():
            return {}
        case "torch.storage._load_from_bytes", (data,):
            return _read_storage(_bytes(data))
        case "torch._utils._rebuild_tensor_v2", (_Storage() as storage, *rest):
            return _rebuild(storage, storage.dtype, rest)
        case "torch._utils._rebuild_tensor_v3", (_Storage() as storage, *rest, Symbol(name)):
            return _rebuild(storage, _DTYPES.get(name), rest)
    raise PayloadError(f"pickle: a call of {function.name!r} is not allowed")


def _rebuild(storage: _Storage, dtype: torch.dtype | None, arguments: list[Any]) -> _Tensor:
    """A tensor over part of a storage."""
    offset, shape, stride, requires_grad, hooks = arguments
    shape, stride = _counts(shape), _counts(stride)
    if dtype is None or storage.dtype not in (None, dtype):
        raise PayloadError("pickle: a tensor whose dtype no cache has")
    if requires_grad is not False or hooks != {}:
        raise PayloadError("pickle: a tensor with gradients or hooks")
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise PayloadError(f"pickle: a tensor {list(shape)} with strides {list(stride)}")
        expected *= length
    (start,) = _counts((offset,))
    start, end = start * dtype.itemsize, (start + expected) * dtype.itemsize
    if end > len(storage.data):
        raise PayloadError(f"pickle: a tensor up to byte {end} of {len(storage.data)}")
    return _Tensor(storage.data[start:end], dtype, shape)


def _read_storage(data: memoryview) -> _Storage:
    """Read one storage in torch's stream format."""
    reader = PickleReader(data, persistent=_Persistent)
    magic, version, system = reader.read(), reader.read(), reader.read()
    if magic != _TORCH_MAGIC or version != _TORCH_VERSION:
        raise PayloadError("pickle: a storage that is not in torch's stream format")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise PayloadError("pickle: a storage that is not little-endian")
    match reader.read():
        case _Persistent(("storage", Symbol(name), str(key), "cpu", int(count), None)):
            pass
        case _:
            raise PayloadError("pickle: a storage that is not one CPU storage")
    if name not in _STORAGES or reader.read() != [key]:
        raise PayloadError(f"pickle: a storage of class {name!r}")
    dtype = _STORAGES[name]
    (count,) = _counts((count,))
    length = count * (1 if dtype is None else dtype.itemsize)
    if reader.number("q") != count or len(data) - reader.position != length:
        raise PayloadError(f"pickle: a storage that is not the {length} bytes that it says")
    return _Storage(reader.take(length), dtype)


@dataclass(frozen=True)
class _Persistent:
    fields: Any


def _bytes(value: Any) -> memoryview:
    if not isinstance(value, memoryview):
        raise PayloadError(f"pickle: {type(value).__name__} where bytes are expected")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(v) is int and v >= 0 for v in value):
        raise PayloadError(f"pickle: {type(value).__name__} where sizes are expected")
    return value
