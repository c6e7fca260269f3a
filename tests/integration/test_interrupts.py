"""Ctrl-C, wherever it comes, leaves no lock, no session and no half-written chunk."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lmcache_fast
from lmcache_fast import KVClient, edits
from lmcache_fast.interrupts import interruptible, shielded
from lmcache_fast.protocol.operations import Operation
from tests.integration.conftest import CHUNK, locked
from tests.integration.faults import Gate, Mortal, pattern, quiet_client

OURS = str(Path(lmcache_fast.__file__).parent)
TOKENS = list(range(100, 100 + 4 * CHUNK))
HALF = edits.keep(lambda total, _: range(0, total, 2))


@pytest.fixture(params=["shm", "pickle"])
def mortal(request: pytest.FixtureRequest) -> Iterator[Mortal]:
    mortal = Mortal(request.param)
    yield mortal
    mortal.stop()


@pytest.fixture
def client(mortal: Mortal) -> Iterator[KVClient]:
    with quiet_client(mortal.server) as client:
        client.store(pattern(TOKENS), TOKENS)
        yield client


class AtLine:
    """Raises SIGINT when this thread comes to the n-th line of the package from now on."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.lines = 0

    def __enter__(self) -> AtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(OURS) or "/serve/" in path:
            return None
        if event == "line":
            self.lines += 1
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def use_lease(client: KVClient) -> None:
    with client.lease(TOKENS) as lease:
        for chunk in lease:
            chunk.tensor()


CALLS: dict[str, Callable[[KVClient, int], Any]] = {
    "lookup": lambda client, _: client.lookup(TOKENS),
    "retrieve": lambda client, _: client.retrieve(TOKENS),
    "lease": lambda client, _: use_lease(client),
    "store": lambda client, n: client.store(pattern([n] * 2 * CHUNK), [n] * 2 * CHUNK),
    "edit": lambda client, n: client.edit(TOKENS, HALF, target_salt=f"salt {n}"),
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_at_any_line_leaves_nothing_behind(
    mortal: Mortal, client: KVClient, call: str
) -> None:
    with AtLine(-1) as dry_run:
        CALLS[call](client, 1)
    assert dry_run.lines > 50
    step = max(1, dry_run.lines // 60)  # every line in turn takes minutes: see docs/reliability.md
    if os.environ.get("LMCACHE_FAST_EVERY_CASE"):
        step = 1
    for line in range(1, dry_run.lines, step):
        interrupted = False
        at_line = AtLine(line)
        try:
            with at_line:
                CALLS[call](client, 1000 + line)
        except KeyboardInterrupt:
            interrupted = True
        # (The dry run may have had more lines: a first use of something.)
        assert interrupted or at_line.left > 0, f"the Ctrl-C at line {line} was swallowed"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert locked(mortal.server) == 0
    found = client.retrieve(TOKENS)
    # (Storing something else at each line may have pushed it out.)
    assert call == "store" if found is None else torch.equal(found, pattern(TOKENS))


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        ("retrieve", Operation.LOOKUP),
        ("retrieve", Operation.WAIT_PREFETCH_STATUS),
        ("retrieve", Operation.PREPARE_RETRIEVE),
        ("store", Operation.COMMIT_STORE),
    ],
)
def test_ctrl_c_ends_a_call_that_waits_for_a_server_that_hangs(
    mortal: Mortal, client: KVClient, call: str, operation: Operation
) -> None:
    gate = Gate(mortal, operation)

    def press() -> None:
        gate.reached.wait(60)
        time.sleep(1)  # so that it waits; not needed for the test to pass
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](client, 7)
    presser.join()
    assert not gate.is_open, "it was let through while the server still hung"
    gate.open()
    mortal.on_request = lambda _: None
    assert client.store(pattern(TOKENS), TOKENS) is False
    assert locked(mortal.server) == 0


@pytest.mark.parametrize("transport", ["shm"])
def test_ctrl_c_in_the_users_own_function_stores_nothing(transport: str) -> None:
    mortal = Mortal(transport)

    def choose(total: int, _: object) -> range:
        signal.raise_signal(signal.SIGINT)
        return range(0, total, 2)

    with quiet_client(mortal.server) as client:
        client.store(pattern(TOKENS), TOKENS)
        with pytest.raises(KeyboardInterrupt):
            client.edit(TOKENS, edits.keep(choose))
        assert client.lookup(TOKENS[::2]) == 0
        assert locked(mortal.server) == 0
    mortal.stop()


def test_a_shield_holds_the_first_ctrl_c_and_not_the_second() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_shield_lets_ctrl_c_through_where_it_may_come() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
        reached.append("held")
        with shielded(), interruptible():
            reached.append("never")
    assert reached == ["held"]


def test_a_shield_respects_a_handler_of_the_program_and_other_threads() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with shielded():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
            thread = threading.Thread(target=lambda: shielded().__enter__())
            thread.start()
            thread.join()
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
