"""Nodes without Ray: real workers in this process, over stand-ins for server and engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lmcache_fast.cluster import Node
from lmcache_fast.cluster.worker import NodeWorker
from lmcache_fast.completion import TokenEvent
from lmcache_fast.errors import NodeLostError
from tests.unit.sdk_fakes import CHUNK, FakeClient, FakeEngine, as_client


class CountingEngine(FakeEngine):
    """Generates what follows from its prompt, and from ``base``."""

    base = 0

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        first = self.base + sum(prompt_token_ids) % 1000
        events = super().__call__(prompt_token_ids, sampling_params, cache_salt)
        for number, event in enumerate(events):
            yield TokenEvent(first + number, event.text)


class FakeWorker(NodeWorker):
    """A worker whose server and engine are stand-ins.

    Args:
        name: of its node.
    """

    def __init__(self, name: str) -> None:
        node = Node("tcp://nowhere:1", "http://nowhere:1", "http://nowhere:2", "model", name)
        super().__init__(node, 4, 5.0)
        self._engine.http.close()
        self.client = FakeClient()
        self.engine = CountingEngine(self.client)
        self._client = as_client(self.client)
        self._engine = self.engine  # type: ignore[assignment]
        self.problem = ""

    def _sick(self) -> str:
        return self.problem


class FakeNodes:
    """What a Fleet is to a Dispatcher.

    Attributes:
        before: called with the node's name before each parcel is run; may call :meth:`lose`.
        most_under_way: the most parcels that were under way to each node at once.
        parcels: how many parcels each node was sent.
        rounds: how often each node was asked what it holds.
    """

    parcel_streams = 2
    max_parcels = 2
    chunk_size = CHUNK

    def __init__(self, *names: str) -> None:
        self.workers = {name: FakeWorker(name) for name in names}
        self.alive = list(names)
        self.before: Callable[[str], None] = lambda name: None
        self.most_under_way: Counter[str] = Counter()
        self.parcels: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self._work: dict[object, tuple[str, Callable[[], bytes]]] = {}

    @property
    def names(self) -> list[str]:
        return list(self.alive)

    def share(self, data: bytes) -> object:
        return data

    def ask_hits(self, name: str, prompts: Any) -> object:
        self.rounds[name] += 1
        return self._later(name, partial(self.workers[name].hits, prompts))

    def run(self, name: str, parcel: bytes, phases: Sequence[Any]) -> object:
        if name not in self.alive:
            raise NodeLostError(f"node {name} is lost")
        self.parcels[name] += 1
        under_way = sum(where == name for where, _ in self._work.values()) + 1
        self.most_under_way[name] = max(self.most_under_way[name], under_way)
        return self._later(name, partial(self.workers[name].run, parcel, *phases))

    def collect(self, tickets: Mapping[object, str]) -> list[tuple[object, bytes | Exception]]:
        ticket, name = next(iter(tickets.items()))
        self.before(name)
        answers: list[tuple[object, bytes | Exception]] = []
        for lost in [ticket for ticket, where in tickets.items() if where not in self.alive]:
            del self._work[lost]
            answers.append((lost, NodeLostError("node is lost: the test ended it")))
        if name in self.alive:
            try:
                answers.append((ticket, self._work.pop(ticket)[1]()))
            except ValueError as error:
                answers.append((ticket, error))
        return answers

    def lose(self, name: str, reason: str = "") -> None:
        self.alive.remove(name)

    def _later(self, name: str, work: Callable[[], bytes]) -> object:
        ticket = object()
        self._work[ticket] = (name, work)
        return ticket
