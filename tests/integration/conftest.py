"""An embedded server for each way that chunks can travel, and clients of it."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lmcache_fast import KVClient, KVLayout
from lmcache_fast.serve.server import EmbeddedServer

CHUNK = 16
LAYOUT = KVLayout(3, 2, 8, "bfloat16")
#: How the server has to be started for each transport.
SERVERS: dict[str, dict[str, Any]] = {
    "shm": {"protocol": "0.5.6"},
    "shm-0.5.7": {"protocol": "0.5.7"},
    "pickle": {"protocol": "0.5.6"},
    "inline": {"protocol": "0.5.7"},
}

Connect = Callable[..., KVClient]


def start_server(transport: str, **settings: Any) -> EmbeddedServer:
    """Start a server that chunks travel to and from over ``transport``."""
    name = f"lmcache_fast_test_{uuid.uuid4().hex[:8]}" if transport.startswith("shm") else ""
    defaults = {"chunk_size": CHUNK, "pool_bytes": 1 << 22, "shm_name": name}
    return EmbeddedServer(**{**defaults, **SERVERS[transport], **settings})


def locked(server: EmbeddedServer) -> int:
    """Locks, open transfers and sessions on the server, once it has worked off what was sent."""
    fields = ("locked_objects", "pending_stores", "pending_retrieves", "sessions")
    deadline = time.monotonic() + 30
    while True:
        counters = server.status()["fast"]
        left = sum(counters[name] for name in fields)
        if not left or time.monotonic() > deadline:
            return int(left)
        time.sleep(0.02)


@pytest.fixture(params=SERVERS)
def transport(request: pytest.FixtureRequest) -> str:
    """Name the server's kind."""
    return str(request.param)


@pytest.fixture
def server(transport: str) -> Iterator[EmbeddedServer]:
    """Run a server; after the test no lock and no session may be left on it."""
    with start_server(transport) as running:
        yield running
        assert locked(running) == 0


@pytest.fixture
def connect(server: EmbeddedServer) -> Iterator[Connect]:
    """Return a function that opens clients of the server."""
    with ExitStack() as stack:

        def make(
            model_name: str = "model", layout: KVLayout | None = LAYOUT, timeout: float = 30.0
        ) -> KVClient:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*no shared memory.*")
                client = KVClient(
                    server.url, server.http_url, model_name, layout=layout, timeout=timeout
                )
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(connect: Connect) -> KVClient:
    """One client of the server."""
    return connect()
