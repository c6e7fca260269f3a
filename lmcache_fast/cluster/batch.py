"""ClusterBatchedStream: the batch of one process, over many nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from lmcache_fast.arguments import TokenIds, check_salt, check_tokens
from lmcache_fast.closing import Closing
from lmcache_fast.cluster.dispatch import Dispatcher, Tally, next_phase_number
from lmcache_fast.cluster.fleet import Fleet
from lmcache_fast.cluster.messages import Phase, plain
from lmcache_fast.cluster.node import Node
from lmcache_fast.cluster.report import ClusterMetrics
from lmcache_fast.cluster.routing import Router
from lmcache_fast.cluster.stream import ClusterStream
from lmcache_fast.edits import Edit
from lmcache_fast.errors import BatchError, ClosedError, InvalidInputError
from lmcache_fast.metrics import Number, StreamPerfMetrics, check_format
from lmcache_fast.sdk.batch import is_silent, select
from lmcache_fast.sdk.stream import EditFunction

#: Failed streams that the text of an error names; all are in its ``failures``.
_NAMED = 20


class ClusterBatchedStream(Closing):
    """Request streams that are run together over many nodes; a context manager.

    As :class:`lmcache_fast.sdk.batch.LMCacheBatchedStream`, but streams are made by :meth:`add` and
    live on their nodes: the driver sends prompts and the edit, and gets tokens, text and metrics.

    A stream that fails does not end the others. Streams of a node that dies go to other nodes, are
    prefilled there again, and what was done to them is done again; what they had generated stays.
    After two moves, or when no node is left, such a stream fails with
    :class:`lmcache_fast.NodeLostError`. Ctrl-C cancels what is running, waits for it, ends the
    actors and goes on as KeyboardInterrupt; the batch is closed then.

    Args:
        nodes: the machines, or a :class:`Fleet` that several batches share.
        max_imbalance: a node that has this many times the mean of all nodes' tokens gets no further
            streams; 1 or more.
        ask_nodes: whether each node is asked how much it holds of every new stream. Without that
            streams go by the hash of their first chunk alone.
        options: what :class:`Fleet` takes, where ``nodes`` is a list.

    Attributes:
        streams: the streams by id, in the order they were added.
        perf_metrics: what each stream measured in the last phase, by id. ``tpot`` stays empty:
            the times of single tokens do not travel.

    Raises:
        ConnectError: Ray is not installed, or no node can be used.
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        nodes: Sequence[Node] | Fleet,
        *,
        max_imbalance: float = 1.25,
        ask_nodes: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(max_imbalance, (int, float)) or not 1 <= max_imbalance < float("inf"):
            raise InvalidInputError(
                f"ClusterBatchedStream: max_imbalance is {max_imbalance!r}; expected 1 or more"
            )
        if isinstance(nodes, Fleet) and options:
            raise InvalidInputError(f"ClusterBatchedStream: {', '.join(options)}: for the fleet")
        self._owns_fleet = not isinstance(nodes, Fleet)
        self.fleet = nodes if isinstance(nodes, Fleet) else Fleet(nodes, **options)
        self._dispatcher = Dispatcher(self.fleet, Router(max_imbalance), ask_nodes)
        self._is_closed = False
        self.streams: dict[str, ClusterStream] = {}
        self.perf_metrics: dict[str, StreamPerfMetrics] = {}

    def add(
        self, prompt_token_ids: TokenIds, cache_salt: str = "", *, isolate_edits: bool = False
    ) -> ClusterStream:
        """Add a stream; it gets its node when it is first run.

        Args:
            prompt_token_ids: the prompt.
            cache_salt: keeps the caches of different users apart.
            isolate_edits: store each edited KV under a random salt of its own, so that no other
                request with the same tokens finds it.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        stream = ClusterStream(
            check_tokens("add", prompt_token_ids), check_salt("add", cache_salt), isolate_edits
        )
        self.streams[stream.stream_id] = stream
        return stream

    def get_stream(self, stream_id: str) -> ClusterStream:
        """Return the stream with that id.

        Raises:
            InvalidInputError: the batch has none.
        """
        select("get_stream", self.streams, [stream_id])
        return self.streams[stream_id]

    def prefill(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
    ) -> ClusterMetrics:
        """Generate one token with every stream, so that its node's engine stores its KV.

        Args:
            sampling_params: the engine's parameters; ``max_tokens`` is taken to be 1.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to run; None for all.

        Returns:
            Metrics with ``duration``, ``input_tokens`` and ``input_tput``, what it cost the driver
            (``driver_seconds``, ``bytes_sent``, ``bytes_received``), ``num_moved`` streams, and
            ``nodes``.

        Raises:
            BatchError: some streams failed; the others finished.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        params = plain({**sampling_params, "max_tokens": 1}, "prefill")
        phase = Phase(next_phase_number(), params)
        return self._run("prefill", phase, fmt, width, stream_ids, "input_tokens", "input_tput")

    def modify(
        self,
        fn: EditFunction | Edit,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> ClusterMetrics:
        """Edit every stream's cached KV on its node, at most as many at once as the node has cores.

        Args:
            fn: the edit, pickled by value as Ray does. It should depend on its arguments alone: for
                a stream that moves it is called again.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to edit; None for all.
            timeout: seconds to wait for one stream's chunks.
            poll_interval: seconds between two look-ups.
            allow_partial: be content with one cached chunk or more.

        Returns:
            Metrics as of :meth:`prefill`, without its tokens.

        Raises:
            BatchError: some streams failed; the others are edited.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        if not callable(fn):
            raise InvalidInputError(f"modify: fn is {fn!r}; expected a function (kv, tokens)")
        phase = Phase(
            next_phase_number(),
            edit=self.fleet.pickle(fn),
            timeout=timeout,
            poll_interval=poll_interval,
            allow_partial=allow_partial,
        )
        return self._run("modify", phase, fmt, width, stream_ids)

    def decode(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
    ) -> ClusterMetrics:
        """Generate with every stream, a bounded number on each node at once.

        Args:
            sampling_params: the engine's parameters, e.g. ``max_tokens``.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to run; None for all.

        Returns:
            Metrics as of :meth:`prefill`, with ``output_tokens`` and ``output_tput``.

        Raises:
            BatchError: some streams failed; the others finished.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        phase = Phase(next_phase_number(), plain(sampling_params, "decode"))
        return self._run("decode", phase, fmt, width, stream_ids, "output_tokens", "output_tput")

    def close(self) -> None:
        """End the actors, or let those of a shared fleet forget the streams; again: nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_fleet:
            self.fleet.close()
            return
        by_node: dict[str, list[str]] = {name: [] for name in self.fleet.names}
        for stream in self.streams.values():
            if stream.node in by_node:
                by_node[stream.node].append(stream.stream_id)
        for name, stream_ids in by_node.items():
            self.fleet.drop(name, stream_ids, self._dispatcher.phases)

    def _run(
        self,
        where: str,
        phase: Phase,
        fmt: str,
        width: int,
        stream_ids: Sequence[str] | None,
        *counts: str,
    ) -> ClusterMetrics:
        check_format(where, fmt, width)
        streams = [self.streams[name] for name in select(where, self.streams, stream_ids)]
        if self._is_closed:
            raise ClosedError(f"{where}: the batch was closed")
        begin, driver = time.perf_counter(), time.process_time()
        try:
            with tqdm(total=len(streams), desc=where, disable=is_silent(), file=sys.stderr) as bar:
                tally = self._dispatcher.run(phase, streams, bar.update)
        except BaseException:  # Ctrl-C above all
            self.fleet.close()
            self.close()
            raise
        duration, driver = time.perf_counter() - begin, time.process_time() - driver
        self.perf_metrics = {
            stream_id: outcome.perf for stream_id, outcome in tally.outcomes.items()
        }
        results = _results(tally, duration, driver, *counts)
        config = {"num_request_streams": len(streams), "num_nodes": len(tally.nodes)}
        metrics = ClusterMetrics(f"Cluster {where}", config, results, fmt, width, tally.nodes)
        if tally.failures:
            raise BatchError(_told(where, len(streams), tally.failures), tally.failures, metrics)
        return metrics


def _results(tally: Tally, duration: float, driver: float, *counts: str) -> dict[str, Number]:
    def total(name: str) -> int:
        return sum(getattr(node, name) for node in tally.nodes.values())

    results: dict[str, Number] = {"duration": duration}
    if counts:
        tokens, tput = counts
        results[tokens] = sum(getattr(outcome, tokens) for outcome in tally.outcomes.values())
        results[tput] = results[tokens] / duration if duration > 0 else 0.0
    results["num_moved"] = tally.moved
    results["driver_seconds"] = driver
    results["bytes_sent"] = total("bytes_sent")
    results["bytes_received"] = total("bytes_received")
    return results


def _told(where: str, num_streams: int, failures: Mapping[str, Exception]) -> str:
    named = [
        f"stream {stream_id}: {type(error).__name__}: {error}"
        for stream_id, error in list(failures.items())[:_NAMED]
    ]
    if len(failures) > _NAMED:
        named.append(f"and {len(failures) - _NAMED} more")
    return f"{where}: {len(failures)} of {num_streams} streams failed: {'; '.join(named)}"
