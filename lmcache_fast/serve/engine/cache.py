"""Where the engine keeps prefixes: nowhere, or on a cache server."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from lmcache_fast.errors import LMCacheFastError

if TYPE_CHECKING:
    from lmcache_fast.client import KVClient

_log = logging.getLogger(__name__)


class PrefixCache(Protocol):
    """What the scheduler asks of a cache. No method raises when the cache fails."""

    #: Tokens a chunk: only whole chunks are kept.
    chunk_size: int

    def load(self, tokens: Sequence[int], cache_salt: str) -> torch.Tensor | None:
        """Return the KV ``[2, L, T, D]`` of the cached prefix, or None where there is none."""

    def save(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str) -> None:
        """Keep the KV ``[2, L, T, D]`` of ``tokens``, as far as it is not kept yet."""

    def close(self) -> None:
        """Let go of the cache."""


class NoCache:
    """Keeps nothing, so that every prompt is computed whole."""

    def __init__(self, chunk_size: int = 256) -> None:
        self.chunk_size = chunk_size

    def load(self, tokens: Sequence[int], cache_salt: str) -> torch.Tensor | None:
        """Find nothing."""
        return None

    def save(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Nothing to let go of."""


class ServerCache:
    """Prefixes on a server. A failing server costs the cache, not the request.

    Args:
        client: a client with the model's layout; closed by :meth:`close`.
        pause: seconds to go without the server after it failed, as each try may take a time-out.
    """

    def __init__(self, client: KVClient, pause: float = 10.0) -> None:
        self.chunk_size: int = client.chunk_size
        self._client = client
        self._pause = pause
        self._paused_until = 0.0

    def load(self, tokens: Sequence[int], cache_salt: str) -> torch.Tensor | None:
        """Return the KV ``[2, L, T, D]`` of the cached prefix; None on a miss or a failure."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            return self._client.retrieve(tokens, cache_salt)
        except LMCacheFastError as error:
            self._failed("loading", error)
            return None

    def save(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str) -> None:
        """Store the KV ``[2, L, T, D]`` of ``tokens`` on the server, if that can be done."""
        if time.monotonic() < self._paused_until:
            return
        try:
            self._client.store(kv, tokens, cache_salt)
        except LMCacheFastError as error:
            self._failed("storing", error)

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def _failed(self, doing: str, error: LMCacheFastError) -> None:
        self._paused_until = time.monotonic() + self._pause
        _log.warning(
            "%s failed, going on without the cache for %g s: %s", doing, self._pause, error
        )
