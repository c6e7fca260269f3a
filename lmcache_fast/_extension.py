"""The native extension, or the reason why it is not there."""

from __future__ import annotations

import os
import warnings
from types import ModuleType


def _load() -> ModuleType | None:
    if os.environ.get("LMCACHE_FAST_DISABLE_NATIVE", "") not in ("", "0"):
        reason = "LMCACHE_FAST_DISABLE_NATIVE is set"
    else:
        try:
            from lmcache_fast import _native
        except ImportError as error:
            reason = str(error)
        else:
            return _native
    warnings.warn(
        f"lmcache_fast: the native extension is not used ({reason}); shared memory is off and "
        "everything goes over the slower pure-Python path",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


#: ``lmcache_fast._native``, or None where it is missing or disabled (a warning said why).
native: ModuleType | None = _load()


def available() -> bool:
    """Return whether the native extension is in use."""
    return native is not None
