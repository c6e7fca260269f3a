"""KV that two processes can make, or compare, without sending it.

Imported in the peer's environment too, so it needs numpy and torch and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def random_kv(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, the same for the same seed everywhere (NaNs included)."""
    count = int(np.prod(shape)) * dtype.itemsize
    if not count:  # torch cannot view no bytes as another type
        return torch.empty(tuple(shape), dtype=dtype)
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(tuple(shape))


def made_up_kv(layout: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return KV ``[planes, L, T, D]`` in which every row tells its token, layer and plane."""
    shape = layout.kv_shape(len(tokens))
    rows = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    layers = torch.arange(shape[1], dtype=torch.float32).view(1, -1, 1, 1) * 1024
    planes = torch.arange(shape[0], dtype=torch.float32).view(-1, 1, 1, 1) * 0.25
    return (rows + layers + planes).expand(shape).to(layout.dtype).contiguous()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a NaN equals itself."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and (left.numel() == 0 or digest(left) == digest(right))
    )


def digest(kv: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    return hashlib.sha256(kv.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
