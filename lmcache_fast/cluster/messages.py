"""What travels between the driver and the nodes: token ids, text, metrics and pickled edits.

Encoded by us and not left to Ray, so that its size is known. Token ids are packed as little-endian
uint32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from lmcache_fast.cluster.routing import Tokens
from lmcache_fast.errors import InvalidInputError
from lmcache_fast.metrics import StreamPerfMetrics

_T = TypeVar("_T")


class Phase(msgspec.Struct, array_like=True, frozen=True):
    """What is done to every stream: generating with ``params``, or an edit where there is one.

    Args:
        number: counts the phases of all batches of one driver.
        params: the engine's parameters.
        edit: the pickled edit; empty to generate.
        timeout: seconds that an edit waits for a stream's chunks.
        poll_interval: seconds between two look-ups.
        allow_partial: whether an edit is content with one chunk.
    """

    number: int
    params: dict[str, Any] = {}
    edit: bytes = b""
    timeout: float = 0.0
    poll_interval: float = 0.0
    allow_partial: bool = False


class Done(msgspec.Struct, array_like=True, frozen=True):
    """A phase that a stream has behind it, with what the engine generated in it."""

    phase: int
    tokens: bytes = b""
    text: str = ""


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """A stream that the node does not know yet.

    Args:
        tokens: the prompt.
        cache_salt: the stream's salt.
        isolate_edits: whether edits get salts of their own.
        is_displaced: whether it was to run on a node that is lost.
        history: the phases behind it.
    """

    tokens: bytes
    cache_salt: str
    isolate_edits: bool
    is_displaced: bool = False
    history: list[Done] = []


class Parcel(msgspec.Struct, array_like=True, frozen=True):
    """Streams to run one phase of, by id; those that the node does not know come with openings."""

    phase: int
    streams: dict[str, Opening | None]


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What became of one stream.

    Args:
        tokens: what was generated.
        text: its text.
        num_tokens: how many tokens the stream's KV stands for now.
        done: whether the engine ended before ``max_tokens``.
        input_tokens: tokens that were sent to the engine.
        duration: seconds that it took.
        ttft: seconds to the first token.
        failure: the pickled exception; empty where it went well.
        is_known: whether the node has the stream now.
        is_ours: whether the failure may be the node's: neither the caller's nor his function's.
    """

    tokens: bytes = b""
    text: str = ""
    num_tokens: int = 0
    done: bool = False
    input_tokens: int = 0
    duration: float = 0.0
    ttft: float = 0.0
    failure: bytes = b""
    is_known: bool = False
    is_ours: bool = False

    @property
    def output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) // 4

    @property
    def perf(self) -> StreamPerfMetrics:
        """The outcome as a stream measures it, without the time of each token."""
        seconds = self.duration or float("inf")
        return StreamPerfMetrics(
            duration=self.duration,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            input_tput=self.input_tokens / seconds,
            output_tput=self.output_tokens / seconds,
            ttft=self.ttft,
        )


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcomes of a parcel, in its order, and why the node can do no more, if so."""

    outcomes: list[Outcome]
    sick: str = ""


class Prompts(msgspec.Struct, array_like=True, frozen=True):
    """Prompts to look up: each one's tokens and salt."""

    tokens: list[bytes]
    salts: list[str]


class Hits(msgspec.Struct, array_like=True, frozen=True):
    """How many leading tokens of each prompt are cached, as packed int64."""

    counts: bytes
    sick: str = ""


def encode(message: msgspec.Struct) -> bytes:
    """Return a message's bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return the message of ``kind`` that ``data`` holds."""
    return msgspec.msgpack.decode(data, type=kind)


def pack(tokens: Tokens | list[int]) -> bytes:
    """Return token ids as bytes."""
    return np.asarray(tokens, "<u4").tobytes()


def unpack(data: bytes) -> Tokens:
    """Return the token ids of ``data``, read-only."""
    return np.frombuffer(data, "<u4")


def plain(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the engine's parameters if they can be sent.

    Raises:
        InvalidInputError: one of them is no JSON value.
    """
    try:
        decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(params)))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{where}: sampling_params cannot be sent: {error}") from error
    return decoded
