"""One request to the server: a session, the locks it holds, and their return."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_fast import clock
from lmcache_fast.closing import Closing
from lmcache_fast.observe import Counters
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.tokens import PackedTokens
from lmcache_fast.transport.base import ChunkReader, ChunkWriter, Transport
from lmcache_fast.transport.ranks import RankReader, RankWriter


@dataclass(frozen=True)
class Link:
    """A connection as it is between two openings: what belongs together and changes together.

    Args:
        connection: where to send.
        generation: which of its openings this is.
        transport: how chunks travel.
        chunk_size: tokens a chunk.
        read_ttl: seconds that the server keeps a lookup's locks.
        counters: where to count what is done.
    """

    connection: Connection
    generation: int
    transport: Transport
    chunk_size: int
    read_ttl: float
    counters: Counters

    def whole_chunks(self, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The tokens up to the last whole chunk's end."""
        return tokens[: len(tokens) // self.chunk_size * self.chunk_size]


class Request(Closing):
    """A context manager over one server session.

    Whatever happens inside, leaving it gives back the locks that are still held, once, and ends the
    session, once and after the locks.

    The server tells transfers apart by instance and key, and two requests for the same tokens would
    end each other's transfer. So each request's tokens have a random one behind the range: it
    belongs to no chunk, and makes the key this request's own.

    Args:
        link: where to send, and how chunks travel.
        model_name: the model as its engine registered it.
        tokens: the whole chunks' token ids.
        cache_salt: keeps users apart; "" for none.
        request_configs: what the server passes on to its storage with the key, if anything.
    """

    def __init__(
        self,
        link: Link,
        model_name: str,
        tokens: npt.NDArray[np.uint32],
        cache_salt: str,
        request_configs: Mapping[str, Any] | None = None,
    ) -> None:
        self._link = link
        self._connection = link.connection
        self._model_name = model_name
        self._num_tokens = len(tokens)
        nonce = np.array([secrets.randbits(32)], np.uint32)
        self._tokens = PackedTokens(np.concatenate((tokens, nonce)))
        self._cache_salt = cache_salt
        self._request_configs = dict(request_configs) if request_configs is not None else None
        self._request_id = f"lmcache_fast-{uuid.uuid4().hex}"
        self._chunk_size = link.chunk_size
        self._looked_up: list[Key] = []
        self._reading: list[Key] = []
        self._used = False
        #: Until when the hit may be read, by :func:`lmcache_fast.clock.now`.
        self.deadline = float("inf")

    def lookup(self) -> int:
        """Ask how many leading chunks are cached; they are read-locked until given back."""
        self._begin()
        self.deadline = clock.deadline(self._link.read_ttl)
        with self._link.counters.timed("seconds_waiting"):
            num_chunks = self._connection.lookup(self._key(self._num_tokens, worker_id=None))
        if num_chunks:
            self._looked_up.append(self._key(num_chunks * self._chunk_size, worker_id=None))
        return num_chunks

    def open_read(self, num_chunks: int) -> ChunkReader | None:
        """Turn the lookup's locks on its ``num_chunks`` chunks into access to their bytes.

        Returns None where one of the chunks is gone.
        """
        connection = self._connection
        end = num_chunks * self._chunk_size
        ranks = range(connection.world_size)
        self._give_back_surplus(self._looked_up.pop())
        self._looked_up += [self._key(end, rank) for rank in reversed(ranks)]
        grants, keys = [], []
        # Of what all ranks hold alike one copy is enough; the others' locks are given back unused.
        for _ in ranks[:1] if connection.layout.is_replicated else ranks:
            key = self._looked_up[-1]
            with self._link.counters.timed("seconds_waiting"):
                grant = connection.prepare_retrieve(key)
            # From here on the transfer owns the locks: a refused one has dropped them itself.
            self._looked_up.pop()
            if grant.success:
                self._reading.append(key)
                keys.append(key)
            grants.append(grant)
        if not all(grant.success for grant in grants):
            for key in keys:
                self._reading.remove(key)
                connection.release_read(key)
            return None
        readers = [self._link.transport.reader(grant, num_chunks) for grant in grants]
        return readers[0] if len(readers) == 1 else RankReader(readers)

    def write(self, fill: Callable[[ChunkWriter], None]) -> tuple[bool, bool]:
        """Store the request's chunks, as far as the server has room and lacks them.

        Args:
            fill: puts the bytes into the chunks that it is given.

        Returns:
            Whether something was stored, and whether that was every chunk.
        """
        self._begin()
        num_chunks = self._num_tokens // self._chunk_size
        counters = self._link.counters
        with counters.timed("seconds_waiting"):
            writer = self._open_write(num_chunks)
        if writer is None:
            return False, False
        try:
            with counters.timed("seconds_copying"):
                fill(writer)
            with counters.timed("seconds_waiting"):
                stored = writer.commit()
        except BaseException:
            writer.abandon()
            raise
        return stored, len(writer.chunk_indices) == num_chunks

    def check(self, where: str) -> None:
        """Make sure that what is locked is locked still, as far as the connection can tell.

        Raises:
            ServerGoneError: the server went away.
            ClosedError: the client was closed, or belongs to the process we were forked from.
        """
        self._connection.check_current(where, self._link.generation)

    def close(self) -> None:
        """Give back what is held and end the session; again: nothing."""
        looked_up, self._looked_up = self._looked_up, []
        reading, self._reading = self._reading, []
        used, self._used = self._used, False
        for key in looked_up:
            self._connection.free_lookup_locks(key)
        for key in reading:
            self._connection.release_read(key)
        if used:
            self._connection.end_session(self._request_id)

    def _open_write(self, num_chunks: int) -> ChunkWriter | None:
        connection, transport = self._connection, self._link.transport
        if connection.world_size == 1:
            return transport.writer(connection, self._key(self._num_tokens), num_chunks)
        parts: list[ChunkWriter | None] = []
        try:
            for rank in range(connection.world_size):
                key = self._key(self._num_tokens, rank)
                parts.append(transport.writer(connection, key, num_chunks))
        except BaseException:
            RankWriter(parts, connection.layout.is_replicated).abandon()
            raise
        if not any(part is not None for part in parts):
            return None
        return RankWriter(parts, connection.layout.is_replicated)

    def _give_back_surplus(self, key: Key) -> None:
        """Keep one lock of those that a lookup takes for several readers: we are only one."""
        surplus = key.num_kv_readers - 1
        if surplus and self._connection.info.dialect.key_extras:
            self._connection.free_lookup_locks(replace(key, num_kv_readers=surplus))

    def _begin(self) -> None:
        if not self._used:
            self._connection.begin(self._request_id, self._link.generation)
            self._used = True

    def _key(self, end: int, worker_id: int | None = 0) -> Key:
        # The locks of a rank are one reader's: its transfer's. Those of a lookup are all readers'.
        readers = self._connection.num_kv_readers if worker_id is None else 1
        return Key(
            model_name=self._model_name,
            world_size=self._connection.world_size,
            worker_id=worker_id,
            tokens=self._tokens,
            start=0,
            end=end,
            request_id=self._request_id,
            cache_salt=self._cache_salt,
            request_configs=self._request_configs,
            num_kv_readers=readers,
        )
