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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from lmcache_fast.edits import Edit
from lmcache_fast.errors import (
    BatchError,
    InvalidInputError,
    LMCacheBatchedStreamError,
    LMCacheFastError,
)
from lmcache_fast.metrics import Metrics, Number, StreamPerfMetrics, check_format
from lmcache_fast.sdk.context import ModifyFnType
from lmcache_fast.sdk.stream import EditFunction
from lmcache_fast.sdk.stream_base import BaseStream

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError"]

#: What each report counts.
_COUNTED = {"prefill": "input", "decode": "output"}

_T = TypeVar("_T")


@dataclass
class _Outcome(Generic[_T]):
    """What running every selected stream once gave, by stream id."""

    duration: float = 0.0
    results: dict[str, _T] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)


class LMCacheBatchedStream:
    """Request streams of either generation that are run together.

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
        self.streams: dict[str, BaseStream] = {}
        self.perf_metrics: dict[str, StreamPerfMetrics] = {}

    @property
    def request_streams(self) -> dict[str, BaseStream]:
        """The streams by id, as the second generation calls them."""
        return self.streams

    def add(
        self, stream: BaseStream | None = None, *, request_stream: BaseStream | None = None
    ) -> None:
        """Add a stream; ``request_stream`` is its keyword in the second generation.

        Raises:
            InvalidInputError: it is no stream, or was added before.
        """
        stream = request_stream if stream is None else stream
        if not isinstance(stream, BaseStream):
            raise InvalidInputError(f"add: got {type(stream).__name__}; expected a stream")
        if stream.stream_id() in self.streams:
            raise InvalidInputError(f"add: stream {stream.stream_id()} was added before")
        self.streams[stream.stream_id()] = stream

    def get_stream(self, stream_id: str) -> BaseStream:
        """Return the stream with that id.

        Raises:
            InvalidInputError: the batch has none.
        """
        select("get_stream", self.streams, [stream_id])
        return self.streams[stream_id]

    def get_request_stream(self, stream_id: str) -> BaseStream:
        """Call :meth:`get_stream`, as the second generation does."""
        return self.get_stream(stream_id)

    def run_streams(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> float:
        """Generate with every stream at once; see :meth:`decode`.

        Returns:
            Seconds that it took. What each stream measured is in ``perf_metrics``.
        """
        return float(self._generate("decode", sampling_params, "terminal", 80, stream_ids).duration)

    def run_request_streams(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> float:
        """Call :meth:`run_streams`, as the second generation does."""
        return self.run_streams(sampling_params, stream_ids)

    def modify_stream(
        self,
        fn: EditFunction | ModifyFnType | Edit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
    ) -> float:
        """Edit every stream's cached KV; see :meth:`modify`.

        Returns:
            Seconds that it took.
        """
        metrics = self.modify(
            fn, stream_ids=stream_ids, timeout=timeout, poll_interval=poll_interval
        )
        return float(metrics.duration)

    def modify_request_streams(
        self,
        fn: EditFunction | ModifyFnType | Edit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
    ) -> float:
        """Call :meth:`modify_stream`, as the second generation does."""
        return self.modify_stream(fn, stream_ids, timeout, poll_interval)

    def get_perf_metrics(
        self,
        duration: float,
        fmt: str,
        width: int,
        mode: str,
        stream_ids: Sequence[str] | None = None,
    ) -> Metrics:
        """Add up what the streams measured in the last run.

        Args:
            duration: seconds that the run took.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            mode: ``"prefill"`` to count input tokens, ``"decode"`` to count output tokens.
            stream_ids: streams to count; None for all.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        ids = self._prepare("get_perf_metrics", fmt, width, stream_ids)
        if mode not in _COUNTED:
            raise InvalidInputError(
                f"get_perf_metrics: mode is {mode!r}; expected one of {', '.join(_COUNTED)}"
            )
        outcome = _Outcome(duration, {i: p for i, p in self.perf_metrics.items() if i in ids})
        return _report(mode, ids, outcome, _count(mode, outcome), fmt, width)

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
        fn: EditFunction | ModifyFnType | Edit,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> Metrics:
        """Edit every stream's cached KV; at most as many at once as there are cores.

        Args:
            fn: the edit. Streams of the first generation call it with a tensor, those of the
                second with tensors by kind; an :class:`lmcache_fast.edits.Edit` suits both.
            fmt: how the report is printed: ``"terminal"`` or ``"json"``.
            width: columns of the printed report.
            stream_ids: streams to edit; None for all. The second generation has it behind
                ``poll_interval``: give it and the times by keyword.
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

    def _prepare(
        self, where: str, fmt: str, width: int, stream_ids: Sequence[str] | None
    ) -> list[str]:
        check_format(where, fmt, width)
        return select(where, self.streams, stream_ids)

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
        return _report(where, ids, outcome, _count(where, outcome), fmt, width)

    def _run(
        self, where: str, ids: list[str], work: Callable[[BaseStream], _T], max_workers: int
    ) -> _Outcome[_T]:
        """Do ``work`` for every stream in threads; failures are collected, not raised."""
        outcome: _Outcome[_T] = _Outcome()
        if not ids:
            return outcome
        stopping = threading.Event()
        running: set[BaseStream] = set()

        def task(stream: BaseStream) -> _T:
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
                with tqdm(total=len(ids), desc=where, disable=is_silent(), file=sys.stderr) as bar:
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


def select(
    where: str, streams: Mapping[str, object], stream_ids: Sequence[str] | None
) -> list[str]:
    """Return the ids of the streams that are meant, each once.

    Args:
        where: the call, for errors.
        streams: all there are, by id.
        stream_ids: those that are meant; None for all.

    Raises:
        InvalidInputError: that is no list of ids, or there is no such stream.
    """
    if stream_ids is None:
        return list(streams)
    if isinstance(stream_ids, str) or not isinstance(stream_ids, Iterable):
        raise InvalidInputError(
            f"{where}: stream_ids is {stream_ids!r}; expected a list of ids (or None), given "
            "by keyword"
        )
    for stream_id in stream_ids:
        if stream_id not in streams:
            raise InvalidInputError(f"{where}: the batch has no stream {stream_id!r}")
    return list(dict.fromkeys(stream_ids))


def is_silent() -> bool:
    """Whether no progress bar is to be shown."""
    return os.environ.get("LMCACHE_FAST_PROGRESS") == "0" or not sys.stderr.isatty()


def _count(mode: str, outcome: _Outcome[StreamPerfMetrics]) -> dict[str, Number]:
    """Return the tokens that ``mode`` counts, and how many that is a second."""
    what = _COUNTED[mode]
    tokens = sum(getattr(perf, f"{what}_tokens") for perf in outcome.results.values())
    tput = tokens / outcome.duration if outcome.duration > 0 else 0.0
    return {f"{what}_tokens": tokens, f"{what}_tput": tput}


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
