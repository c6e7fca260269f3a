"""One chunk, there and back: where round trips count, not bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.conftest import GEOMETRIES, Connect
from bench.workers.common import Geometry

_seeds = itertools.count(1_000_000)


@pytest.mark.parametrize("operation", ["lookup", "lease", "retrieve", "store"])
@pytest.mark.parametrize("transport", ["shm", "inline", "pickle"])
def test_one_chunk(benchmark: Any, connect: Connect, transport: str, operation: str) -> None:
    """One operation on one chunk of 37.7 MB."""
    benchmark.group = f"one chunk, {operation}"
    geometry = Geometry()
    client = connect(transport, GEOMETRIES["Qwen3-8B"])
    kv = geometry.kv(1)
    tokens = geometry.tokens(next(_seeds), 1)

    def lease() -> None:
        with client.lease(tokens) as held:
            assert len(held) == 1

    if operation == "store":
        benchmark.pedantic(
            client.store,
            setup=lambda: ((kv, geometry.tokens(next(_seeds), 1)), {}),
            rounds=20,
            warmup_rounds=3,
        )
        return
    client.store(kv, tokens)
    call = {
        "lookup": lambda: client.lookup(tokens),
        "lease": lease,
        "retrieve": lambda: client.retrieve(tokens),
    }[operation]
    benchmark.pedantic(call, rounds=20, warmup_rounds=3)
