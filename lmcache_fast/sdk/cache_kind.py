"""What kinds of tensors an engine keeps in the cache."""

from __future__ import annotations

import enum

_QUERY_SUFFIX = "##query"


class LMCacheSDKCacheKind(enum.Enum):
    """A kind of cached tensor; each has model names of its own on the server."""

    #: Keys and values, ``[2, L, T, D]``.
    KV = "kv"
    #: Queries, ``[1, L, T, D]``; engines write them, programs read them.
    QUERY = "query"

    def server_model_name(self, model_name: str) -> str:
        """Return the name that this kind of the model's cache has on the server."""
        return model_name + _QUERY_SUFFIX if self is LMCacheSDKCacheKind.QUERY else model_name

    def base_model_name(self, model_name: str) -> str:
        """Return the engine's own name of the model; undoes :meth:`server_model_name`."""
        if self is LMCacheSDKCacheKind.QUERY:
            return model_name.removesuffix(_QUERY_SUFFIX)
        return model_name
