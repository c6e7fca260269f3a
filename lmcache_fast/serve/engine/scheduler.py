"""Continuous batching under a budget of KV tokens.

One thread steps all running sequences together. A sequence is admitted when the KV of its prompt
and of all that it may generate fits into what the running ones leave of the budget, as on a GPU,
whose memory bounds the batch the same way; until then it waits, first come first served.

The prompt is computed in pieces that end at multiples of the chunk size, and its last token goes
through the decoding step. So the same pieces are computed whether what precedes them was loaded
from a cache or computed, and the results are the same.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lmcache_fast.errors import EngineError, InvalidInputError
from lmcache_fast.serve.engine.cache import PrefixCache
from lmcache_fast.serve.engine.model import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationRequest:
    """What one request asks for.

    Args:
        prompt: token ids, at least one.
        max_tokens: how many tokens are generated at most.
        cache_salt: keeps the request's cached prefixes apart from those with other salts.
        ignore_eos: go on after the end-of-sequence token.
        temperature: 0 takes the likeliest token, above it draws.
        seed: of the draws; None for any.
        num_logprobs: how many of the likeliest tokens to tell with each token; -1 for all.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    cache_salt: str = ""
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None
    num_logprobs: int = 0


@dataclass(frozen=True)
class Generated:
    """One generated token.

    Args:
        token_id: the token.
        logprob: its logarithmic probability before any temperature.
        cached_tokens: how many tokens of the prompt came from the cache.
        finish_reason: ``"length"`` or ``"stop"`` on the last token, else None.
        likeliest: the likeliest tokens and their logarithmic probabilities, the likeliest first,
            as many as were asked for.
    """

    token_id: int
    logprob: float
    cached_tokens: int
    finish_reason: str | None
    likeliest: tuple[tuple[int, float], ...] = ()


#: Called from the scheduler's thread for each token, or once with what went wrong.
Listener = Callable[[Generated | EngineError], None]


@dataclass(eq=False)
class Sequence:
    """A request on its way; a handle to cancel it with."""

    request: GenerationRequest
    listener: Listener
    tokens: list[int]
    cancelled: bool = False
    generator: torch.Generator = field(default_factory=torch.Generator)
    #: ``[2, L, capacity, D]`` once admitted; rows up to ``computed`` are filled.
    kv: torch.Tensor | None = None
    #: ``[1, L, capacity, heads * head_dim]``, rows likewise; None where they are not kept.
    queries: torch.Tensor | None = None
    computed: int = 0
    cached: int = 0
    saved: int = 0

    @property
    def capacity(self) -> int:
        """The most tokens whose KV is ever kept: the last generated one's is never computed."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the last have their KV."""
        return self.kv is not None and self.computed == len(self.tokens) - 1


