"""A server that dies, hangs and comes back as the tests want it to."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch

from lmcache_fast import KVClient, KVLayout
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import LAYOUT, start_server

#: Requests that come from the connection itself, at any time.
OPERATIONS_OF_NOBODY = (Operation.REGISTER, Operation.UNREGISTER)


class Mortal:
    """An embedded server on fixed ports.

    ``on_request(operation)`` is called in the server's thread before each operation but
    registrations; what it raises drops the request.
    """

    def __init__(self, transport: str, **settings: Any) -> None:
        self.transport = transport
        self.settings = settings
        self.on_request: Callable[[Operation], None] = lambda _: None
        self.seen: Counter[Operation] = Counter()
        self._start(settings)
        for url, name in ((self.server.url, "port"), (self.server.http_url, "http_port")):
            port = urlsplit(url).port
            assert port is not None
            self.settings[name] = port

    def _start(self, settings: dict[str, Any]) -> None:
        self.server: EmbeddedServer = start_server(self.transport, **settings)
        self.is_up = True
        service = self.server._service
        call = service.call

        def hooked(operation: Operation, payloads: list[Any]) -> Any:
            if operation not in OPERATIONS_OF_NOBODY:
                self.seen[operation] += 1
                self.on_request(operation)
            return call(operation, payloads)

        service.call = hooked  # type: ignore[method-assign]

    def stop(self) -> None:
        """Die, with all that is cached."""
        if self.is_up:
            self.is_up = False
            self.server.close()

    def start(self, **changes: Any) -> None:
        """Come back, perhaps as another one."""
        self.transport = changes.pop("transport", self.transport)
        self._start({**self.settings, **changes})

    def die_at(self, step: int, comeback: dict[str, Any] | None) -> threading.Event:
        """Die at the ``step``-th request from now on; then come back, unless None.

        Returns an event that is set once all that has happened.
        """
        done = threading.Event()
        left = step

        def end() -> None:
            self.stop()
            if comeback is not None:
                self.start(**comeback)
            done.set()

        def on_request(_: Operation) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.on_request = lambda _: None
                threading.Thread(target=end).start()
                raise ValueError("the server dies")

        self.on_request = on_request
        return done


class Gate:
    """Holds the server up at one operation until it is opened."""

    def __init__(self, mortal: Mortal, operation: Operation) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self._operation = operation
        mortal.on_request = self._wait

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()

    def _wait(self, operation: Operation) -> None:
        if operation is self._operation:
            self.reached.set()
            self._open.wait(120)


def quiet_client(
    server: EmbeddedServer, timeout: float = 30.0, layout: KVLayout | None = LAYOUT
) -> KVClient:
    """A client without warnings about its transport."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no shared memory.*")
        return KVClient(server.url, server.http_url, "model", layout=layout, timeout=timeout)


def pattern(tokens: list[int], layout: KVLayout = LAYOUT) -> torch.Tensor:
    """KV that tells which tokens it is of: every row is made from its token's id."""
    rows = torch.tensor(tokens, dtype=torch.int64).view(1, 1, -1, 1)
    place = torch.arange(layout.planes * layout.num_layers * layout.width)
    place = place.view(layout.planes, layout.num_layers, 1, layout.width)
    return ((rows * 31 + place * 7) % 251).to(layout.dtype)
