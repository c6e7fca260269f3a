"""The server's side of the wire: what each operation's payloads must look like."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from lmcache_fast.protocol.operations import NUMBERS, Operation
from lmcache_fast.serve.server.hashing import TOKEN_BYTES, chunk_hashes

_SALT_LENGTH = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")
_BY_NUMBER = {number: operation for operation, number in NUMBERS.items()}

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class MessageError(ValueError):
    """A request that a real server answers with silence."""


class Key(msgspec.Struct, kw_only=True):
    """Which chunks of which prompt an operation is about."""

    model_name: str
    world_size: Count
    worker_id: int | None
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None
    num_kv_readers: int = 0

    def __post_init__(self) -> None:
        """Refuse what no client may ask for."""
        if len(self.cache_salt) > _SALT_LENGTH or _SALT_FORBIDDEN & set(self.cache_salt):
            raise MessageError(f"cache_salt {self.cache_salt!r} is too long or has one of @ / \\")
        if self.worker_id is not None and not 0 <= self.worker_id < self.world_size:
            raise MessageError(
                f"worker_id {self.worker_id} is outside world_size {self.world_size}"
            )

    def packed_tokens(self) -> bytes:
        """Return the token ids as big-endian uint32."""
        raise NotImplementedError

    @property
    def ranks(self) -> range:
        """The ranks that the key is about: all of them where it names no worker."""
        return range(self.world_size) if self.worker_id is None else _one(self.worker_id)

    @property
    def rank(self) -> int:
        """The one rank that a transfer is about."""
        if len(self.ranks) != 1:
            raise MessageError("a transfer needs a worker_id where world_size is above 1")
        return self.ranks[0]

    def hashes(self, chunk_size: int, whole: bool = False) -> list[bytes]:
        """Return the hashes of the chunks in ``[start, end)``, or ``[0, end)`` with ``whole``."""
        tokens = self.packed_tokens()
        length = len(tokens) // TOKEN_BYTES
        if not 0 <= self.start <= self.end <= length:
            raise MessageError(f"range {self.start}..{self.end} is outside {length} tokens")
        tokens = tokens[: self.end * TOKEN_BYTES]
        hashes = chunk_hashes(tokens, chunk_size, self.model_name, self.world_size, self.cache_salt)
        return hashes if whole else hashes[self.start // chunk_size :]


class ListKey(Key, kw_only=True):
    """The key up to release 0.5.6."""

    token_ids: list[TokenId]

    def packed_tokens(self) -> bytes:
        """Return the token ids as big-endian uint32."""
        return np.asarray(self.token_ids, dtype=">u4").tobytes()


class PackedKey(Key, kw_only=True):
    """The key from release 0.5.7 on."""

    token_bytes: bytes

    def packed_tokens(self) -> bytes:
        """Return the token ids as big-endian uint32."""
        if len(self.token_bytes) % TOKEN_BYTES:
            raise MessageError(
                f"token_bytes has {len(self.token_bytes)} bytes; expected 4 for each token"
            )
        return self.token_bytes


class Registration(msgspec.Struct):
    """How an engine's or SDK's chunks look.

    ``num_kv_heads`` is our own optional field: a real server ignores it, ours publishes it, so that
    clients that rotate keys need not be told.
    """

    instance_id: int
    model_name: str
    world_size: Count
    block_size: Count
    num_layers: Count
    hidden_dim_size: Count
    dtype_str: str
    use_mla: bool
    num_physical_slots: Count | None = None
    group_layouts: list[Any] = []
    num_kv_heads: Count | None = None


def payload_types(protocol: str) -> dict[Operation, tuple[Any, ...]]:
    """Return the payloads that each operation takes in a release, in order."""
    packed = protocol != "0.5.6"
    key: Any = PackedKey if packed else ListKey
    ranges: tuple[Any, ...] = (list[Any],) if packed else ()
    return {
        Operation.LOOKUP: (key, int),
        Operation.QUERY_PREFETCH_STATUS: (str,),
        Operation.WAIT_PREFETCH_STATUS: (str, float),
        Operation.FREE_LOOKUP_LOCKS: (key, int, *ranges),
        Operation.END_SESSION: (str,),
        Operation.REGISTER: (Registration,),
        Operation.UNREGISTER: (int,),
        Operation.PREPARE_STORE: (key, int, *ranges),
        Operation.COMMIT_STORE: (key, int, memoryview),
        Operation.PREPARE_RETRIEVE: (key, int),
        Operation.COMMIT_RETRIEVE: (key, int),
        Operation.CLEAR: (bool,),
        Operation.GET_CHUNK_SIZE: (),
        Operation.PING: (int | None,),
        Operation.NOOP: (),
    }


def decode_operation(frame: bytes) -> Operation:
    """Return the operation that a frame names by number or by name.

    Raises:
        MessageError: there is no such operation.
    """
    value = msgspec.msgpack.decode(frame)
    try:
        return Operation(value) if isinstance(value, str) else _BY_NUMBER[value]
    except (KeyError, ValueError, TypeError):
        raise MessageError(f"operation {value!r} is unknown") from None


def _one(value: int) -> range:
    return range(value, value + 1)