class Scheduler:
    """Runs sequences through a model.

    Args:
        model: the model.
        cache: where prefixes are loaded from and saved to; closed by :meth:`close`.
        kv_budget_tokens: over how many tokens' KV the running sequences share.
        dtype: of the KV cache.
        query_cache: where queries are saved to beside it, of sequences that are computed from their
            first token on; None to keep none. Closed by :meth:`close`.
    """

    def __init__(
        self,
        model: Model,
        cache: PrefixCache,
        kv_budget_tokens: int,
        dtype: torch.dtype = torch.float32,
        query_cache: PrefixCache | None = None,
    ) -> None:
        self.kv_budget_tokens = kv_budget_tokens
        self._query_cache = query_cache
        self._model = model
        self._cache = cache
        self._layout = model.config.layout(dtype)
        self._wake = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being worked on."""
        return self._thread.is_alive() and not self._closed

    def submit(self, request: GenerationRequest, listener: Listener) -> Sequence:
        """Queue a request; ``listener`` gets its tokens.

        Raises:
            InvalidInputError: the request could never run.
            EngineError: the scheduler was closed.
        """
        vocabulary = self._model.config.vocab_size
        if not request.prompt:
            raise InvalidInputError("prompt has no tokens; expected at least 1")
        for index, token in enumerate(request.prompt):
            if not 0 <= token < vocabulary:
                raise InvalidInputError(
                    f"prompt[{index}] is {token}; expected 0 to {vocabulary - 1}"
                )
        if request.max_tokens < 1:
            raise InvalidInputError(f"max_tokens is {request.max_tokens}; expected at least 1")
        if not -1 <= request.num_logprobs <= vocabulary:
            raise InvalidInputError(
                f"logprobs is {request.num_logprobs}; expected 0 to {vocabulary}, or -1 for all"
            )
        sequence = Sequence(request, listener, list(request.prompt))
        if sequence.capacity > self.kv_budget_tokens:
            raise InvalidInputError(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} need the "
                f"KV of {sequence.capacity} tokens; the engine has room for {self.kv_budget_tokens}"
            )
        if request.seed is None:
            sequence.generator.seed()
        else:
            sequence.generator.manual_seed(request.seed)
        with self._wake:
            if self._closed:
                raise EngineError("the engine is shutting down")
            self._waiting.append(sequence)
            self._wake.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop working on a sequence soon; nothing more reaches its listener then."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Fail what is still under way and end the thread; waits ``timeout`` seconds at most."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._admit():
                try:
                    self._step()
                except Exception as error:  # the next requests may well work
                    _log.exception("a step failed")
                    self._fail_all(f"the engine failed: {error!r}")
        finally:
            self._fail_all("the engine is shutting down")
            self._cache.close()
            if self._query_cache is not None:
                self._query_cache.close()

    def _admit(self) -> bool:
        """Wait for work and admit what fits. False when closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._waiting or self._running)
            if self._closed:
                return False
            self._running = [one for one in self._running if not one.cancelled]
            used = sum(one.capacity for one in self._running)
            while self._waiting:
                head = self._waiting[0]
                if not head.cancelled:
                    used += head.capacity
                    if used > self.kv_budget_tokens:
                        break
                    self._running.append(head)
                self._waiting.popleft()
        return True

    def _fail_all(self, message: str) -> None:
        with self._wake:
            failed = [*self._running, *self._waiting]
            self._running = []
            self._waiting.clear()
        for sequence in failed:
            if not sequence.cancelled:
                sequence.listener(EngineError(message))

    def _step(self) -> None:
        """Compute a piece of one prompt and one token of all sequences that decode."""
        for sequence in self._running:
            if sequence.kv is None:
                self._load(sequence)
            if not sequence.decoding:
                self._prefill_piece(sequence)
                break
        batch = [sequence for sequence in self._running if sequence.decoding]
        if batch:
            self._decode(batch)

    def _load(self, sequence: Sequence) -> None:
        sequence.kv = torch.empty(
            self._layout.kv_shape(sequence.capacity), dtype=self._layout.dtype
        )
        prefix = None
        if len(sequence.tokens) >= self._cache.chunk_size:
            prefix = self._cache.load(sequence.tokens, sequence.request.cache_salt)
        if prefix is None:
            if self._query_cache is not None:
                layout = self._model.config.query_layout(self._layout.dtype)
                shape = layout.kv_shape(sequence.capacity)
                sequence.queries = torch.empty(shape, dtype=layout.dtype)
            return
        sequence.saved = prefix.shape[2]
        # The last token goes through the decoding step even when its KV is there.
        sequence.computed = sequence.cached = min(sequence.saved, len(sequence.tokens) - 1)
        sequence.kv[:, :, : sequence.cached] = prefix[:, :, : sequence.cached]

    def _prefill_piece(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        start, size = sequence.computed, self._cache.chunk_size
        end = min(start - start % size + size, len(sequence.tokens) - 1)
        piece = torch.tensor(sequence.tokens[start:end])
        self._model.prefill(piece, sequence.kv, start, sequence.queries)
        sequence.computed = end

    def _decode(self, batch: list[Sequence]) -> None:
        kvs = [one.kv for one in batch if one.kv is not None]
        logits = self._model.decode(
            [one.tokens[-1] for one in batch],
            kvs,
            [one.computed for one in batch],
            [one.queries for one in batch],
        )
        best = logits.argmax(-1).tolist()
        for row, sequence in enumerate(batch):
            sequence.computed += 1
            token = best[row]
            if sequence.request.temperature > 0:
                weights = torch.softmax(logits[row] / sequence.request.temperature, -1)
                token = int(torch.multinomial(weights, 1, generator=sequence.generator))
            self._take(sequence, token, logits[row].log_softmax(-1))

    def _take(self, sequence: Sequence, token: int, logprobs: torch.Tensor) -> None:
        """Add a generated token; save and let go of a sequence that is done."""
        request = sequence.request
        reason = None
        if token == self._model.config.eos_token_id and not request.ignore_eos:
            reason = "stop"
        elif len(sequence.tokens) + 1 == len(request.prompt) + request.max_tokens:
            reason = "length"
        if sequence.computed == len(request.prompt) or reason:
            self._save(sequence)  # before the listener knows: whoever asks next finds it
        sequence.tokens.append(token)
        if reason:
            self._running.remove(sequence)
            sequence.kv = sequence.queries = None
        if not sequence.cancelled:
            count = request.num_logprobs if request.num_logprobs >= 0 else len(logprobs)
            best = logprobs.topk(count)
            likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            sequence.listener(
                Generated(token, float(logprobs[token]), sequence.cached, reason, likeliest)
            )

    def _save(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        whole = sequence.computed - sequence.computed % self._cache.chunk_size
        if whole > sequence.saved:
            for cache, rows in ((self._query_cache, sequence.queries), (self._cache, sequence.kv)):
                if cache is not None and rows is not None:
                    cache.save(
                        rows[:, :, :whole].contiguous(),
                        sequence.tokens[:whole],
                        sequence.request.cache_salt,
                    )
            sequence.saved = whole
