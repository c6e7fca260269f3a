"""Shared memory, inline and pickle side by side: store, retrieve and edit, from 1 to 64 chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.conftest import GEOMETRIES, Connect
from bench.workers.common import Geometry
from lmcache_fast import edits

LAYOUT = GEOMETRIES["Qwen3-8B"]
ROPE = edits.Rope(128, theta=1e6)
_seeds = itertools.count(1)


@pytest.mark.parametrize("chunks", [1, 4, 16, 64])
@pytest.mark.parametrize("transport", ["shm", "inline", "pickle"])
@pytest.mark.parametrize("operation", ["store", "retrieve", "edit"])
def test_transport(
    benchmark: Any, connect: Connect, operation: str, transport: str, chunks: int
) -> None:
    """One request moved one way; new tokens each time where something is stored."""
    benchmark.group = f"{operation}, {chunks} chunks"
    geometry = Geometry()
    client = connect(transport, LAYOUT)
    kv = geometry.kv(chunks)
    num_bytes = kv.numel() * kv.element_size()
    benchmark.extra_info.update(operation=operation, transport=transport, bytes=num_bytes)
    rounds = 5 if transport == "shm" or chunks < 16 else 2

    def request(stored: bool) -> list[int]:
        tokens = geometry.tokens(next(_seeds), chunks)
        if stored:
            assert client.store(kv, tokens)
        return tokens

    if operation == "store":
        stored = benchmark.pedantic(
            client.store, setup=lambda: ((kv, request(False)), {}), rounds=rounds, warmup_rounds=1
        )
        assert stored
    elif operation == "retrieve":
        tokens = request(True)
        result = benchmark.pedantic(client.retrieve, (tokens,), rounds=rounds, warmup_rounds=1)
        assert torch.equal(result, kv)
    else:
        edit = edits.drop_middle_chunks(0.5, rope=ROPE)
        if chunks == 1:
            edit = edits.keep(lambda total, tokens: range(total), rope=ROPE)
        benchmark.pedantic(
            client.edit,
            setup=lambda: ((request(True), edit), {}),
            rounds=rounds,
            warmup_rounds=1,
        )
