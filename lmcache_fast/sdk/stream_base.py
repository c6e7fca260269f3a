"""What the streams of both generations have in common: their state, and how it moves on."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch

from lmcache_fast.arguments import MAX_TOKEN_ID, TokenIds, check_kv, check_salt, check_tokens
from lmcache_fast.client import KVClient
from lmcache_fast.completion import PostCompletion, TokenEvent
from lmcache_fast.edits import Edit, LeaseView, with_queries
from lmcache_fast.edits.plan import check_chunks_kept
from lmcache_fast.errors import EditError, EngineError, InvalidInputError, LMCacheFastError
from lmcache_fast.metrics import StreamPerfMetrics
from lmcache_fast.sdk.accessors import CallableBool, CallableInt, CallableList, CallableStr
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_fast.sdk.waiting import wait_cached

logger = logging.getLogger(__name__)

#: What the completions API generates where the parameters name no ``max_tokens``.
DEFAULT_MAX_TOKENS = 16


class BaseStream(ABC):
    """One request; what it tells can be read as an attribute and called as a method.

    Args:
        contexts: where the caches of each kind are.
        post_completion: hands a prompt to the engine and yields a :class:`TokenEvent` a token.
        prompt_token_ids: the prompt.
        cache_salt: keeps the caches of different users apart.
        isolate_edits: store each edited KV under a random salt of its own and go on under that.

    Attributes:
        tokens: the token ids that the stream's KV stands for: prompt, then what was generated;
            after an edit, what the edit kept.
        done: the last ``generate`` brought fewer than ``max_tokens`` tokens.
        cache_salt: keeps the caches of different users apart; a new one after an isolated edit.
        usage: the engine's own count of the last ``generate``, where it gives one.
    """

    def __init__(
        self,
        contexts: Mapping[LMCacheSDKCacheKind, KVClient],
        post_completion: PostCompletion,
        prompt_token_ids: TokenIds,
        cache_salt: str,
        isolate_edits: bool,
    ) -> None:
        if not callable(post_completion):
            raise InvalidInputError(
                f"create_request: post_completion is {post_completion!r}; expected a callable"
            )
        self._contexts = dict(contexts)
        self.post_completion = post_completion
        self.cache_salt = check_salt("create_request", cache_salt)
        self.tokens: list[int] = check_tokens("create_request", prompt_token_ids).tolist()
        self.isolate_edits = isolate_edits
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

    @property
    def stream_id(self) -> CallableStr:
        """The stream's unique id."""
        return CallableStr(self._stream_id)

    @property
    def request_stream_id(self) -> CallableStr:
        """The stream's unique id, as the second generation calls it."""
        return self.stream_id

    @property
    def suffix_tokens(self) -> CallableList[int]:
        """The tokens behind the edited prefix that the next ``generate`` sends again; a copy."""
        return CallableList(self._suffix)

    @property
    def decoded_tokens(self) -> CallableInt:
        """How many tokens were generated so far."""
        return CallableInt(len(self._output))

    @property
    def output_text(self) -> CallableStr:
        """The text generated so far."""
        return CallableStr("".join(self._text))

    @property
    def output_tokens(self) -> CallableList[int]:
        """The tokens generated so far, and only those; a copy."""
        return CallableList(self._output)

    @property
    def is_done(self) -> CallableBool:
        """Whether the last ``generate`` brought fewer than ``max_tokens`` tokens."""
        return CallableBool(self.done)

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

    @abstractmethod
    def modify_kv(
        self,
        fn: Any,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> None:
        """Edit the stream's cached KV and go on from the result."""

    @abstractmethod
    def _apply(
        self,
        fn: Any,
        kv: torch.Tensor,
        tokens: list[int],
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
    ) -> Any:
        """Call the user's edit function as this generation does."""

    def _modify(self, fn: Any, timeout: float, poll_interval: float, allow_partial: bool) -> None:
        if not callable(fn):
            raise InvalidInputError(f"modify_kv: fn is {fn!r}; expected a function (kv, tokens)")
        with self._use("modify_kv"):
            ctx = self._context("modify_kv", LMCacheSDKCacheKind.KV)
            if isinstance(fn, Edit):
                self._edit_slots(ctx, fn, timeout, poll_interval, allow_partial)
                return
            kv = self._retrieve(
                "modify_kv", ctx, self.tokens, timeout, poll_interval, allow_partial
            )
            num_cached = kv.shape[2]
            result = self._apply(
                fn, kv, self.tokens[:num_cached], timeout, poll_interval, allow_partial
            )
            new_kv, new_tokens = _check_edited(result, ctx)
            if ctx.layout.rows == "opaque":
                check_chunks_kept("modify_kv", self.tokens[:num_cached], new_tokens, ctx.chunk_size)
            del kv, result
            self._store(ctx, new_kv, new_tokens, self.tokens[num_cached:] + self._suffix)

    def _context(self, where: str, kind: LMCacheSDKCacheKind) -> KVClient:
        if kind not in self._contexts:
            have = ", ".join(str(each) for each in self._contexts) or "none"
            raise InvalidInputError(
                f"{where}: stream {self._stream_id} has no context of kind {kind}; it has {have}"
            )
        return self._contexts[kind]

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
        self,
        where: str,
        ctx: KVClient,
        tokens: Sequence[int],
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
    ) -> Iterator[tuple[int, int]]:
        """Yield how many tokens are enough, and how many may be cached; see wait_cached."""
        expected = min(self._expected, len(tokens))
        chunks = 1 if allow_partial else max(1, expected // ctx.chunk_size)
        for cached in wait_cached(
            f"{where}: stream {self._stream_id}",
            lambda tokens: ctx.lookup(tokens, self.cache_salt),
            tokens,
            ctx.chunk_size,
            chunks,
            timeout,
            poll_interval,
            self._cancelled,
        ):
            yield chunks * ctx.chunk_size, cached

    def _retrieve(
        self,
        where: str,
        ctx: KVClient,
        tokens: Sequence[int],
        timeout: float,
        poll_interval: float,
        allow_partial: bool = False,
    ) -> torch.Tensor:
        for required, cached in self._wait_cached(
            where, ctx, tokens, timeout, poll_interval, allow_partial
        ):
            kv = ctx.retrieve(tokens[:cached], self.cache_salt, min_tokens=required)
            if kv is not None:
                return kv
        raise AssertionError("the wait ends with an error")

    def _edit_slots(
        self, ctx: KVClient, edit: Edit, timeout: float, poll_interval: float, allow_partial: bool
    ) -> None:
        salt = self._salt_of_edit()
        for required, cached in self._wait_cached(
            "modify_kv", ctx, self.tokens, timeout, poll_interval, allow_partial
        ):
            tokens = self.tokens[:cached]
            with self._given_queries(edit, tokens) as (bound, num_queries):
                if num_queries < required:  # the engine is still storing them
                    continue
                result = ctx.edit(
                    tokens[:num_queries],
                    bound,
                    self.cache_salt,
                    target_salt=salt,
                    min_tokens=required,
                )
            if result.num_source >= required:
                self._go_on_from(result.tokens, self.tokens[result.num_source :] + self._suffix)
                self.cache_salt = salt
                return

    @contextmanager
    def _given_queries(self, edit: Edit, tokens: list[int]) -> Iterator[tuple[Edit, int]]:
        """Yield the edit with the queries that it needs, and of how many tokens there are some."""
        queries = self._contexts.get(LMCacheSDKCacheKind.QUERY)
        if not edit.needs_queries or queries is None:
            yield edit, len(tokens)
            return
        with queries.lease(tokens, self.cache_salt) as lease:
            yield with_queries(edit, LeaseView(lease, queries.layout)), lease.num_tokens

    def _store(self, ctx: KVClient, kv: torch.Tensor, tokens: list[int], suffix: list[int]) -> None:
        is_edit = ctx is self._contexts.get(LMCacheSDKCacheKind.KV)
        salt = self._salt_of_edit() if is_edit else self.cache_salt
        stored = ctx.store(kv, tokens, salt)
        if not stored and len(tokens) >= ctx.chunk_size:
            logger.warning(
                "stream %s: these tokens were cached already, and the cache keeps what it had",
                self._stream_id,
            )
        self._go_on_from(tokens, suffix)
        self.cache_salt = salt

    def _salt_of_edit(self) -> str:
        """Return the salt to store an edited KV under."""
        # A new one for each edit: the server keeps what it has under known tokens, so an edit that
        # keeps the tokens and changes their KV would be lost under the salt of the one before.
        return f"isolated-{secrets.token_hex(16)}" if self.isolate_edits else self.cache_salt

    def _go_on_from(self, tokens: list[int], suffix: list[int]) -> None:
        self.tokens = tokens
        self._suffix = suffix
        self._expected = len(tokens)
        self.done = False


def _check_edited(result: object, ctx: KVClient) -> tuple[torch.Tensor, list[int]]:
    where = "modify_kv: result of the edit function"
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise EditError(f"{where}: got {type(result).__name__}; expected (kv, tokens)")
    try:
        tokens = check_tokens(where, result[1])
        kv = check_kv(where, result[0], ctx.layout, len(tokens))
    except InvalidInputError as error:
        raise EditError(str(error)) from error
    return kv, tokens.tolist()


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
