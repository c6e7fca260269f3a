"""ServerConfig: everything the embedded server can be told."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from lmcache_fast.errors import InvalidInputError

#: Releases whose protocol the server speaks.
PROTOCOLS = ("0.5.6", "0.5.7")
TRANSFER_MODES = ("auto", "engine_driven")
#: Objects start at multiples of this many bytes.
ALIGNMENT = 4096


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one embedded server; the defaults are those of a real one.

    Args:
        pool_bytes: size of the pool that holds the chunks.
        chunk_size: tokens a chunk.
        shm_name: the shared segment is ``/dev/shm/lmcache_l1_pool_<shm_name>``; empty for none.
        lazy: keep the pool in private memory that is only taken when written: no shared memory.
        host: address of the message port, or a whole ``ipc://`` address.
        port: message port; 0 takes a free one.
        http_host: address of the HTTP side.
        http_port: HTTP port; 0 takes a free one.
        protocol: release whose protocol is spoken, one of :data:`PROTOCOLS`.
        transfer_mode: one of :data:`TRANSFER_MODES`; published, the two behave alike here.
        read_ttl: seconds a lookup's lock lives.
        write_ttl: seconds a reservation lives.
        populate: give the shared segment its pages at the start. Without this a full ``/dev/shm``
            kills whoever writes next.
        reap_timeout: seconds of silence after which an instance that has pinged is dropped.
        registration_grace: the same for an instance that never pinged.
        session_ttl: seconds of silence after which a session is forgotten.

    Raises:
        InvalidInputError: a value is out of range.
    """

    pool_bytes: int = 1 << 28
    chunk_size: int = 256
    shm_name: str = ""
    lazy: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    http_host: str = "127.0.0.1"
    http_port: int = 0
    protocol: str = "0.5.6"
    transfer_mode: str = "auto"
    read_ttl: float = 300.0
    write_ttl: float = 600.0
    populate: bool = True
    reap_timeout: float = 120.0
    registration_grace: float = 3600.0
    session_ttl: float = 600.0
    server_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def __post_init__(self) -> None:
        """Check what the rest relies on."""
        for name in ("pool_bytes", "chunk_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"ServerConfig: {name} is {getattr(self, name)}; expected a positive number"
                )
        for name in ("read_ttl", "write_ttl", "reap_timeout", "registration_grace", "session_ttl"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(
                    f"ServerConfig: {name} is {getattr(self, name)}; expected seconds above 0"
                )
        for name in ("port", "http_port"):
            if not 0 <= getattr(self, name) < 1 << 16:
                raise InvalidInputError(
                    f"ServerConfig: {name} is {getattr(self, name)}; expected 0 to 65535"
                )
        if self.protocol not in PROTOCOLS:
            raise InvalidInputError(
                f"ServerConfig: protocol is {self.protocol!r}; expected one of {PROTOCOLS}"
            )
        if self.transfer_mode not in TRANSFER_MODES:
            raise InvalidInputError(
                f"ServerConfig: transfer_mode is {self.transfer_mode!r}; "
                f"expected one of {TRANSFER_MODES}"
            )
        if "/" in self.shm_name or "\0" in self.shm_name or len(self.shm_name) > 200:
            raise InvalidInputError(
                f"ServerConfig: shm_name is {self.shm_name!r}; expected a file name without '/'"
            )

    @property
    def version(self) -> str:
        """What ``/version`` answers."""
        return f"{self.protocol}-fast"

    @property
    def shares_memory(self) -> bool:
        """Whether clients are offered the pool as shared memory."""
        return bool(self.shm_name) and not self.lazy

    def to_json(self, port: int, http_port: int) -> dict[str, Any]:
        """Return what ``/config`` answers, at the places where a real server has it."""
        eviction = {"eviction_policy": "LRU"}
        shm_name = self.shm_name if self.shares_memory else ""
        l1 = {
            "memory_config": {
                "size_in_bytes": self.pool_bytes,
                "use_lazy": self.lazy,
                "align_bytes": ALIGNMENT,
                "shm_name": shm_name,
            },
            "write_ttl_seconds": self.write_ttl,
            "read_ttl_seconds": self.read_ttl,
            "eviction": eviction,
        }
        return {
            "mp": {
                "transport": "zmq",
                "host": self.host,
                "port": port,
                "chunk_size": self.chunk_size,
                "max_workers": 1,
                "max_cpu_workers": 1,
                "hash_algorithm": "blake3",
                "supported_transfer_mode": self.transfer_mode,
                "shm_name": shm_name,
                "instance_id": self.server_id,
                "worker_reap_timeout_seconds": self.reap_timeout,
                "worker_registration_grace_seconds": self.registration_grace,
                "session_ttl_seconds": self.session_ttl,
            },
            "storage_manager": {
                "l1_manager_config": l1,
                "l1_manager_configs": [l1],
                "eviction_config": eviction,
            },
            "http": {"http_host": self.http_host, "http_port": http_port},
        }
