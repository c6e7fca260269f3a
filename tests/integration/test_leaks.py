"""Many good calls leak no memory, descriptor, thread, lock or session.

``LMCACHE_FAST_LEAK_ROUNDS=10000`` makes it as many as docs/reliability.md reports.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from lmcache_fast import edits
from tests.integration.conftest import CHUNK, locked, start_server
from tests.integration.faults import pattern, quiet_client

ROUNDS = int(os.environ.get("LMCACHE_FAST_LEAK_ROUNDS", "400"))
HALF = edits.keep(lambda total, _: range(0, total, 2))
#: What a leak of a few hundred bytes a call would pass by far in ten thousand rounds.
MEMORY_BOUND = 24 << 20


def resources() -> tuple[int, int, int]:
    """Private memory in bytes, threads and descriptors of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    memory = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    ours = sum(thread.name.startswith("lmcache") for thread in threading.enumerate())
    return memory, ours, len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["shm", "pickle", "inline"])
def test_calls_that_go_well_leak_nothing(kind: str) -> None:
    with start_server(kind) as server, quiet_client(server) as client:

        def work(rounds: range) -> None:
            for number in rounds:
                tokens = [number, *range(1, 2 * CHUNK)]
                kv = pattern(tokens)
                assert client.store(kv, tokens)
                found = client.retrieve(tokens)
                assert found is not None and torch.equal(found, kv)
                client.edit(tokens, HALF)
                with client.lease(tokens) as lease:
                    lease[0].tensor()

        work(range(ROUNDS // 4))
        before = resources()
        work(range(ROUNDS // 4, ROUNDS))
        after = resources()
        print(f"\n{kind}: {ROUNDS} rounds; memory, threads, descriptors: {before} -> {after}")
        assert after[1:] == before[1:]
        assert after[0] - before[0] < MEMORY_BOUND
        assert locked(server) == 0
        assert not client._connection._sessions and not client._connection._endings


@pytest.mark.timeout(1800)
def test_opening_and_closing_leaks_nothing() -> None:
    with start_server("shm") as server:
        for number in range(ROUNDS // 10):
            with quiet_client(server) as client:
                client.store(pattern([number] * CHUNK), [number] * CHUNK)
            if number == 4:
                before = resources()
        after = resources()
        assert after[1:] == before[1:]
        assert after[0] - before[0] < MEMORY_BOUND
        assert server.status()["fast"]["instances"] == 0
        assert locked(server) == 0
