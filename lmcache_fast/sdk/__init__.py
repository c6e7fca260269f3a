"""LMCache's SDK, both generations.

First: ``kvcache``, ``stream`` and ``batch``. Second: ``context``, ``request``, ``batch``,
``kvcache``, ``qcache`` and ``cache_kind``. Contexts serve both, and a batch may hold streams of
both.
"""

from __future__ import annotations

from typing import Literal

from lmcache_fast.errors import KVCacheSDKError, LMCacheSDKError
from lmcache_fast.layout import KVLayout
from lmcache_fast.sdk import batch, context, kvcache, qcache, request, stream
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_fast.sdk.kvcache import LMCacheKVCacheContext

__all__ = [
    "KVCacheSDKError",
    "LMCacheKVCacheContext",
    "LMCacheSDKCacheKind",
    "LMCacheSDKError",
    "batch",
    "connect",
    "context",
    "kvcache",
    "qcache",
    "request",
    "stream",
]


def connect(
    kind: LMCacheSDKCacheKind,
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | Literal["opaque"] | None = None,
    world_size: int | None = None,
) -> context.LMCacheSDKContext:
    """Connect to a server for one kind of a model's cache.

    Args:
        kind: keys and values, or queries.
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under, for every kind.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the cache, or ``"opaque"``; by default the server's ``/status`` tells it.
        world_size: ranks that store a share each; by default ``/status`` tells it.

    Returns:
        A context, also a context manager.

    Raises:
        ConnectError: no usable connection; says why and what would help.
        InvalidInputError: an argument is wrong.
    """
    if kind is LMCacheSDKCacheKind.KV:
        return kvcache.connect(
            url, http_url, model_name, timeout, layout=layout, world_size=world_size
        )
    return context.LMCacheSDKContext(
        url, http_url, model_name, kind, timeout, layout=layout, world_size=world_size
    )
