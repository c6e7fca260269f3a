"""Chunks inside the messages: for servers without shared memory, and for those on other hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lmcache_fast.buffers import TensorPool
from lmcache_fast.errors import PayloadError, SharedMemoryError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.messages import Frame, Key, ReadGrant
from lmcache_fast.transport import inline, pickle
from lmcache_fast.transport.payload import Part, size_of, write

if TYPE_CHECKING:
    from lmcache_fast.protocol.connection import Connection

#: Bytes of chunks that one message holds at most (it always holds one chunk).
MESSAGE_BYTES = 32 << 20
#: Messages under way at a time: one is filled, one travels, one is being read by the server. More
#: would only need memory on both ends.
UNDER_WAY = 3


@dataclass(frozen=True)
class Codec:
    """A way to put chunks into bytes and to get them back.

    ``parts(chunks)`` takes chunks as they are stored, see :meth:`KVLayout.object_shape`;
    ``decode(data, layout, chunk_size)`` gives them back as views of the joined parts.
    """

    name: str
    parts: Callable[[Sequence[torch.Tensor]], list[Part]]
    decode: Callable[[Frame | Mapping[str, Any], KVLayout, int], list[torch.Tensor]]


CODECS = {
    "inline": Codec("inline", inline.chunk_parts, inline.decode_chunks),
    "pickle": Codec("pickle", pickle.chunk_parts, pickle.decode_chunks),
}


class MessageTransport:
    """Sends and receives chunks inside the messages themselves.

    Args:
        codec: how chunks are put into bytes.
        layout: shape of the model's cache.
        chunk_size: tokens a chunk.
    """

    def __init__(self, codec: Codec, layout: KVLayout, chunk_size: int) -> None:
        self.name = codec.name
        self.codec = codec
        self.layout = layout
        self.chunk_size = chunk_size
        self.buffers = TensorPool()

    def reader(self, grant: ReadGrant, num_chunks: int) -> MessageReader:
        """See :class:`lmcache_fast.transport.base.Transport`.

        Raises:
            PayloadError: the data is not those chunks.
            SharedMemoryError: the server has a pool and sends no chunks.
        """
        if grant.slots and not grant.data:
            raise SharedMemoryError(
                f"retrieve: this server hands out chunks in its shared memory only, and the "
                f"{self.name} transport is in use; make its pool usable here, or start it "
                "without --shm-name"
            )
        if grant.data is None:
            raise PayloadError(f"{self.name}: no chunks came; expected {num_chunks}")
        chunks = self.codec.decode(grant.data, self.layout, self.chunk_size)
        if len(chunks) != num_chunks:
            raise PayloadError(f"{self.name}: {len(chunks)} chunks came; expected {num_chunks}")
        return MessageReader(chunks, self.layout)

    def writer(self, connection: Connection, key: Key, num_chunks: int) -> MessageWriter | None:
        """See :class:`lmcache_fast.transport.base.Transport`."""
        # Nothing is reserved beforehand; so ask what is there, which also saves sending it again.
        hit = _lookup(connection, key, self.chunk_size)
        if hit >= num_chunks:
            return None
        return MessageWriter(self, connection, key, range(hit, num_chunks))

    def close(self) -> None:
        """Give back the memory of messages that were sent."""
        self.buffers.clear()


class MessageReader:
    """Chunks of one message; see :class:`lmcache_fast.transport.base.ChunkReader`."""

    side = None

    def __init__(self, chunks: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._chunks = chunks
        self._layout = layout

    def chunk(self, index: int) -> torch.Tensor:
        """Chunk ``index`` within the message; a copy if it is packed."""
        return self._layout.from_object(self._chunks[index])

    def edit_to(self, writer: object, runs: object, rotation: object) -> None:
        """Not here: there are no slots."""
        raise NotImplementedError("MessageReader.edit_to: chunks of messages are in no slots")

    def copy_to(self, out: torch.Tensor, first_chunk: int = 0) -> None:
        """Copy the chunks from ``first_chunk`` on into ``out``, as many as it has room for."""
        start = 0
        for chunk in self._chunks[first_chunk:]:
            source = self._layout.by_head(chunk)
            end = start + source.shape[2]
            if end > out.shape[2]:
                break
            # As bytes: the message's chunks need not be aligned.
            target = out[:, :, start:end].unflatten(3, tuple(source.shape[3:]))
            target.view(torch.uint8).copy_(source.view(torch.uint8))
            start = end


class MessageWriter:
    """Chunks to be sent; see :class:`lmcache_fast.transport.base.ChunkWriter`."""

    side = None

    def __init__(
        self,
        transport: MessageTransport,
        connection: Connection,
        key: Key,
        chunk_indices: Sequence[int],
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._key = key
        self._kv: torch.Tensor | None = None
        self.chunk_indices = chunk_indices

    def copy_from(self, kv: torch.Tensor) -> None:
        """Take the chunks of ``kv``: they are copied into messages while others travel."""
        self._kv = kv

    def commit(self) -> bool:
        """Send the chunks; True if all of them are there then.

        Of several ranks' writers the last one has to be committed last.
        """
        if not self._send():
            return False
        # A lookup is about all ranks' shares. With only some of them there it would find nothing,
        # and servers before 0.5.6 would keep those locked: the last rank's writer asks for all.
        if self._key.worker_id != self._key.world_size - 1:
            return True
        # A server says yes as well when it had no room for some of the chunks.
        hit = _lookup(self._connection, self._key, self._transport.chunk_size)
        return hit > self.chunk_indices[-1]

    def abandon(self) -> None:
        """Send nothing more; nothing is reserved."""
        self._kv = None

    def _send(self) -> bool:
        """Send all messages; no more once the server has no room for one."""
        kv, self._kv = self._kv, None
        assert kv is not None, "commit without copy_from"
        layout, size = self._transport.layout, self._transport.chunk_size
        per_message = max(1, MESSAGE_BYTES // (layout.token_bytes * size))
        under_way: deque[Callable[[], bool]] = deque()
        for place in range(0, len(self.chunk_indices), per_message):
            if len(under_way) == UNDER_WAY and not under_way.popleft()():
                return False
            indices = self.chunk_indices[place : place + per_message]
            chunks = [
                layout.to_object(kv[:, :, index * size : (index + 1) * size]) for index in indices
            ]
            key = replace(
                self._key,
                start=self._key.start + indices[0] * size,
                end=self._key.start + (indices[-1] + 1) * size,
            )
            under_way.append(self._connection.send_chunks(key, self._message(chunks)))
        return all([stored() for stored in under_way])

    def _message(self, chunks: Sequence[torch.Tensor]) -> memoryview:
        parts = self._transport.codec.parts(chunks)
        head = self._connection.info.dialect.data_head(size_of(parts))
        parts.insert(0, head)
        buffer = self._transport.buffers.empty((size_of(parts),), torch.uint8)
        message = buffer.numpy().data
        write(parts, message)
        return message


def _lookup(connection: Connection, key: Key, chunk_size: int) -> int:
    """Return how many of the key's leading chunks are cached, keeping no lock."""
    lookup_key = replace(key, worker_id=None)
    hit = connection.lookup(lookup_key)
    if hit:
        connection.free_lookup_locks(replace(lookup_key, end=key.start + hit * chunk_size))
    return hit
