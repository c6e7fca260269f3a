"""Batches: many request streams at once.

::

    batch = LMCacheBatchedStream()
    for prompt in prompts:
        batch.add(create_request(ctx, post_completion, prompt))
    batch.prefill({"temperature": 0.0}).emit()
    batch.modify(edit).emit()
    batch.decode({"max_tokens": 128}).emit()
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from lmcache_fast.errors import BatchError, InvalidInputError, LMCacheFastError
from lmcache_fast.metrics import Metrics, Number, check_format
from lmcache_fast.sdk.stream import EditFunction, LMCacheStream, StreamPerfMetrics

#: Name that code written for the first generation catches.
LMCacheBatchedStreamError = LMCacheFastError

_T = TypeVar("_T")


@dataclass
class _Outcome(Generic[_T]):
    """What running every selected stream once gave, by stream id."""

    duration: float = 0.0
    results: dict[str, _T] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)


class LMCacheBatchedStream:
    """Request streams that are run together.

    A stream that fails does not end the others: the batch finishes, then raises one
    :class:`lmcache_fast.BatchError` that names each failed stream and carries the metrics of the
    rest. Ctrl-C stops every stream at its next token or look-up, waits for them and goes on as
    KeyboardInterrupt; each keeps what it had received.

    A progress bar is shown where standard error is a terminal, unless the environment variable
    ``LMCACHE_FAST_PROGRESS`` is ``0``.

    Attributes:
        streams: the streams by id, in the order they were added.
        perf_metrics: what each stream measured in the last ``prefill`` or ``decode``, by id.
    """

    def __init__(self) -> None:
        self.streams: dict[str, LMCacheStream] = {}
        self.perf_metrics: dict[str, StreamPerfMetrics] = {}

    def add(self, stream: LMCacheStream) -> None:
        """Add a stream.

        Raises:
            InvalidInputError: it is no stream, or was added before.
        """
        if not isinstance(stream, LMCacheStream):
            raise InvalidInputError(f"add: got {type(stream).__name__}; expected a stream")
        if stream.stream_id() in self.streams:
            raise InvalidInputError(f"add: stream {stream.stream_id()} was added before")
        self.streams[stream.stream_id()] = stream

    def get_stream(self, stream_id: str) -> LMCacheStream:
        """Return the stream with that id.

        Raises:
            InvalidInputError: the batch has none.
        """
        self._select("get_stream", [stream_id])
        return self.streams[stream_id]

    def prefill(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
    ) -> Metrics:
        """Generate one token with every stream at once, so that the engine stores their KV.

        Args:
            sampling_params: the engine's parameters; ``max_tokens`` is taken to be 1.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to run; None for all.

        Returns:
            Metrics with ``duration``, ``input_tokens`` and ``input_tput``.

        Raises:
            BatchError: some streams failed; the others finished.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        params = {**sampling_params, "max_tokens": 1}
        return self._generate("prefill", params, fmt, width, stream_ids)

    def modify(
        self,
        fn: EditFunction,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> Metrics:
        """Edit every stream's cached KV; at most as many at once as there are cores.

        Args:
            fn: the edit; see :meth:`LMCacheStream.modify_kv`.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to edit; None for all.
            timeout: seconds to wait for one stream's chunks.
            poll_interval: seconds between two look-ups.
            allow_partial: be content with one cached chunk or more.

        Returns:
            Metrics with ``duration``.

        Raises:
            BatchError: some streams failed; the others are edited.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        ids = self._prepare("modify", fmt, width, stream_ids)
        outcome = self._run(
            "modify",
            ids,
            lambda stream: stream.modify_kv(fn, timeout, poll_interval, allow_partial),
            os.cpu_count() or 1,
        )
        return _report("modify", ids, outcome, {}, fmt, width)

    def decode(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
    ) -> Metrics:
        """Generate with every stream at once.

        Args:
            sampling_params: the engine's parameters, e.g. ``max_tokens``.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to run; None for all.

        Returns:
            Metrics with ``duration``, ``output_tokens`` and ``output_tput``.

        Raises:
            BatchError: some streams failed; the others finished.
            InvalidInputError: an argument is wrong; nothing was run.
        """
        return self._generate("decode", sampling_params, fmt, width, stream_ids)

    def _select(self, where: str, stream_ids: Sequence[str] | None) -> list[str]:
        if stream_ids is None:
            return list(self.streams)
        if isinstance(stream_ids, str):
            raise InvalidInputError(f"{where}: stream_ids is a string; expected a list of ids")
        for stream_id in stream_ids:
            if stream_id not in self.streams:
                raise InvalidInputError(f"{where}: the batch has no stream {stream_id!r}")
        return list(dict.fromkeys(stream_ids))

    def _prepare(
        self, where: str, fmt: str, width: int, stream_ids: Sequence[str] | None
    ) -> list[str]:
        check_format(where, fmt, width)
        return self._select(where, stream_ids)

    def _generate(
        self,
        where: str,
        params: Mapping[str, Any],
        fmt: str,
        width: int,
        stream_ids: Sequence[str] | None,
    ) -> Metrics:
        ids = self._prepare(where, fmt, width, stream_ids)
        outcome = self._run(where, ids, lambda stream: stream.generate(params), len(ids))
        self.perf_metrics = outcome.results
        what = "input" if where == "prefill" else "output"
        tokens = sum(getattr(perf, f"{what}_tokens") for perf in outcome.results.values())
        tput = tokens / outcome.duration if outcome.duration > 0 else 0.0
        counts = {f"{what}_tokens": tokens, f"{what}_tput": tput}
        return _report(where, ids, outcome, counts, fmt, width)

    def _run(
        self, where: str, ids: list[str], work: Callable[[LMCacheStream], _T], max_workers: int
    ) -> _Outcome[_T]:
        """Do ``work`` for every stream in threads; failures are collected, not raised."""
        outcome: _Outcome[_T] = _Outcome()
        if not ids:
            return outcome
        stopping = threading.Event()
        running: set[LMCacheStream] = set()

        def task(stream: LMCacheStream) -> _T:
            running.add(stream)
            try:
                if stopping.is_set():
                    raise LMCacheFastError(f"{where}: cancelled")
                return work(stream)
            finally:
                running.discard(stream)

        begin = time.perf_counter()
        with ThreadPoolExecutor(min(max_workers, len(ids)), f"lmcache_fast-{where}") as executor:
            try:
                futures = {executor.submit(task, self.streams[name]): name for name in ids}
                with tqdm(total=len(ids), desc=where, disable=_silent(), file=sys.stderr) as bar:
                    for future in as_completed(futures):
                        try:
                            outcome.results[futures[future]] = future.result()
                        except Exception as error:
                            outcome.failures[futures[future]] = error
                        bar.update()
                outcome.duration = time.perf_counter() - begin
            except BaseException:  # Ctrl-C above all; it may come in the middle of a submit
                stopping.set()
                executor.shutdown(wait=False, cancel_futures=True)
                while running:
                    for stream in running.copy():
                        stream.cancel()
                    time.sleep(0.05)
                raise
        return outcome


def _silent() -> bool:
    return os.environ.get("LMCACHE_FAST_PROGRESS") == "0" or not sys.stderr.isatty()


def _report(
    where: str,
    ids: Sequence[str],
    outcome: _Outcome[Any],
    counts: Mapping[str, Number],
    fmt: str,
    width: int,
) -> Metrics:
    """Return the metrics; raise them inside a BatchError if a stream failed."""
    metrics = Metrics(
        f"Batch {where}",
        {"num_request_streams": len(ids)},
        {"duration": outcome.duration, **counts},
        fmt,
        width,
    )
    if outcome.failures:
        reasons = "; ".join(
            f"stream {stream_id}: {type(error).__name__}: {error}"
            for stream_id, error in outcome.failures.items()
        )
        raise BatchError(
            f"{where}: {len(outcome.failures)} of {len(ids)} streams failed: {reasons}",
            outcome.failures,
            metrics,
        )
    return metrics
