"""gRPC: the same conversation as over ZeroMQ, and a server's refusals become errors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.errors import (
    ClosedError,
    ConnectError,
    ProtocolError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    UnsupportedServerError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol import protobuf, silence
from lmcache_fast.protocol.channel import open_channel, transport_of
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.protocol.dialect import dialect_for
from lmcache_fast.protocol.grpc_channel import GrpcChannel
from lmcache_fast.protocol.grpc_dialect import GrpcDialect, read_reply
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.server_info import read_server_info
from lmcache_fast.protocol.tokens import PackedTokens
from tests.unit.protocol_fake import SLOT, Dropped, FakeServer, confirmation_limits, until
from tests.unit.protocol_fake_grpc import GrpcFakeServer

LAYOUT = KVLayout(1, 1, 4, "bfloat16", 4)
KEY = Key("m", 1, 0, PackedTokens(range(9)), 0, 8, "r")
DIALECT = GrpcDialect.of(dialect_for("0.5.6"))
PING = DIALECT.name(Operation.PING)
UINT64 = st.integers(0, 2**64 - 1)


@pytest.fixture(params=["0.5.6", "0.5.7rc2"])
def server(request: pytest.FixtureRequest) -> Iterator[GrpcFakeServer]:
    server = GrpcFakeServer(request.param)
    yield server
    server.close()


@pytest.fixture
def connection(server: GrpcFakeServer) -> Iterator[Connection]:
    connection = Connection(server.url, server.http_url, "m", LAYOUT, 30.0)
    yield connection
    connection.close()


@pytest.fixture
def old_server() -> Iterator[GrpcFakeServer]:
    server = GrpcFakeServer()
    yield server
    server.close()


@pytest.fixture
def channel(old_server: GrpcFakeServer) -> Iterator[GrpcChannel]:
    channel = GrpcChannel(old_server.url, 30)
    yield channel
    channel.close()


def drop(*_: object) -> None:
    raise Dropped


def ping(channel: GrpcChannel) -> Any:
    return channel.submit(PING, DIALECT.instance(None))


# The wire format


@given(st.lists(st.one_of(UINT64, st.binary(max_size=200), st.floats(allow_nan=False))))
def test_messages_are_read_as_they_were_written(values: list[Any]) -> None:
    encode: dict[type, Callable[[int, Any], bytes]] = {
        int: protobuf.integer,
        bytes: protobuf.data,
        float: protobuf.double,
    }
    parts = [encode[type(value)](field, value) for field, value in enumerate(values, 1)]
    fields = protobuf.read(b"".join(parts))
    for field, value in enumerate(values, 1):
        if isinstance(value, float):
            assert fields[field].to_bytes(8, "little") == protobuf.double(1, value)[1:]  # type: ignore[union-attr]
        else:
            assert fields[field] == value


@given(st.binary(max_size=64))
def test_hostile_messages_are_protocol_errors(message: bytes) -> None:
    for operation in Operation:
        try:
            read_reply(DIALECT.name(operation), message)
        except ProtocolError:
            continue


@given(st.lists(st.sampled_from([0, 1, 127, 128, 2**14, 2**28 - 1, 2**28, 2**32 - 1])))
def test_tokens_are_varints(tokens: list[int]) -> None:
    encoded = PackedTokens(tokens).as_varints()
    whole = b"".join(b"\x08" + encoded[i : i + 5] for i in range(0, len(encoded), 5))
    read = [protobuf.read(whole[i : i + 6])[1] for i in range(0, len(whole), 6)]
    assert read == tokens


# The channel


def test_addresses_name_their_transport() -> None:
    assert [transport_of(url) for url in ("grpc://h:1", "grpc+unix:///x")] == ["grpc"] * 2
    assert [transport_of(url) for url in ("tcp://h:1", "ipc:///x")] == ["zmq"] * 2


def test_replies_find_their_requests_in_any_order(
    old_server: GrpcFakeServer, channel: GrpcChannel
) -> None:
    gate, first = threading.Event(), threading.Event()

    def answer(_: object) -> bool:
        if not first.is_set():
            first.set()
            return gate.wait(30)
        return False

    old_server.on[Operation.PING] = answer
    slow = ping(channel)
    until(first.is_set, "the first ping")
    assert ping(channel).result(30) == b"\xc2"
    assert not slow.done()
    gate.set()
    assert slow.result(30) == b"\xc3"


def test_a_refusal_carries_the_servers_words(
    old_server: GrpcFakeServer, channel: GrpcChannel
) -> None:
    def refuse(_: object) -> bool:
        raise ValueError("no such luck")

    old_server.on[Operation.PING] = refuse
    with pytest.raises(RequestDroppedError, match=r"Ping: .*UNKNOWN.*no such luck"):
        ping(channel).result(30)
    assert channel.is_open


def test_a_lost_server_fails_what_was_sent_and_what_comes_and_is_not_called_again(
    old_server: GrpcFakeServer, channel: GrpcChannel
) -> None:
    gate, called = threading.Event(), threading.Event()

    def answer(_: object) -> bool:
        called.set()
        return gate.wait(30)

    old_server.on[Operation.PING] = answer
    reply = ping(channel)
    until(called.is_set, "the ping")
    old_server.stop()
    gate.set()
    with pytest.raises(ServerGoneError):
        reply.result(30)
    old_server.start()
    seen = len(old_server.seen)
    until(lambda: not channel.is_open, "the loss to be noticed")
    with pytest.raises(ServerGoneError):
        ping(channel)
    assert len(old_server.seen) == seen


def test_an_idle_channel_notices_that_the_server_went(
    old_server: GrpcFakeServer, channel: GrpcChannel
) -> None:
    assert channel.is_open
    old_server.stop()
    until(lambda: not channel.is_open, "the loss to be noticed")


def test_a_dead_host_is_for_the_kernel_to_notice(
    old_server: GrpcFakeServer, channel: GrpcChannel
) -> None:
    assert ping(channel).result(30) == b"\xc3"
    assert confirmation_limits(old_server._port) == [30_000]


def test_closing_fails_what_is_missing(old_server: GrpcFakeServer, channel: GrpcChannel) -> None:
    gate = threading.Event()
    old_server.on[Operation.PING] = lambda _: gate.wait(30)
    reply = ping(channel)
    channel.close()
    channel.close()
    with pytest.raises(ClosedError):
        reply.result(30)
    with pytest.raises(ClosedError):
        ping(channel)
    gate.set()


def test_a_fork_may_not_use_the_channel(
    channel: GrpcChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not channel.is_open
    with pytest.raises(ClosedError, match="parent process"):
        ping(channel)
    channel.close()
    with pytest.raises(ConnectError, match="spawn"):
        GrpcChannel(channel.url, 30)
    monkeypatch.undo()
    assert ping(channel).result(30) == b"\xc3"


def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    server = GrpcFakeServer(address=f"unix://{tmp_path}/socket")
    try:
        channel = open_channel(server.url, 30)
        assert channel.submit(PING, DIALECT.instance(None)).result(30) == b"\xc3"
        channel.close()
    finally:
        server.close()


@pytest.mark.parametrize("url", ["grpc://", "grpc://host", "grpc+unix://", "grpc://h:port"])
def test_malformed_addresses_are_told(url: str) -> None:
    with pytest.raises(ConnectError, match="expected grpc://host:port"):
        open_channel(url, 30)


def test_nobody_there_is_an_error(old_server: GrpcFakeServer) -> None:
    url = old_server.url
    old_server.stop()
    with pytest.raises(ConnectError, match="accepts no connection"):
        open_channel(url, 30)


def test_a_missing_grpcio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConnectError, match=r"pip install 'lmcache_fast\[grpc\]'"):
        open_channel("grpc://127.0.0.1:1", 30)


# The connection


def test_a_retrieve_and_a_store_send_what_the_protocol_asks_for(
    server: GrpcFakeServer, connection: Connection
) -> None:
    assert (connection.pool.shm_name, connection.pool.pool_size) == ("fake_pool", 1 << 20)
    (payload,) = server.payloads(Operation.REGISTER)[0]
    assert payload["instance_id"] == connection.instance_id
    assert (payload["hidden_dim_size"], payload["dtype_str"]) == (4, "bfloat16")

    configs = {"lmcache.tag": "x"}
    assert connection.lookup(replace(KEY, worker_id=None, request_configs=configs)) == 2
    grant = connection.prepare_retrieve(KEY)
    assert (grant.success, grant.data, grant.slots[1].offset) == (True, None, SLOT["offset"])
    assert connection.commit_retrieve(KEY)
    assert connection.prepare_store(KEY).chunk_indices == [0]
    assert connection.commit_store(KEY)
    connection.end_session("r")
    until(lambda: Operation.END_SESSION in server.operations(), "the end of the session")

    (key, world_size), *_ = server.payloads(Operation.LOOKUP)
    assert (key["worker_id"], key["request_id"], world_size) == (None, "r", 1)
    (key, instance_id), *_ = server.payloads(Operation.PREPARE_RETRIEVE)
    assert (key["worker_id"], key["start"], key["end"]) == (0, 0, 8)
    assert instance_id == connection.instance_id
    packed = KEY.tokens.as_big_endian() if server.version > "0.5.7" else KEY.tokens.as_varints()
    assert key["tokens"] == packed


def test_inline_data_travels_both_ways(server: GrpcFakeServer, connection: Connection) -> None:
    wire = bytes(5 << 20)  # above gRPC's own limit
    server.on[Operation.PREPARE_RETRIEVE] = lambda key, instance: {
        "success": True,
        "data": wire,
        "context": {},
    }
    connection.lookup(KEY)
    grant = connection.prepare_retrieve(KEY)
    assert isinstance(grant.data, memoryview)
    assert (bytes(grant.data), grant.slots) == (wire, [])
    head = connection.info.dialect.data_head(len(wire))
    assert connection.send_chunks(KEY, head + wire)()
    assert server.payloads(Operation.COMMIT_STORE)[0][2] == wire


def test_pings_go_to_the_service_of_the_release(
    server: GrpcFakeServer, connection: Connection
) -> None:
    assert connection.ping()
    service = "ManagementService" if server.version > "0.5.7" else "ControllerService"
    assert server.paths[-1] == f"/lmcache.mp.{service}/Ping"


def test_a_forgotten_instance_is_registered_again_and_the_request_sent_again(
    server: GrpcFakeServer, connection: Connection
) -> None:
    server.instances.clear()
    assert connection.prepare_store(KEY).chunk_indices == [0]
    assert server.operations().count(Operation.PREPARE_STORE) == 2
    assert connection.instance_id in server.instances


def test_a_refused_request_is_sent_once(server: GrpcFakeServer, connection: Connection) -> None:
    server.on[Operation.PREPARE_STORE] = drop
    with pytest.raises(RequestDroppedError, match="PrepareStore"):
        connection.prepare_store(KEY)
    assert server.operations().count(Operation.PREPARE_STORE) == 1


def test_silence_is_slowness(server: GrpcFakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "PATIENCE", 0.02)
    gate = threading.Event()
    server.on[Operation.COMMIT_RETRIEVE] = lambda key, instance: gate.wait(30)
    connection = Connection(server.url, server.http_url, "m", LAYOUT, 1.0)
    try:
        with pytest.raises(ServerTimeoutError, match=r"a ping was answered: the server is slow$"):
            connection.commit_retrieve(KEY)
    finally:
        gate.set()
        connection.close()
    assert server.operations().count(Operation.COMMIT_RETRIEVE) == 1  # nothing sent to find out


def test_after_a_restart_the_connection_opens_anew(
    server: GrpcFakeServer, connection: Connection
) -> None:
    server.stop()
    until(lambda: not connection._listener.channel.is_open, "the loss to be noticed")
    with pytest.raises(ServerGoneError):
        connection.ping()
    server.start()
    connection.ensure_open()
    assert connection.generation == 1
    assert connection.ping()


# Address and server disagree


def test_a_zmq_address_of_a_grpc_server_is_told(server: GrpcFakeServer) -> None:
    with pytest.raises(UnsupportedServerError, match="connect to grpc://HOST:PORT"):
        read_server_info(server.http_url, 30)


def test_a_grpc_address_of_a_zmq_server_is_told() -> None:
    server = FakeServer("0.5.3")
    try:
        with pytest.raises(UnsupportedServerError, match=r"connect to tcp://.* 0\.5\.6 on"):
            read_server_info(server.http_url, 30, "grpc")
    finally:
        server.close()
