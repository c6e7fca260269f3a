"""Store and fetch KV caches by token ids: ``connect``, and the first generation's functions.

::

    ctx = connect("tcp://localhost:6555", "http://localhost:8080", "Qwen/Qwen3-8B")
    kv = retrieve(ctx, tokens)      # [2, L, hit, D] or None
    store(ctx, kv, tokens[: kv.shape[2]])
    close(ctx)
"""

from __future__ import annotations

from typing import Literal

import torch

from lmcache_fast.arguments import TokenIds
from lmcache_fast.client import KVClient
from lmcache_fast.errors import KVCacheSDKError
from lmcache_fast.layout import KVLayout
from lmcache_fast.sdk.context import LMCacheSDKCacheKind, LMCacheSDKContext

__all__ = [
    "KVCacheSDKError",
    "LMCacheKVCacheContext",
    "LMCacheSDKCacheKind",
    "LMCacheSDKContext",
    "close",
    "connect",
    "retrieve",
    "store",
]


class LMCacheKVCacheContext(LMCacheSDKContext):
    """A context for keys and values, under the first generation's name.

    Args:
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the model's cache; by default the server's ``/status`` tells it.
        world_size: ranks that store a share each; by default ``/status`` tells it.
    """

    def __init__(
        self,
        url: str,
        http_url: str,
        model_name: str,
        timeout: float = 60.0,
        *,
        layout: KVLayout | Literal["opaque"] | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            url, http_url, model_name, timeout=timeout, layout=layout, world_size=world_size
        )

    def register_kv_caches(self) -> None:
        """Do nothing: a context registers when it connects, and again when the server restarts."""


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | Literal["opaque"] | None = None,
    world_size: int | None = None,
) -> LMCacheKVCacheContext:
    """Connect to a server and register the transfer with it.

    Args:
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the model's cache; by default the server's ``/status`` tells it.
        world_size: ranks that store a share each; by default ``/status`` tells it.

    Returns:
        The context of the calls below and of the streams of both generations; also a context
        manager.

    Raises:
        ConnectError: no usable connection; says why and what would help.
        InvalidInputError: an argument is wrong.
    """
    return LMCacheKVCacheContext(
        url, http_url, model_name, timeout, layout=layout, world_size=world_size
    )


def close(ctx: KVClient) -> None:
    """Release everything that ``ctx`` holds."""
    ctx.close()


def retrieve(ctx: KVClient, tokens: TokenIds, cache_salt: str = "") -> torch.Tensor | None:
    """Fetch the KV of the cached prefix of ``tokens``.

    Returns:
        A contiguous CPU tensor ``[planes, L, hit, D]`` that the caller owns, ``hit`` being whole
        chunks, or None where not even one chunk is cached.

    Raises:
        InvalidInputError: bad tokens or salt.
        LMCacheFastError: the server failed or did not answer in time.
    """
    return ctx.retrieve(tokens, cache_salt)


def store(ctx: KVClient, kv: torch.Tensor, tokens: TokenIds, cache_salt: str = "") -> bool:
    """Store the whole chunks of ``kv`` under ``tokens``; the part past the last one is left out.

    Args:
        ctx: what :func:`connect` returned.
        kv: ``[planes, L, T, D]``.
        tokens: ``T`` token ids.
        cache_salt: keeps the caches of different users apart.

    Returns:
        True if something new was stored, False if all of it was cached already.

    Raises:
        InvalidInputError: shapes, dtype, tokens or salt are wrong.
        StoreIncompleteError: the server had no room for all of it.
        LMCacheFastError: the server failed or did not answer in time.
    """
    return ctx.store(kv, tokens, cache_salt)
