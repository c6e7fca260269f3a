"""Links: which server a client talks to now, and calls that survive its restart."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache_fast.errors import ClosedError, LeaseExpiredError, ServerGoneError
from lmcache_fast.interrupts import shielded
from lmcache_fast.observe import Counters
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.request import Link
from lmcache_fast.transport.select import VARIABLE, choose_transport

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_COUNTERS = {
    "lookup": "lookups",
    "lease": "leases",
    "retrieve": "retrieves",
    "store": "stores",
    "edit": "edits",
}


class Links:
    """A connection and the :class:`Link` that belongs to its current opening; thread-safe.

    Args:
        connection: what every link is over.
        counters: where to count what is done.
    """

    def __init__(self, connection: Connection, counters: Counters) -> None:
        self._connection = connection
        self._counters = counters
        self._lock = threading.Lock()
        self._closed = False
        #: What the last call talked to.
        self.current = self._make()

    def call(self, where: str, attempt: Callable[[Link], _T]) -> _T:
        """Run ``attempt``; once more if the server came back under it, or a lock ran out.

        Ctrl-C is held back until nothing of the call would be left on the server.
        """
        with shielded():
            self._counters.add(**{_COUNTERS[where]: 1})
            try:
                try:
                    return attempt(self._renew(where))
                except (ServerGoneError, LeaseExpiredError) as error:
                    logger.warning("%s: %s; trying once more", where, error)
                    self._counters.add(retries=1)
                return attempt(self._renew(where))
            except BaseException:
                self._counters.add(failures=1)
                raise

    def close(self) -> bool:
        """Refuse calls from now on, and give back the transport; False if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self.current.transport.close()
            return True

    def _renew(self, where: str) -> Link:
        """Make sure of a live connection; return it with what belongs to it."""
        self._check_open(where)
        self._connection.ensure_open()
        link = self.current
        if link.generation == self._connection.generation:
            return link
        with self._lock:
            self._check_open(where)
            if self.current.generation != self._connection.generation:
                # The old transport is not closed: other threads may still read from its pool.
                self.current = link = self._make()
                self._counters.add(reconnects=1)
                logger.warning(
                    "%s: the server at %s is another one now: LMCache %s, chunks of %d tokens, "
                    "transport %s",
                    where, self._connection.url, self._connection.info.version, link.chunk_size,
                    link.transport.name,
                )  # fmt: skip
            return self.current

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ClosedError(f"{where}: the client was closed")

    def _make(self) -> Link:
        connection = self._connection
        while True:
            generation, info = connection.generation, connection.info
            transport = choose_transport(connection)
            if generation == connection.generation:
                break
            transport.close()
        if transport.name != "shm" and not os.environ.get(VARIABLE):
            self._counters.add(fallbacks=1)
        return Link(
            connection, generation, transport, info.chunk_size, info.read_ttl, self._counters
        )
