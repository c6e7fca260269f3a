"""Fetch the queries that an engine has stored beside its keys and values.

::

    with connect("tcp://localhost:6555", "http://localhost:8080", "Qwen/Qwen3-8B") as ctx:
        queries = ctx.retrieve(tokens)  # [1, L, hit, D] or None
"""

from __future__ import annotations

from lmcache_fast.layout import KVLayout
from lmcache_fast.sdk.context import LMCacheSDKCacheKind, LMCacheSDKContext

__all__ = ["LMCacheSDKCacheKind", "LMCacheSDKContext", "connect"]


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | None = None,
    world_size: int | None = None,
) -> LMCacheSDKContext:
    """Connect to a server for a model's queries.

    Args:
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the queries, of one plane; by default the server's ``/status`` tells it.
        world_size: ranks that store a share each; by default ``/status`` tells it.

    Returns:
        A context, also a context manager.

    Raises:
        ConnectError: no usable connection; says why and what would help.
        InvalidInputError: an argument is wrong.
    """
    kind = LMCacheSDKCacheKind.QUERY
    return LMCacheSDKContext(
        url, http_url, model_name, kind, timeout, layout=layout, world_size=world_size
    )
