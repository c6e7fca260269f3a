"""A server that dies, and one that comes back."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_fast import ConnectError, KVClient, ServerGoneError, ServerTimeoutError, edits
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.samples import random_kv, same_bits
from tests.interop.servers import CHUNK, Server, real_server

TIMEOUT = 20.0


@pytest.fixture(scope="module")
def zmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real_server(peer.ensure(), tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with real_server(peer.ensure(), folder, transport="grpc+unix") as server:
        yield server


@pytest.fixture
def mortal_server(request: pytest.FixtureRequest) -> Server:
    """A server that is up, whatever the test before did to it, with nothing cached."""
    server: Server = request.getfixturevalue(f"{getattr(request, 'param', 'zmq')}_server")
    server.signal(signal.SIGCONT)
    try:
        server.clear()
    except OSError:
        server.start()
    return server


@pytest.mark.parametrize("mortal_server", ["zmq", "grpc"], indirect=True)
def test_a_killed_server_is_an_error_in_bounded_time_and_a_new_one_is_used(
    mortal_server: Server,
) -> None:
    server = mortal_server
    tokens = list(range(3 * CHUNK))
    kv = random_kv(LAYOUT.kv_shape(len(tokens)), LAYOUT.dtype, 5)
    leaver = KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT)
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        assert client.store(kv, tokens)
        before = client.retrieve(tokens)
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
        leaver.close()  # works without a server
        leaver.close()
        server.start()
        assert before is not None and same_bits(before, kv), "a result outlives its server"
        assert client.retrieve(tokens) is None  # a new server's cache is empty
        assert client.store(kv, tokens)
        found = client.retrieve(tokens)
        assert found is not None
        assert same_bits(found, kv)
        server.wait_nothing_held()


STEPS = ["lookup", "prepare_retrieve", "release_read", "prepare_store", "commit_store"]
TOKENS = list(range(1000, 1000 + 4 * CHUNK))
KV = random_kv(LAYOUT.kv_shape(len(TOKENS)), LAYOUT.dtype, 7)
HALF = edits.keep(lambda total, _: range(0, total, 2))


def before(client: KVClient, step: str, action: Callable[[], object]) -> None:
    """Have ``action`` run once, just before the client's connection does ``step``."""
    connection = client._connection
    original = getattr(connection, step)

    def hooked(*arguments: Any) -> Any:
        setattr(connection, step, original)
        action()
        return original(*arguments)

    setattr(connection, step, hooked)


def use(client: KVClient, number: int) -> None:
    """Go through every step: retrieve, edit and store."""
    found = client.retrieve(TOKENS)
    assert found is None or same_bits(found, KV[:, :, : found.shape[2]])
    if found is not None:
        client.edit(TOKENS, HALF, target_salt=f"half {number}")
    client.store(KV, TOKENS, f"again {number}")


def test_a_server_stopped_for_longer_than_a_time_out_costs_one_call(
    mortal_server: Server,
) -> None:
    server = mortal_server
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        client.store(KV, TOKENS)
        for number, step in enumerate(STEPS):
            client._connection.timeout = 3.0
            object.__setattr__(client._connection._listener, "timeout", 3.0)
            before(client, step, lambda: server.signal(signal.SIGSTOP))
            with contextlib.suppress(ServerTimeoutError, ServerGoneError):
                use(client, number)
                assert step == "release_read", "nobody waits for that one"
            server.signal(signal.SIGCONT)
            client._connection.timeout = TIMEOUT
            object.__setattr__(client._connection._listener, "timeout", TIMEOUT)
            use(client, number)
            found = client.retrieve(TOKENS)
            assert found is not None and same_bits(found, KV)
        server.wait_nothing_held()


@pytest.mark.parametrize("comeback", ["chunk size", "pool name", "release"])
def test_a_server_killed_at_a_step_and_replaced_is_used_by_the_next_call(
    mortal_server: Server, comeback: str
) -> None:
    server = mortal_server

    def replace() -> None:
        server.kill()
        if comeback == "chunk size":
            server.chunk_size = 2 * CHUNK
            server._command += ["--chunk-size", server.chunk_size]
        elif comeback == "pool name":
            server.segment = server.segment.with_name(f"{server.segment.name}_other")
            server._command += ["--shm-name", server.segment.name.removeprefix("lmcache_l1_pool_")]
        elif comeback == "release":
            other = peer.ensure("0.5.7rc2")
            server._environment = other.environment()
            server._command[0] = other.python
        server.start()

    step = {"chunk size": "lookup", "pool name": "commit_store", "release": "prepare_retrieve"}
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        client.store(KV, TOKENS)
        before(client, step[comeback], replace)
        with contextlib.suppress(ServerGoneError, ConnectError):
            use(client, 0)
        client.store(KV, TOKENS)
        found = client.retrieve(TOKENS)
        assert found is not None and same_bits(found, KV)
        use(client, 1)
        assert client.chunk_size == server.chunk_size
        server.wait_nothing_held()
