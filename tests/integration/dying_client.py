"""Clients that kill themselves: ``python dying_client.py URL HTTP_URL FIRST_TOKEN STEP...``.

Forks once for each step, so that the imports are done only once; each child dies at its step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lmcache_fast import KVClient, edits
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.transport.shm import ShmTransport
from tests.integration.conftest import CHUNK, LAYOUT
from tests.integration.faults import pattern


def die(*_: object) -> None:
    """End like a process that the kernel kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(where: Any, name: str) -> None:
    """Die in place of a method."""
    setattr(where, name, die)


def after(where: Any, name: str) -> None:
    """Die right after a method."""
    original: Callable[..., Any] = getattr(where, name)

    def hooked(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        die()

    setattr(where, name, hooked)


STEPS: dict[str, Callable[[], None]] = {
    "retrieve: after lookup": lambda: after(Connection, "lookup"),
    "retrieve: after prepare_retrieve": lambda: after(Connection, "prepare_retrieve"),
    "retrieve: after the copy": lambda: after(ShmTransport, "copy"),
    "retrieve: before the release": lambda: before(Connection, "release_read"),
    "store: after prepare_store": lambda: after(Connection, "prepare_store"),
    "store: after the copy": lambda: after(ShmTransport, "copy"),
    "store: before commit_store": lambda: before(Connection, "commit_store"),
    "store: after commit_store": lambda: after(Connection, "commit_store"),
    "edit: in the function": lambda: None,
    "edit: after prepare_store": lambda: after(Connection, "prepare_store"),
    "edit: after the copy": lambda: after(ShmTransport, "copy"),
    "edit: before the release": lambda: before(Connection, "release_read"),
}


def work(url: str, http_url: str, first: int, step: str) -> None:
    """Store something, then do what the step is part of."""
    tokens = list(range(first, first + 4 * CHUNK))
    client = KVClient(url, http_url, "model", layout=LAYOUT, timeout=30)
    call = step.partition(":")[0]
    if call != "store":
        client.store(pattern(tokens), tokens)
    STEPS[step]()
    if call == "retrieve":
        client.retrieve(tokens)
    elif call == "store":
        client.store(pattern(tokens), tokens)
    else:
        choose = die if step == "edit: in the function" else lambda total, _: range(0, total, 2)
        client.edit(tokens, edits.keep(choose))  # type: ignore[arg-type]


def main() -> None:
    """Fork a child for each step; say how each ended."""
    url, http_url, first, *steps = sys.argv[1:]
    for number, step in enumerate(steps):
        pid = os.fork()
        if pid == 0:
            work(url, http_url, int(first) + 1000 * number, step)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(f"{step}: {-os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'lived'}", flush=True)


if __name__ == "__main__":
    main()
