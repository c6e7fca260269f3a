"""What a client has done so far: counters, and the same for Prometheus."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_fast.client import KVClient

LOG_LEVEL_VARIABLE = "LMCACHE_FAST_LOG_LEVEL"


@dataclass(frozen=True)
class ClientStats:
    """A snapshot of a client's counters; all only ever grow.

    Attributes:
        lookups: calls of ``lookup``.
        leases: calls of ``lease``.
        retrieves: calls of ``retrieve``.
        stores: calls of ``store``.
        edits: calls of ``edit``.
        failures: calls that raised, except for arguments that were refused at once.
        retries: attempts beyond a call's first: the server came back, a lock had run out, or a full
            pool was given time to evict.
        reconnects: times that the connection was opened anew.
        fallbacks: times that a slower transport than shared memory had to be chosen.
        bytes_read: bytes of cache copied or viewed from the server.
        bytes_written: bytes of cache sent or written to the server.
        seconds_waiting: seconds in which calls waited for the server's answers.
        seconds_copying: seconds in which calls copied.
    """

    lookups: int = 0
    leases: int = 0
    retrieves: int = 0
    stores: int = 0
    edits: int = 0
    failures: int = 0
    retries: int = 0
    reconnects: int = 0
    fallbacks: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_waiting: float = 0.0
    seconds_copying: float = 0.0

    @property
    def requests(self) -> int:
        """Calls of any kind."""
        return self.lookups + self.leases + self.retrieves + self.stores + self.edits

    def to_dict(self) -> dict[str, int | float]:
        """Return the counters by name."""
        return {**asdict(self), "requests": self.requests}


class Counters:
    """Adds up what :class:`ClientStats` says; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = asdict(ClientStats())

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - started})

    def snapshot(self) -> ClientStats:
        """Return the counters as they are now."""
        with self._lock:
            return ClientStats(**self._values)


class StatsCollector:
    """A client's counters for Prometheus: ``registry.register(StatsCollector(client))``.

    Needs ``prometheus_client``. Each counter is ``lmcache_fast_<name>_total`` with the labels
    ``model`` and ``instance_id``.

    Args:
        client: whose counters they are; after its ``close`` they stay as they were.
    """

    def __init__(self, client: KVClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Any]:
        """Yield one counter for each of the client's."""
        from prometheus_client.core import CounterMetricFamily

        labels = {"model": self._client.model_name, "instance_id": str(self._client.instance_id)}
        for name, value in asdict(self._client.stats()).items():
            text = f"LMCache fast client: {name.replace('_', ' ')}"
            family = CounterMetricFamily(f"lmcache_fast_{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family


def set_log_level() -> None:
    """Set the level of the logger ``lmcache_fast`` if ``LMCACHE_FAST_LOG_LEVEL`` says one."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper()
    if not level:
        return
    try:
        logging.getLogger("lmcache_fast").setLevel(int(level) if level.isdecimal() else level)
    except ValueError:
        warnings.warn(
            f"{LOG_LEVEL_VARIABLE} is {level!r}; expected DEBUG, INFO, WARNING, ERROR, CRITICAL or "
            "a number",
            UserWarning,
            stacklevel=2,
        )
