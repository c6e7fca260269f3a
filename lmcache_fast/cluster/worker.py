"""NodeWorker: the actor of one node. It owns the node's client and the streams sent to it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Any

import httpx
import numpy as np

from lmcache_fast import __version__
from lmcache_fast.client import KVClient
from lmcache_fast.cluster.messages import (
    Done,
    Hits,
    Opening,
    Outcome,
    Parcel,
    Phase,
    Prompts,
    Reply,
    decode,
    encode,
    pack,
    unpack,
)
from lmcache_fast.cluster.node import Node
from lmcache_fast.completion import PostCompletion, TokenEvent
from lmcache_fast.errors import InvalidInputError, LMCacheFastError
from lmcache_fast.metrics import StreamPerfMetrics
from lmcache_fast.sdk.stream import LMCacheStream
from lmcache_fast.vllm import make_post_completion

_STOP_PAUSE = 0.05


class NodeWorker:
    """Runs the streams of one node, a bounded number at once, and keeps them across phases.

    It is an ordinary threaded class, which Ray makes an actor of: each call of :meth:`run` waits in
    a thread of Ray's while the streams run in threads of ours, so that a parcel's slow streams do
    not keep the next parcel's waiting.

    Args:
        node: where everything is.
        streams_at_once: how many streams generate at the same time.
        timeout: seconds that one answer of the server, or one token of the engine, may take.
    """

    def __init__(self, node: Node, streams_at_once: int, timeout: float) -> None:
        self._node = node
        self._timeout = timeout
        self._client: KVClient | None = None
        self._engine = make_post_completion(node.engine_url, node.served_model, timeout)
        self._streams: dict[str, LMCacheStream] = {}
        self._running: set[LMCacheStream] = set()
        self._phases: dict[int, _Phase] = {}
        self._phases_lock = threading.Lock()
        self._stopping = threading.Event()
        self._generating = ThreadPoolExecutor(streams_at_once, "lmcache_fast-generate")
        # As for a batch of one process: more edits at once than cores gain nothing.
        self._editing = ThreadPoolExecutor(cpu_count() or 1, "lmcache_fast-edit")

    def connect(self) -> dict[str, Any]:
        """Open the client and return what the driver wants to know of it.

        Raises:
            LMCacheFastError: the server or the engine cannot be used.
        """
        self._client = KVClient(
            self._node.url,
            self._node.http_url,
            self._node.model,
            layout=self._node.layout,
            timeout=self._timeout,
        )
        problem = self._sick()
        if problem:
            raise LMCacheFastError(problem)
        return {
            "package": __version__,
            "chunk_size": self._client.chunk_size,
            "transport": self._client.transport_name,
        }

    def ping(self) -> None:
        """Answer, to show that the process is there."""

    def hits(self, prompts: bytes) -> bytes:
        """Return how much of each prompt is cached: :class:`Prompts` in, :class:`Hits` out."""
        asked = decode(prompts, Prompts)
        client = self._connected()
        missing: set[tuple[bytes, str]] = set()

        def lookup(tokens: bytes, salt: str) -> int:
            first = (tokens[: 4 * client.chunk_size], salt)
            if first in missing:  # whoever has no first chunk has nothing
                return 0
            found = client.lookup(unpack(tokens), salt)
            if not found:
                missing.add(first)
            return found

        try:
            counts = list(self._editing.map(lookup, asked.tokens, asked.salts))
        except LMCacheFastError as error:
            if not self._sick():
                raise
            return encode(Hits(b"", str(error)))
        return encode(Hits(np.array(counts, np.int64).tobytes()))

    def run(self, parcel: bytes, *phases: bytes) -> bytes:
        """Run one phase of some streams: :class:`Parcel` in, :class:`Reply` out.

        Args:
            parcel: the streams.
            phases: :class:`Phase` messages: this one, and those in the streams' histories.
        """
        received = decode(parcel, Parcel)
        for data in phases:
            self._learn(data)
        phase = self._phases[received.phase]
        threads = self._generating if phase.edit is None else self._editing
        futures = [
            threads.submit(self._advance, phase, stream_id, opening)
            for stream_id, opening in received.streams.items()
        ]
        outcomes = [future.result() for future in futures]
        sick = self._sick() if any(outcome.is_ours for outcome in outcomes) else ""
        return encode(Reply(outcomes, sick))

    def drop(self, stream_ids: list[str], phases: list[int]) -> None:
        """Forget streams and phases."""
        for stream_id in stream_ids:
            self._streams.pop(stream_id, None)
        for number in phases:
            self._phases.pop(number, None)

    def stop(self, seconds: float) -> None:
        """End what is running, give back every lock and close; waits ``seconds`` at most."""
        self._stopping.set()
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            for stream in self._running.copy():
                stream.cancel()
            time.sleep(_STOP_PAUSE)
        if self._client is not None:
            self._client.close()
        self._engine.http.close()

    def _connected(self) -> KVClient:
        if self._client is None:
            raise LMCacheFastError(f"node {self._node.name}: connect() comes first")
        return self._client

    def _learn(self, data: bytes) -> None:
        phase = decode(data, Phase)
        with self._phases_lock:  # an edit is unpickled once, whatever it holds
            if phase.number not in self._phases:
                self._phases[phase.number] = _Phase(phase)

    def _advance(self, phase: _Phase, stream_id: str, opening: Opening | None) -> Outcome:
        """Run one phase of one stream. Never raises: what went wrong is in the outcome."""
        try:
            stream = self._streams[stream_id] if opening is None else self._new(opening)
            self._running.add(stream)
        except Exception as error:
            return _failed(error)
        try:
            if self._stopping.is_set():
                raise LMCacheFastError("cancelled")
            if opening is not None:
                self._catch_up(stream, opening, phase)
                self._streams[stream_id] = stream
            return self._apply(phase, stream)
        except Exception as error:
            return _failed(error)
        finally:
            self._running.discard(stream)

    def _apply(self, phase: _Phase, stream: LMCacheStream) -> Outcome:
        tokens, characters = int(stream.decoded_tokens), len(stream.output_text)
        failed, perf = Outcome(), StreamPerfMetrics()
        begin = time.perf_counter()
        try:
            perf = phase.apply(stream) or StreamPerfMetrics(time.perf_counter() - begin)
        except Exception as error:
            failed = _failed(error)
        return Outcome(
            tokens=pack(stream.output_tokens[tokens:]),
            text=stream.output_text[characters:],
            num_tokens=len(stream.tokens) + len(stream.suffix_tokens),
            done=stream.done,
            input_tokens=perf.input_tokens,
            duration=perf.duration,
            ttft=perf.ttft,
            failure=failed.failure,
            is_known=True,
            is_ours=failed.is_ours,
        )

    def _new(self, opening: Opening) -> LMCacheStream:
        return LMCacheStream(
            self._connected(),
            self._engine,
            unpack(opening.tokens),
            opening.cache_salt,
            isolate_edits=opening.isolate_edits,
        )

    def _catch_up(self, stream: LMCacheStream, opening: Opening, last: _Phase) -> None:
        """Bring a stream that was elsewhere to where it was there, up to the phase ``last``.

        What it generated there stays as it was. The engine is asked again only where an edit
        follows, which needs the KV of the prompt here.
        """
        history = list(opening.history)
        edits = [self._phases[done.phase].edit is not None for done in history]
        edits.append(last.edit is not None)
        if opening.is_displaced and edits[0]:
            self._regenerate(stream, None, {}, prefill=True)
        for done, edit_follows in zip(history, edits[1:], strict=True):
            phase = self._phases[done.phase]
            if phase.edit is None:
                self._regenerate(stream, done, phase.params, prefill=edit_follows)
            else:
                phase.apply(stream)

    def _regenerate(
        self, stream: LMCacheStream, done: Done | None, params: dict[str, Any], prefill: bool
    ) -> None:
        engine = stream.post_completion
        stream.post_completion = _Again(engine, done, prefill)
        try:
            stream.generate(params)
        finally:
            stream.post_completion = engine

    def _sick(self) -> str:
        """Return why this node can do no more, or "" if its server and its engine answer."""
        for url in (f"{self._node.http_url}/healthcheck", f"{self._node.engine_url}/health"):
            try:
                # Not the engine's pool of connections: it may be what is stuck.
                status = httpx.get(url, timeout=self._timeout, trust_env=False).status_code
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return f"GET {url}: {error or type(error).__name__}"
            if status >= 500:
                return f"GET {url}: HTTP status {status}"
        return ""


class _Phase:
    """A phase, ready to run."""

    def __init__(self, phase: Phase) -> None:
        self.params = phase.params
        self.edit: Callable[..., Any] | None = pickle.loads(phase.edit) if phase.edit else None
        self._waiting = (phase.timeout, phase.poll_interval, phase.allow_partial)

    def apply(self, stream: LMCacheStream) -> StreamPerfMetrics | None:
        if self.edit is None:
            return stream.generate(self.params)
        stream.modify_kv(self.edit, *self._waiting)
        return None


class _Again:
    """Stands in for the engine: gives what was generated before, elsewhere.

    Args:
        engine: the real one, which makes the prompt's KV if ``prefill``.
        done: what was generated; None for nothing.
        prefill: whether the KV is needed.
    """

    def __init__(self, engine: PostCompletion, done: Done | None, prefill: bool) -> None:
        self._engine = engine
        self._done = done
        self._prefill = prefill

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterable[TokenEvent]:
        if self._prefill:
            params = {**sampling_params, "max_tokens": 1}
            params.pop("min_tokens", None)
            for _ in self._engine(prompt_token_ids, params, cache_salt):
                pass
        return self._events()

    def _events(self) -> Iterator[TokenEvent]:
        if self._done is not None:
            text = self._done.text
            for token in unpack(self._done.tokens).tolist():
                yield TokenEvent(token, text)
                text = ""


def _failed(error: Exception) -> Outcome:
    """Return the outcome of a stream that failed."""
    # The caller's mistakes and his edit function's are as wrong on another node.
    is_ours = isinstance(error, LMCacheFastError) and not isinstance(error, InvalidInputError)
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(LMCacheFastError(f"{type(error).__name__}: {error}"))
    return Outcome(failure=data, is_ours=is_ours)
