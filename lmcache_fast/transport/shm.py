"""Shared memory: chunks are read and written where the server keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast import clock
from lmcache_fast import runs as run_plans
from lmcache_fast._extension import native
from lmcache_fast.errors import (
    ClosedError,
    LeaseExpiredError,
    ProtocolError,
    SharedMemoryError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.messages import Key, PoolInfo, ReadGrant, Slot, StoreReservation

if TYPE_CHECKING:
    from lmcache_fast._native import ChunkedSide, Rotation, SharedRegion
    from lmcache_fast.protocol.connection import Connection


class ShmTransport:
    """Maps the server's pool once; moves bytes with the native copy engine.

    Args:
        pool: name and size of the pool, as the server's register reply gives them.
        layout: shape of the model's cache.
        chunk_size: tokens a chunk.

    Raises:
        SharedMemoryError: no extension, or the pool is missing, smaller than said or not readable.
    """

    name = "shm"

    def __init__(self, pool: PoolInfo, layout: KVLayout, chunk_size: int) -> None:
        if native is None:
            raise SharedMemoryError("the native extension is not in use")
        self._native = native
        try:
            self._region: SharedRegion = native.SharedRegion(pool.shm_name, pool.pool_size)
        except (OSError, ValueError, TypeError) as error:
            raise SharedMemoryError(f"cannot map {pool.shm_name!r}: {error}") from error
        self._layout = layout
        self._chunk_size = chunk_size
        self._chunk_bytes = layout.token_bytes * chunk_size

    def reader(self, grant: ReadGrant, num_chunks: int) -> SlotReader:
        """See :class:`lmcache_fast.transport.base.Transport`."""
        if len(grant.slots) != num_chunks:
            raise ProtocolError(
                f"prepare_retrieve: the server gave {len(grant.slots)} slots; expected {num_chunks}"
            )
        offsets = self._offsets("prepare_retrieve", grant.slots)
        return SlotReader(self, offsets)

    def writer(self, connection: Connection, key: Key, num_chunks: int) -> SlotWriter | None:
        """See :class:`lmcache_fast.transport.base.Transport`."""
        reservation = connection.prepare_store(key)
        indices = reservation.chunk_indices
        if not indices:
            return None
        # An error below leaves the reservation to its TTL: the protocol has no way to give one
        # back, committing it would publish chunks that nobody has written, and who sends such a
        # reply is not asked again.
        if len(reservation.slots) != len(indices) or indices[-1] >= num_chunks:
            raise ProtocolError(
                f"prepare_store: {len(reservation.slots)} slots for the chunks {indices}; expected "
                f"one each, for chunks below {num_chunks}"
            )
        offsets = self._offsets("prepare_store", reservation.slots)
        self._region.populate(offsets, self._chunk_bytes)
        return SlotWriter(
            self, connection, replace(reservation, key=reservation.key or key), offsets
        )

    def close(self) -> None:
        """Unmap the pool once no view of it is left."""
        self._region.close()

    def side(self, offsets: npt.NDArray[np.uint64]) -> ChunkedSide:
        """The slots at ``offsets`` (bytes) as one side of a copy."""
        side: ChunkedSide = self._native.ChunkedSide.from_region(
            self._region,
            offsets,
            tokens_per_chunk=self._chunk_size,
            planes=self._layout.planes,
            layers=self._layout.num_layers,
            row_bytes=self._layout.row_bytes,
            **self._strides(),
        )
        return side

    def _strides(self) -> dict[str, int]:
        """How the rows of a slot stand, in bytes; nothing where they are contiguous."""
        layout = self._layout
        if layout.rows != "packed":
            return {}
        head = layout.head_dim * layout.dtype.itemsize
        token = 2 * layout.row_bytes
        return {
            "plane_stride": head,
            "layer_stride": self._chunk_size * token,
            "token_stride": token,
            "row_pieces": layout.num_kv_heads,
            "piece_stride": 2 * head,
        }

    def tensor_side(self, kv: torch.Tensor) -> ChunkedSide:
        """A tensor ``[planes, L, T, D]``, each row contiguous, as one side of a copy."""
        itemsize = kv.element_size()
        side: ChunkedSide = self._native.ChunkedSide.from_addresses(
            np.array([kv.data_ptr()], np.uint64),
            kv,
            tokens_per_chunk=kv.shape[2],
            planes=kv.shape[0],
            layers=kv.shape[1],
            row_bytes=self._layout.row_bytes,
            plane_stride=kv.stride(0) * itemsize,
            layer_stride=kv.stride(1) * itemsize,
            token_stride=kv.stride(2) * itemsize,
        )
        return side

    def view(self, offset: int) -> torch.Tensor:
        """The slot at ``offset`` (bytes) as ``[planes, L, chunk, D]``; a copy if it is packed."""
        view = self._region.view(offset, self._chunk_bytes, writable=True)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        stored = flat.view(self._layout.dtype).view(self._layout.object_shape(self._chunk_size))
        return self._layout.from_object(stored)

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._chunk_size

    def copy(
        self,
        source: ChunkedSide,
        target: ChunkedSide,
        runs: run_plans.Runs,
        rotation: Rotation | None = None,
    ) -> None:
        """Copy ``runs`` of token rows from ``source`` to ``target``.

        Raises:
            SharedMemoryError: the pool was made shorter, or /dev/shm is full.
        """
        self.check()
        try:
            self._native.copy_runs(source, target, runs, rotation)
        except OSError as error:
            raise SharedMemoryError(f"the pool {self._region.name!r}: {error}") from error

    def check(self) -> None:
        """Make sure that the pool is all there.

        Raises:
            SharedMemoryError: somebody made it shorter.
            ClosedError: the transport was closed.
        """
        try:
            intact = self._region.is_intact
        except ValueError as error:
            raise ClosedError("the client was closed") from error
        if not intact:
            raise SharedMemoryError(
                f"the pool {self._region.name!r} is shorter than the {self._region.size} bytes "
                "that the server has promised: was it replaced?"
            )

    def _offsets(self, where: str, slots: Sequence[Slot]) -> npt.NDArray[np.uint64]:
        shape = self._layout.object_shape(self._chunk_size)
        for slot in slots:
            fits = self._layout.is_object_shape(slot.shape, self._chunk_size)
            if not fits or slot.dtype != self._layout.dtype_name:
                raise ProtocolError(
                    f"{where}: a slot holds {slot.dtype} {list(slot.shape)}; expected "
                    f"{self._layout.dtype_name} {list(shape)}: another engine registered this "
                    "model name with another layout"
                )
            if slot.length != self._chunk_bytes:
                raise ProtocolError(
                    f"{where}: a slot has {slot.length} bytes; expected {self._chunk_bytes}"
                )
            try:
                self._region.check_slot(
                    slot.offset, slot.length, alignment=self._layout.dtype.itemsize
                )
            except (ValueError, TypeError) as error:
                raise ProtocolError(f"{where}: {error}") from error
        offsets = np.array([slot.offset for slot in slots], np.uint64)
        if (np.diff(np.sort(offsets)) < self._chunk_bytes).any():
            raise ProtocolError(f"{where}: two of the slots overlap")
        return offsets


class SlotReader:
    """Chunks read in place; see :class:`lmcache_fast.transport.base.ChunkReader`."""

    def __init__(self, transport: ShmTransport, offsets: npt.NDArray[np.uint64]) -> None:
        self._transport = transport
        self._offsets = offsets
        self.side = transport.side(offsets)

    def chunk(self, index: int) -> torch.Tensor:
        """The slot itself as a tensor, not to be written to; a copy if it is packed."""
        self._transport.check()
        return self._transport.view(int(self._offsets[index]))

    def copy_to(self, out: torch.Tensor, first_chunk: int = 0) -> None:
        """Copy the chunks from ``first_chunk`` on into ``out``, as many as it has room for."""
        start = first_chunk * self._transport.chunk_size
        count = min(self.side.num_tokens - start, out.shape[2])
        runs = run_plans.whole(count) + np.array([start, 0, 0])
        self._transport.copy(self.side, self._transport.tensor_side(out), runs)

    def edit_to(self, writer: SlotWriter, runs: run_plans.Runs, rotation: Rotation | None) -> None:
        """Copy ``runs`` from these slots to those of ``writer``, rotating the keys."""
        writer.check()
        self._transport.copy(self.side, writer.side, runs, rotation)


class SlotWriter:
    """Reserved slots; see :class:`lmcache_fast.transport.base.ChunkWriter`."""

    def __init__(
        self,
        transport: ShmTransport,
        connection: Connection,
        reservation: StoreReservation,
        offsets: npt.NDArray[np.uint64],
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._reservation = reservation
        self.chunk_indices: Sequence[int] = reservation.chunk_indices
        self.side = transport.side(offsets)

    def copy_from(self, kv: torch.Tensor) -> None:
        """Copy the reserved chunks out of ``kv``."""
        chunk = self._transport.chunk_size
        plan = run_plans.whole(kv.shape[2])
        runs, _ = run_plans.for_chunks(plan, self.chunk_indices, chunk)
        source = self._transport.tensor_side(kv)
        self.check()
        self._transport.copy(source, self.side, runs)

    def check(self) -> None:
        """Make sure that the slots are still reserved for us.

        Raises:
            LeaseExpiredError: they may be someone else's by now: nothing may be written there.
        """
        late = clock.now() - self._reservation.deadline
        if late >= 0:
            raise LeaseExpiredError(
                f"store: the server's reservation may have run out {late:.1f} s ago; nothing was "
                "stored. Start it with a longer write TTL, or store less at once"
            )

    def commit(self) -> bool:
        """Tell the server that the slots are written."""
        self.check()
        assert self._reservation.key is not None
        return self._connection.commit_store(self._reservation.key)

    def abandon(self) -> None:
        """Keep the slots for whoever stores the same next."""
        self._connection.keep_reservation(self._reservation)
