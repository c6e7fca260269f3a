"""Request streams of the second generation: edits that see every kind of cached tensor.

::

    stream = create_request([kv_context, query_context], post_completion, prompt_token_ids)
    stream.generate({"max_tokens": 1})      # prefill: the engine stores the prompt's KV and queries
    stream.modify_kv(edit)                  # edit({KV: kv, QUERY: queries}, tokens)
    stream.generate({"max_tokens": 128})    # decode on against the smaller KV
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lmcache_fast.arguments import TokenIds, check_tokens
from lmcache_fast.client import KVClient
from lmcache_fast.completion import PostCompletion, TokenEvent
from lmcache_fast.edits import Edit
from lmcache_fast.errors import InvalidInputError, LMCacheRequestStreamError
from lmcache_fast.metrics import StreamPerfMetrics
from lmcache_fast.sdk.context import (
    LMCacheSDKCacheKind,
    LMCacheSDKContext,
    ModifyFnType,
    kind_of,
)
from lmcache_fast.sdk.stream_base import BaseStream

__all__ = [
    "LMCacheRequestStream",
    "LMCacheRequestStreamError",
    "LMCacheSDKCacheKind",
    "LMCacheSDKContext",
    "ModifyFnType",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
]


class LMCacheRequestStream(BaseStream):
    """One request; made by :func:`create_request`. Not for two threads at once.

    What it tells (``output_text``, ``is_done``, ...) can be read as an attribute, as the second
    generation does, and called as a method, as the first does.

    Attributes:
        tokens: the token ids that the stream's KV stands for: prompt, then what was generated;
            after an edit, what the edit kept.
        done: the last ``generate`` brought fewer than ``max_tokens`` tokens.
        cache_salt: keeps the caches of different users apart; a new one after an isolated edit.
        usage: the engine's own count of the last ``generate``, where it gives one.
    """

    def __init__(
        self,
        contexts: Iterable[KVClient],
        post_completion: PostCompletion,
        prompt_token_ids: TokenIds,
        cache_salt: str = "",
        *,
        isolate_edits: bool = False,
    ) -> None:
        if not isinstance(contexts, Iterable):
            raise InvalidInputError(
                f"create_request: contexts is a {type(contexts).__name__}; expected a list of "
                "contexts"
            )
        by_kind: dict[LMCacheSDKCacheKind, KVClient] = {}
        for context in contexts:
            if by_kind.setdefault(kind_of(context), context) is not context:
                raise InvalidInputError(
                    f"create_request: two contexts are of kind {kind_of(context)}; expected one"
                )
        super().__init__(by_kind, post_completion, prompt_token_ids, cache_salt, isolate_edits)

    def retrieve(
        self, kind: LMCacheSDKCacheKind, timeout: float = 30.0, poll_interval: float = 0.2
    ) -> torch.Tensor:
        """Fetch one kind of the stream's cached prefix, once the engine has stored it.

        Waits as :meth:`modify_kv` does.

        Returns:
            ``[planes, L, hit, D]``, the caller's own; queries have one plane.

        Raises:
            ModifyTimeoutError: not all of it was cached in time.
            InvalidInputError: no context of that kind, or less than one chunk of tokens.
        """
        with self._use("retrieve"):
            context = self._context("retrieve", kind)
            return self._retrieve("retrieve", context, self.tokens, timeout, poll_interval)

    def update(self, kind: LMCacheSDKCacheKind, kv: torch.Tensor, tokens: TokenIds) -> None:
        """Store an edited cache and go on from it: ``tokens`` replace the stream's.

        Args:
            kind: which cache to store to; edits make new KV, and queries are the engine's to make.
            kv: ``[planes, L, T, D]``.
            tokens: ``T`` token ids.

        Raises:
            InvalidInputError: no context of that kind; shapes, dtype or tokens are wrong.
            LMCacheFastError: the store failed. The stream is as it was in every such case.
        """
        with self._use("update"):
            context = self._context("update", kind)
            self._store(context, kv, check_tokens("update", tokens).tolist(), self._suffix)

    def modify_kv(
        self,
        fn: ModifyFnType | Edit,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
    ) -> None:
        """Edit the stream's cached KV and go on from the result.

        Waits until every whole chunk of the last prompt is cached, of every kind that the stream
        has a context of; see :meth:`lmcache_fast.sdk.stream.LMCacheStream.modify_kv`, which also
        says what becomes of the tokens behind them. ``tokens`` are those of the KV. The engine
        makes queries of what it computes and of nothing else: none are found for an edited prefix.

        An edit of :mod:`lmcache_fast.edits` runs from slot to slot, without a tensor.

        Args:
            fn: ``fn({kind: tensor [planes, L, T, D]}, tokens) -> (kv [planes, L, T', D], tokens)``.
            timeout: seconds to wait for the chunks, of each kind.
            poll_interval: seconds between two look-ups.
            allow_partial: be content with one cached chunk or more.

        Raises:
            ModifyTimeoutError: not all chunks were cached in time; says how many were.
            EditError: ``fn`` returned something that cannot be stored.
            InvalidInputError: no context for KV, or less than one chunk of tokens.
            LMCacheFastError: the store failed. The stream is as it was in every such case, also
                when ``fn`` itself raises.
        """
        self._modify(fn, timeout, poll_interval, allow_partial)

    def _apply(
        self,
        fn: ModifyFnType,
        kv: torch.Tensor,
        tokens: list[int],
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
    ) -> Any:
        tensors = {LMCacheSDKCacheKind.KV: kv}
        for kind, context in self._contexts.items():
            if kind is not LMCacheSDKCacheKind.KV:
                where = f"modify_kv ({kind.value})"
                tensors[kind] = self._retrieve(
                    where, context, tokens, timeout, poll_interval, allow_partial
                )
        return fn(tensors, tokens)


def create_request(
    contexts: Iterable[KVClient],
    post_completion: PostCompletion,
    prompt_token_ids: TokenIds,
    cache_salt: str = "",
    *,
    isolate_edits: bool = False,
) -> LMCacheRequestStream:
    """Return a new stream for one request.

    Args:
        contexts: one context of each kind of cache that edits are to see.
        post_completion: hands a prompt to the engine and yields a :class:`TokenEvent` a token.
        prompt_token_ids: the prompt.
        cache_salt: keeps the caches of different users apart.
        isolate_edits: store each edited KV under a random salt of its own, and send that salt to
            the engine from then on, so that no other request with the same tokens finds it.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    return LMCacheRequestStream(
        contexts, post_completion, prompt_token_ids, cache_salt, isolate_edits=isolate_edits
    )
