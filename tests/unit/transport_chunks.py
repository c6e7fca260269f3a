"""Chunks for the tests of what travels in messages."""

from __future__ import annotations

import torch

from lmcache_fast.layout import KVLayout

CHUNK = 4
LAYOUT = KVLayout(3, 2, 5, torch.bfloat16)


def make_chunks(layout: KVLayout, count: int) -> list[torch.Tensor]:
    """Strided views of one ``[planes, L, T, D]``, as the store cuts them."""
    kv = torch.randint(0, 256, (*layout.kv_shape(count * CHUNK)[:-1], layout.row_bytes))
    kv = kv.to(torch.uint8).view(layout.dtype)
    chunks = [kv[:, :, i * CHUNK : (i + 1) * CHUNK] for i in range(count)]
    return chunks if layout.planes == 2 else [chunk[0] for chunk in chunks]


def raw(chunk: torch.Tensor) -> bytes:
    return chunk.contiguous().view(torch.uint8).numpy().tobytes()
