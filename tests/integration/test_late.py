"""Locks that run out: what may be stale is not returned, what may be someone else's not written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_fast import KVClient, LeaseExpiredError, clock, edits
from lmcache_fast.serve.server import EmbeddedServer
from lmcache_fast.transport.shm import ShmTransport, SlotWriter
from tests.integration.conftest import CHUNK, LAYOUT, locked, start_server
from tests.integration.faults import pattern, quiet_client

TTL = 1.5
SLOTS = 8
TOKENS = list(range(100, 100 + 4 * CHUNK))


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    pool_bytes = SLOTS * max(4096, LAYOUT.token_bytes * CHUNK)
    with start_server("shm", pool_bytes=pool_bytes, read_ttl=TTL, write_ttl=TTL) as server:
        yield server
        assert locked(server) == 0


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[KVClient]:
    with quiet_client(server) as client:
        yield client


@pytest.fixture
def other(server: EmbeddedServer) -> Iterator[KVClient]:
    with quiet_client(server) as client:
        yield client


def wait_until_nothing_is_locked(server: EmbeddedServer) -> None:
    deadline = time.monotonic() + 60
    while server.status()["fast"]["locked_objects"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def recycle(server: EmbeddedServer, other: KVClient) -> list[int]:
    """Let every lock run out, and every slot be written by someone else."""
    wait_until_nothing_is_locked(server)
    tokens = list(range(9000, 9000 + SLOTS * CHUNK))
    assert other.store(pattern(tokens), tokens)
    return tokens


def once(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, before: Callable[[], object]
) -> None:
    """Have ``before`` run before the first call of a method, of the client's only."""
    original = getattr(where, name)
    calls = []

    def hooked(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            before()
        return original(*arguments, **keywords)

    monkeypatch.setattr(where, name, hooked)


def test_a_slot_recycled_under_a_late_reader_is_never_returned(
    server: EmbeddedServer,
    client: KVClient,
    other: KVClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.store(pattern(TOKENS), TOKENS)
    once(monkeypatch, ShmTransport, "copy", lambda: recycle(server, other))
    assert client.retrieve(TOKENS) is None, "a fresh lookup finds that it was evicted"
    assert client.stats().retries == 1


def test_a_read_that_is_late_twice_is_an_error(
    client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.store(pattern(TOKENS), TOKENS)
    copy = ShmTransport.copy

    def late(self: ShmTransport, *arguments: Any) -> None:
        copy(self, *arguments)
        time.sleep(TTL)

    monkeypatch.setattr(ShmTransport, "copy", late)
    with pytest.raises(LeaseExpiredError, match="read lock may have run out"):
        client.retrieve(TOKENS)


@pytest.mark.parametrize("where", ["check", "copy_from"])
def test_a_late_writer_touches_no_slot_that_may_be_someone_elses(
    server: EmbeddedServer,
    client: KVClient,
    other: KVClient,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    theirs: list[int] = []

    def hold_up() -> None:
        monkeypatch.undo()
        theirs.extend(recycle(server, other))
        before.append(other.retrieve(theirs))

    before: list[torch.Tensor | None] = []
    once(monkeypatch, SlotWriter, where, hold_up)
    # The second attempt finds room among the others' chunks, which are in no use.
    assert client.store(pattern(TOKENS), TOKENS) is True
    assert before[0] is not None and torch.equal(before[0], pattern(theirs))
    found = client.retrieve(TOKENS)
    assert found is not None and torch.equal(found, pattern(TOKENS))
    left = other.retrieve(theirs)
    assert left is None or torch.equal(left, pattern(theirs)[:, :, : left.shape[2]])
    assert client.stats().retries >= 1


def test_what_was_written_too_late_is_not_published(
    server: EmbeddedServer,
    client: KVClient,
    other: KVClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []
    copy_from = SlotWriter.copy_from

    def late(self: SlotWriter, kv: torch.Tensor) -> None:
        copy_from(self, torch.zeros_like(kv))  # what must not be found
        copies.append(1)
        time.sleep(TTL)

    monkeypatch.setattr(SlotWriter, "copy_from", late)
    with pytest.raises(LeaseExpiredError, match="nothing was stored"):
        client.store(pattern(TOKENS), TOKENS)
    assert len(copies) == 2
    monkeypatch.undo()
    wait_until_nothing_is_locked(server)
    assert other.lookup(TOKENS) == 0
    assert client.store(pattern(TOKENS), TOKENS)
    found = other.retrieve(TOKENS)
    assert found is not None and torch.equal(found, pattern(TOKENS))


def test_an_edit_whose_function_outlives_the_lease_is_not_stored(
    server: EmbeddedServer, client: KVClient
) -> None:
    client.store(pattern(TOKENS), TOKENS)

    def choose(total: int, _: object) -> range:
        wait_until_nothing_is_locked(server)
        return range(0, total, 2)

    with pytest.raises(LeaseExpiredError, match="read lock may have run out"):
        client.edit(TOKENS, edits.keep(choose))
    assert client.lookup(TOKENS[::2]) == 0
    assert client.lookup(TOKENS) == len(TOKENS), "the source is as it was"


def test_a_lease_ends_by_itself_when_nobody_closes_it(
    server: EmbeddedServer, client: KVClient
) -> None:
    client.store(pattern(TOKENS), TOKENS)
    lease = client.lease(TOKENS)
    assert len(lease) == 4
    del lease
    assert locked(server) == 0


def test_a_lease_says_when_its_client_was_closed(client: KVClient) -> None:
    client.store(pattern(TOKENS), TOKENS)
    with client.lease(TOKENS) as lease:
        chunk = lease[0]
        client.close()
        with pytest.raises(Exception, match="was closed"):
            chunk.tensor()


def test_time_passes_for_deadlines_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert clock.deadline(300) - clock.now() == pytest.approx(298, abs=0.5)
    assert 0 < clock.deadline(1) - clock.now() < 1
    assert clock._BOOT == time.CLOCK_BOOTTIME
