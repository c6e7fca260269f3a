"""This package beside upstream's SDK on one real server; left out where that cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.compare_upstream import Comparison
from tests.interop.peer import ensure
from tests.interop.servers import real_server


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    """Both workers on one real server."""
    try:
        peer = ensure("0.5.6")
    except Exception as error:
        pytest.skip(f"no environment with the real LMCache could be made: {error}")
    folder: Path = tmp_path_factory.mktemp("server")
    with real_server(peer, folder, chunk_size=256, flags=("--l1-size-gb", "6")) as server:
        both = Comparison(server, pairs=1)
        try:
            for _ in range(10):  # every page of the pool, once
                both.ours("store", seed=both.seed(), chunks=16)
            yield both
        finally:
            both.close()


@pytest.mark.parametrize("chunks", [1, 16])
@pytest.mark.parametrize("operation", ["store", "retrieve", "modify"])
@pytest.mark.parametrize("sdk", ["ours", "upstream"])
def test_sdk(benchmark: Any, comparison: Comparison, sdk: str, operation: str, chunks: int) -> None:
    """What is timed has the pipe to the worker in it, some 0.1 ms."""
    if operation == "modify" and chunks == 1:
        chunks = 4
    benchmark.group = f"real server, {operation}, {chunks} chunks"
    arguments = {"which": "middle"} if operation == "modify" else {}
    worker = getattr(comparison, sdk)

    def setup() -> tuple[tuple[str], dict[str, Any]]:
        seed = comparison.prepare(chunks, stored=operation != "store")
        return (operation,), {"seed": seed, "chunks": chunks, **arguments}

    benchmark.pedantic(worker, setup=setup, rounds=6)
