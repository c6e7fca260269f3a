"""KVView: a cache as an edit looks at it, whether it is a tensor or lies in a server's slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast._extension import native
from lmcache_fast.errors import InvalidInputError

if TYPE_CHECKING:
    from lmcache_fast._native import ChunkedSide
    from lmcache_fast.layout import KVLayout
    from lmcache_fast.lease import Lease


class KVView(ABC):
    """A cache, read-only, layer by layer.

    Attributes:
        num_tokens: tokens, the first of the sequence.
        num_layers: layers.
        planes: 2 for keys and values; 1 where a token has one row.
        width: elements of a row, heads times head_dim.
        dtype: the elements' type.
        head_dim: elements a head; None where nobody knows.
        queries: the queries of the same tokens, a view of one plane; None where there are none.
    """

    num_tokens: int
    num_layers: int
    planes: int
    width: int
    dtype: torch.dtype
    head_dim: int | None = None
    queries: KVView | None = None

    @abstractmethod
    def rows(self, plane: int, layer: int, begin: int, end: int) -> torch.Tensor:
        """Return rows ``begin`` to ``end`` of a plane, ``[end - begin, width]``; do not write."""

    @property
    def side(self) -> ChunkedSide | None:
        """The chunks for the native scorers; None where they cannot read them."""
        return None

    def keys(self, layer: int) -> torch.Tensor:
        """Return a layer's keys as they are cached, rotary positions included: ``[T, width]``."""
        return self.rows(0, layer, 0, self.num_tokens)

    def values(self, layer: int) -> torch.Tensor:
        """Return a layer's values, ``[T, width]``.

        Raises:
            InvalidInputError: the cache has one plane.
        """
        if self.planes != 2:
            raise InvalidInputError(
                f"KVView.values: the cache has {self.planes} plane; expected keys and values apart"
            )
        return self.rows(1, layer, 0, self.num_tokens)

    def take(self, positions: npt.NDArray[np.int64]) -> KVView:
        """Return the view of some tokens only."""
        return _Part(self, positions)

    def check(self) -> None:  # noqa: B027 - a tensor stays what it is
        """Make sure that what was read can be trusted; raises if a lease ran out meanwhile."""


class TensorView(KVView):
    """A tensor ``[planes, L, T, D]`` as a view."""

    def __init__(self, kv: torch.Tensor, head_dim: int | None = None) -> None:
        self._kv = kv
        self.planes, self.num_layers, self.num_tokens, self.width = kv.shape
        self.dtype = kv.dtype
        self.head_dim = head_dim

    def rows(self, plane: int, layer: int, begin: int, end: int) -> torch.Tensor:
        """See :meth:`KVView.rows`."""
        return self._kv[plane, layer, begin:end]

    @property
    def side(self) -> ChunkedSide | None:
        """The tensor as one chunk, if it is in memory with its rows in one piece."""
        kv = self._kv
        if native is None or kv.device.type != "cpu" or not kv.numel():
            return None
        strides = [stride * kv.element_size() for stride in kv.stride()]
        if kv.stride(3) != 1 or strides[2] < kv.shape[3] * kv.element_size():
            return None
        return _side(native, kv, [kv.data_ptr()], kv, strides)


class LeaseView(KVView):
    """The cached prefix of a lease as a view; good inside the lease only."""

    def __init__(self, lease: Lease, layout: KVLayout) -> None:
        self._lease = lease
        self._layout = layout
        self.num_tokens = lease.num_tokens
        self.num_layers = layout.num_layers
        self.planes = layout.planes
        self.width = layout.width
        self.dtype = layout.dtype
        self.head_dim = layout.head_dim

    def rows(self, plane: int, layer: int, begin: int, end: int) -> torch.Tensor:
        """See :meth:`KVView.rows`; a copy."""
        size = self._lease.chunk_size
        if begin >= end:
            return torch.empty(0, self.width, dtype=self.dtype)
        return torch.cat(
            [
                self._chunks[i][plane, layer, max(begin - i * size, 0) : end - i * size]
                for i in range(begin // size, -(-end // size))
            ]
        )

    @property
    def side(self) -> ChunkedSide | None:
        """The lease's slots; else its chunks, as they came in a message or from several ranks."""
        self._refuse_opaque()
        if not len(self._lease):
            return None
        side = self._lease.side
        if side is not None or native is None:
            return side
        chunks = self._chunks
        if not all(chunk.is_contiguous() for chunk in chunks):
            return None
        strides = [stride * chunks[0].element_size() for stride in chunks[0].stride()]
        addresses = [chunk.data_ptr() for chunk in chunks]
        return _side(native, chunks, addresses, chunks[0], strides)

    @cached_property
    def _chunks(self) -> list[torch.Tensor]:
        self._refuse_opaque()
        reader = self._lease.reader("LeaseView")
        return [reader.chunk(index) for index in range(len(self._lease))]

    def _refuse_opaque(self) -> None:
        if self._layout.rows == "opaque":
            raise InvalidInputError(
                "LeaseView: the engine's rows are opaque, no row is one token; expected a layout "
                "whose rows are tokens where an edit looks at the cache"
            )

    def check(self) -> None:
        """See :meth:`KVView.check`."""
        self._lease.check("edit")


class _Part(KVView):
    """Some tokens of another view."""

    def __init__(self, whole: KVView, positions: npt.NDArray[np.int64]) -> None:
        self._whole = whole
        self._positions = positions
        self.num_tokens = positions.size
        self.num_layers, self.planes = whole.num_layers, whole.planes
        self.width, self.dtype, self.head_dim = whole.width, whole.dtype, whole.head_dim
        self.queries = None if whole.queries is None else whole.queries.take(positions)

    def rows(self, plane: int, layer: int, begin: int, end: int) -> torch.Tensor:
        wanted = self._positions[begin:end]
        if not wanted.size:
            return self._whole.rows(plane, layer, 0, 0)
        first = int(wanted[0])
        rows = self._whole.rows(plane, layer, first, int(wanted[-1]) + 1)
        return rows[torch.from_numpy(wanted - first).to(rows.device)]

    def check(self) -> None:
        self._whole.check()


def _side(
    native: Any, owner: object, addresses: list[int], chunk: torch.Tensor, strides: list[int]
) -> ChunkedSide:
    side: ChunkedSide = native.ChunkedSide.from_addresses(
        np.array(addresses, np.uint64),
        owner,
        tokens_per_chunk=chunk.shape[2],
        planes=chunk.shape[0],
        layers=chunk.shape[1],
        row_bytes=chunk.shape[3] * chunk.element_size(),
        plane_stride=strides[0],
        layer_stride=strides[1],
        token_stride=strides[2],
        writable=False,
    )
    return side
