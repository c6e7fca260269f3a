"""One request to the server: a session, the locks it holds, and their return."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_fast.protocol.connection import Connection
from lmcache_fast.protocol.messages import Key, ReadGrant
from lmcache_fast.protocol.tokens import PackedTokens
from lmcache_fast.transport.base import ChunkWriter, Transport


class Request:
    """A context manager over one server session.

    Whatever happens inside, leaving it gives back the locks that are still held, once, and ends the
    session, once and after the locks.

    The server tells transfers apart by instance and key, and two requests for the same tokens would
    end each other's transfer. So each request's tokens have a random one behind the range: it
    belongs to no chunk, and makes the key this request's own.

    Args:
        connection: where to send.
        transport: how chunks travel.
        model_name: the model as its engine registered it.
        tokens: the whole chunks' token ids.
        cache_salt: keeps users apart; "" for none.
        request_configs: what the server passes on to its storage with the key, if anything.
    """

    def __init__(
        self,
        connection: Connection,
        transport: Transport,
        model_name: str,
        tokens: npt.NDArray[np.uint32],
        cache_salt: str,
        request_configs: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._model_name = model_name
        self._num_tokens = len(tokens)
        nonce = np.array([secrets.randbits(32)], np.uint32)
        self._tokens = PackedTokens(np.concatenate((tokens, nonce)))
        self._cache_salt = cache_salt
        self._request_configs = dict(request_configs) if request_configs is not None else None
        self._request_id = f"lmcache_fast-{uuid.uuid4().hex}"
        self._chunk_size = connection.info.chunk_size
        self._looked_up: Key | None = None
        self._reading: Key | None = None
        self._used = False
        #: When the locks of the hit run out, in ``time.monotonic()`` seconds.
        self.deadline = float("inf")

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def lookup(self) -> int:
        """Ask how many leading chunks are cached; they are read-locked until given back."""
        self.deadline = time.monotonic() + self._connection.info.read_ttl
        self._used = True
        num_chunks = self._connection.lookup(self._key(self._num_tokens, worker_id=None))
        if num_chunks:
            self._looked_up = self._key(num_chunks * self._chunk_size, worker_id=None)
        return num_chunks

    def open_read(self, num_chunks: int) -> ReadGrant:
        """Turn the lookup's locks on its ``num_chunks`` chunks into access to their bytes."""
        key = self._key(num_chunks * self._chunk_size)
        grant = self._connection.prepare_retrieve(key)
        # From here on the transfer owns the locks: a refused one has dropped them itself.
        self._looked_up = None
        if grant.success:
            self._reading = key
        return grant

    def open_write(self) -> ChunkWriter | None:
        """Open the request's chunks that can be stored; None when the server reserves none."""
        self._used = True
        key = self._key(self._num_tokens)
        return self._transport.writer(self._connection, key, self._num_tokens // self._chunk_size)

    def close(self) -> None:
        """Give back what is held and end the session; again: nothing."""
        looked_up, self._looked_up = self._looked_up, None
        reading, self._reading = self._reading, None
        used, self._used = self._used, False
        if looked_up is not None:
            self._connection.free_lookup_locks(looked_up)
        if reading is not None:
            self._connection.release_read(reading)
        if used:
            self._connection.end_session(self._request_id)

    def _key(self, end: int, worker_id: int | None = 0) -> Key:
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
            num_kv_readers=self._connection.num_kv_readers,
        )
