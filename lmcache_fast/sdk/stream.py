"""Request streams: one logical request over several passes through the engine.

::

    stream = create_request(ctx, post_completion, prompt_token_ids)
    stream.generate({"max_tokens": 1})          # prefill: the engine stores the prompt's KV
    stream.modify_kv(edit)                      # fetch, edit, store back
    stream.generate({"max_tokens": 128})        # decode on against the smaller KV
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmcache_fast.arguments import TokenIds, check_tokens
from lmcache_fast.client import KVClient
from lmcache_fast.completion import PostCompletion, TokenEvent
from lmcache_fast.edits import Edit
from lmcache_fast.errors import LMCacheStreamError
from lmcache_fast.metrics import StreamPerfMetrics
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_fast.sdk.stream_base import BaseStream

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

#: ``fn(kv [planes, L, T, D], tokens) -> (kv [planes, L, T', D], tokens)``
EditFunction = Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, Sequence[int]]]


class LMCacheStream(BaseStream):
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
        ctx: KVClient,
        post_completion: PostCompletion,
        prompt_token_ids: TokenIds,
        cache_salt: str = "",
        *,
        isolate_edits: bool = False,
    ) -> None:
        self.ctx = ctx
        contexts = {LMCacheSDKCacheKind.KV: ctx}
        super().__init__(contexts, post_completion, prompt_token_ids, cache_salt, isolate_edits)

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
            return self._retrieve("retrieve_kv", self.ctx, self.tokens, timeout, poll_interval)

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
            self._store(self.ctx, kv, check_tokens("update_kv", tokens).tolist(), self._suffix)

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
        self._modify(fn, timeout, poll_interval, allow_partial)

    def _apply(
        self, fn: EditFunction, kv: torch.Tensor, tokens: list[int], *waiting: float
    ) -> tuple[torch.Tensor, Sequence[int]]:
        return fn(kv, tokens)


def create_request(
    ctx: KVClient,
    post_completion: PostCompletion,
    prompt_token_ids: TokenIds,
    cache_salt: str = "",
    *,
    isolate_edits: bool = False,
) -> LMCacheStream:
    """Return a new stream over ``ctx`` for the request that begins with ``prompt_token_ids``.

    With ``isolate_edits`` each edited KV is stored under a random salt of its own, which the engine
    is sent from then on, so that no other request with the same tokens finds it.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    return LMCacheStream(
        ctx, post_completion, prompt_token_ids, cache_salt, isolate_edits=isolate_edits
    )


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
