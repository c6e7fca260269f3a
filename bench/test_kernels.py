"""The copy engine beside memcpy and torch, against the copy roofline of the same run."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from bench.conftest import GEOMETRIES
from lmcache_fast import KVLayout, edits
from lmcache_fast._native import ChunkedSide, copy_runs
from lmcache_fast.edits.plan import compile_plan

CHUNK = 256
REQUEST_BYTES = 400_000_000
KERNELS = ("roofline", "gather", "scatter", "drop middle", "every second", "memcpy", "torch")


def _chunks_side(buffer: torch.Tensor, layout: KVLayout, chunks: int) -> ChunkedSide:
    chunk_bytes = layout.token_bytes * CHUNK
    return ChunkedSide.from_addresses(
        buffer.data_ptr() + np.arange(chunks, dtype=np.uint64) * np.uint64(chunk_bytes),
        buffer,
        tokens_per_chunk=CHUNK,
        planes=layout.planes,
        layers=layout.num_layers,
        row_bytes=layout.row_bytes,
        plane_stride=chunk_bytes // layout.planes,
        layer_stride=layout.row_bytes * CHUNK,
    )


def _tensor_side(buffer: torch.Tensor, layout: KVLayout, tokens: int) -> ChunkedSide:
    return ChunkedSide.from_addresses(
        np.array([buffer.data_ptr()], np.uint64),
        buffer,
        tokens_per_chunk=tokens,
        planes=layout.planes,
        layers=layout.num_layers,
        row_bytes=layout.row_bytes,
        plane_stride=layout.num_layers * tokens * layout.row_bytes,
        layer_stride=tokens * layout.row_bytes,
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark: Any, kernel: str, geometry: str) -> None:
    """Move one request between warm buffers; bytes count as read and written."""
    benchmark.group = f"kernels, {geometry}"
    layout = GEOMETRIES[geometry]
    chunks = max(REQUEST_BYTES // (layout.token_bytes * CHUNK), 4) // 4 * 4
    tokens = chunks * CHUNK
    size = tokens * layout.token_bytes
    source = torch.zeros(size // 2, dtype=torch.bfloat16).fill_(1.5)
    target = torch.zeros_like(source).fill_(0)
    whole = np.array([[0, 0, tokens]], np.int64)
    in_chunks, as_tensor = _chunks_side, _tensor_side
    moved = 2 * size
    if kernel == "memcpy":
        memmove = ctypes.CDLL(None).memcpy
        memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        call, arguments = memmove, (target.data_ptr(), source.data_ptr(), size)
    elif kernel == "torch":
        call, arguments = target.copy_, (source,)
    elif kernel in ("roofline", "gather", "scatter"):
        # The roofline has chunks on both sides: every row of chunks is one long stream.
        left = as_tensor(source, layout, tokens) if kernel == "scatter" else None
        right = as_tensor(target, layout, tokens) if kernel == "gather" else None
        left = left or in_chunks(source, layout, chunks)
        right = right or in_chunks(target, layout, chunks)
        call, arguments = copy_runs, (left, right, whole)
    else:
        rope = edits.Rope(layout.head_dim, theta=1e6) if layout.planes == 2 else None
        edit = (
            edits.drop_middle_chunks(0.5, rope=rope)
            if kernel == "drop middle"
            else edits.keep(range(0, tokens, 2), rope=rope)
        )
        plan = edit.plan(range(tokens), chunk_size=CHUNK)
        runs, rotation = compile_plan(plan, layout, CHUNK).for_chunks(range(chunks // 2), CHUNK)
        sides = in_chunks(source, layout, chunks), in_chunks(target, layout, chunks)
        call, arguments = copy_runs, (*sides, runs, rotation)
        moved = size
    benchmark.extra_info.update(kernel=kernel, geometry=geometry, moved_bytes=moved)
    benchmark.pedantic(call, arguments, rounds=9, warmup_rounds=2)
