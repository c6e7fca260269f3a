"""Fleet: one actor a node, from the first batch to the last."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import warnings
import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from lmcache_fast import __version__
from lmcache_fast.arguments import check_timeout
from lmcache_fast.closing import Closing
from lmcache_fast.cluster.node import Node
from lmcache_fast.cluster.worker import NodeWorker
from lmcache_fast.errors import (
    ClosedError,
    ConnectError,
    InvalidInputError,
    LMCacheFastError,
    NodeLostError,
)
from lmcache_fast.interrupts import interruptible, shielded

logger = logging.getLogger(__name__)

Ticket = Hashable

#: Share of a node's resource that an actor takes, so that many batches can use the node.
_SHARE = 0.001
_CONTROL = "control"
#: A node's streams travel in this many parcels, and twice as many are under way: the next ones are
#: there when the first are done.
_PARCELS = 4
_POLL = 1.0
_STOP_SECONDS = 15.0


class Fleet(Closing):
    """The actors of a cluster's nodes; a context manager.

    Each actor is pinned by its node's resource, takes no CPU of Ray's and is not started again when
    it dies: what it had was on its node. A node that cannot be used at the start is left out with a
    warning; one that is lost later is lost for good.

    Ray must run on every node. A process that is not connected to it yet calls ``ray.init()``.

    Args:
        nodes: the machines.
        streams_per_node: how many streams a node generates for at once.
        timeout: seconds that one answer of a server, one token of an engine, or a sign of life of a
            node may take.
        start_timeout: seconds that all actors together may take to start.

    Attributes:
        left_out: why, by name, for each node that could not be used at the start.
        lost: the same for each node that was lost later.
        chunk_size: tokens a chunk.

    Raises:
        ConnectError: Ray is not installed, or no node can be used.
        InvalidInputError: an argument is wrong, or the servers' chunk sizes differ.
    """

    #: What runs on the nodes.
    worker: ClassVar[type[NodeWorker]] = NodeWorker

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        streams_per_node: int = 64,
        timeout: float = 60.0,
        start_timeout: float = 120.0,
    ) -> None:
        self.timeout = check_timeout("Fleet", timeout)
        check_timeout("Fleet", start_timeout)
        if not isinstance(streams_per_node, int) or streams_per_node < 1:
            raise InvalidInputError(
                f"Fleet: streams_per_node is {streams_per_node!r}; expected 1 or more"
            )
        by_name = _by_name(nodes)
        #: Streams a parcel, and parcels under way to a node.
        self.parcel_streams = math.ceil(streams_per_node / _PARCELS)
        self.max_parcels = 2 * math.ceil(streams_per_node / self.parcel_streams)
        self.left_out: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._pings: dict[str, tuple[Ticket, float]] = {}
        self._ray = ray = _load_ray()
        if not ray.is_initialized():
            ray.init()
        worker = ray.remote(concurrency_groups={_CONTROL: 2})(self.worker)
        self._actors: dict[str, Any] = {
            name: worker.options(
                num_cpus=0,
                resources={node.resource: _SHARE},
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=self.max_parcels,
            ).remote(node, streams_per_node, timeout)
            for name, node in by_name.items()
        }
        # Whoever forgets to close a fleet keeps no actors. Ray ends its own at exit before the
        # finalizers of others run, so this one is registered behind it as well.
        self._last_will = weakref.finalize(self, _stop, ray, self._actors)
        atexit.register(self._last_will)
        try:
            greetings = self._connect(start_timeout)
            sizes = {name: greeting["chunk_size"] for name, greeting in greetings.items()}
            if len(set(sizes.values())) > 1:
                raise InvalidInputError(f"Fleet: the servers' chunk sizes differ: {sizes}")
        except BaseException:
            self.close()
            raise
        self.chunk_size: int = next(iter(sizes.values()))
        #: How chunks travel between a node's actor and its server, by name.
        self.transports: dict[str, str] = {
            name: greeting["transport"] for name, greeting in greetings.items()
        }

    @property
    def names(self) -> list[str]:
        """The nodes that can be used, in the order they were given."""
        return list(self._actors)

    def pickle(self, value: object) -> bytes:
        """Pickle a function as Ray does: by value where nodes cannot import it.

        Raises:
            InvalidInputError: it holds something that cannot be sent.
        """
        try:
            data: bytes = self._ray.cloudpickle.dumps(value)
        except Exception as error:
            raise InvalidInputError(f"{value!r} cannot be sent to the nodes: {error}") from error
        return data

    def share(self, data: bytes) -> object:
        """Put bytes where every node can fetch them once."""
        return self._ray.put(data)

    def ask_hits(self, name: str, prompts: object) -> Ticket:
        """Ask a node how much of shared prompts it holds; see :meth:`NodeWorker.hits`."""
        return self._send(name, "hits", prompts)

    def run(self, name: str, parcel: bytes, phases: Sequence[object]) -> Ticket:
        """Let a node run a parcel with shared phases; see :meth:`NodeWorker.run`."""
        return self._send(name, "run", parcel, *phases)

    def drop(self, name: str, stream_ids: Sequence[str], phases: Sequence[int]) -> None:
        """Let a node forget streams and phases; not waited for."""
        actor = self._actors.get(name)
        if actor is not None:
            actor.drop.options(concurrency_group=_CONTROL).remote(list(stream_ids), list(phases))

    def collect(self, tickets: Mapping[Ticket, str]) -> list[tuple[Ticket, bytes | Exception]]:
        """Wait about a second for answers and return those that are there.

        Args:
            tickets: what is waited for, and from which node.

        Returns:
            Each answer, or why there is none: NodeLostError where the node was lost.
        """
        ray = self._ray
        pings = self._ping_silent({name for name in tickets.values() if name in self._actors})
        waiting = [*tickets, *pings]
        ready, _ = ray.wait(waiting, num_returns=1, timeout=_POLL)
        if ready:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        answers: list[tuple[Ticket, bytes | Exception]] = []
        for ticket in ready:
            name = pings.get(ticket) or tickets[ticket]
            answer: bytes | Exception
            try:
                answer = ray.get(ticket, timeout=self.timeout)
                self._heard[name] = time.monotonic()
            except ray.exceptions.RayTaskError as error:
                answer = _cause(error)
            except ray.exceptions.RayError as error:
                self.lose(name, _first_line(error))
                continue
            if ticket in tickets:
                answers.append((ticket, answer))
        self._lose_silent(set(pings.values()))
        answered = {ticket for ticket, _ in answers}
        for ticket, name in tickets.items():
            if name not in self._actors and ticket not in answered:
                answers.append((ticket, self._gone(name)))
        return answers

    def lose(self, name: str, reason: str) -> None:
        """Give a node up: its actor is ended and nothing is sent there any more."""
        with self._lock:
            actor = self._actors.pop(name, None)
            if actor is None:
                return
            self.lost[name] = reason
        logger.warning("node %s is lost: %s", name, reason)
        self._ray.kill(actor)

    def close(self) -> None:
        """End the actors; what they are running is cancelled and its locks are given back.

        Takes under 20 s. Again: nothing.
        """
        with shielded():
            atexit.unregister(self._last_will)
            self._last_will()

    def _send(self, name: str, method: str, *arguments: object) -> Ticket:
        if not self._last_will.alive:
            raise ClosedError("the fleet was closed")
        actor = self._actors.get(name)
        if actor is None:
            raise self._gone(name)
        self._heard.setdefault(name, time.monotonic())
        ticket: Ticket = getattr(actor, method).remote(*arguments)
        return ticket

    def _connect(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Return what each actor says of itself; leave out the nodes that cannot be used."""
        ray = self._ray
        calls = {actor.connect.remote(): name for name, actor in self._actors.items()}
        ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
        greetings: dict[str, dict[str, Any]] = {}
        for call, name in calls.items():
            try:
                greeting = ray.get(call, timeout=0)
                if greeting["package"] != __version__:
                    raise LMCacheFastError(
                        f"it has lmcache_fast {greeting['package']}; this is {__version__}"
                    )
                greetings[name] = greeting
            except ray.exceptions.GetTimeoutError:
                self.left_out[name] = (
                    f"its actor did not start within {seconds:g} s: does a Ray node offer its "
                    "resource?"
                )
            except ray.exceptions.RayTaskError as error:
                self.left_out[name] = str(_cause(error))
            except ray.exceptions.RayError as error:
                # Ray tells that the actor died, a traceback, and last why.
                told = [line.strip() for line in str(error).splitlines() if line.strip()]
                self.left_out[name] = f"its actor could not start: {told[-1] if told else error!r}"
            except LMCacheFastError as error:
                self.left_out[name] = str(error)
        for name, reason in self.left_out.items():
            ray.kill(self._actors.pop(name))
            warnings.warn(f"node {name} is left out: {reason}", stacklevel=3)
        if not greetings:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise ConnectError(f"Fleet: no node can be used: {reasons}")
        return greetings

    def _ping_silent(self, names: set[str]) -> dict[Ticket, str]:
        """Ask those not heard of for long whether they live; return the pings under way."""
        with self._lock:
            now = time.monotonic()
            for name in names:
                if name not in self._pings and now - self._heard[name] > self.timeout:
                    ping = self._actors[name].ping.options(concurrency_group=_CONTROL)
                    self._pings[name] = (ping.remote(), now)
            return {self._pings[name][0]: name for name in names if name in self._pings}

    def _lose_silent(self, names: set[str]) -> None:
        now = time.monotonic()
        for name in names:
            with self._lock:
                _, since = self._pings.get(name, (None, now))
                answered = self._heard[name] >= since
                if answered:
                    self._pings.pop(name, None)
            if not answered and now - since > self.timeout:
                self.lose(name, f"no sign of life for {2 * self.timeout:g} s")

    def _gone(self, name: str) -> NodeLostError:
        return NodeLostError(f"node {name} is lost: {self.lost.get(name, 'the fleet was closed')}")


