"""Faster drop-in for LMCache's SDK: fetch, edit and store KV caches from outside the engine.

``lmcache_fast.sdk`` holds the drop-in modules, :class:`KVClient` is what they stand on. Importing
this package is cheap: torch comes in only when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmcache_fast import observe as _observe
from lmcache_fast._version import __version__
from lmcache_fast.errors import (
    BatchError,
    ClosedError,
    ConnectError,
    EditError,
    EngineError,
    InvalidInputError,
    LeaseExpiredError,
    LMCacheFastError,
    ModifyTimeoutError,
    NodeLostError,
    PayloadError,
    ProtocolError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    SharedMemoryError,
    StoreIncompleteError,
    UnknownModelError,
    UnsupportedServerError,
)

if TYPE_CHECKING:
    from lmcache_fast.client import KVClient
    from lmcache_fast.layout import KVLayout

__all__ = [
    "BatchError",
    "ClosedError",
    "ConnectError",
    "EditError",
    "EngineError",
    "InvalidInputError",
    "KVClient",
    "KVLayout",
    "LMCacheFastError",
    "LeaseExpiredError",
    "ModifyTimeoutError",
    "NodeLostError",
    "PayloadError",
    "ProtocolError",
    "RequestDroppedError",
    "ServerGoneError",
    "ServerTimeoutError",
    "SharedMemoryError",
    "StoreIncompleteError",
    "UnknownModelError",
    "UnsupportedServerError",
    "__version__",
]

_observe.set_log_level()

_LAZY = {"KVClient": "lmcache_fast.client", "KVLayout": "lmcache_fast.layout"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
