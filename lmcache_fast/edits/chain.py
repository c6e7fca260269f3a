"""Several edits as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lmcache_fast.arguments import TokenIds
from lmcache_fast.edits.edit import Edit
from lmcache_fast.edits.selection import Positions, select_tokens
from lmcache_fast.errors import InvalidInputError


@dataclass(frozen=True)
class _Chain(Edit):
    name: ClassVar[str] = "chain"
    edits: tuple[Edit, ...]

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        positions = np.arange(len(tokens), dtype=np.int64)
        for edit in self.edits:
            kept = edit.plan(tokens, chunk_size).positions
            positions, tokens = positions[kept], select_tokens(tokens, kept)
        return positions


def chain(*edits: Edit) -> Edit:
    """Return the edit that does ``edits`` one after the other, each on what the one before left.

    The keys are rotated once, from where they were first to where they are last; so the result is
    rounded once, however long the chain.

    Raises:
        InvalidInputError: no edits, something that is no edit, or edits whose ropes differ (also
            one with and one without: one rotation cannot do both).
    """
    if not edits:
        raise InvalidInputError("edits.chain: no edits given; expected at least one")
    for index, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise InvalidInputError(
                f"edits.chain: argument {index} is {type(edit).__name__}; expected an Edit"
            )
        if edit.rope != edits[0].rope:
            raise InvalidInputError(
                f"edits.chain: argument {index} has rope {edit.rope}, argument 0 has "
                f"{edits[0].rope}; expected the same in all"
            )
    return _Chain(edits, rope=edits[0].rope)
