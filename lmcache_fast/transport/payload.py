"""Tensors as parts of one message: written with one copy, read with none."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence

import numpy as np
import torch


def contiguous_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor``'s elements take when they stand side by side."""
    return tensor.numel() * tensor.element_size()


def assemble(parts: Sequence[bytes | torch.Tensor]) -> bytes:
    """Join byte strings and the elements of CPU tensors, which may be strided views."""
    sizes = [len(part) if isinstance(part, bytes) else contiguous_bytes(part) for part in parts]
    # The stream takes the zeros over, lets them be written to, and gives them back, never copied.
    stream = io.BytesIO(bytes(sum(sizes)))
    with stream.getbuffer() as message:
        position = 0
        for part, size in zip(parts, sizes, strict=True):
            if isinstance(part, bytes):
                message[position : position + size] = part
            elif size:
                _write(message, position, part)
            position += size
    return stream.getvalue()


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
