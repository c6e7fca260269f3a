"""Lease: chunks held in place on the server, for as long as its read lock lasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast import clock
from lmcache_fast.closing import Closing
from lmcache_fast.errors import ClosedError, InvalidInputError, LeaseExpiredError
from lmcache_fast.interrupts import shielded
from lmcache_fast.layout import KVLayout
from lmcache_fast.observe import Counters
from lmcache_fast.request import Request
from lmcache_fast.transport.base import ChunkReader
from lmcache_fast.transport.ranks import reader_parts

if TYPE_CHECKING:
    from lmcache_fast._native import ChunkedSide


class Lease(Closing):
    """The cached prefix of a request, read where the server keeps it; a context manager.

    ``len(lease)`` is the number of chunks, ``lease[i]`` a :class:`ChunkView` of one of them.
    Nothing is copied. Leaving the ``with`` block gives the server's lock back; a view used later
    raises.
    """

    def __init__(
        self,
        request: Request,
        reader: ChunkReader | None,
        num_chunks: int,
        layout: KVLayout,
        chunk_size: int,
        counters: Counters,
    ) -> None:
        self._request = request
        self._counters = counters
        self._reader = reader
        self._num_chunks = num_chunks
        self._layout = layout
        self._closed = False
        self.chunk_size = chunk_size

    def __del__(self) -> None:
        # Never entered, or interrupted on the way out.
        if not getattr(self, "_closed", True):
            self.close()

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> ChunkView:
        """View chunk ``index``.

        Raises:
            IndexError: there is no such chunk.
            ClosedError, LeaseExpiredError: the lease is over.
        """
        self.check("Lease[]")
        if not -self._num_chunks <= index < self._num_chunks:
            raise IndexError(f"Lease: chunk {index} of {self._num_chunks}")
        return ChunkView(self, index % self._num_chunks)

    def __iter__(self) -> Iterator[ChunkView]:
        return (self[index] for index in range(self._num_chunks))

    @property
    def num_tokens(self) -> int:
        """Tokens of the cached prefix, whole chunks."""
        return self._num_chunks * self.chunk_size

    @property
    def seconds_left(self) -> float:
        """Seconds until the lease must not be used any more."""
        return self._request.deadline - clock.now()

    @property
    def side(self) -> ChunkedSide | None:
        """The chunks for the native copy engine.

        None where they are no slots, or where several ranks have a share of each in a slot.
        """
        return self.reader("Lease.side").side

    @property
    def in_slots(self) -> bool:
        """Whether the chunks are where the native copy engine can take them from."""
        return reader_parts(self.reader("Lease.in_slots"))[0].side is not None

    def check(self, where: str) -> None:
        """Make sure that the chunks' bytes can still be trusted.

        Raises:
            ClosedError: the lease was closed, or its client.
            LeaseExpiredError: the server's read lock may have run out.
            ServerGoneError: the server went away; the next one may use the same memory.
        """
        if self._closed:
            raise ClosedError(f"{where}: the lease is over; use it inside its 'with' block")
        if self.seconds_left <= 0:
            raise LeaseExpiredError(
                f"{where}: the server's read lock may have run out {-self.seconds_left:.1f} s ago; "
                "start it with a longer read TTL or read faster"
            )
        if self._reader is not None and reader_parts(self._reader)[0].side is not None:
            self._request.check(where)

    def reader(self, where: str) -> ChunkReader:
        """The chunks as the transport reads them, if the lease still stands."""
        self.check(where)
        if self._reader is None:
            raise InvalidInputError(f"{where}: the lease is empty: nothing is cached")
        return self._reader

    def copy_to(self, out: torch.Tensor) -> None:
        """Copy the whole prefix into ``out``, ``[planes, L, T, D]`` with contiguous token rows.

        Raises:
            LeaseExpiredError: the lock may have run out before the copy was done.
        """
        if self._reader is None:
            self.check("Lease.copy_to")
            return
        self._copy("Lease.copy_to", out)

    def close(self) -> None:
        """Give the locks back; again: nothing."""
        with shielded():
            self._closed = True
            self._reader = None
            self._request.close()

    def _chunk(self, index: int) -> torch.Tensor:
        return self.reader("ChunkView").chunk(index)

    def _copy(self, where: str, out: torch.Tensor, first_chunk: int = 0) -> None:
        with shielded(), self._counters.timed("seconds_copying"):
            self.reader(where).copy_to(out, first_chunk)
        # Bytes may have been recycled under the copy: then it is not given away.
        self.check(where)


class ChunkView:
    """One chunk of a lease, ``[planes, L, chunk, D]``, read-only and good inside the lease only."""

    def __init__(self, lease: Lease, index: int) -> None:
        self._lease = lease
        self.index = index

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(planes, L, chunk, D)``."""
        return self._lease._layout.kv_shape(self._lease.chunk_size)

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return self._lease._layout.dtype

    def numpy(self) -> npt.NDArray[Any]:
        """The chunk itself as a read-only array, not copied.

        Elements that numpy has no type for (bfloat16, 8-bit floats) come as unsigned integers of
        their size. The array must not be used after the lease: its bytes are then someone else's,
        and if the server's pool were replaced by a shorter one, reading it would end the process.

        Raises:
            ClosedError, LeaseExpiredError: the lease is over.
        """
        chunk = self._lease._chunk(self.index)
        if chunk.dtype == torch.bfloat16:
            array = chunk.view(torch.int16).numpy().view(np.uint16)
        elif chunk.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            array = chunk.view(torch.uint8).numpy()
        else:
            array = chunk.numpy()
        array.flags.writeable = False
        return array

    def tensor(self) -> torch.Tensor:
        """A copy of the chunk, the caller's own.

        Raises:
            ClosedError, LeaseExpiredError: the lease is over.
        """
        copy = torch.empty(self.shape, dtype=self.dtype)
        self._lease._copy("ChunkView.tensor", copy, self.index)
        return copy
