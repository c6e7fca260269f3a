"""Dispatch: streams to their nodes in parcels, and to other nodes when theirs die."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lmcache_fast.cluster.messages import (
    Hits,
    Outcome,
    Parcel,
    Phase,
    Prompts,
    Reply,
    decode,
    encode,
    pack,
)
from lmcache_fast.cluster.report import NodeTally
from lmcache_fast.cluster.routing import Counts, Router, prefix_key
from lmcache_fast.cluster.stream import ClusterStream
from lmcache_fast.errors import LMCacheFastError, NodeLostError

#: How often a stream goes to another node because its own died.
MAX_MOVES = 2
#: Prompts, and tokens of them, that the nodes are asked about at a time: what is under way at most.
_ASKED_PROMPTS = 512
_ASKED_TOKENS = 1 << 23
_phase_numbers = itertools.count()


class Nodes(Protocol):
    """What runs parcels: :class:`lmcache_fast.cluster.Fleet`."""

    parcel_streams: int
    max_parcels: int
    chunk_size: int

    @property
    def names(self) -> list[str]:
        """The nodes that can be used."""

    def share(self, data: bytes) -> object:
        """Put bytes where every node can fetch them."""

    def ask_hits(self, name: str, prompts: object) -> object:
        """Ask for :class:`Hits`; return a ticket."""

    def run(self, name: str, parcel: bytes, phases: Sequence[object]) -> object:
        """Ask for a :class:`Reply`; return a ticket."""

    def collect(self, tickets: Mapping[object, str]) -> list[tuple[object, bytes | Exception]]:
        """Wait a little; return the answers that are there."""

    def lose(self, name: str, reason: str) -> None:
        """Give a node up."""


@dataclass
class Tally:
    """What one phase gave.

    Attributes:
        outcomes: of the streams that went well, by id, without their tokens.
        failures: of the others.
        nodes: by name.
        moved: how many times a stream moved.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    nodes: dict[str, NodeTally] = field(default_factory=dict)
    moved: int = 0


