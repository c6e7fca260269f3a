"""Result tensors whose memory is used again: page faults cost more than copies."""

from __future__ import annotations

import os

import torch

from lmcache_fast._extension import native
from lmcache_fast.errors import InvalidInputError

_VARIABLE = "LMCACHE_FAST_BUFFER_POOL_BYTES"
_DEFAULT_LIMIT = 2 << 30


def _limit() -> int:
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return _DEFAULT_LIMIT
    if not text.isdecimal():
        raise InvalidInputError(f"{_VARIABLE} is {text!r}; expected a number of bytes")
    return int(text)


class TensorPool:
    """Hands out uninitialised tensors; a freed one leaves its memory to the next.

    At most ``LMCACHE_FAST_BUFFER_POOL_BYTES`` (2 GiB) are kept back.
    """

    def __init__(self) -> None:
        limit = _limit()
        self._pool = native.BufferPool(limit) if native is not None else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        if self._pool is None or num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._pool.take(num_bytes), dtype=torch.uint8, count=num_bytes)
        return flat.view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory that is kept back to the system."""
        if self._pool is not None:
            self._pool.clear()
