"""Store and fetch KV caches by token ids: the first-generation functions.

::

    ctx = connect("tcp://localhost:6555", "http://localhost:8080", "Qwen/Qwen3-8B")
    kv = retrieve(ctx, tokens)      # [2, L, hit, D] or None
    store(ctx, kv, tokens[: kv.shape[2]])
    close(ctx)
"""

from __future__ import annotations

import torch

from lmcache_fast.arguments import TokenIds
from lmcache_fast.client import KVClient
from lmcache_fast.errors import LMCacheFastError
from lmcache_fast.layout import KVLayout

#: Names that code written for the first generation catches or annotates with.
KVCacheSDKError = LMCacheFastError
LMCacheKVCacheContext = KVClient


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | None = None,
) -> KVClient:
    """Connect to a server and register the transfer with it.

    Args:
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the model's cache; by default the server's ``/status`` tells it.

    Returns:
        The context of the calls below; also a context manager.

    Raises:
        ConnectError: no usable connection; says why and what would help.
        InvalidInputError: an argument is wrong.
    """
    return KVClient(url, http_url, model_name, layout=layout, timeout=timeout)


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