class Dispatcher:
    """Runs phases of one batch's streams.

    What it holds beside the streams is bounded: for each node at most ``max_parcels`` parcels are
    under way.

    Args:
        nodes: what runs parcels.
        router: chooses nodes for new streams.
        ask_nodes: whether the nodes are asked what they hold before streams are placed.
    """

    def __init__(self, nodes: Nodes, router: Router, ask_nodes: bool) -> None:
        self.nodes = nodes
        self._router = router
        self._ask_nodes = ask_nodes
        self._shared: dict[int, _Shared] = {}

    @property
    def phases(self) -> list[int]:
        """The numbers of the phases that nodes may know."""
        return list(self._shared)

    def run(
        self, phase: Phase, streams: Sequence[ClusterStream], finished: Callable[[], object]
    ) -> Tally:
        """Run one phase; ``finished`` is called for each stream that is through."""
        data = encode(phase)
        self._shared[phase.number] = _Shared(self.nodes.share(data), len(data))
        return _Run(self, phase, finished).of(streams)

    def place(self, streams: Sequence[ClusterStream], tally: Tally) -> dict[str, str]:
        """Return a node for each stream, by id. Those that moved are not asked about again."""
        new = [stream for stream in streams if not stream.moves]
        hits = self._hits(new, tally) if self._ask_nodes else None
        placed: dict[str, str] = {}
        for group, known in ((new, hits), ([s for s in streams if s.moves], None)):
            names = self.nodes.names
            if not group or not names:
                continue
            chunk = self.nodes.chunk_size
            keys = [prefix_key(stream.prompt, stream.cache_salt, chunk) for stream in group]
            chosen = self._router.assign(
                names,
                np.array(keys, np.uint64),
                [max(1, len(stream.prompt)) for stream in group],
                np.stack([known[name] for name in names], axis=1) if known else None,
            )
            placed.update(zip((stream.stream_id for stream in group), chosen, strict=True))
        return placed

    def parcel(self, phase: Phase, streams: Sequence[ClusterStream]) -> tuple[bytes, list[_Shared]]:
        """Return a parcel and the phases that go with it."""
        needed = {phase.number}
        content = {}
        for stream in streams:
            content[stream.stream_id] = None if stream.is_open else stream.opening()
            if not stream.is_open:
                needed.update(stream.phases)
        parcel = encode(Parcel(phase.number, content))
        return parcel, [self._shared[number] for number in sorted(needed)]

    def _hits(self, streams: Sequence[ClusterStream], tally: Tally) -> dict[str, Counts] | None:
        """Ask every node how much it holds of each stream, in one round; None if nobody has to be.

        A node that gives no answer holds nothing.
        """
        if len(self.nodes.names) < 2 or not streams:
            return None
        counts = {name: np.zeros(len(streams), np.int64) for name in self.nodes.names}
        begin = 0
        while begin < len(streams):
            end = _end_of_call(streams, begin)
            found = self._ask(streams[begin:end], tally)
            for name, answer in found.items():
                counts[name][begin:end] = answer
            begin = end
        return counts

    def _ask(self, streams: Sequence[ClusterStream], tally: Tally) -> dict[str, Counts]:
        """Ask every node about a bounded number of streams, in one call each."""
        data = encode(Prompts([pack(s.prompt) for s in streams], [s.cache_salt for s in streams]))
        shared = self.nodes.share(data)
        waiting: dict[object, str] = {}
        for name in self.nodes.names:
            with suppress(NodeLostError):
                waiting[self.nodes.ask_hits(name, shared)] = name
                tally.nodes.setdefault(name, NodeTally()).bytes_sent += len(data)
        found: dict[str, Counts] = {}
        while waiting:
            for ticket, answer in self.nodes.collect(waiting):
                name = waiting.pop(ticket)
                if not isinstance(answer, bytes):
                    continue
                tally.nodes[name].bytes_received += len(answer)
                hits = decode(answer, Hits)
                if hits.sick:
                    self.nodes.lose(name, hits.sick)
                else:
                    found[name] = np.frombuffer(hits.counts, np.int64)
        return found


@dataclass
class _Shared:
    """A phase that the nodes can fetch, and which of them have."""

    handle: object
    size: int
    fetched: set[str] = field(default_factory=set)


