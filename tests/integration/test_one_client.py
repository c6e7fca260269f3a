"""One client under load: threads, forks, closing at the wrong moment, odd sizes, what it tells."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_fast import (
    ClosedError,
    InvalidInputError,
    KVClient,
    KVLayout,
    StoreIncompleteError,
    edits,
)
from lmcache_fast.observe import ClientStats, StatsCollector
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import CHUNK, LAYOUT, locked, start_server
from tests.integration.faults import Gate, Mortal, pattern, quiet_client

TOKENS = list(range(100, 100 + 4 * CHUNK))
HALF = edits.keep(lambda total, _: range(0, total, 2))
RAISES = edits.keep(lambda total, _: range(total // 0))


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with start_server("shm") as server:
        yield server
        assert locked(server) == 0


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[KVClient]:
    with quiet_client(server) as client:
        client.store(pattern(TOKENS), TOKENS)
        yield client


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """Run ``work`` in many threads at once; return what went wrong."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(60)
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call hangs"
    return failures


def test_one_client_from_32_threads(client: KVClient) -> None:
    def work(number: int) -> None:
        shared = list(range(7000, 7000 + 3 * CHUNK))
        for step in range(6):
            own = list(
                range(10_000 * (number + 1) + step, 10_000 * (number + 1) + step + 2 * CHUNK)
            )
            for tokens in (own, shared):
                client.store(pattern(tokens), tokens)
                found = client.retrieve(tokens)
                # With 32 at once the pool may have evicted it again.
                assert found is None or torch.equal(found, pattern(tokens)[:, :, : found.shape[2]])
            with client.lease(shared) as lease:
                for chunk in lease:
                    expected = pattern(shared)[:, :, chunk.index * CHUNK :][:, :, :CHUNK]
                    assert torch.equal(chunk.tensor(), expected)
            client.edit(TOKENS, HALF, target_salt=f"{number}")
            client.lookup(TOKENS)

    assert in_threads(32, work) == []


@pytest.mark.parametrize("kind", ["shm", "pickle"])
def test_closing_while_others_call_ends_every_call(kind: str) -> None:
    with start_server(kind) as server:
        client = quiet_client(server)
        client.store(pattern(TOKENS), TOKENS)
        begun = threading.Event()

        def work(number: int) -> None:
            if number == 0:
                begun.wait(60)
                client.close()
                return
            while True:  # until the client is closed
                found = client.retrieve(TOKENS)
                assert found is not None and torch.equal(found, pattern(TOKENS))
                client.store(pattern(TOKENS), TOKENS, f"{number}")
                client.edit(TOKENS, HALF, target_salt=f"{number}e")
                begun.set()

        failures = in_threads(9, work)
        assert len(failures) == 8
        assert all(isinstance(error, ClosedError) for error in failures), failures
        assert locked(server) == 0
        assert server.status()["fast"]["instances"] == 0


def test_closing_does_not_wait_for_calls_on_a_server_that_hangs() -> None:
    mortal = Mortal("shm")
    client = quiet_client(mortal.server, timeout=60)
    gate = Gate(mortal, Operation.LOOKUP)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            client.retrieve(TOKENS)
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert gate.reached.wait(60)
    client.close()
    caller.join(30)
    assert not caller.is_alive() and not gate.is_open
    assert isinstance(errors[0], ClosedError)
    gate.open()
    mortal.stop()


