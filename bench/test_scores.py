"""Policies' scores straight from the chunks, against how fast these bytes can be read at all."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bench.conftest import GEOMETRIES
from lmcache_fast import KVLayout, edits
from lmcache_fast._native import ChunkedSide, num_threads

CHUNK = 256
REQUEST_BYTES = 400_000_000
#: How often each reads a plane: keys, and values.
SCORERS = {
    "read roofline": 1,
    "Knorm": 1,
    "KeyDiff": 2,
    "LagKV": 2,
    "TOVA": 1,
}
POLICIES = {
    "Knorm": edits.Knorm(0.5),
    "KeyDiff": edits.KeyDiff(0.5),
    "LagKV": edits.LagKV(0.5),
    "TOVA": edits.TOVA(0.5),
    "SnapKV": edits.SnapKV(0.5),
}


class Chunks(edits.TensorView):
    """A cache in chunks, as a server keeps it."""

    def __init__(self, layout: KVLayout, chunks: int) -> None:
        shape = (chunks, layout.planes, layout.num_layers, CHUNK, layout.width)
        generator = torch.Generator().manual_seed(1)
        chunk = torch.randn(shape[2:], generator=generator).to(layout.dtype)
        self.buffer = chunk.expand(shape).contiguous()
        tokens = chunks * CHUNK
        super().__init__(chunk[:1, :1].expand(*shape[1:3], tokens, layout.width), layout.head_dim)
        chunk_bytes = layout.token_bytes * CHUNK
        self._chunked = ChunkedSide.from_addresses(
            self.buffer.data_ptr() + np.arange(chunks, dtype=np.uint64) * np.uint64(chunk_bytes),
            self.buffer,
            tokens_per_chunk=CHUNK,
            planes=layout.planes,
            layers=layout.num_layers,
            row_bytes=layout.row_bytes,
            plane_stride=chunk_bytes // layout.planes,
            layer_stride=layout.row_bytes * CHUNK,
        )

    @property
    def side(self) -> ChunkedSide:
        """See :class:`KVView`."""
        return self._chunked


def _read(buffer: torch.Tensor, size: int, pool: ThreadPoolExecutor) -> None:
    """Look for a byte that is not there, on as many threads as score."""
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    part = size // num_threads()
    starts = [buffer.data_ptr() + i * part for i in range(num_threads())]
    assert not any(pool.map(lambda start: memchr(start, 1, part), starts))


@pytest.mark.parametrize("geometry", ["Qwen3-8B", "Llama-3-70B shard"])
@pytest.mark.parametrize("scorer", [*SCORERS, "SnapKV"])
def test_scores(benchmark: Any, scorer: str, geometry: str) -> None:
    """Score one request in warm memory; bytes are counted as often as they are read."""
    benchmark.group = f"scores, {geometry}"
    layout = GEOMETRIES[geometry]
    chunks = REQUEST_BYTES // (layout.token_bytes * CHUNK)
    view = Chunks(layout, chunks)
    plane = view.buffer.nbytes // 2
    if scorer == "read roofline":
        view.buffer.fill_(1.5)
        with ThreadPoolExecutor(num_threads()) as pool:
            benchmark.pedantic(_read, (view.buffer, plane, pool), rounds=9, warmup_rounds=2)
    else:
        shape = (1, layout.num_layers, view.num_tokens, 4 * layout.width)
        view.queries = edits.TensorView(torch.zeros(1, dtype=layout.dtype).expand(shape))
        rounds = 2 if scorer == "SnapKV" else 9
        call = POLICIES[scorer].scores
        benchmark.pedantic(call, (view,), rounds=rounds, warmup_rounds=1)
    read = plane * SCORERS.get(scorer, 1)
    benchmark.extra_info.update(scorer=scorer, geometry=geometry, read_bytes=read)
    benchmark.extra_info["gigabytes_per_second"] = read / benchmark.stats.stats.min / 1e9
