"""Importing this makes ``lmcache.sdk`` mean ``lmcache_fast.sdk`` for the whole process.

::

    import lmcache_fast.dropin          # before the first import of lmcache.sdk
    import lmcache.sdk.kvcache as lmc_sdk

or, for a script that is to stay as it is, ``python -m lmcache_fast.dropin script.py arguments``.

Everything else of lmcache is imported as ever where lmcache is installed. Where it is not, an empty
package stands in for it, with nothing in it but ``sdk``.
"""

from __future__ import annotations

from lmcache_fast.dropin.finder import install

__all__ = ["install"]

install()