class _Run:
    """One phase under way."""

    def __init__(
        self, dispatcher: Dispatcher, phase: Phase, finished: Callable[[], object]
    ) -> None:
        self._dispatcher = dispatcher
        self._nodes = dispatcher.nodes
        self._phase = phase
        self._finished = finished
        self._tally = Tally()
        self._queues: dict[str, deque[ClusterStream]] = {}
        self._waiting: dict[object, str] = {}
        self._parcels: dict[object, list[ClusterStream]] = {}

    def of(self, streams: Sequence[ClusterStream]) -> Tally:
        alive = set(self._nodes.names)
        self._enqueue([stream for stream in streams if not stream.node or stream.node in alive])
        self._move(
            [stream for stream in streams if stream.node and stream.node not in alive],
            "it died before this phase",
        )
        while self._queues or self._waiting:
            self._leave_lost_nodes()
            self._send()
            if self._waiting:
                for ticket, answer in self._nodes.collect(self._waiting):
                    self._take(self._waiting.pop(ticket), self._parcels.pop(ticket), answer)
        return self._tally

    def _enqueue(self, streams: Sequence[ClusterStream]) -> None:
        homeless = [stream for stream in streams if not stream.node]
        placed = self._dispatcher.place(homeless, self._tally) if homeless else {}
        for stream in streams:
            stream.node = stream.node or placed.get(stream.stream_id, "")
            if stream.node:
                self._queues.setdefault(stream.node, deque()).append(stream)
            else:
                self._fail(stream, NodeLostError(f"stream {stream.stream_id}: no node is left"))

    def _send(self) -> None:
        under_way = Counter(self._waiting.values())
        for name, queue in list(self._queues.items()):
            for _ in range(self._nodes.max_parcels - under_way[name]):
                if not queue:
                    del self._queues[name]
                    break
                size = min(len(queue), self._nodes.parcel_streams)
                streams = [queue.popleft() for _ in range(size)]
                parcel, phases = self._dispatcher.parcel(self._phase, streams)
                try:
                    ticket = self._nodes.run(name, parcel, [phase.handle for phase in phases])
                except NodeLostError:
                    queue.extendleft(streams)
                    break
                tally = self._tally.nodes.setdefault(name, NodeTally())
                tally.bytes_sent += len(parcel)
                for phase in phases:
                    tally.bytes_sent += phase.size if name not in phase.fetched else 0
                    phase.fetched.add(name)
                self._waiting[ticket] = name
                self._parcels[ticket] = streams

    def _take(self, name: str, streams: list[ClusterStream], answer: bytes | Exception) -> None:
        if isinstance(answer, NodeLostError):
            # They may have been what killed it.
            self._move(streams, str(answer))
            return
        tally = self._tally.nodes[name]
        if isinstance(answer, Exception):
            for stream in streams:
                self._fail(stream, answer)
            return
        tally.bytes_received += len(answer)
        reply = decode(answer, Reply)
        if reply.sick:
            self._nodes.lose(name, reply.sick)
        moving = []
        for stream, outcome in zip(streams, reply.outcomes, strict=True):
            if reply.sick and outcome.is_ours:
                moving.append(stream)
                continue
            tally.moved_in += stream.moves > 0 and not stream.is_open
            stream.is_open = outcome.is_known
            stream.take(self._phase.number, outcome)
            tally.input_tokens += outcome.input_tokens
            tally.output_tokens += outcome.output_tokens
            if outcome.failure:
                self._fail(stream, _error_of(outcome))
            else:
                tally.streams += 1
                self._tally.outcomes[stream.stream_id] = outcome
                self._finished()
        self._move(moving, reply.sick)

    def _leave_lost_nodes(self) -> None:
        alive = set(self._nodes.names)
        for name in [name for name in self._queues if name not in alive]:
            streams = self._queues.pop(name)
            # Those that never were there have lost nothing.
            untouched = [stream for stream in streams if not stream.is_open]
            for stream in untouched:
                stream.displace()
            self._enqueue(untouched)
            self._move([stream for stream in streams if stream.is_open], "it died in this phase")

    def _move(self, streams: Iterable[ClusterStream], reason: str) -> None:
        """Place streams anew whose node is gone."""
        moving = []
        for stream in streams:
            lost = stream.node
            stream.displace()
            stream.moves += 1
            if stream.moves > MAX_MOVES:
                told = f"stream {stream.stream_id}: it was moved {MAX_MOVES} times, and node {lost}"
                self._fail(stream, NodeLostError(f"{told} is lost too: {reason}"))
            else:
                self._tally.moved += 1
                moving.append(stream)
        if moving:
            self._enqueue(moving)

    def _fail(self, stream: ClusterStream, error: Exception) -> None:
        if stream.node:
            tally = self._tally.nodes.setdefault(stream.node, NodeTally())
            tally.streams += 1
            tally.failed += 1
        self._tally.failures[stream.stream_id] = error
        self._finished()


def _end_of_call(streams: Sequence[ClusterStream], begin: int) -> int:
    """Return how far a call about ``streams[begin:]`` goes: one stream at least."""
    tokens = len(streams[begin].prompt)
    for end in range(begin + 1, min(len(streams), begin + _ASKED_PROMPTS)):
        tokens += len(streams[end].prompt)
        if tokens > _ASKED_TOKENS:
            return end
    return min(len(streams), begin + _ASKED_PROMPTS)


def next_phase_number() -> int:
    """Return a number that no other phase of this process has."""
    return next(_phase_numbers)


def _error_of(outcome: Outcome) -> Exception:
    try:
        error = pickle.loads(outcome.failure)
    except Exception as unknown:  # a class that only the node has
        return LMCacheFastError(f"an error that cannot be read here: {unknown}")
    return error if isinstance(error, Exception) else LMCacheFastError(repr(error))
