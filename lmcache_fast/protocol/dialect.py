"""How each server release spells the protocol. Whatever differs between releases is here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec

from lmcache_fast.errors import InvalidInputError, ProtocolError, UnsupportedServerError
from lmcache_fast.protocol.messages import Frame, Key, Registration
from lmcache_fast.protocol.operations import FIRST_NUMBERS, NUMBERS, Operation

_encode = msgspec.msgpack.Encoder().encode
_NIL = _encode(None)
_EMPTY_ARRAY = _encode([])
_ChunkSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_EMPTY_MAP = 0x80  # msgpack: a map of up to 15 entries is this plus their number


@dataclass(frozen=True)
class Dialect:
    """One release's way to say things.

    Args:
        release: the release, such as ``"0.5.6"``.
        numbers: the number of each operation.
        packed_tokens: keys carry ``token_bytes`` in place of ``token_ids``.
        key_extras: keys carry ``request_configs`` and ``num_kv_readers``.
        group_fields: registrations carry ``group_layouts``, and prepare_store and
            free_lookup_locks take a list more.
        inline_format: how chunks travel inside messages: ``"pickle"`` or ``"envelope"``.
        transfer_mode: what a server that does not name its transfer mode runs.
        owns_locks: free_lookup_locks gives back only what the request's lookup has locked;
            earlier releases unlock whatever they are told.
        control_service: the gRPC service with ping and its like.
    """

    release: str
    numbers: Mapping[Operation, int]
    packed_tokens: bool = False
    key_extras: bool = False
    group_fields: bool = False
    inline_format: str = "pickle"
    transfer_mode: str = "lmcache_driven"
    owns_locks: bool = False
    control_service: str = "ControllerService"

    def name(self, operation: Operation) -> int | str:
        """What the operation is called on the wire."""
        return self.numbers[operation]

    def key(self, key: Key) -> bytes:
        """Encode a key; the tokens are spliced in as they were encoded before."""
        fields: dict[str, Any] = {
            "model_name": key.model_name,
            "world_size": key.world_size,
            "worker_id": key.worker_id,
            "start": key.start,
            "end": key.end,
            "request_id": key.request_id,
            "cache_salt": key.cache_salt,
        }
        if self.key_extras:
            fields["request_configs"] = key.request_configs
            fields["num_kv_readers"] = key.num_kv_readers
        head = bytes([_EMPTY_MAP + len(fields) + 1]) + _encode(fields)[1:]
        if self.packed_tokens:
            tokens = key.tokens.as_big_endian()
            return b"".join((head, _encode("token_bytes"), _binary_head(len(tokens)), tokens))
        return b"".join((head, _encode("token_ids"), key.tokens.as_msgpack_array()))

    def register(self, registration: Registration) -> list[bytes]:
        """Payloads of register."""
        fields = asdict(registration)
        if self.key_extras:
            fields["num_physical_slots"] = None
        if self.group_fields:
            fields["group_layouts"] = []
        return [_encode(fields)]

    def lookup(self, key: Key) -> list[bytes]:
        """Payloads of lookup."""
        return [self.key(key), _encode(key.world_size)]

    def wait_prefetch_status(self, request_id: str, timeout: float) -> list[bytes]:
        """Payloads of wait_prefetch_status; ``timeout`` in seconds."""
        return [_encode(request_id), _encode(float(timeout))]

    def free_lookup_locks(self, key: Key) -> list[bytes]:
        """Payloads of free_lookup_locks."""
        payloads = [self.key(key), _encode(key.world_size)]
        return [*payloads, _EMPTY_ARRAY] if self.group_fields else payloads

    def prepare_store(self, key: Key, instance_id: int) -> list[bytes]:
        """Payloads of prepare_store."""
        payloads = self.transfer(key, instance_id)
        return [*payloads, _EMPTY_ARRAY] if self.group_fields else payloads

    def data_head(self, num_bytes: int) -> bytes:
        """What stands before the bytes of chunks that travel in commit_store.

        Raises:
            InvalidInputError: they are too many for one message.
        """
        return _binary_head(num_bytes)

    def commit_store(self, key: Key, instance_id: int, data: Frame | None) -> list[Frame]:
        """Payloads of commit_store; ``data``: :meth:`data_head` and chunks, None if in slots."""
        return [*self.transfer(key, instance_id), self.data_head(0) if data is None else data]

    def transfer(self, key: Key, instance_id: int) -> list[bytes]:
        """Payloads of prepare_retrieve and commit_retrieve."""
        return [self.key(key), _encode(instance_id)]

    def instance(self, instance_id: int | None) -> list[bytes]:
        """Payloads of unregister and ping."""
        return [_NIL if instance_id is None else _encode(instance_id)]

    def session(self, request_id: str) -> list[bytes]:
        """Payloads of end_session."""
        return [_encode(request_id)]

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """Pick what a client needs to know out of ``/config``.

        Raises:
            ProtocolError: a field is missing or of the wrong type.
        """
        server = _section(config, "mp")
        storage = _section(config, "storage_manager")
        l1 = _section(storage, "l1_manager_config")
        fields = {
            "chunk_size": server.get("chunk_size"),
            "shm_name": server.get("shm_name") or "",
            "transfer_mode": server.get("supported_transfer_mode") or self.transfer_mode,
            "transport": server.get("transport") or "zmq",
            "cpu_workers": server.get("max_cpu_workers"),
            "read_ttl": l1.get("read_ttl_seconds"),
            "write_ttl": l1.get("write_ttl_seconds"),
        }
        try:
            return msgspec.convert({k: v for k, v in fields.items() if v is not None}, Settings)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"/config of a {self.release} server: {error}") from error


class Settings(msgspec.Struct, frozen=True):
    """What a client needs to know out of a server's configuration; times in seconds."""

    chunk_size: _ChunkSize
    transfer_mode: str
    transport: str
    shm_name: str = ""
    cpu_workers: int | None = None
    read_ttl: _Seconds = 300.0
    write_ttl: _Seconds = 600.0


