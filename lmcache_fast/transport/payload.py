"""Tensors as parts of one message: written with one copy, read with none."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

#: Part of a message: bytes, or the elements of a CPU tensor, which may be a strided view.
Part: TypeAlias = "bytes | torch.Tensor"


def contiguous_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor``'s elements take when they stand side by side."""
    return tensor.numel() * tensor.element_size()


def size_of(parts: Sequence[Part]) -> int:
    """Bytes that ``parts`` take one behind the other."""
    return sum(map(_size, parts))


def write(parts: Sequence[Part], message: memoryview) -> None:
    """Put ``parts`` one behind the other into ``message``, which has just their size."""
    position = 0
    for part in parts:
        size = _size(part)
        if isinstance(part, bytes):
            message[position : position + size] = part
        elif size:
            _write(message, position, part)
        position += size


def assemble(parts: Sequence[Part]) -> bytes:
    """Join ``parts``."""
    # The stream takes the zeros over, lets them be written to, and gives them back, never copied.
    stream = io.BytesIO(bytes(size_of(parts)))
    with stream.getbuffer() as message:
        write(parts, message)
    return stream.getvalue()


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else contiguous_bytes(part)


def _write(message: memoryview, position: int, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    rows = tensor.detach().view(torch.uint8)
    target = torch.frombuffer(message, dtype=torch.uint8, count=rows.numel(), offset=position)
    target.view(rows.shape).copy_(rows)


def tensor_over(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View ``data``, which has just the right length, as a tensor that must not be written to.

    The tensor keeps the memory alive. It need not be aligned: the processors we run on don't mind.
    """
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    # torch warns about every buffer that is read-only, and tells nobody when it is written to. So
    # it gets the address.
    address = np.frombuffer(data, np.uint8).ctypes.data
    block = (ctypes.c_ubyte * len(data)).from_address(address)
    block.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(block, dtype=dtype).view(tuple(shape))
