"""How a release spells the protocol over gRPC: protobuf messages to methods of services.

Requests are written as protobuf here. Replies are turned into what the same operation answers over
ZeroMQ, so that everything above the channels reads one kind of reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from lmcache_fast.errors import ProtocolError
from lmcache_fast.protocol import protobuf
from lmcache_fast.protocol.dialect import Dialect
from lmcache_fast.protocol.messages import Frame, Key, Registration
from lmcache_fast.protocol.operations import Operation

_encode = msgspec.msgpack.Encoder().encode
_LOOKUPS = frozenset(
    (
        Operation.LOOKUP,
        Operation.QUERY_PREFETCH_STATUS,
        Operation.WAIT_PREFETCH_STATUS,
        Operation.FREE_LOOKUP_LOCKS,
        Operation.END_SESSION,
    )
)
_CONTROL = frozenset((Operation.CLEAR, Operation.GET_CHUNK_SIZE, Operation.PING))


@dataclass(frozen=True)
class GrpcDialect(Dialect):
    """A release's way to say things over gRPC; each request is one payload, a message."""

    @classmethod
    def of(cls, dialect: Dialect) -> GrpcDialect:
        """Return the gRPC side of a release."""
        return cls(**{field.name: getattr(dialect, field.name) for field in fields(dialect)})

    def name(self, operation: Operation) -> str:
        """The path of the operation's method."""
        service = "EngineDrivenService"
        if operation in _LOOKUPS:
            service = "LookupService"
        elif operation in _CONTROL:
            service = self.control_service
        return f"/lmcache.mp.{service}/{_method(operation)}"

    def key(self, key: Key) -> bytes:
        """Encode a key; the tokens are spliced in as they were encoded before."""
        tokens = key.tokens.as_big_endian() if self.packed_tokens else key.tokens.as_varints()
        configs = None if key.request_configs is None else _encode(key.request_configs)
        return b"".join(
            (
                protobuf.data(1, key.model_name),
                protobuf.integer(2, key.world_size),
                protobuf.integer(3, key.worker_id),
                protobuf.head(4, len(tokens)),
                tokens,
                protobuf.integer(5, key.start),
                protobuf.integer(6, key.end),
                protobuf.data(7, key.request_id),
                protobuf.data(8, key.cache_salt),
                protobuf.data(9, configs),
                protobuf.integer(10, key.num_kv_readers),
            )
        )

    def register(self, registration: Registration) -> list[bytes]:
        """Payloads of register."""
        message = (
            protobuf.integer(1, registration.instance_id),
            protobuf.data(2, registration.model_name),
            protobuf.integer(3, registration.world_size),
            protobuf.integer(4, registration.block_size),
            protobuf.integer(5, registration.num_layers),
            protobuf.integer(6, registration.hidden_dim_size),
            protobuf.data(7, registration.dtype_str),
            protobuf.integer(8, registration.use_mla),
        )
        return [b"".join(message)]

    def lookup(self, key: Key) -> list[bytes]:
        """Payloads of lookup."""
        return [self._with_key(key, key.world_size)]

    def wait_prefetch_status(self, request_id: str, timeout: float) -> list[bytes]:
        """Payloads of wait_prefetch_status; ``timeout`` in seconds."""
        return [protobuf.data(1, request_id) + protobuf.double(2, timeout)]

    def free_lookup_locks(self, key: Key) -> list[bytes]:
        """Payloads of free_lookup_locks."""
        return [self._with_key(key, key.world_size)]

    def prepare_store(self, key: Key, instance_id: int) -> list[bytes]:
        """Payloads of prepare_store."""
        return self.transfer(key, instance_id)

    def data_head(self, num_bytes: int) -> bytes:
        """What stands before the bytes of chunks that travel in commit_store."""
        return protobuf.head(3, num_bytes)

    def commit_store(self, key: Key, instance_id: int, data: Frame | None) -> list[Frame]:
        """Payloads of commit_store; ``data``: :meth:`data_head` and chunks, None if in slots."""
        chunks = self.data_head(0) if data is None else data
        return [b"".join((self._with_key(key, instance_id), chunks))]

    def transfer(self, key: Key, instance_id: int) -> list[bytes]:
        """Payloads of prepare_retrieve and commit_retrieve."""
        return [self._with_key(key, instance_id)]

    def instance(self, instance_id: int | None) -> list[bytes]:
        """Payloads of unregister and ping."""
        return [protobuf.integer(1, instance_id)]

    def session(self, request_id: str) -> list[bytes]:
        """Payloads of end_session."""
        return [protobuf.data(1, request_id)]

    def _with_key(self, key: Key, number: int) -> bytes:
        return protobuf.data(1, self.key(key)) + protobuf.integer(2, number)


def read_reply(path: str, message: bytes) -> bytes | None:
    """Turn the reply of the method ``path`` into the result frame that ZeroMQ would bring.

    Raises:
        ProtocolError: it is no such reply.
    """
    read = _REPLIES.get(path.rpartition("/")[2])
    try:
        return None if read is None else read(protobuf.read(message))
    except (ProtocolError, TypeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{path}: the reply cannot be read: {error}") from error


def _method(operation: Operation) -> str:
    return "".join(word.capitalize() for word in operation.value.split("_"))


_Fields = dict[int, protobuf.Value]


def _count(fields: _Fields) -> bytes | None:
    return _encode(fields[1]) if 1 in fields else None


def _answer(fields: _Fields) -> bytes:
    return _encode(bool(fields.get(1, 0)))


def _pool(fields: _Fields) -> bytes:
    name = str(fields.get(1, b""), "utf-8")  # type: ignore[arg-type]
    return _encode({"shm_name": name, "pool_size": fields.get(2, 0)})


def _reservation(fields: _Fields) -> bytes:
    return b"".join((b"\x81", _encode("context"), _context(fields.get(1))))


def _grant(fields: _Fields) -> bytes:
    data = fields.get(2, b"")
    parts = (
        *(b"\x83", _encode("success"), _answer(fields)),
        *(_encode("context"), _context(fields.get(3))),
        *(_encode("data"), _encode(data)),
    )
    return b"".join(parts)


def _context(value: protobuf.Value | None) -> Any:
    """A context comes packed with msgpack already; one without anything in it does not come."""
    return value or b"\x80"


_REPLIES: dict[str, Callable[[_Fields], bytes | None]] = {
    _method(operation): read
    for operation, read in {
        Operation.QUERY_PREFETCH_STATUS: _count,
        Operation.WAIT_PREFETCH_STATUS: _count,
        Operation.GET_CHUNK_SIZE: _count,
        Operation.REGISTER: _pool,
        Operation.PREPARE_STORE: _reservation,
        Operation.COMMIT_STORE: _answer,
        Operation.PREPARE_RETRIEVE: _grant,
        Operation.COMMIT_RETRIEVE: _answer,
        Operation.PING: _answer,
    }.items()
}