def in_child(work: Callable[[], object]) -> str:
    """Fork; return the name of the error that ``work`` raises in the child, "" for none."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = ""
        try:
            work()
        except BaseException as error:
            answer = type(error).__name__
        os.write(write_end, answer.encode() or b"-")
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.waitpid(pid, 0)
    return "" if answer == "-" else answer


def test_a_fork_may_close_what_it_inherited_without_a_trace(
    server: EmbeddedServer, client: KVClient
) -> None:
    with client.lease(TOKENS) as lease:

        def leave() -> None:
            lease.close()
            client.close()
            gc.collect()

        assert in_child(leave) == ""
        assert in_child(lambda: lease[0].tensor()) == "ClosedError"
        assert in_child(lambda: client.lookup(TOKENS)) == "ClosedError"
        assert torch.equal(lease[3].tensor(), pattern(TOKENS)[:, :, 3 * CHUNK :])
    assert server.status()["fast"]["instances"] == 1
    found = client.retrieve(TOKENS)
    assert found is not None and torch.equal(found, pattern(TOKENS))


def test_a_fork_inside_the_users_function_does_not_share_the_connection(client: KVClient) -> None:
    answers = []

    def choose(total: int, _: object) -> range:
        answers.append(in_child(lambda: client.lookup(TOKENS)))
        return range(0, total, 2)

    assert client.edit(TOKENS, edits.keep(choose)).num_cached == 2 * CHUNK
    assert answers == ["ClosedError"]


def test_a_function_that_blocks_holds_up_nobody_else(
    server: EmbeddedServer, client: KVClient
) -> None:
    entered, leave = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def choose(total: int, _: object) -> range:
        entered.set()
        assert leave.wait(60)
        return range(0, total, 2)

    def edit() -> None:
        try:
            client.edit(TOKENS, edits.keep(choose))
        except BaseException as error:
            errors.append(error)

    editing = threading.Thread(target=edit)
    editing.start()
    assert entered.wait(60)
    found = client.retrieve(TOKENS)
    assert found is not None and torch.equal(found, pattern(TOKENS))
    assert client.edit(TOKENS, HALF, target_salt="meanwhile").num_cached == 2 * CHUNK
    client.close()
    assert locked(server) == 0 and not leave.is_set()
    leave.set()
    editing.join(60)
    assert [type(error) for error in errors] == [ClosedError]
    with quiet_client(server) as other:
        assert other.lookup(TOKENS[::2]) == 0


def test_a_fork_can_connect_for_itself(server: EmbeddedServer, client: KVClient) -> None:
    def connect() -> None:
        with quiet_client(server) as own:
            assert own.lookup(TOKENS) == len(TOKENS)

    assert in_child(connect) == ""
    assert client.lookup(TOKENS) == len(TOKENS)


def test_a_forgotten_client_gives_its_threads_and_registration_back(
    server: EmbeddedServer,
) -> None:
    def threads() -> int:
        return sum(t.name.startswith("lmcache_fast-") for t in threading.enumerate())

    before = threads()
    client = quiet_client(server)
    client.store(pattern(TOKENS), TOKENS)
    assert server.status()["fast"]["instances"] == 1
    del client
    gc.collect()
    for _ in range(300):
        if threads() <= before and not server.status()["fast"]["instances"]:
            return
        threading.Event().wait(0.1)
    raise AssertionError("its threads or its registration stay")


@pytest.mark.parametrize("chunk_size", [400, 544, 640, 1, 7])
@pytest.mark.parametrize("kind", ["shm", "inline"])
def test_any_chunk_size_and_any_length_around_its_multiples(kind: str, chunk_size: int) -> None:
    layout = KVLayout(1, 1, 4, "float16")
    counts: Sequence[int] = [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 130]
    if chunk_size == 7 or os.environ.get("LMCACHE_FAST_EVERY_CASE"):
        counts = range(1, 131)
    with (
        start_server(kind, chunk_size=chunk_size, pool_bytes=8 << 20) as server,
        quiet_client(server, layout=layout) as client,
    ):
        for count in counts:
            for length in (count * chunk_size - 1, count * chunk_size, count * chunk_size + 1):
                tokens = list(range(count, count + length))
                whole = length // chunk_size * chunk_size
                kv = pattern(tokens, layout)
                assert client.store(kv, tokens, f"{length}") is (whole > 0)
                assert client.lookup(tokens, f"{length}") == whole
                found = client.retrieve(tokens, f"{length}")
                if found is None:
                    assert not whole
                else:
                    assert torch.equal(found, kv[:, :, :whole])
        assert locked(server) == 0


def test_a_prompt_of_a_million_tokens() -> None:
    layout = KVLayout(1, 1, 4, "float16")
    with (
        start_server("shm", chunk_size=256, pool_bytes=34 << 20) as server,
        quiet_client(server, layout=layout, timeout=120) as client,
    ):
        tokens = torch.arange(1_000_000)
        whole = 1_000_000 // 256 * 256
        kv = pattern(tokens.tolist(), layout)
        assert client.store(kv, tokens)
        assert client.lookup(tokens) == whole
        found = client.retrieve(tokens)
        assert found is not None and torch.equal(found, kv[:, :, :whole])
        result = client.edit(tokens, HALF)
        assert result.num_cached == whole // 2 // 256 * 256
        assert locked(server) == 0


def test_half_a_prefix_that_fits_is_reported_as_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_fast.client.EVICTION_PAUSE", 0.01)
    slots = max(4096, LAYOUT.token_bytes * CHUNK)
    with start_server("shm", pool_bytes=5 * slots) as server, quiet_client(server) as client:
        tokens = list(range(8 * CHUNK))
        with pytest.raises(StoreIncompleteError, match="only 80 of 128 tokens") as caught:
            client.store(pattern(tokens), tokens)
        assert caught.value.stored_tokens == client.lookup(tokens) == 5 * CHUNK
        found = client.retrieve(tokens)
        assert found is not None and torch.equal(found, pattern(tokens)[:, :, : 5 * CHUNK])
        assert locked(server) == 0


FAILING: dict[str, Callable[[KVClient, int], object]] = {
    "wrong shape": lambda c, n: c.store(torch.zeros(2, 1, 5, 3), range(5)),
    "wrong count": lambda c, n: c.store(pattern(TOKENS), TOKENS[1:]),
    "wrong selection": lambda c, n: c.edit(TOKENS, edits.keep([10**6])),
    "function raises": lambda c, n: c.edit(TOKENS, RAISES),
    "copy raises": lambda c, n: c.store(pattern([7, n] * CHUNK), [7, n] * CHUNK),
    "too large": lambda c, n: c.store(pattern([n] * 64 * CHUNK), [n] * 64 * CHUNK),
}


def test_a_thousand_failing_calls_leave_no_lock_and_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmcache_fast.client.EVICTION_PAUSE", 0.0)
    slots = max(4096, LAYOUT.token_bytes * CHUNK)
    with (
        start_server("shm", pool_bytes=8 * slots, write_ttl=2.0) as server,
        quiet_client(server) as client,
    ):
        client.store(pattern(TOKENS), TOKENS)
        copy = client._links.current.transport.copy  # type: ignore[attr-defined]
        fail = [False]

        def broken(*arguments: Any) -> None:
            if fail[0]:
                raise MemoryError
            copy(*arguments)

        monkeypatch.setattr(client._links.current.transport, "copy", broken)
        for number in range(1000):
            # Those that fill the pool are slow: fewer of them.
            name = "too large" if number % 40 == 0 else list(FAILING)[number % (len(FAILING) - 1)]
            fail[0] = name == "copy raises"
            with pytest.raises(
                (InvalidInputError, StoreIncompleteError, ZeroDivisionError, MemoryError)
            ):
                FAILING[name](client, 100_000 + number // 100)
        fail[0] = False
        assert client.stats().failures > 500
        assert locked(server) == 0
        assert server.status()["fast"]["sessions"] == 0
        assert client.store(pattern(TOKENS), TOKENS) in (True, False)


def test_counters_say_what_was_done(client: KVClient) -> None:
    assert isinstance(client.stats(), ClientStats)
    before = client.stats()
    client.lookup(TOKENS)
    client.retrieve(TOKENS)
    with client.lease(TOKENS):
        pass
    client.edit(TOKENS, HALF)
    with pytest.raises(ZeroDivisionError):
        client.edit(TOKENS, RAISES)
    after = client.stats()
    size = LAYOUT.token_bytes * len(TOKENS)
    assert (before.stores, before.bytes_written, before.requests) == (1, size, 1)
    assert (after.lookups, after.retrieves, after.leases, after.edits) == (1, 1, 1, 2)
    assert after.failures == 1 and after.retries == after.fallbacks == after.reconnects == 0
    assert after.bytes_written == size + size // 2
    assert after.bytes_read >= 3 * size
    assert after.seconds_waiting > before.seconds_waiting > 0 < after.seconds_copying
    assert after.requests == 6 and after.to_dict()["requests"] == 6


def test_a_fallback_is_counted() -> None:
    with start_server("pickle") as server, quiet_client(server) as client:
        assert client.stats().fallbacks == 1


def test_counters_go_to_prometheus(client: KVClient) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    registry.register(StatsCollector(client))
    client.lookup(TOKENS)
    labels = {"model": "model", "instance_id": str(client.instance_id)}
    assert registry.get_sample_value("lmcache_fast_lookups_total", labels) == 1
    assert registry.get_sample_value("lmcache_fast_bytes_written_total", labels) > 0
    client.close()
    assert registry.get_sample_value("lmcache_fast_lookups_total", labels) == 1


def test_one_line_says_what_was_chosen_and_why(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmcache_fast")
    with quiet_client(server) as client:
        lines = [r.getMessage() for r in caplog.records if r.name == "lmcache_fast.client"]
        assert len(lines) == 1
        for part in (server.url, "0.5.6-fast", "'model'", str(client.instance_id), "shm", "16 tok"):
            assert part in lines[0]


@pytest.mark.parametrize(
    ("level", "expected"), [("debug", "10"), ("15", "15"), ("", "0"), ("loud", "0")]
)
def test_the_log_level_comes_from_the_environment_and_no_handler_is_ours(
    level: str, expected: str
) -> None:
    script = (
        "import lmcache_fast, logging; l = logging.getLogger('lmcache_fast');"
        "print(l.level, l.handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LMCACHE_FAST_LOG_LEVEL": level},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [expected, "[]"]
    assert ("LMCACHE_FAST_LOG_LEVEL is 'LOUD'" in done.stderr) is (level == "loud")
