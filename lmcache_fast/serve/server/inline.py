"""Chunk data inside messages, for clients that do not share the pool's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from lmcache_fast.layout import KVLayout, parse_dtype
from lmcache_fast.serve.server.cache import ObjectSpec, StoredObject
from lmcache_fast.serve.server.messages import Registration
from lmcache_fast.serve.server.pool import Pool
from lmcache_fast.transport import inline, pickle


class InlineData:
    """Reads and writes chunk data as one release has it: a pickle, or an envelope from 0.5.7 on."""

    def __init__(self, pool: Pool, protocol: str) -> None:
        self._pool = pool
        if protocol == "0.5.6":
            self._encode, self._decode = pickle.encode_chunks, pickle.decode_chunks
        else:
            self._encode, self._decode = inline.encode_chunks, inline.decode_chunks

    def encode(self, objects: Sequence[StoredObject]) -> bytes | bytearray:
        """Return the objects' bytes as one message field."""
        return self._encode([self._tensor(stored) for stored in objects])

    def decode(
        self, data: memoryview, registration: Registration, spec: ObjectSpec
    ) -> list[torch.Tensor]:
        """Return the chunks that a client sent, as views of ``data``.

        Raises:
            PayloadError: they are not what the registration promised.
        """
        layout = KVLayout(
            registration.num_layers,
            1,
            registration.hidden_dim_size,
            parse_dtype(spec.dtype),
            registration.block_size,
            planes=1 if registration.use_mla else 2,
        )
        # A view does as well as bytes, and saves a copy.
        return self._decode(cast(bytes, data), layout, spec.shape[-2])

    def write(self, stored: StoredObject, chunk: torch.Tensor) -> None:
        """Copy one chunk into the pool."""
        self._tensor(stored).copy_(chunk)

    def _tensor(self, stored: StoredObject) -> torch.Tensor:
        dtype = parse_dtype(stored.spec.dtype)
        flat = torch.frombuffer(
            self._pool.memory,
            dtype=dtype,
            count=stored.spec.length // dtype.itemsize,
            offset=stored.offset,
        )
        return flat.view(stored.spec.shape)
