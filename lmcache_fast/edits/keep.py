"""The edits that name what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lmcache_fast.arguments import TokenIds
from lmcache_fast.edits.edit import DEFAULT_CHUNK_SIZE, Edit
from lmcache_fast.edits.rope import Rope
from lmcache_fast.edits.selection import Positions, Selection
from lmcache_fast.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class _Keep(Edit):
    name: ClassVar[str] = "keep"
    selection: Selection

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        if callable(self.selection):
            return self.selection(len(tokens), tokens)
        return self.selection


def keep(selection: Selection, rope: Rope | None = None) -> Edit:
    """Return the edit that keeps the selected tokens, in their order.

    Args:
        selection: sorted unique positions (list, array or tensor), a boolean mask with one value a
            token, or a function ``(num_tokens, tokens) -> positions or mask``.
        rope: moves the kept keys to their new positions; without it they keep the old ones.

    The selection is checked against each sequence that is edited.
    """
    return _Keep(selection, rope=rope)


@dataclass(frozen=True)
class _DropMiddleChunks(Edit):
    name: ClassVar[str] = "drop_middle_chunks"
    fraction: float
    chunk_size: int | None

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        size = self.chunk_size or chunk_size or DEFAULT_CHUNK_SIZE
        num_tokens = len(tokens)
        num_chunks = num_tokens // size
        dropped = max(0, min(int(self.fraction * num_chunks + 1e-9), num_chunks - 2))
        start = (num_chunks - dropped + 1) // 2 * size
        end = start + dropped * size
        return np.concatenate((np.arange(min(start, num_tokens)), np.arange(end, num_tokens)))


def drop_middle_chunks(
    fraction: float = 0.5, rope: Rope | None = None, chunk_size: int | None = None
) -> Edit:
    """Return the edit that drops the middle of a sequence, in whole chunks.

    Of ``n`` whole chunks ``fraction * n`` (rounded down) are dropped, but never the first or the
    last; a partial chunk at the end is kept.

    Args:
        fraction: share of the chunks to drop, 0 to 1.
        rope: moves the kept keys to their new positions; without it they keep the old ones.
        chunk_size: tokens a chunk; by default the server's, which the SDK tells the edit, and 256
            where the edit is called as a plain function.

    Raises:
        InvalidInputError: fraction is not within 0 to 1, or chunk_size not positive.
    """
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise InvalidInputError(
            f"edits.drop_middle_chunks: fraction is {fraction!r}; expected 0 to 1"
        )
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise InvalidInputError(
            f"edits.drop_middle_chunks: chunk_size is {chunk_size!r}; expected a positive integer"
        )
    return _DropMiddleChunks(fraction, chunk_size, rope=rope)
