"""Edits: ordinary edit functions that the SDK can also run inside the server's shared memory."""

from lmcache_fast.edits.chain import chain
from lmcache_fast.edits.edit import Edit
from lmcache_fast.edits.keep import drop_middle_chunks, keep
from lmcache_fast.edits.rope import Rope

__all__ = ["Edit", "Rope", "chain", "drop_middle_chunks", "keep"]
