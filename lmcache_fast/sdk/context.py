"""Contexts: one connection for one kind of cache, for the calls and streams of both generations.

::

    with kvcache.connect("tcp://localhost:6555", "http://localhost:8080", "Qwen/Qwen3-8B") as ctx:
        kv = ctx.retrieve(tokens)       # [2, L, hit, D] or None
        ctx.store(kv, tokens[: kv.shape[2]])
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from lmcache_fast.arguments import check_model_name, check_timeout
from lmcache_fast.client import KVClient
from lmcache_fast.errors import InvalidInputError, LMCacheSDKError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.registrations import RegisteredModel
from lmcache_fast.protocol.server_info import read_models
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind

__all__ = ["LMCacheSDKCacheKind", "LMCacheSDKContext", "LMCacheSDKError", "ModifyFnType", "kind_of"]

#: ``fn({kind: tensor [planes, L, T, D]}, tokens) -> (kv [planes, L, T', D], tokens)``
ModifyFnType = Callable[
    [Mapping[LMCacheSDKCacheKind, torch.Tensor], Sequence[int]],
    tuple[torch.Tensor, Sequence[int]],
]


class LMCacheSDKContext(KVClient):
    """A :class:`lmcache_fast.KVClient` that knows which kind of cache it serves.

    Args:
        url: the server's message queue, ``tcp://host:port`` or ``ipc://path``.
        http_url: the server's HTTP address.
        model_name: the name that the engine registered its model under, for every kind.
        kind: what it retrieves and stores.
        timeout: seconds that any one wait for the server may take.
        layout: shape of the cache; by default the server's ``/status`` tells it. Queries that no
            engine has registered are taken to be as wide as the keys, with a warning.
        world_size: ranks that store a share each; by default ``/status`` tells it.

    Raises:
        ConnectError: no usable connection; says why and what would help.
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        http_url: str,
        model_name: str,
        kind: LMCacheSDKCacheKind = LMCacheSDKCacheKind.KV,
        timeout: float = 60.0,
        *,
        layout: KVLayout | Literal["opaque"] | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(kind, LMCacheSDKCacheKind):
            raise InvalidInputError(f"connect: kind is {kind!r}; expected an LMCacheSDKCacheKind")
        self._kind = kind
        base_name = kind.base_model_name(check_model_name("connect", model_name))
        name = kind.server_model_name(base_name)
        if kind is LMCacheSDKCacheKind.QUERY and layout is None:
            models = read_models(http_url, check_timeout("connect", timeout))
            if base_name in models and (name not in models or models[name].layout is None):
                layout = _query_layout(name, base_name, models[base_name])
                world_size = world_size or models[base_name].world_size
        super().__init__(url, http_url, name, layout=layout, timeout=timeout, world_size=world_size)

    @property
    def kind(self) -> LMCacheSDKCacheKind:
        """The kind of cache that is retrieved and stored."""
        return self._kind

    @property
    def mq_timeout(self) -> float:
        """Seconds that any one wait for the server may take."""
        return self.timeout

    def register_caches(self) -> None:
        """Do nothing: a context registers when it connects, and again when the server restarts."""


def kind_of(context: KVClient) -> LMCacheSDKCacheKind:
    """Return the kind that a context, or a plain client, serves."""
    return getattr(context, "kind", LMCacheSDKCacheKind.KV)


def _query_layout(name: str, base_name: str, model: RegisteredModel) -> KVLayout | None:
    """Return the keys' layout with one plane if the queries have none of their own."""
    keys = model.layout
    if keys is None or keys.rows == "opaque":
        return None
    warnings.warn(
        f"no engine has registered {name!r}: its queries are taken to be as wide as the keys of "
        f"{base_name!r}, {keys.width} elements. A model with more query heads than key heads needs "
        "layout=...",
        stacklevel=4,
    )
    return replace(keys, planes=1, rows="plain")
