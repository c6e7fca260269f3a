"""CacheService: what each operation of the protocol does."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_fast.errors import PayloadError
from lmcache_fast.layout import parse_dtype
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.serve.server.cache import Cache, ObjectKey, ObjectSpec, StoredObject
from lmcache_fast.serve.server.config import ALIGNMENT, ServerConfig
from lmcache_fast.serve.server.inline import InlineData
from lmcache_fast.serve.server.messages import Key, MessageError, Registration
from lmcache_fast.serve.server.pool import Pool

logger = logging.getLogger(__name__)

#: One transfer: instance, request, rank and token range.
TransferId = tuple[int, str, int, int, int]


@dataclass
class Instance:
    """A registered engine or SDK client."""

    registration: Registration
    spec: ObjectSpec
    last_seen: float
    has_pinged: bool = False


@dataclass
class Session:
    """What is known of one request between its first operation and end_session."""

    last_seen: float
    #: Chunks that the lookup found; None once the client was told.
    result: int | None = None


class CacheService:
    """The operations, on decoded messages. Thread-safe: one operation runs at a time.

    A handler that raises gets no reply, as in a real server; :meth:`call` only lets the error out.
    """

    def __init__(
        self, config: ServerConfig, pool: Pool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._pool = pool
        self._clock = clock
        self._cache = Cache(pool.size, ALIGNMENT, config.read_ttl, config.write_ttl, clock)
        self._inline = InlineData(pool, config.protocol)
        self._instances: dict[int, Instance] = {}
        self._sessions: dict[str, Session] = {}
        self._writes: dict[TransferId, list[StoredObject]] = {}
        self._reads: dict[TransferId, list[ObjectKey]] = {}
        self._lock = threading.RLock()
        self._dropped_requests = 0
        self._handlers: dict[Operation, Callable[..., Any]] = {
            Operation.LOOKUP: self._lookup,
            Operation.QUERY_PREFETCH_STATUS: self._prefetch_status,
            Operation.WAIT_PREFETCH_STATUS: self._prefetch_status,
            Operation.FREE_LOOKUP_LOCKS: self._free_lookup_locks,
            Operation.END_SESSION: self._end_session,
            Operation.REGISTER: self._register,
            Operation.UNREGISTER: self._unregister,
            Operation.PREPARE_STORE: self._prepare_store,
            Operation.COMMIT_STORE: self._commit_store,
            Operation.PREPARE_RETRIEVE: self._prepare_retrieve,
            Operation.COMMIT_RETRIEVE: self._commit_retrieve,
            Operation.CLEAR: self._clear,
            Operation.GET_CHUNK_SIZE: lambda: config.chunk_size,
            Operation.PING: self._ping,
            Operation.NOOP: lambda: "OK",
        }

    def call(self, operation: Operation, payloads: list[Any]) -> Any:
        """Run one operation and return its result."""
        with self._lock:
            return self._handlers[operation](*payloads)

    def clear(self, force: bool = False) -> None:
        """Empty the cache; without ``force`` the locked chunks stay."""
        with self._lock:
            self._clear(force)

    def count_dropped_request(self) -> None:
        """Note a request that got no reply."""
        with self._lock:
            self._dropped_requests += 1

    def forget_silent(self) -> None:
        """Drop instances and sessions that were silent for too long, transfers that ran out."""
        with self._lock:
            now = self._clock()
            for instance_id, instance in list(self._instances.items()):
                patience = (
                    self.config.reap_timeout
                    if instance.has_pinged
                    else self.config.registration_grace
                )
                if now - instance.last_seen > patience:
                    logger.warning("instance %d was silent for too long: dropped", instance_id)
                    self._unregister(instance_id)
            for request_id, session in list(self._sessions.items()):
                if now - session.last_seen > self.config.session_ttl:
                    del self._sessions[request_id]
            self._cache.expire()
            for transfer, reserved in list(self._writes.items()):
                if not any(self._cache.is_reserved(stored) for stored in reserved):
                    del self._writes[transfer]
            for transfer, keys in list(self._reads.items()):
                if not any(self._cache.is_locked_by(key, transfer[1]) for key in keys):
                    del self._reads[transfer]

    def report(self) -> tuple[dict[int, Registration], dict[str, int]]:
        """Return the registrations by instance, and the counters."""
        with self._lock:
            counters = self._cache.report() | {
                "sessions": len(self._sessions),
                "instances": len(self._instances),
                "pending_stores": len(self._writes),
                "pending_retrieves": len(self._reads),
                "dropped_requests": self._dropped_requests,
                "pool_bytes": self._pool.size,
            }
            return {i: known.registration for i, known in self._instances.items()}, counters

    # -- lookups --------------------------------------------------------------------------------

    def _lookup(self, key: Key, _tp_size: int) -> None:
        session = self._session(key.request_id)
        known = (instance.registration for instance in self._instances.values())
        if not any((r.model_name, r.world_size) == (key.model_name, key.world_size) for r in known):
            logger.warning("lookup: model %r has no registration", key.model_name)
            session.result = 0
            return
        if key.num_kv_readers < 1:
            raise MessageError(f"num_kv_readers is {key.num_kv_readers}; expected 1 or more")
        hashes = key.hashes(self.config.chunk_size, whole=True)
        chunks = [[(digest, rank) for rank in key.ranks] for digest in hashes]
        session.result = self._cache.lock_prefix(chunks, key.request_id, key.num_kv_readers)

    def _prefetch_status(self, request_id: str, _timeout: float = 0.0) -> int:
        # A lookup is done when it is answered, so there is never anything to wait for.
        session = self._sessions.get(request_id)
        if session is None or session.result is None:
            return 0
        result, session.result = session.result, None
        return result

    def _free_lookup_locks(self, key: Key, _tp_size: int, ranges: list[Any] | None = None) -> None:
        if ranges:
            raise MessageError("free_lookup_locks: extra_ranges are not supported")
        keys = [(digest, rank) for digest in self._hashes(key) for rank in key.ranks]
        self._cache.unlock(keys, key.request_id, max(key.num_kv_readers, 1))

    def _end_session(self, request_id: str) -> None:
        # Locks stay, as in a real server: giving them back is the client's task.
        if self._sessions.pop(request_id, None) is None:
            logger.debug("end_session: request %r is unknown", request_id)

    # -- registrations --------------------------------------------------------------------------

    def _register(self, registration: Registration) -> dict[str, Any]:
        if registration.group_layouts:
            raise MessageError("register: models with several groups are not supported")
        if registration.hidden_dim_size % (registration.num_kv_heads or 1):
            raise MessageError(
                f"register: hidden_dim_size {registration.hidden_dim_size} is no multiple of "
                f"num_kv_heads {registration.num_kv_heads}"
            )
        known = self._instances.get(registration.instance_id)
        if known is not None:
            known.last_seen = self._clock()
        else:
            dtype = parse_dtype(registration.dtype_str)
            tokens = registration.num_physical_slots or self.config.chunk_size
            planes = () if registration.use_mla else (2,)
            shape = (*planes, registration.num_layers, tokens, registration.hidden_dim_size)
            name = str(dtype).removeprefix("torch.")
            spec = ObjectSpec(shape, name, math.prod(shape) * dtype.itemsize)
            self._instances[registration.instance_id] = Instance(registration, spec, self._clock())
        shared = bool(self._pool.name)
        reply: dict[str, Any] = {
            "shm_name": self._pool.name,
            "pool_size": self._pool.size if shared else 0,
        }
        return reply if self.config.protocol == "0.5.6" else {**reply, "null_block_id": 0}

    def _unregister(self, instance_id: int) -> None:
        if self._instances.pop(instance_id, None) is None:
            logger.warning("unregister: instance %d is unknown", instance_id)
            return
        for transfer in [t for t in self._writes if t[0] == instance_id]:
            self._cache.drop(self._writes.pop(transfer))
        for transfer in [t for t in self._reads if t[0] == instance_id]:
            self._cache.unlock(self._reads.pop(transfer), transfer[1])

    def _ping(self, instance_id: int | None) -> bool:
        instance = self._instances.get(instance_id) if instance_id is not None else None
        if instance is not None:
            instance.last_seen, instance.has_pinged = self._clock(), True
        return True

    # -- stores ---------------------------------------------------------------------------------

    def _prepare_store(
        self, key: Key, instance_id: int, skipped: list[Any] | None = None
    ) -> dict[str, Any]:
        instance = self._instance(instance_id)
        if skipped and any(skipped):
            raise MessageError("prepare_store: skipped_chunks are not supported")
        self._session(key.request_id)
        if not self._pool.name:
            return {"context": {}}  # the data comes with commit_store
        reserved = self._cache.reserve(self._object_keys(key), instance.spec)
        if reserved:
            transfer = _transfer_id(key, instance_id)
            self._writes.setdefault(transfer, []).extend(reserved.values())
        slots = [_slot(stored) for stored in reserved.values()]
        return {"context": {"slots": slots, "chunk_indices": list(reserved)}}

    def _commit_store(self, key: Key, instance_id: int, data: memoryview) -> bool:
        instance = self._instance(instance_id)
        self._session(key.request_id)
        if len(data):
            return self._store_inline(key, instance, data)
        reserved = self._writes.pop(_transfer_id(key, instance_id), None)
        return reserved is not None and self._cache.publish(reserved)

    def _store_inline(self, key: Key, instance: Instance, data: memoryview) -> bool:
        keys = self._object_keys(key)
        try:
            chunks = self._inline.decode(data, instance.registration, instance.spec)
        except PayloadError as error:
            logger.error("commit_store: %s", error)
            return False
        if len(chunks) != len(keys):
            logger.error("commit_store: %d chunks came; expected %d", len(chunks), len(keys))
            return False
        reserved = self._cache.reserve(keys, instance.spec)
        for index, stored in reserved.items():
            self._inline.write(stored, chunks[index])
        return self._cache.publish(reserved.values())

    # -- retrieves ------------------------------------------------------------------------------

    def _prepare_retrieve(self, key: Key, instance_id: int) -> dict[str, Any]:
        self._instance(instance_id)
        self._session(key.request_id)
        keys = self._object_keys(key)
        objects = self._cache.read(keys, key.request_id)
        if not objects:
            self._cache.unlock(keys, key.request_id)
            return {"success": False, "data": b"", "context": {}}
        if self._pool.name:
            self._reads[_transfer_id(key, instance_id)] = keys
            slots = [_slot(stored) for stored in objects]
            return {"success": True, "data": b"", "context": {"slots": slots}}
        try:
            return {"success": True, "data": self._inline.encode(objects), "context": {}}
        finally:  # the message is a copy, so nothing has to stay locked
            self._cache.unlock(keys, key.request_id)

    def _commit_retrieve(self, key: Key, instance_id: int) -> bool:
        self._instance(instance_id)
        self._cache.unlock(self._reads.pop(_transfer_id(key, instance_id), ()), key.request_id)
        return True

    # -- helpers --------------------------------------------------------------------------------

    def _clear(self, force: bool) -> None:
        self._cache.clear(force)

    def _instance(self, instance_id: int) -> Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise MessageError(f"instance {instance_id} is not registered")
        instance.last_seen = self._clock()
        return instance

    def _session(self, request_id: str) -> Session:
        session = self._sessions.setdefault(request_id, Session(self._clock()))
        session.last_seen = self._clock()
        return session

    def _hashes(self, key: Key) -> list[bytes]:
        return key.hashes(self.config.chunk_size)

    def _object_keys(self, key: Key) -> list[ObjectKey]:
        rank = key.rank
        return [(digest, rank) for digest in self._hashes(key)]


def _transfer_id(key: Key, instance_id: int) -> TransferId:
    return (instance_id, key.request_id, key.rank, key.start, key.end)


def _slot(stored: StoredObject) -> dict[str, Any]:
    return {
        "offset": stored.offset,
        "length": stored.spec.length,
        "shape": list(stored.spec.shape),
        "dtype": stored.spec.dtype,
    }
