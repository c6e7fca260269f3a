"""A server that dies, and one that comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_fast import ConnectError, KVClient, ServerGoneError
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.samples import random_kv, same_bits
from tests.interop.servers import CHUNK, Server, real_server

TIMEOUT = 20.0


@pytest.fixture
def mortal_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with real_server(peer.ensure(), tmp_path, transport=getattr(request, "param", "zmq")) as server:
        yield server


@pytest.mark.parametrize("mortal_server", ["zmq", "grpc"], indirect=True)
def test_a_killed_server_is_an_error_in_bounded_time_and_a_new_one_is_used(
    mortal_server: Server,
) -> None:
    server = mortal_server
    tokens = list(range(3 * CHUNK))
    kv = random_kv(LAYOUT.kv_shape(len(tokens)), LAYOUT.dtype, 5)
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        assert client.store(kv, tokens)
        server.kill()
        for call in (
            lambda: client.lookup(tokens),
            lambda: client.retrieve(tokens),
            lambda: client.store(kv, tokens, "other"),
        ):
            started = time.monotonic()
            with pytest.raises((ServerGoneError, ConnectError)):
                call()
            # Not a measurement: a call that has no bound of its own would wait far longer.
            assert time.monotonic() - started < 3 * TIMEOUT
        server.start()
        assert client.retrieve(tokens) is None  # a new server's cache is empty
        assert client.store(kv, tokens)
        found = client.retrieve(tokens)
        assert found is not None
        assert same_bits(found, kv)
        server.wait_nothing_held()


def test_closing_works_without_a_server(mortal_server: Server) -> None:
    server = mortal_server
    client = KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT)
    server.kill()
    client.close()
    client.close()


def test_a_tensor_outlives_the_server_it_came_from(mortal_server: Server) -> None:
    server = mortal_server
    tokens = list(range(CHUNK))
    kv = random_kv(LAYOUT.kv_shape(CHUNK), LAYOUT.dtype, 6)
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        client.store(kv, tokens)
        found = client.retrieve(tokens)
        server.kill()
    assert found is not None
    assert same_bits(found, kv)
