"""Several edits as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lmcache_fast.arguments import TokenIds
from lmcache_fast.edits.edit import Edit
from lmcache_fast.edits.policy import WithQueries
from lmcache_fast.edits.selection import Positions, select_tokens
from lmcache_fast.edits.view import KVView
from lmcache_fast.errors import InvalidInputError


@dataclass(frozen=True)
class _Chain(Edit):
    name: ClassVar[str] = "chain"
    edits: tuple[Edit, ...]

    @property
    def needs_queries(self) -> bool:
        return any(edit.needs_queries for edit in self.edits)

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        positions = np.arange(len(tokens), dtype=np.int64)
        for edit in self.edits:
            kept = edit.plan(tokens, chunk_size).positions
            positions, tokens = positions[kept], select_tokens(tokens, kept)
        return positions

    def select_from(self, view: KVView, tokens: TokenIds, chunk_size: int | None) -> Positions:
        positions = np.arange(len(tokens), dtype=np.int64)
        for index, edit in enumerate(self.edits):
            left = view.take(positions) if index else view
            kept = edit.plan(tokens, chunk_size, left).positions
            positions, tokens = positions[kept], select_tokens(tokens, kept)
        return positions


def chain(*edits: Edit) -> Edit:
    """Return the edit that does ``edits`` one after the other, each on what the one before left.

    The keys are rotated once, from where they were first to where they are last; so the result is
    rounded once, however long the chain. An edit that looks at the cache sees the keys as they are
    cached, before any rotation.

    Raises:
        InvalidInputError: no edits, something that is no edit, edits whose ropes differ (also one
            with and one without: one rotation cannot do both), or queries that were given to one of
            them: give them to the chain.
    """
    if not edits:
        raise InvalidInputError("edits.chain: no edits given; expected at least one")
    for index, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise InvalidInputError(
                f"edits.chain: argument {index} is {type(edit).__name__}; expected an Edit"
            )
        if isinstance(edit, WithQueries):
            raise InvalidInputError(
                f"edits.chain: argument {index} has queries of its own; expected "
                "with_queries(chain(...), queries)"
            )
        if edit.rope != edits[0].rope:
            raise InvalidInputError(
                f"edits.chain: argument {index} has rope {edit.rope}, argument 0 has "
                f"{edits[0].rope}; expected the same in all"
            )
    return _Chain(edits, rope=edits[0].rope)
