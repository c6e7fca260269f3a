"""What requests and replies say, apart from how each release spells it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from lmcache_fast.errors import ProtocolError
from lmcache_fast.protocol.tokens import PackedTokens

Count = Annotated[int, msgspec.Meta(ge=0)]
#: Part of a message: small ones are copied, large ones stay where they are.
Frame: TypeAlias = "bytes | memoryview"
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """Names a range of tokens of one request, as stored by one rank.

    Args:
        model_name: the name the engine registered.
        world_size: ranks of the engine.
        worker_id: the rank whose objects are meant; None for all, as lookups want it.
        tokens: the request's tokens, from its first one on.
        start: first token of the range.
        end: one past the last token of the range.
        request_id: ties the operations of one request together.
        cache_salt: keeps users apart; "" for none.
        request_configs: what the engine passes on, or None.
        num_kv_readers: readers of each stored object.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    tokens: PackedTokens
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None
    num_kv_readers: int = 1


@dataclass(frozen=True)
class Registration:
    """Tells the server what the chunks of this instance look like."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool


@dataclass(frozen=True)
class Slot:
    """Where one chunk lies in the server's pool: ``offset`` and ``length`` in bytes."""

    offset: Count
    length: Count
    shape: tuple[Count, ...]
    dtype: str


@dataclass(frozen=True)
class PoolInfo:
    """The shared pool: its name ("" for none) and its size in bytes."""

    shm_name: str = ""
    pool_size: Count = 0


@dataclass(frozen=True)
class StoreReservation:
    """The chunks of a range that may be written, in ascending order.

    ``slots`` is empty where chunks travel inside the messages. ``generation`` tells which opening
    of the connection the slots belong to: after a restart of the server its pool is another one.
    ``key`` is what they were reserved, and have to be committed, with; ``deadline`` until when they
    may be written, by :func:`lmcache_fast.clock.now`.
    """

    slots: list[Slot]
    chunk_indices: list[Count]
    generation: int = 0
    key: Key | None = None
    deadline: float = math.inf


@dataclass(frozen=True)
class ReadGrant:
    """The chunks of a range that may be read: as slots of the pool, or as inline ``data``.

    ``data`` is a pickle, an envelope (maybe unpacked), or None; ``generation`` as in
    :class:`StoreReservation`.
    """

    success: bool
    data: Frame | dict[str, Any] | None
    slots: list[Slot]
    generation: int = 0


class _StoreContext(msgspec.Struct):
    slots: list[Slot] = []
    chunk_indices: list[Count] = []


class _StoreReply(msgspec.Struct):
    context: _StoreContext


class _RetrieveContext(msgspec.Struct):
    slots: list[Slot] = []


class _RetrieveReply(msgspec.Struct):
    success: bool
    context: _RetrieveContext | None = None
    data: memoryview | dict[str, Any] | None = None


_POOL = msgspec.msgpack.Decoder(PoolInfo)
_STORE = msgspec.msgpack.Decoder(_StoreReply)
_RETRIEVE = msgspec.msgpack.Decoder(_RetrieveReply)
_CHUNKS = msgspec.msgpack.Decoder(Count | None)
_BOOL = msgspec.msgpack.Decoder(bool)


def _decode(decoder: msgspec.msgpack.Decoder[T], what: str, frame: Frame | None) -> T:
    if frame is None:
        raise ProtocolError(f"{what}: the reply has no result")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: the reply cannot be read: {error}") from error


def decode_pool_info(frame: Frame | None) -> PoolInfo:
    """Read the reply to a registration.

    Raises:
        ProtocolError: it is something else.
    """
    return _decode(_POOL, "register", frame)


def decode_store_reservation(frame: Frame | None, generation: int = 0) -> StoreReservation:
    """Read the reply to prepare_store.

    Raises:
        ProtocolError: it is something else, its chunks are not in ascending order, or it has slots
            but not one for each chunk.
    """
    context = _decode(_STORE, "prepare_store", frame).context
    indices = context.chunk_indices
    if any(a >= b for a, b in itertools.pairwise(indices)):
        raise ProtocolError(f"prepare_store: chunk_indices {indices[:8]}... are not ascending")
    if context.slots and len(context.slots) != len(indices):
        raise ProtocolError(
            f"prepare_store: {len(context.slots)} slots for {len(indices)} chunk_indices"
        )
    return StoreReservation(context.slots, indices, generation)


def decode_read_grant(frame: Frame | None, generation: int = 0) -> ReadGrant:
    """Read the reply to prepare_retrieve; its inline data stays a view of ``frame``.

    Raises:
        ProtocolError: it is something else.
    """
    reply = _decode(_RETRIEVE, "prepare_retrieve", frame)
    slots = reply.context.slots if reply.context else []
    return ReadGrant(reply.success, reply.data or None, slots, generation)


def decode_chunks(frame: Frame | None) -> int | None:
    """Read the reply to wait_prefetch_status: chunks of the hit, or None while it goes on.

    Raises:
        ProtocolError: it is something else.
    """
    return None if frame is None else _decode(_CHUNKS, "wait_prefetch_status", frame)


def decode_bool(what: str, frame: Frame | None) -> bool:
    """Read a yes or no.

    Raises:
        ProtocolError: it is something else.
    """
    return _decode(_BOOL, what, frame)
