"""ClusterStream: what the driver knows of one stream."""

from __future__ import annotations

import uuid

import numpy as np

from lmcache_fast.cluster.messages import Done, Opening, Outcome, pack, unpack
from lmcache_fast.cluster.routing import Tokens


class ClusterStream:
    """One request. Its KV, and the stream that works on it, are on its node.

    Attributes:
        stream_id: unique id.
        prompt: the prompt's token ids, uint32 ``[n]``.
        cache_salt: keeps the caches of different users apart.
        isolate_edits: whether each edit is stored under a salt of its own.
        node: name of the node that has it; "" before its first phase.
        moves: how often it has moved to another node because its own died.
        num_tokens: how many tokens its KV stands for.
        done: whether the last generation ended before ``max_tokens``.
    """

    __slots__ = (
        "_history",
        "cache_salt",
        "done",
        "is_displaced",
        "is_open",
        "isolate_edits",
        "moves",
        "node",
        "num_tokens",
        "prompt",
        "stream_id",
    )

    def __init__(self, prompt: Tokens, cache_salt: str, isolate_edits: bool) -> None:
        self.stream_id = uuid.uuid4().hex
        self.prompt = prompt
        self.cache_salt = cache_salt
        self.isolate_edits = isolate_edits
        self.node = ""
        self.moves = 0
        self.num_tokens = len(prompt)
        self.done = False
        #: Whether a node that it was to run on is lost, with what that may have had of its KV.
        self.is_displaced = False
        #: Whether the node knows the stream.
        self.is_open = False
        self._history: list[Done] = []

    def __repr__(self) -> str:
        """Show the id, the node and how far it is."""
        where = f"on {self.node}" if self.node else "on no node yet"
        return f"ClusterStream({self.stream_id}, {where}, {len(self.output_tokens)} tokens)"

    @property
    def output_tokens(self) -> list[int]:
        """The tokens generated so far."""
        parts = [unpack(done.tokens) for done in self._history]
        tokens: list[int] = np.concatenate(parts).tolist() if parts else []
        return tokens

    @property
    def output_text(self) -> str:
        """The text generated so far."""
        return "".join(done.text for done in self._history)

    @property
    def phases(self) -> list[int]:
        """The phases behind it."""
        return [done.phase for done in self._history]

    def displace(self) -> None:
        """Take it off its node, which is lost."""
        self.node, self.is_open, self.is_displaced = "", False, True

    def opening(self) -> Opening:
        """Return what a node needs to go on with the stream."""
        return Opening(
            pack(self.prompt), self.cache_salt, self.isolate_edits, self.is_displaced, self._history
        )

    def take(self, phase: int, outcome: Outcome) -> None:
        """Note what a phase gave; a failed one may have brought tokens."""
        if not outcome.failure or outcome.tokens:
            self._history.append(Done(phase, outcome.tokens, outcome.text))
            self.num_tokens = outcome.num_tokens
            self.done = outcome.done
