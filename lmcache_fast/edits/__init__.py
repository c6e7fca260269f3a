"""Edits: ordinary edit functions that the SDK can also run inside the server's shared memory."""

from lmcache_fast.edits.chain import chain
from lmcache_fast.edits.edit import Edit
from lmcache_fast.edits.keep import drop_middle_chunks, keep
from lmcache_fast.edits.policies import TOVA, KeyDiff, Knorm, LagKV, Random, SnapKV, StreamingLLM
from lmcache_fast.edits.policy import Policy, from_scores, with_queries
from lmcache_fast.edits.rope import Rope
from lmcache_fast.edits.view import KVView, LeaseView, TensorView

__all__ = [
    "TOVA",
    "Edit",
    "KVView",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "LeaseView",
    "Policy",
    "Random",
    "Rope",
    "SnapKV",
    "StreamingLLM",
    "TensorView",
    "chain",
    "drop_middle_chunks",
    "from_scores",
    "keep",
    "with_queries",
]
