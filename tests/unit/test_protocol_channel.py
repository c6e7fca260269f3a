"""The channel: replies find their requests, and a lost server is never taken for a slow one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from lmcache_fast.errors import ClosedError, ConnectError, ServerGoneError
from lmcache_fast.protocol.channel import ZmqChannel
from lmcache_fast.protocol.dialect import dialect_for
from lmcache_fast.protocol.operations import NUMBERS, Operation
from tests.unit.protocol_fake import Dropped, FakeServer, confirmation_limits, until

PING = NUMBERS[Operation.PING]
PING_PAYLOADS = dialect_for("0.5.6").instance(None)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer(cpu_workers=2)
    yield server
    server.close()


@pytest.fixture
def channel(server: FakeServer) -> Iterator[ZmqChannel]:
    channel = ZmqChannel(server.url, 30)
    yield channel
    channel.close()


def test_replies_find_their_requests_in_any_order(server: FakeServer, channel: ZmqChannel) -> None:
    gate = threading.Event()
    first = threading.Event()

    def ping(_: object) -> bool:
        if not first.is_set():
            first.set()
            return gate.wait(30)
        return False

    server.on[Operation.PING] = ping
    slow = channel.submit(PING, PING_PAYLOADS)
    until(first.is_set, "the first ping")
    assert channel.submit(PING, PING_PAYLOADS).result(30) == b"\xc2"
    assert not slow.done()
    gate.set()
    assert slow.result(30) == b"\xc3"


def test_many_threads_share_a_channel(channel: ZmqChannel) -> None:
    answers: list[bytes | memoryview | None] = []

    def ask() -> None:
        answers.extend(channel.submit(PING, PING_PAYLOADS).result(30) for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"\xc3"] * 200


def test_when_the_server_goes_calls_fail_and_the_channel_never_reconnects(
    server: FakeServer, channel: ZmqChannel
) -> None:
    def drop(_: object) -> None:
        raise Dropped

    server.on[Operation.PING] = drop
    waiting = channel.submit(PING, PING_PAYLOADS)
    until(lambda: bool(server.seen), "the ping")
    server.stop()
    with pytest.raises(ServerGoneError, match=server.url):
        waiting.result(30)
    server.seen.clear()
    server.start()
    assert not channel.is_open
    with pytest.raises(ServerGoneError):
        channel.submit(PING, PING_PAYLOADS)
    assert server.seen == []


def test_a_dead_host_is_for_the_kernel_to_notice(server: FakeServer, channel: ZmqChannel) -> None:
    assert channel.submit(PING, PING_PAYLOADS).result(30) == b"\xc3"
    assert confirmation_limits(int(server.url.rpartition(":")[2])) == [30_000]


def test_a_port_where_nobody_listens_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectError, match=url):
            ZmqChannel(url, 30)


@pytest.mark.parametrize("url", ["nonsense", "tcp://", "udp://x:1"])
def test_a_malformed_address_is_an_error(url: str) -> None:
    with pytest.raises(ConnectError, match="cannot connect"):
        ZmqChannel(url, 1)


def test_close_fails_what_is_in_flight_and_can_be_repeated(
    server: FakeServer, channel: ZmqChannel
) -> None:
    def drop(_: object) -> None:
        raise Dropped

    server.on[Operation.PING] = drop
    waiting = channel.submit(PING, PING_PAYLOADS)
    channel.close()
    channel.close()
    with pytest.raises(ClosedError):
        waiting.result(30)
    with pytest.raises(ClosedError):
        channel.submit(PING, PING_PAYLOADS)


def test_a_callback_may_send_and_close(channel: ZmqChannel) -> None:
    done = threading.Event()

    def more(_: object) -> None:
        channel.submit(PING, PING_PAYLOADS)
        channel.close()
        done.set()

    channel.submit(PING, PING_PAYLOADS).add_done_callback(more)
    assert done.wait(30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(channel: ZmqChannel) -> None:
    child = os.fork()
    if child == 0:
        try:
            channel.submit(PING, PING_PAYLOADS)
        except ClosedError:
            channel.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert channel.submit(PING, PING_PAYLOADS).result(30) == b"\xc3"
