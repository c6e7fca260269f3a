"""A server that dies, hangs or is replaced at any step: an error or a retry, never wrong bytes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import (
    ConnectError,
    KVClient,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    edits,
)
from lmcache_fast.client import EditResult
from lmcache_fast.protocol import connection as connection_module
from lmcache_fast.protocol.operations import Operation
from tests.integration.conftest import CHUNK, locked
from tests.integration.faults import Gate, Mortal, pattern, quiet_client

LOST = (ConnectError, RequestDroppedError, ServerGoneError, ServerTimeoutError)
TOKENS = list(range(100, 100 + 6 * CHUNK))
KEPT = TOKENS[::2]
OTHER = list(range(5000, 5000 + 2 * CHUNK))
HALF = edits.keep(lambda total, _: range(0, total, 2))

COMEBACKS: dict[str, dict[str, Any] | None] = {
    "not at all": None,
    "empty": {},
    "with another chunk size": {"chunk_size": 2 * CHUNK},
    "with another pool": {"shm_name": "lmcache_fast_test_other"},
    "as another release": {"transport": "shm-0.5.7"},
    "without a pool": {"transport": "pickle", "shm_name": ""},
}
CALLS: dict[str, tuple[int, Callable[[KVClient], Any]]] = {
    "retrieve": (5, lambda client: client.retrieve(TOKENS)),
    "store": (3, lambda client: client.store(pattern(OTHER), OTHER)),
    "edit": (8, lambda client: client.edit(TOKENS, HALF)),
}
STEPS = [
    (call, step, comeback)
    for call, (steps, _) in CALLS.items()
    for step in range(1, steps + 1)
    for number, comeback in enumerate(COMEBACKS)
    if number == step % len(COMEBACKS)
    or (comeback == "empty" and step % 2)
    or os.environ.get("LMCACHE_FAST_EVERY_CASE")
]


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    mortal = Mortal("shm")
    yield mortal
    mortal.stop()


@pytest.fixture
def client(mortal: Mortal) -> Iterator[KVClient]:
    with quiet_client(mortal.server) as client:
        client.store(pattern(TOKENS), TOKENS)
        yield client


def check(found: torch.Tensor | None, tokens: list[int]) -> None:
    """Nothing, or the right bytes of the beginning."""
    if found is not None:
        assert torch.equal(found, pattern(tokens)[:, :, : found.shape[2]])


@pytest.mark.filterwarnings("ignore:.*no shared memory")
@pytest.mark.parametrize(("call", "step", "comeback"), STEPS)
def test_a_server_that_dies_at_any_step_costs_an_error_at_most(
    mortal: Mortal, client: KVClient, call: str, step: int, comeback: str
) -> None:
    done = mortal.die_at(step, COMEBACKS[comeback])
    try:
        result = CALLS[call][1](client)
    except LOST:
        result = None
    if isinstance(result, torch.Tensor):
        check(result, TOKENS)
    if isinstance(result, EditResult):  # perhaps the server is still about to die
        with contextlib.suppress(*LOST):
            check(client.retrieve(KEPT), KEPT)
    while not done.wait(0.05):  # the call needed fewer steps, or was over before
        with contextlib.suppress(*LOST):
            client.lookup(OTHER)
    if not mortal.is_up:
        mortal.start()
    for attempt in range(30):  # the loss may still have to be noticed
        try:
            client.store(pattern(TOKENS), TOKENS)
            break
        except LOST:
            assert attempt < 29
            time.sleep(0.2)
    whole = len(TOKENS) // client.chunk_size * client.chunk_size
    found = client.retrieve(TOKENS)
    assert found is not None and found.shape[2] == whole
    check(found, TOKENS)
    assert (
        client.edit(TOKENS, HALF).num_cached == len(KEPT) // client.chunk_size * client.chunk_size
    )
    check(client.retrieve(KEPT), KEPT)
    assert locked(mortal.server) == 0


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "operation",
    [
        Operation.LOOKUP,
        Operation.WAIT_PREFETCH_STATUS,
        Operation.PREPARE_RETRIEVE,
        Operation.PREPARE_STORE,
        Operation.COMMIT_STORE,
        Operation.COMMIT_RETRIEVE,
    ],
    ids=lambda operation: operation.value,
)
def test_a_server_that_hangs_longer_than_the_time_out_costs_one_call(
    mortal: Mortal, operation: Operation, call: str
) -> None:
    with quiet_client(mortal.server) as patient, quiet_client(mortal.server, 0.8) as client:
        patient.store(pattern(TOKENS), TOKENS)
        gate = Gate(mortal, operation)
        try:
            result = CALLS[call][1](client)
        except LOST:
            assert not gate.is_open
        else:
            check(result if call == "retrieve" else None, TOKENS)
        gate.open()
        mortal.on_request = lambda _: None
        client.timeout = client._connection.timeout = 30.0
        assert client.lookup(TOKENS) == len(TOKENS)
        for name, (_, again) in CALLS.items():
            if name == "retrieve":
                check(again(client), TOKENS)
            else:
                again(client)
        check(client.retrieve(OTHER), OTHER)
        check(client.retrieve(KEPT), KEPT)
        assert client.lookup(OTHER) == len(OTHER)
        assert locked(mortal.server) == 0


def test_what_a_store_reserved_too_late_is_taken_over_by_the_next(mortal: Mortal) -> None:
    with quiet_client(mortal.server, 0.8) as client:
        gate = Gate(mortal, Operation.PREPARE_STORE)
        with pytest.raises(ServerTimeoutError):
            client.store(pattern(OTHER), OTHER)
        gate.open()
        deadline = time.monotonic() + 30
        while not client._connection._reservations._kept and time.monotonic() < deadline:
            time.sleep(0.02)
        mortal.on_request = lambda _: None
        prepared = mortal.seen[Operation.PREPARE_STORE]
        assert client.store(pattern(OTHER), OTHER) is True
        assert mortal.seen[Operation.PREPARE_STORE] == prepared
        check(client.retrieve(OTHER), OTHER)
        assert client.lookup(OTHER) == len(OTHER)
        assert locked(mortal.server) == 0


def test_a_server_that_never_answers_again_is_an_error_for_every_thread(mortal: Mortal) -> None:
    with quiet_client(mortal.server, 0.5) as client:
        gate = Gate(mortal, Operation.LOOKUP)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                client.retrieve(TOKENS)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(errors) == 16 and all(isinstance(error, LOST) for error in errors)
        gate.open()


def test_a_client_that_the_server_forgot_while_we_slept_registers_before_it_asks(
    mortal: Mortal, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal.server._service._unregister(client.instance_id)
    assert client.lookup(TOKENS) == 0, "nobody knows the model: everything is a miss"
    asleep = client._connection._last_sign_of_life - 10 * connection_module.HEARTBEAT
    monkeypatch.setattr(client._connection, "_last_sign_of_life", asleep)
    assert client.lookup(TOKENS) == len(TOKENS)
    check(client.retrieve(TOKENS), TOKENS)


@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_was_reaped_just_now_is_known_again(
    mortal: Mortal, client: KVClient, call: str
) -> None:
    with quiet_client(mortal.server) as other:  # so that the model stays known
        reaped = threading.Event()

        def reap(operation: Operation) -> None:
            if operation in (Operation.PREPARE_STORE, Operation.PREPARE_RETRIEVE):
                mortal.on_request = lambda _: None
                mortal.server._service._unregister(client.instance_id)
                reaped.set()

        mortal.on_request = reap
        result = CALLS[call][1](client)
        assert reaped.is_set()
        if call == "retrieve":
            assert torch.equal(result, pattern(TOKENS))
        assert other.lookup(TOKENS) == len(TOKENS)
        assert locked(mortal.server) == 0


@pytest.mark.parametrize("left", [0, 4])
def test_an_eviction_between_lookup_and_read_is_looked_up_afresh(
    mortal: Mortal, client: KVClient, left: int
) -> None:
    def evict(operation: Operation) -> None:
        if operation is Operation.PREPARE_RETRIEVE:
            mortal.on_request = lambda _: None
            cache = mortal.server._service._cache
            for stored in list(cache._objects.values())[: 6 - left]:  # the last chunks go first
                cache._remove(stored)

    mortal.on_request = evict
    found = client.retrieve(TOKENS)
    assert (0 if found is None else found.shape[2]) == left * CHUNK
    check(found, TOKENS)
    assert locked(mortal.server) == 0


def test_two_clients_that_store_the_same_at_once_both_end_with_all_of_it(mortal: Mortal) -> None:
    with quiet_client(mortal.server) as one, quiet_client(mortal.server) as two:
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda c=c: results.append(c.store(pattern(TOKENS), TOKENS)))
            for c in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 2 and any(results)
        for client in (one, two):
            check(client.retrieve(TOKENS), TOKENS)
            assert client.lookup(TOKENS) == len(TOKENS)
        assert locked(mortal.server) == 0


def test_a_restarted_server_is_logged_and_counted(
    mortal: Mortal, client: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    mortal.stop()
    mortal.start(chunk_size=2 * CHUNK)
    assert client.retrieve(TOKENS) is None
    assert client.chunk_size == 2 * CHUNK
    assert client.stats().reconnects == 1
    assert f"another one now: LMCache 0.5.6-fast, chunks of {2 * CHUNK} tokens" in caplog.text


def test_nothing_of_one_server_is_mixed_with_its_successor(
    mortal: Mortal, client: KVClient
) -> None:
    """A call that has begun on the old server must not go on on the new one, with its pool."""
    link = client._links.current
    mortal.stop()
    mortal.start(chunk_size=2 * CHUNK, shm_name="lmcache_fast_test_next")
    client.store(pattern(TOKENS), TOKENS)
    with pytest.raises(ServerGoneError, match="went away meanwhile"):
        client._lookup(link, np.array(TOKENS, np.uint32), "")