def _by_name(nodes: Sequence[Node]) -> dict[str, Node]:
    by_name: dict[str, Node] = {}
    for node in nodes:
        if not isinstance(node, Node):
            raise InvalidInputError(f"Fleet: got {type(node).__name__}; expected a list of nodes")
        if by_name.setdefault(node.name, node) is not node:
            raise InvalidInputError(
                f"Fleet: two nodes are called {node.name!r}; give them names of their own"
            )
    if not by_name:
        raise InvalidInputError("Fleet: no nodes; expected at least one")
    return by_name


def _load_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ConnectError(
            f"lmcache_fast.cluster needs Ray ({error}): pip install 'lmcache_fast[ray]'"
        ) from error
    module: ModuleType = ray
    return module


def _stop(ray: ModuleType, actors: dict[str, Any]) -> None:
    """End all actors, gently and then not."""
    if not ray.is_initialized():
        return
    ending = list(actors.values())
    actors.clear()
    try:
        calls = [
            actor.stop.options(concurrency_group=_CONTROL).remote(_STOP_SECONDS) for actor in ending
        ]
        if calls:
            with interruptible():  # a second Ctrl-C ends the waiting
                ray.wait(calls, num_returns=len(calls), timeout=_STOP_SECONDS + 5)
    finally:
        for actor in ending:
            ray.kill(actor)


def _cause(error: Any) -> Exception:
    """Return the exception that a call raised on its node."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else LMCacheFastError(_first_line(error))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
