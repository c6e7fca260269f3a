"""The connection: locks come back, silence is told from slowness, a restart is survived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lmcache_fast.errors import (
    ClosedError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    UnknownModelError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol import connection as connection_module
from lmcache_fast.protocol import silence
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.tokens import PackedTokens
from tests.unit.protocol_fake import SLOT, Dropped, FakeServer, until

LAYOUT = KVLayout(1, 1, 4, "bfloat16", 4)
KEY = Key("m", 1, 0, PackedTokens(range(9)), 0, 8, "r")


def drop(*_: object) -> None:
    raise Dropped


def shorten(connection: Connection) -> None:
    """Let calls time out from now on; opening must not, however busy the machine."""
    connection.timeout = 0.3
    connection._listener = replace(connection._listener, timeout=0.3)
    for session in connection._sessions.values():
        session.listener = connection._listener


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "PATIENCE", 0.02)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def open_to(server: FakeServer) -> Iterator[Callable[..., Connection]]:
    opened: list[Connection] = []

    def open_to(to: FakeServer = server) -> Connection:
        opened.append(Connection(to.url, to.http_url, "m", LAYOUT, 30))
        return opened[-1]

    yield open_to
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(open_to: Callable[..., Connection]) -> Connection:
    return open_to()


def test_opening_registers_the_layout(server: FakeServer, connection: Connection) -> None:
    assert connection.pool.shm_name == "fake_pool" and connection.pool.pool_size == 1 << 20
    (payload,) = server.payloads(Operation.REGISTER)[0]
    assert payload["instance_id"] == connection.instance_id
    assert (payload["hidden_dim_size"], payload["dtype_str"]) == (4, "bfloat16")
    assert payload["use_mla"] is False


def test_a_retrieve_and_a_store_send_what_the_protocol_asks_for(
    server: FakeServer, connection: Connection
) -> None:
    assert connection.lookup(replace(KEY, worker_id=None)) == 2
    assert connection.prepare_retrieve(KEY).slots[1].offset == SLOT["offset"]
    assert connection.commit_retrieve(KEY)
    assert connection.prepare_store(KEY).chunk_indices == [0]
    assert connection.commit_store(KEY)
    connection.end_session("r")
    until(lambda: server.operations()[-1] is Operation.END_SESSION, "the end of the session")
    assert server.operations()[1:] == [
        Operation.LOOKUP,
        Operation.WAIT_PREFETCH_STATUS,
        Operation.PREPARE_RETRIEVE,
        Operation.COMMIT_RETRIEVE,
        Operation.PREPARE_STORE,
        Operation.COMMIT_STORE,
        Operation.END_SESSION,
    ]


def test_a_lookup_waits_on_the_server_until_it_knows(
    server: FakeServer, connection: Connection
) -> None:
    answers = iter([None, None, 1])
    server.on[Operation.WAIT_PREFETCH_STATUS] = lambda request_id, timeout: next(answers)
    assert connection.lookup(KEY) == 1
    waits = server.payloads(Operation.WAIT_PREFETCH_STATUS)
    assert len(waits) == 3 and all(0 < seconds <= 2 for _, seconds in waits)


@pytest.mark.parametrize("release", ["free_lookup_locks", "release_read"])
def test_a_session_ends_only_after_its_locks_were_given_back(
    server: FakeServer, connection: Connection, release: str
) -> None:
    gate = threading.Event()
    for operation in (Operation.FREE_LOOKUP_LOCKS, Operation.COMMIT_RETRIEVE):
        server.on[operation] = lambda *_: gate.wait(30)
    connection.lookup(KEY)
    getattr(connection, release)(KEY)
    connection.end_session("r")
    connection.register()
    assert Operation.END_SESSION not in server.operations()
    gate.set()
    until(lambda: Operation.END_SESSION in server.operations(), "the end of the session")


def test_operations_on_a_session_that_never_began_send_nothing(
    server: FakeServer, connection: Connection
) -> None:
    connection.free_lookup_locks(KEY)
    connection.release_read(KEY)
    connection.end_session("r")
    connection.register()
    assert set(server.operations()) == {Operation.REGISTER}


def test_a_dropped_registration_is_an_error_that_names_the_flag(
    server: FakeServer, open_to: Callable[..., Connection]
) -> None:
    server.on[Operation.REGISTER] = drop
    with pytest.raises(RequestDroppedError, match="--supported-transfer-mode auto"):
        open_to()


def test_a_dropped_lookup_is_an_error_once_a_later_ping_was_answered(
    server: FakeServer, connection: Connection
) -> None:
    server.on[Operation.LOOKUP] = drop
    with pytest.raises(RequestDroppedError, match=r"lookup: .*0\.5\.6"):
        connection.lookup(KEY)


def test_a_dropped_transfer_is_an_error(server: FakeServer, connection: Connection) -> None:
    server.on[Operation.PREPARE_STORE] = drop
    with pytest.raises(RequestDroppedError, match=r"prepare_store: .*refused"):
        connection.prepare_store(KEY)
    assert Operation.PING in server.operations()
    assert server.payloads(Operation.PING) == [[None]]  # never with our instance


@pytest.mark.parametrize("operation", ["prepare_store", "prepare_retrieve"])
def test_an_instance_that_the_server_forgot_registers_again_and_repeats_the_request(
    server: FakeServer,
    connection: Connection,
    operation: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.instances.clear()
    assert getattr(connection, operation)(KEY).slots
    assert connection.instance_id in server.instances
    assert "did not know instance" in caplog.text


def test_a_commit_of_a_forgotten_instance_is_an_error_that_says_so(
    server: FakeServer, connection: Connection
) -> None:
    connection.prepare_store(KEY)
    server.instances.clear()
    with pytest.raises(RequestDroppedError, match=r"did not know instance .* registered again"):
        connection.commit_store(KEY)
    assert len(server.payloads(Operation.COMMIT_STORE)) == 1


@pytest.mark.parametrize("operation", ["lookup", "prepare_store", "prepare_retrieve"])
def test_a_slow_server_is_never_taken_for_one_that_drops(
    server: FakeServer, connection: Connection, operation: str
) -> None:
    original = server.on[Operation(operation)]
    gate = threading.Event()

    def slow(*payloads: Any) -> Any:
        gate.wait(30)
        return original(*payloads)

    server.on[Operation(operation)] = slow
    answers: list[object] = []
    caller = threading.Thread(target=lambda: answers.append(getattr(connection, operation)(KEY)))
    caller.start()
    until(lambda: Operation.PING in server.operations(), "the diagnosis")
    connection.register()
    assert caller.is_alive()
    gate.set()
    caller.join(30)
    assert len(answers) == 1


def test_with_several_workers_an_answered_ping_proves_nothing(
    open_to: Callable[..., Connection],
) -> None:
    server = FakeServer(cpu_workers=2)
    try:
        connection = open_to(server)
        shorten(connection)
        server.on[Operation.LOOKUP] = drop
        with pytest.raises(ServerTimeoutError, match=r"lookup: .*0\.3 s; a ping was answered"):
            connection.lookup(KEY)
    finally:
        server.close()


def test_a_time_out_says_what_was_asked_of_whom_and_what_a_ping_found(
    server: FakeServer, connection: Connection
) -> None:
    shorten(connection)
    gate = threading.Event()
    server.on[Operation.LOOKUP] = lambda *_: gate.wait(30) and None
    with pytest.raises(ServerTimeoutError) as caught:
        connection.lookup(KEY)
    gate.set()
    for part in ("lookup", server.url, "0.3 s", "ping was not answered"):
        assert part in str(caught.value)


@pytest.mark.parametrize("slow", [Operation.LOOKUP, Operation.WAIT_PREFETCH_STATUS])
def test_locks_that_a_late_answer_brings_are_given_back(
    server: FakeServer, connection: Connection, slow: Operation
) -> None:
    shorten(connection)
    original, gate = server.on[slow], threading.Event()

    def late(*payloads: Any) -> Any:
        gate.wait(30)
        return original(*payloads)

    server.on[slow] = late
    with pytest.raises(ServerTimeoutError):
        connection.lookup(replace(KEY, worker_id=None))
    connection.end_session("r")
    assert Operation.END_SESSION not in server.operations()
    gate.set()
    until(lambda: Operation.END_SESSION in server.operations(), "the end of the session")
    ((key, _),) = server.payloads(Operation.FREE_LOOKUP_LOCKS)
    assert (key["start"], key["end"]) == (0, 8)
    ends = [Operation.FREE_LOOKUP_LOCKS, Operation.END_SESSION]
    assert [operation for operation in server.operations() if operation in ends] == ends


def test_a_read_granted_too_late_is_released_by_its_transfer_only(
    server: FakeServer, connection: Connection
) -> None:
    original, gate = server.on[Operation.PREPARE_RETRIEVE], threading.Event()

    def late(*payloads: Any) -> Any:
        gate.wait(30)
        return original(*payloads)

    server.on[Operation.PREPARE_RETRIEVE] = late
    connection.lookup(KEY)
    shorten(connection)
    with pytest.raises(ServerTimeoutError):
        connection.prepare_retrieve(KEY)
    connection.free_lookup_locks(KEY)
    connection.end_session("r")
    gate.set()
    until(lambda: ["r"] in server.payloads(Operation.END_SESSION), "the end of the session")
    assert not server.payloads(Operation.FREE_LOOKUP_LOCKS)
    released = [key["request_id"] for key, _ in server.payloads(Operation.COMMIT_RETRIEVE)]
    assert released.count("r") == 1


def test_a_restarted_server_is_opened_anew_by_ensure_open(
    server: FakeServer, connection: Connection
) -> None:
    connection.prepare_store(KEY)
    connection.lookup(replace(KEY, request_id="old"))
    server.stop()
    until(lambda: not connection._listener.channel.is_open, "the loss")
    with pytest.raises(ServerGoneError):
        connection.lookup(KEY)
    server.seen.clear()
    server.start()
    connection.ensure_open()
    connection.ensure_open()
    assert connection.generation == 1 and connection.instance_id in server.instances
    with pytest.raises(ServerGoneError):  # reserved on the old server
        connection.commit_store(KEY)
    connection.free_lookup_locks(replace(KEY, request_id="old"))
    connection.end_session("old")
    assert connection.prepare_store(replace(KEY, request_id="new")).generation == 1
    assert server.operations() == [Operation.REGISTER, Operation.PREPARE_STORE]


def test_a_server_lost_during_a_call_is_an_error(
    server: FakeServer, connection: Connection
) -> None:
    server.on[Operation.LOOKUP] = drop
    server.on[Operation.PING] = drop

    def stop_during_the_diagnosis() -> None:
        until(lambda: Operation.PING in server.operations(), "the diagnosis")
        server.stop()

    threading.Thread(target=stop_during_the_diagnosis).start()
    with pytest.raises(ServerGoneError, match="went away"):
        connection.lookup(KEY)


def test_closing_ends_sessions_and_unregisters(server: FakeServer, connection: Connection) -> None:
    connection.lookup(KEY)
    connection.free_lookup_locks(KEY)
    connection.end_session("r")
    connection.close()
    connection.close()
    assert server.instances == set()
    assert Operation.END_SESSION in server.operations()
    with pytest.raises(ClosedError):
        connection.lookup(KEY)
    with pytest.raises(ClosedError):
        connection.ensure_open()


def test_closing_with_a_store_begun_does_not_unregister(
    server: FakeServer, connection: Connection
) -> None:
    connection.prepare_store(KEY)
    connection.close()
    assert Operation.UNREGISTER not in server.operations()


def test_closing_after_a_store_was_committed_or_reserved_nothing_unregisters(
    server: FakeServer, connection: Connection
) -> None:
    connection.prepare_store(KEY)
    connection.commit_store(KEY)
    server.on[Operation.PREPARE_STORE] = lambda *_: {"context": {"slots": [], "chunk_indices": []}}
    assert connection.prepare_store(replace(KEY, request_id="r2")).slots == []
    connection.close()
    until(lambda: server.instances == set(), "the unregistration")


def test_closing_does_not_wait_for_a_server_that_hangs(
    server: FakeServer, connection: Connection
) -> None:
    server.on[Operation.UNREGISTER] = drop
    server.on[Operation.END_SESSION] = drop
    connection.lookup(KEY)
    connection.end_session("r")
    closer = threading.Thread(target=connection.close, daemon=True)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()


def test_the_heartbeat_registers_and_never_pings(
    server: FakeServer, open_to: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEARTBEAT", 0.01)
    open_to()
    until(lambda: server.operations().count(Operation.REGISTER) > 3, "heartbeats")
    assert Operation.PING not in server.operations()


def test_an_unknown_model_is_an_error_that_lists_the_registered_ones(server: FakeServer) -> None:
    server.status["non_cuda_context_meta"] = {"1": {"model_name": "org/other"}}
    with pytest.raises(UnknownModelError, match="'org/other'"):
        Connection(server.url, server.http_url, "m", None, 30)
    with pytest.raises(UnknownModelError, match="engine-driven"):
        Connection(server.url, server.http_url, "org/other", None, 30)
    assert server.seen == []
