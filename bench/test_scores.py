"""Policies' scores straight from the chunks, against how fast these bytes can be read at all."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
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
ABSENT = 1  # a byte that no cache here has
GROUP = 4  # query heads a head of keys
GEOMETRY_NAMES = ["Qwen3-8B", "Llama-3-70B shard"]
#: How often each reads a plane: keys, and values.
PLANES_READ = {"Knorm": 1, "KeyDiff": 2, "LagKV": 2, "TOVA": 1, "SnapKV": 1}
POLICIES: dict[str, Any] = {
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
        data = chunk.view(torch.uint8)
        data[data == ABSENT] = ABSENT + 1
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
    assert not any(pool.map(lambda start: memchr(start, ABSENT, part), starts))


def _in_turns(
    benchmark: Any, baseline: Callable[[], object], scores: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Benchmark scores in turns with a baseline; medians of its seconds and of its share."""
    seconds = []

    def timed() -> None:
        started = time.perf_counter()
        baseline()
        seconds.append(time.perf_counter() - started)

    baseline()
    benchmark.pedantic(scores, setup=timed, rounds=rounds)
    pairs = zip(seconds, benchmark.stats.stats.data, strict=True)
    return statistics.median(seconds), statistics.median(first / own for first, own in pairs)


def _view(geometry: str) -> Chunks:
    layout = GEOMETRIES[geometry]
    view = Chunks(layout, REQUEST_BYTES // (layout.token_bytes * CHUNK))
    shape = (1, layout.num_layers, view.num_tokens, GROUP * layout.width)
    view.queries = edits.TensorView(torch.zeros(1, dtype=layout.dtype).expand(shape))
    return view


@pytest.mark.parametrize("geometry", GEOMETRY_NAMES)
@pytest.mark.parametrize("scorer", PLANES_READ)
def test_scores(benchmark: Any, scorer: str, geometry: str) -> None:
    """Score one request in warm memory, in turns with reading the same bytes."""
    benchmark.group = f"scores, {geometry}"
    view = _view(geometry)
    plane = view.buffer.nbytes // 2
    with ThreadPoolExecutor(num_threads()) as pool:
        seconds, share = _in_turns(
            benchmark,
            lambda: _read(view.buffer, plane, pool),
            lambda: POLICIES[scorer].scores(view),
            rounds=3 if scorer == "SnapKV" else 15,
        )
    benchmark.extra_info.update(
        scorer=scorer,
        geometry=geometry,
        read_gigabytes_per_second=plane / seconds / 1e9,
        share_of_read_roofline=share * PLANES_READ[scorer],
    )


@pytest.mark.parametrize("geometry", GEOMETRY_NAMES)
def test_snapkv_beside_its_products(benchmark: Any, geometry: str) -> None:
    """SnapKV is bound by arithmetic: in turns with torch's products of queries and keys alone."""
    benchmark.group = f"scores, {geometry}"
    layout = GEOMETRIES[geometry]
    view = _view(geometry)
    heads = layout.width // layout.head_dim
    keys = torch.randn(heads, layout.head_dim, view.num_tokens)
    queries = torch.randn(heads, GROUP * POLICIES["SnapKV"].window_size, layout.head_dim)

    def products() -> None:
        for _ in range(layout.num_layers):
            torch.matmul(queries, keys)

    _, speed = _in_turns(benchmark, products, lambda: POLICIES["SnapKV"].scores(view), rounds=3)
    benchmark.extra_info.update(geometry=geometry, times_as_fast_as_the_products=speed)
