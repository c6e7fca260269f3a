"""Request streams: one logical request over several passes through the engine.

::

    stream = create_request(ctx, post_completion, prompt_token_ids)
    stream.generate({"max_tokens": 1})          # prefill: the engine stores the prompt's KV
    stream.modify_kv(edit)                      # fetch, edit, store back
    stream.generate({"max_tokens": 128})        # decode on against the smaller KV
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcache_fast.arguments import MAX_TOKEN_ID, TokenIds, check_kv, check_salt, check_tokens
from lmcache_fast.completion import PostCompletion, TokenEvent
from lmcache_fast.edits import Edit
from lmcache_fast.errors import EditError, EngineError, InvalidInputError, LMCacheFastError
from lmcache_fast.metrics import StreamPerfMetrics
from lmcache_fast.sdk.waiting import wait_cached

if TYPE_CHECKING:
    from lmcache_fast.client import KVClient

__all__ = [
    "LMCacheStream",
    "LMCacheStreamError",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
    "generate",
    "get",
    "update",
]

logger = logging.getLogger(__name__)

#: Name that code written for the first generation catches.
LMCacheStreamError = LMCacheFastError

#: What the completions API generates where the parameters name no ``max_tokens``.
DEFAULT_MAX_TOKENS = 16

#: ``fn(kv [planes, L, T, D], tokens) -> (kv [planes, L, T', D], tokens)``
EditFunction = Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, Sequence[int]]]


class LMCacheStream:
    """One request; made by :func:`create_request`. Not for two threads at once.

    Args:
        ctx: what :func:`lmcache_fast.sdk.kvcache.connect` returned.
        post_completion: hands a prompt to the engine and yields a :class:`TokenEvent` a token.
        prompt_token_ids: the prompt.
        cache_salt: keeps the caches of different users apart.

    Attributes:
        tokens: the token ids that the stream's KV stands for: prompt, then what was generated;
            after an edit, what the edit kept.
        done: the last ``generate`` brought fewer than ``max_tokens`` tokens.
        cache_salt: keeps the caches of different users apart.
        usage: the engine's own count of the last ``generate``, where it gives one.
    """

    def __init__(
        self,
        ctx: KVClient,
        post_completion: PostCompletion,
        prompt_token_ids: TokenIds,
        cache_salt: str = "",
    ) -> None:
        if not callable(post_completion):
            raise InvalidInputError(
                f"create_request: post_completion is {post_completion!r}; expected a callable"
            )
        self.ctx = ctx
        self.post_completion = post_completion
        self.cache_salt = check_salt("create_request", cache_salt)
        self.tokens: list[int] = check_tokens("create_request", prompt_token_ids).tolist()
        self.done = False
        self.usage: Mapping[str, Any] | None = None
        self._stream_id = str(uuid.uuid4())
        self._suffix: list[int] = []
        self._output: list[int] = []
        self._text: list[str] = []
        # Leading tokens that somebody has stored or is storing: the engine stores its prompt, but
        # not every engine stores what it generates.
        self._expected = len(self.tokens)
        self._in_use = threading.Lock()
        self._cancelled = threading.Event()
        self._engine_call: Iterable[TokenEvent] = ()

    def stream_id(self) -> str:
        """Return the stream's unique id."""
        return self._stream_id

    def suffix_tokens(self) -> list[int]:
        """Return the tokens behind the edited prefix that the next ``generate`` sends again."""
        return list(self._suffix)

    def decoded_tokens(self) -> int:
        """Return how many tokens were generated so far."""
        return len(self._output)

    def output_text(self) -> str:
        """Return the text generated so far."""
        return "".join(self._text)

    def output_tokens(self) -> list[int]:
        """Return the tokens generated so far, and only those."""
        return list(self._output)

    def is_done(self) -> bool:
        """Return whether the last ``generate`` brought fewer than ``max_tokens`` tokens."""
        return self.done

    def cancel(self) -> None:
        """Let a call that is under way in another thread stop at its next token or look-up."""
        if self._in_use.locked():
            self._cancelled.set()
            cancel = getattr(self._engine_call, "cancel", None)
            if cancel is not None:
                cancel()

    def generate(
        self, sampling_params: Mapping[str, Any], suffix_tokens: TokenIds = ()
    ) -> StreamPerfMetrics:
        """Send the stream's tokens to the engine and add what it generates.

        If the engine breaks off, the stream keeps every token that arrived and ``generate`` can be
        called again: without the suffix, which is part of the stream by then; if not one token
        arrived the stream is as it was before, and the call is to be repeated as it was.

        Args:
            sampling_params: the engine's parameters, e.g. ``max_tokens``, ``temperature``.
            suffix_tokens: token ids to add to the prompt.

        Raises:
            EngineError: the engine failed or broke off.
            InvalidInputError: bad tokens or parameters; nothing was sent.
        """
        added = check_tokens("generate", suffix_tokens).tolist()
        max_tokens = _max_tokens(sampling_params)
        with self._use("generate"):
            prompt = [*self.tokens, *self._suffix, *added]
            if not prompt:
                raise InvalidInputError(f"generate: stream {self._stream_id} has no tokens to send")
            generated: list[int] = []
            texts: list[str] = []
            times: list[float] = []
            begin = time.perf_counter()
            succeeded = False
            try:
                with closing(self._events(prompt, dict(sampling_params))) as events:
                    for event in events:
                        times.append(time.perf_counter())
                        generated.append(int(event.token_id))
                        texts.append(event.text)
                        if self._cancelled.is_set():
                            raise LMCacheFastError("cancelled")
                succeeded = True
            except InvalidInputError:
                raise
            except Exception as error:
                raise EngineError(
                    f"generate: stream {self._stream_id} broke off after {len(generated)} of at "
                    f"most {max_tokens} tokens: {error}"
                ) from error
            finally:
                if succeeded or generated:
                    self._output += generated
                    self._text += texts
                    self.tokens = prompt + generated
                    self._suffix = []
                    self._expected = len(prompt)
                    self.done = succeeded and len(generated) < max_tokens
        return StreamPerfMetrics.of(len(prompt), begin, times, time.perf_counter())

    def retrieve_kv(self, timeout: float = 30.0, poll_interval: float = 0.2) -> torch.Tensor:
        """Fetch the KV of the stream's cached prefix, once the engine has stored it.

        Waits as :meth:`modify_kv` does.

        Returns:
            ``[planes, L, hit, D]``, the caller's own.

        Raises:
            ModifyTimeoutError: not all of it was cached in time.
            InvalidInputError: the stream has less than one chunk of tokens.
        """
        with self._use("retrieve_kv"):
            return self._retrieve("retrieve_kv", timeout, poll_interval, False)

    def update_kv(self, kv: torch.Tensor, tokens: TokenIds) -> None:
        """Store an edited KV and go on from it: ``tokens`` replace the stream's.

        Args:
            kv: ``[planes, L, T, D]``.
            tokens: ``T`` token ids.

        Raises:
            InvalidInputError: shapes, dtype or tokens are wrong.
            LMCacheFastError: the store failed. The stream is as it was in every such case.
        """
        with self._use("update_kv"):
            self._store(kv, check_tokens("update_kv", tokens).tolist(), self._suffix)

    def modify_kv(
        self,
        fn: EditFunction | Edit,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> None:
        """Edit the stream's cached KV and go on from the result.

        Waits until every whole chunk of the last prompt is cached: engines store in the background,
        and some, such as vLLM, store no chunks of generated tokens; those are used where they are
        cached and not waited for. ``fn`` sees the cached whole chunks only. The tokens behind them
        stay with the stream (:meth:`suffix_tokens`) and are sent with the next ``generate``; so
        does, as part of ``tokens``, what the edit leaves behind its last whole chunk.

        An edit of :mod:`lmcache_fast.edits` runs from slot to slot, without a tensor. The server
        knows a chunk by its tokens and those before it: one where they are unchanged keeps the KV
        it had, whatever ``fn`` made of it.

        Args:
            fn: ``fn(kv [planes, L, T, D], tokens) -> (kv [planes, L, T', D], tokens)``.
            timeout: seconds to wait for the chunks.
            poll_interval: seconds between two look-ups.
            allow_partial: be content with one cached chunk or more.

        Raises:
            ModifyTimeoutError: not all chunks were cached in time; says how many were.
            EditError: ``fn`` returned something that cannot be stored.
            InvalidInputError: the stream has less than one chunk of tokens.
            LMCacheFastError: the store failed. The stream is as it was in every such case, also
                when ``fn`` itself raises.
        """
        if not callable(fn):
            raise InvalidInputError(f"modify_kv: fn is {fn!r}; expected a function (kv, tokens)")
        with self._use("modify_kv"):
            if isinstance(fn, Edit):
                self._edit_slots(fn, timeout, poll_interval, allow_partial)
                return
            kv = self._retrieve("modify_kv", timeout, poll_interval, allow_partial)
            num_cached = kv.shape[2]
            result = fn(kv, self.tokens[:num_cached])
            new_kv, new_tokens = self._check_edited(result)
            del kv, result
            self._store(new_kv, new_tokens, self.tokens[num_cached:] + self._suffix)

    @contextmanager
    def _use(self, where: str) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise LMCacheFastError(
                f"{where}: stream {self._stream_id} is in use by another call; a stream is not for "
                "two threads at once"
            )
        try:
            self._cancelled.clear()
            yield
        finally:
            self._in_use.release()

    def _events(
        self, prompt: list[int], params: dict[str, Any]
    ) -> Generator[TokenEvent, None, None]:
        """Yield the engine's events, checked; end the engine's request on every path."""
        events = self.post_completion(list(prompt), params, self.cache_salt)
        self._engine_call = events
        try:
            for event in events:
                token_id = event.token_id
                if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id <= MAX_TOKEN_ID:
                    raise EngineError(f"the engine generated {token_id!r}; expected a token id")
                yield event
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
            self._engine_call = ()
            self.usage = getattr(events, "usage", None)

    def _wait_cached(
        self, where: str, timeout: float, poll_interval: float, allow_partial: bool
    ) -> Iterator[tuple[int, int]]:
        expected = min(self._expected, len(self.tokens))
        chunks = 1 if allow_partial else max(1, expected // self.ctx.chunk_size)
        for cached in wait_cached(
            f"{where}: stream {self._stream_id}",
            lambda tokens: self.ctx.lookup(tokens, self.cache_salt),
            self.tokens,
            self.ctx.chunk_size,
            chunks,
            timeout,
            poll_interval,
            self._cancelled,
        ):
            yield chunks * self.ctx.chunk_size, cached

    def _retrieve(
        self, where: str, timeout: float, poll_interval: float, allow_partial: bool
    ) -> torch.Tensor:
        for required, cached in self._wait_cached(where, timeout, poll_interval, allow_partial):
            kv = self.ctx.retrieve(self.tokens[:cached], self.cache_salt)
            if kv is not None and kv.shape[2] >= required:  # else evicted since the look-up
                return kv
        raise AssertionError("the wait ends with an error")

    def _edit_slots(
        self, edit: Edit, timeout: float, poll_interval: float, allow_partial: bool
    ) -> None:
        for required, cached in self._wait_cached(
            "modify_kv", timeout, poll_interval, allow_partial
        ):
            result = self.ctx.edit(self.tokens[:cached], edit, self.cache_salt)
            if result.num_source >= required:
                self._go_on_from(result.tokens, self.tokens[result.num_source :] + self._suffix)
                return

    def _check_edited(self, result: object) -> tuple[torch.Tensor, list[int]]:
        where = "modify_kv: result of the edit function"
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise EditError(f"{where}: got {type(result).__name__}; expected (kv, tokens)")
        try:
            tokens = check_tokens(where, result[1])
            kv = check_kv(where, result[0], self.ctx.layout, len(tokens))
        except InvalidInputError as error:
            raise EditError(str(error)) from error
        return kv, tokens.tolist()

    def _store(self, kv: torch.Tensor, tokens: list[int], suffix: list[int]) -> None:
        stored = self.ctx.store(kv, tokens, self.cache_salt)
        if not stored and len(tokens) >= self.ctx.chunk_size:
            logger.warning(
                "stream %s: these tokens were cached already, and the cache keeps what it had",
                self._stream_id,
            )
        self._go_on_from(tokens, suffix)

    def _go_on_from(self, tokens: list[int], suffix: list[int]) -> None:
        self.tokens = tokens
        self._suffix = suffix
        self._expected = len(tokens)
        self.done = False


def create_request(
    ctx: KVClient,
    post_completion: PostCompletion,
    prompt_token_ids: TokenIds,
    cache_salt: str = "",
) -> LMCacheStream:
    """Return a new stream over ``ctx`` for the request that begins with ``prompt_token_ids``.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    return LMCacheStream(ctx, post_completion, prompt_token_ids, cache_salt)


def generate(
    stream: LMCacheStream, sampling_params: Mapping[str, Any], suffix_tokens: TokenIds = ()
) -> StreamPerfMetrics:
    """Call :meth:`LMCacheStream.generate`."""
    return stream.generate(sampling_params, suffix_tokens)


def get(stream: LMCacheStream, timeout: float = 30.0, poll_interval: float = 0.2) -> torch.Tensor:
    """Call :meth:`LMCacheStream.retrieve_kv`."""
    return stream.retrieve_kv(timeout, poll_interval)


def update(stream: LMCacheStream, kv: torch.Tensor, tokens: TokenIds) -> None:
    """Call :meth:`LMCacheStream.update_kv`."""
    stream.update_kv(kv, tokens)


def _max_tokens(sampling_params: Mapping[str, Any]) -> int:
    if not isinstance(sampling_params, Mapping):
        raise InvalidInputError(
            f"generate: sampling_params is {sampling_params!r}; expected a dictionary"
        )
    value = sampling_params.get("max_tokens")
    if value is None:
        return DEFAULT_MAX_TOKENS
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1:
        raise InvalidInputError(f"generate: max_tokens is {value!r}; expected 1 or more")
    return int(value)