def _binary_head(num_bytes: int) -> bytes:
    """What msgpack puts before a byte string, with the length in four bytes."""
    if num_bytes >= 2**32:
        raise InvalidInputError(
            f"the message has {num_bytes} bytes; the protocol allows less than 4 GiB at once"
        )
    return b"\xc6" + num_bytes.to_bytes(4, "big")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


_V052 = Dialect("0.5.2", FIRST_NUMBERS, transfer_mode="auto")
_V053 = replace(_V052, release="0.5.3", numbers=NUMBERS)
_V054 = replace(_V053, release="0.5.4", transfer_mode="lmcache_driven")
_V055 = replace(_V054, release="0.5.5", key_extras=True)
_V056 = replace(_V055, release="0.5.6", owns_locks=True)
_V057 = replace(
    _V056,
    release="0.5.7",
    packed_tokens=True,
    group_fields=True,
    inline_format="envelope",
    control_service="ManagementService",
)

#: By release; the last one is the newest that is known.
DIALECTS: dict[tuple[int, int, int], Dialect] = {
    (0, 5, 2): _V052,
    (0, 5, 3): _V053,
    (0, 5, 4): _V054,
    (0, 5, 5): _V055,
    (0, 5, 6): _V056,
    (0, 5, 7): _V057,
}
_OLDEST, _NEWEST = min(DIALECTS), max(DIALECTS)


def dialect_for(version: str) -> Dialect:
    """Return the dialect of a server that names ``version``, such as ``"0.5.6-gabc"``.

    A release newer than every known one is taken for the newest known, with a warning.

    Raises:
        UnsupportedServerError: older than 0.5.2, or no version at all.
    """
    match = re.match(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise UnsupportedServerError(
            f"the server names its version {version!r}; expected one such as '0.5.6-gabc'"
        )
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    if release < _OLDEST:
        raise UnsupportedServerError(
            f"the server runs LMCache {version}; expected {DIALECTS[_OLDEST].release} or newer"
        )
    if release > _NEWEST:
        newest = DIALECTS[_NEWEST]
        warnings.warn(
            f"the server runs LMCache {version}, newer than any release known here; "
            f"it is spoken to like {newest.release}",
            UserWarning,
            stacklevel=2,
        )
        return newest
    return DIALECTS[release]
