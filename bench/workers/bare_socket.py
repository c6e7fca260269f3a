"""The server's own share of a request: its operations over a bare socket, nothing in between."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
import numpy as np
import zmq

from lmcache_fast import KVClient
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.tokens import PackedTokens

_STORE = (Operation.PREPARE_STORE, Operation.COMMIT_STORE, Operation.END_SESSION)
_RETRIEVE = (
    Operation.LOOKUP,
    Operation.WAIT_PREFETCH_STATUS,
    Operation.PREPARE_RETRIEVE,
    Operation.COMMIT_RETRIEVE,
    Operation.END_SESSION,
)
#: Those that a client has to wait for.
WAITED_FOR = {"store": _STORE[:2], "retrieve": _RETRIEVE[:3]}
_PAUSE = 0.02  # seconds, after which the server is as cold as it is between two requests


def round_trips(client: KVClient, tokens: list[int]) -> dict[str, dict[str, float]]:
    """Store and retrieve ``tokens`` without moving a byte; return each operation's seconds."""
    return {
        "store": _run(client, tokens, _STORE),
        "retrieve": _run(client, tokens, _RETRIEVE),
    }


def _run(client: KVClient, tokens: list[int], steps: tuple[Operation, ...]) -> dict[str, float]:
    dialect = client._connection.info.dialect
    payloads = _payloads(client, tokens, uuid.uuid4().hex)
    seconds = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(client._connection.url)
        time.sleep(_PAUSE)
        for number, operation in enumerate(steps):
            head = [msgspec.msgpack.encode(number), msgspec.msgpack.encode(dialect.name(operation))]
            begin = time.perf_counter()
            socket.send_multipart([*head, *payloads[operation]])
            socket.recv_multipart()
            seconds[operation.value] = time.perf_counter() - begin
    return seconds


def _payloads(client: KVClient, tokens: list[int], request_id: str) -> dict[Operation, Any]:
    dialect, instance = client._connection.info.dialect, client.instance_id

    def key(worker_id: int | None) -> Key:
        packed = PackedTokens(np.array([*tokens, 0], np.uint32))
        return Key(client.model_name, 1, worker_id, packed, 0, len(tokens), request_id)

    return {
        Operation.PREPARE_STORE: dialect.prepare_store(key(0), instance),
        Operation.COMMIT_STORE: dialect.commit_store(key(0), instance, None),
        Operation.LOOKUP: dialect.lookup(key(None)),
        Operation.WAIT_PREFETCH_STATUS: dialect.wait_prefetch_status(request_id, 2.0),
        Operation.PREPARE_RETRIEVE: dialect.transfer(key(0), instance),
        Operation.COMMIT_RETRIEVE: dialect.transfer(key(0), instance),
        Operation.END_SESSION: dialect.session(request_id),
    }
