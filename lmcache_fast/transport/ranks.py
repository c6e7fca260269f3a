"""Chunks of which every tensor-parallel rank stores a share, as the whole that users see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lmcache_fast.transport.base import ChunkReader, ChunkWriter


def shares(kv: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """The columns of ``kv [planes, L, T, D]`` that each of ``count`` ranks stores, not copied."""
    width = kv.shape[3] // count
    return [kv[..., rank * width : (rank + 1) * width] for rank in range(count)]


class RankReader:
    """All ranks' chunks, heads joined in rank order; see :class:`.base.ChunkReader`.

    Args:
        parts: one reader a rank.
    """

    side = None  # no one list of slots holds whole rows

    def __init__(self, parts: Sequence[ChunkReader]) -> None:
        self.parts = parts

    def chunk(self, index: int) -> torch.Tensor:
        """Chunk ``index``, put together from its shares: a copy."""
        chunks = [part.chunk(index) for part in self.parts]
        whole = torch.cat([chunk.view(torch.uint8) for chunk in chunks], dim=3)
        return whole.view(chunks[0].dtype)

    def copy_to(self, out: torch.Tensor, first_chunk: int = 0) -> None:
        """Copy the chunks from ``first_chunk`` on into ``out``, as many as it has room for."""
        for part, share in zip(self.parts, shares(out, len(self.parts)), strict=True):
            part.copy_to(share, first_chunk)

    def edit_to(self, writer: Any, runs: Any, rotation: Any) -> None:
        """Not here: each rank's slots are edited by themselves."""
        raise NotImplementedError("RankReader.edit_to: edit its parts")


class RankWriter:
    """Those chunks of all ranks that can be stored; see :class:`.base.ChunkWriter`.

    Args:
        parts: one writer a rank, None where the rank's chunks are all there or cannot be.
        replicated: whether every rank stores the whole, not a share.
    """

    side = None

    def __init__(self, parts: Sequence[ChunkWriter | None], replicated: bool) -> None:
        self.parts = parts
        self._open = [part for part in parts if part is not None]
        self._replicated = replicated

    @property
    def chunk_indices(self) -> Sequence[int]:
        """The chunks that every rank writes."""
        indices = [set(part.chunk_indices) if part is not None else set() for part in self.parts]
        return sorted(set[int]().union(*indices).intersection(*indices))

    def copy_from(self, kv: torch.Tensor) -> None:
        """Copy each rank's share of its chunks out of the whole ``kv``."""
        count = len(self.parts)
        for part, share in zip(
            self.parts, [kv] * count if self._replicated else shares(kv, count), strict=True
        ):
            if part is not None:
                part.copy_from(share)

    def commit(self) -> bool:
        """Make what was written readable, rank by rank; True if something new is stored."""
        stored = False
        while self._open:
            stored |= self._open[0].commit()
            del self._open[0]
        return stored

    def abandon(self) -> None:
        """Say that what was written, if anything, will not be committed."""
        for part in self._open:
            part.abandon()


def reader_parts(reader: ChunkReader) -> Sequence[ChunkReader]:
    """The readers of which each has chunks of one rank."""
    return reader.parts if isinstance(reader, RankReader) else (reader,)


def paired(reader: ChunkReader, writer: ChunkWriter) -> Iterator[tuple[ChunkReader, ChunkWriter]]:
    """Each rank's chunks to read, and those to write. Where all ranks hold the same one is read."""
    sources = reader_parts(reader)
    targets = writer.parts if isinstance(writer, RankWriter) else (writer,)
    for rank, target in enumerate(targets):
        if target is not None:
            yield sources[rank % len(sources)], target
