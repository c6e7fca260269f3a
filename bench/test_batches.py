"""Batches of 1 to 16 streams, edited together; the memory that this adds is in extra_info."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.conftest import GEOMETRIES, Connect
from bench.workers.common import Geometry, added_memory
from lmcache_fast import edits
from lmcache_fast.sdk.batch import LMCacheBatchedStream
from lmcache_fast.sdk.stream import create_request

CHUNKS = 4
_seeds = itertools.count(2_000_000)


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("way", ["slot to slot", "through tensors"])
def test_batch(benchmark: Any, connect: Connect, way: str, streams: int) -> None:
    """Drop half of each stream's chunks: as an edit, and as a plain function over tensors."""
    benchmark.group = f"batch of {streams}"
    geometry = Geometry()
    client = connect("shm", GEOMETRIES["Qwen3-8B"])
    kv = geometry.kv(CHUNKS)
    edit = edits.drop_middle_chunks(0.5, rope=edits.Rope(128, theta=1e6))
    function = edit if way == "slot to slot" else lambda kv, tokens: edit(kv, tokens)

    def batch() -> tuple[tuple[LMCacheBatchedStream], dict[str, Any]]:
        batched = LMCacheBatchedStream()
        for _ in range(streams):
            tokens = geometry.tokens(next(_seeds), CHUNKS)
            client.store(kv, tokens)
            batched.add(create_request(client, lambda *_: iter(()), tokens))
        return (batched,), {}

    benchmark.pedantic(lambda b: b.modify(function), setup=batch, rounds=4, warmup_rounds=1)
    (last,), _ = batch()
    benchmark.extra_info["added_bytes"] = added_memory(lambda: last.modify(function))
