"""What a transport is: the way chunk bytes travel between this process and the server.

A client asks a :class:`Transport` for a :class:`ChunkReader` over the chunks that a read grant
names, or for a :class:`ChunkWriter` into the chunks that the server has room for. Where the chunks
are (slots of the server's shared pool, tensors of a message) is the transport's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from lmcache_fast._native import ChunkedSide, Rotation
    from lmcache_fast.protocol.connection import Connection
    from lmcache_fast.protocol.messages import Key, ReadGrant
    from lmcache_fast.runs import Runs


class ChunkReader(Protocol):
    """The chunks of a granted read, in order; good until the grant is given back."""

    @property
    def side(self) -> ChunkedSide | None:
        """The chunks for the native copy engine; None where they are no slots."""

    def chunk(self, index: int) -> torch.Tensor:
        """Chunk ``index`` as ``[planes, L, chunk, D]``, not to be written to.

        Not copied, except where it is packed or of several ranks.
        """

    def copy_to(self, out: torch.Tensor, first_chunk: int = 0) -> None:
        """Copy the chunks from ``first_chunk`` on into ``out``, as many as it has room for.

        ``out`` is ``[planes, L, T, D]`` with contiguous token rows.
        """

    def edit_to(self, writer: Any, runs: Runs, rotation: Rotation | None) -> None:
        """Copy ``runs`` to the chunks of ``writer``; only where there is a ``side``."""


class ChunkWriter(Protocol):
    """Chunks that may be written, until :meth:`commit` makes them readable for everyone."""

    @property
    def chunk_indices(self) -> Sequence[int]:
        """Which of the key's chunks are written, ascending."""

    @property
    def side(self) -> ChunkedSide | None:
        """Those chunks, one behind the other, for the copy engine; None where they are no slots."""

    def copy_from(self, kv: torch.Tensor) -> None:
        """Copy those chunks out of the whole ``kv``, contiguous ``[planes, L, T, D]``."""

    def commit(self) -> bool:
        """Make what was written readable; True if something new is stored."""

    def abandon(self) -> None:
        """Say that what was written, if anything, will not be committed."""


class Transport(Protocol):
    """One way for chunk bytes to travel; thread-safe."""

    @property
    def name(self) -> str:
        """``shm``, ``inline`` or ``pickle``."""

    def reader(self, grant: ReadGrant, num_chunks: int) -> ChunkReader:
        """Open the ``num_chunks`` chunks that ``grant`` gives access to.

        Raises:
            ProtocolError: the grant's slots or data are not those chunks.
        """

    def writer(self, connection: Connection, key: Key, num_chunks: int) -> ChunkWriter | None:
        """Open the chunks of ``key`` that can be stored; None when the server reserves none."""

    def close(self) -> None:
        """Give back what the transport holds; readers and writers must be done."""
