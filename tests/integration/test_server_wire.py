"""The embedded server as a client sees it on the wire."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
import zmq

from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.operations import NUMBERS, Operation
from lmcache_fast.serve.server import EmbeddedServer
from lmcache_fast.transport import inline, pickle

CHUNK = 4
LAYOUT = KVLayout(3, 2, 8, torch.bfloat16, block_size=2)
SHAPE = LAYOUT.object_shape(CHUNK)
LENGTH = LAYOUT.token_bytes * CHUNK
PROTOCOLS = ["0.5.6", "0.5.7"]


class Wire:
    """A client that says exactly what it is told to."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.packed = server.config.protocol == "0.5.7"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(server.url)
        self._sent = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, operation: int | str, *payloads: Any) -> int:
        self._sent += 1
        self._socket.send_multipart(
            [msgspec.msgpack.encode(part) for part in (self._sent, operation, *payloads)]
        )
        return self._sent

    def receive(self) -> tuple[int, Any]:
        """Return the next reply's number and result."""
        assert self._socket.poll(30_000), "no reply in 30 s"
        frames = [msgspec.msgpack.decode(frame) for frame in self._socket.recv_multipart()]
        return frames[0], frames[2] if len(frames) == 3 else None

    def call(self, operation: Operation, *payloads: Any) -> Any:
        number = self.send(NUMBERS[operation], *payloads)
        answered, result = self.receive()
        assert answered == number
        return result

    def is_silent(self, operation: int | str, *payloads: Any) -> bool:
        """Whether a request gets no reply: requests are answered in order."""
        self.send(operation, *payloads)
        last = self.send(NUMBERS[Operation.NOOP])
        return self.receive()[0] == last

    def key(self, tokens: list[int], request: str, **changes: Any) -> dict[str, Any]:
        packed = np.asarray(tokens, dtype=">u4").tobytes()
        return {
            "model_name": "model",
            "world_size": 1,
            "worker_id": 0,
            "start": 0,
            "end": len(tokens) // CHUNK * CHUNK,
            "request_id": request,
            "num_kv_readers": 1,
            **({"token_bytes": packed} if self.packed else {"token_ids": tokens}),
            **changes,
        }

    def register(self, instance: int = 1, **changes: Any) -> Any:
        payload = {
            "instance_id": instance,
            "model_name": "model",
            "world_size": 1,
            "block_size": 2,
            "num_layers": 3,
            "hidden_dim_size": 16,
            "dtype_str": "bfloat16",
            "use_mla": False,
            **changes,
        }
        return self.call(Operation.REGISTER, payload)

    def prepare_store(self, key: dict[str, Any], instance: int = 1) -> Any:
        extra: list[Any] = [[]] if self.packed else []
        return self.call(Operation.PREPARE_STORE, key, instance, *extra)["context"]

    def commit_store(self, key: dict[str, Any], data: bytes = b"", instance: int = 1) -> Any:
        return self.call(Operation.COMMIT_STORE, key, instance, data)

    def lookup(self, key: dict[str, Any]) -> int:
        self.call(Operation.LOOKUP, {**key, "worker_id": None}, 1)
        result = self.call(Operation.WAIT_PREFETCH_STATUS, key["request_id"], 5.0)
        assert isinstance(result, int)
        return result

    def free(self, key: dict[str, Any]) -> None:
        extra: list[Any] = [[]] if self.packed else []
        self.call(Operation.FREE_LOOKUP_LOCKS, key, 1, *extra)

    def fast(self) -> dict[str, int]:
        counters = httpx.get(f"{self.server.http_url}/status").json()["fast"]
        assert isinstance(counters, dict)
        return counters


def serve(protocol: str, shared: bool) -> EmbeddedServer:
    name = f"test_wire_{uuid.uuid4().hex}" if shared else ""
    return EmbeddedServer(pool_bytes=8 * 4096, chunk_size=CHUNK, shm_name=name, protocol=protocol)


@pytest.fixture(params=PROTOCOLS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """A registered client of a server with shared memory."""
    with serve(request.param, shared=True) as server:
        client = Wire(server)
        client.register()
        yield client
        client.close()


def write(server: EmbeddedServer, slot: dict[str, Any], data: bytes) -> None:
    with open(f"/dev/shm/{server.shm_name}", "r+b") as segment:
        os.pwrite(segment.fileno(), data, slot["offset"])


def read(server: EmbeddedServer, slot: dict[str, Any]) -> bytes:
    with open(f"/dev/shm/{server.shm_name}", "rb") as segment:
        return os.pread(segment.fileno(), slot["length"], slot["offset"])


def store(wire: Wire, tokens: list[int], request: str = "store") -> list[bytes]:
    """Store a prompt; return the bytes of its chunks."""
    key = wire.key(tokens, request)
    context = wire.prepare_store(key)
    written = []
    for slot in context["slots"]:
        written.append(os.urandom(slot["length"]))
        write(wire.server, slot, written[-1])
    assert wire.commit_store(key)
    wire.call(Operation.END_SESSION, request)
    return written


def test_a_shared_store_and_retrieve_keep_every_byte_and_leave_no_lock(wire: Wire) -> None:
    tokens = list(range(3 * CHUNK + 1))
    key = wire.key(tokens, "store")
    context = wire.prepare_store(key)
    assert context["chunk_indices"] == [0, 1, 2]
    assert {(s["length"], tuple(s["shape"]), s["dtype"]) for s in context["slots"]} == {
        (LENGTH, SHAPE, "bfloat16")
    }
    assert wire.lookup(wire.key(tokens, "early")) == 0
    for index, slot in enumerate(context["slots"]):
        write(wire.server, slot, bytes([index]) * LENGTH)
    assert wire.commit_store(key) is True

    key = wire.key(tokens, "retrieve")
    assert wire.lookup(key) == 3
    assert wire.fast()["read_locked_objects"] == 3
    grant = wire.call(Operation.PREPARE_RETRIEVE, key, 1)
    assert (grant["success"], grant["data"]) == (True, b"")
    chunks = [read(wire.server, slot) for slot in grant["context"]["slots"]]
    assert chunks == [bytes([index]) * LENGTH for index in range(3)]
    assert wire.call(Operation.COMMIT_RETRIEVE, key, 1) is True
    for request in ("store", "early", "retrieve"):
        wire.call(Operation.END_SESSION, request)
    fast = wire.fast()
    assert (fast["objects"], fast["locked_objects"], fast["sessions"]) == (3, 0, 0)
    assert (fast["pending_stores"], fast["pending_retrieves"]) == (0, 0)


def test_a_second_store_reserves_only_what_is_missing(wire: Wire) -> None:
    store(wire, list(range(2 * CHUNK)))
    key = wire.key(list(range(3 * CHUNK)), "more")
    assert wire.prepare_store(key)["chunk_indices"] == [2]
    assert wire.commit_store(key) is True
    assert wire.prepare_store(key) == {"slots": [], "chunk_indices": []}
    assert wire.commit_store(key) is False


def test_slots_of_a_range_are_numbered_from_its_start(wire: Wire) -> None:
    tokens = list(range(3 * CHUNK))
    assert wire.prepare_store(wire.key(tokens, "r", start=CHUNK))["chunk_indices"] == [0, 1]


def test_a_full_pool_takes_a_beginning_and_no_more(wire: Wire) -> None:
    tokens = list(range(10 * CHUNK))
    key = wire.key(tokens, "big")
    assert wire.prepare_store(key)["chunk_indices"] == list(range(8))
    wire.commit_store(key)
    assert wire.lookup(wire.key(tokens, "look")) == 8


def test_locks_of_a_lookup_can_be_given_back_without_a_retrieve(wire: Wire) -> None:
    tokens = list(range(2 * CHUNK))
    store(wire, tokens)
    key = wire.key(tokens, "look")
    assert wire.lookup(key) == 2
    wire.free({**key, "worker_id": None})
    assert wire.fast()["locked_objects"] == 0


def test_one_request_cannot_give_back_anothers_locks(wire: Wire) -> None:
    tokens = list(range(CHUNK))
    store(wire, tokens)
    assert wire.lookup(wire.key(tokens, "holder")) == 1
    wire.free(wire.key(tokens, "other"))
    assert wire.fast()["locked_objects"] == 1


def test_a_retrieve_needs_a_lookup_first(wire: Wire) -> None:
    tokens = list(range(CHUNK))
    store(wire, tokens)
    assert not wire.call(Operation.PREPARE_RETRIEVE, wire.key(tokens, "r"), 1)["success"]


def test_a_lookups_result_is_told_once(wire: Wire) -> None:
    tokens = list(range(CHUNK))
    store(wire, tokens)
    assert wire.lookup(wire.key(tokens, "r")) == 1
    assert wire.call(Operation.QUERY_PREFETCH_STATUS, "r") == 0


def test_another_salt_or_model_sees_nothing(wire: Wire) -> None:
    tokens = list(range(CHUNK))
    store(wire, tokens)
    assert wire.lookup(wire.key(tokens, "a", cache_salt="x")) == 0
    assert wire.lookup(wire.key(tokens, "b", model_name="unregistered")) == 0


def test_unregistering_drops_half_written_stores(wire: Wire) -> None:
    key = wire.key(list(range(CHUNK)), "r")
    assert wire.prepare_store(key)["chunk_indices"] == [0]
    wire.call(Operation.UNREGISTER, 1)
    fast = wire.fast()
    assert (fast["objects"], fast["pending_stores"], fast["instances"]) == (0, 0, 0)


def test_what_a_real_server_answers_with_silence_gets_silence(wire: Wire) -> None:
    key = wire.key(list(range(CHUNK)), "r")
    extra: list[Any] = [[]] if wire.packed else []
    prepare = NUMBERS[Operation.PREPARE_STORE]
    assert wire.is_silent(prepare, key, 999, *extra)  # an unknown instance
    assert wire.is_silent(prepare, key)  # too few payloads
    assert wire.is_silent(prepare, {**key, "cache_salt": "a@b"}, 1, *extra)
    assert wire.is_silent(prepare, {**key, "end": 2 * CHUNK}, 1, *extra)
    assert wire.is_silent(NUMBERS[Operation.LOOKUP], {**key, "num_kv_readers": 0}, 1)
    assert wire.is_silent(99) and wire.is_silent("nonsense") and wire.is_silent(prepare, 5, 5)
    assert wire.fast()["dropped_requests"] == 8
    assert not wire.is_silent("ping", None)  # names work as well as numbers


def test_the_other_releases_key_is_not_understood(wire: Wire) -> None:
    key = wire.key([], "r")
    del key["token_bytes" if wire.packed else "token_ids"]
    other: dict[str, Any] = {"token_ids": []} if wire.packed else {"token_bytes": b""}
    assert wire.is_silent(NUMBERS[Operation.LOOKUP], {**key, **other}, 1)


def test_small_talk(wire: Wire) -> None:
    assert wire.call(Operation.GET_CHUNK_SIZE) == CHUNK
    assert wire.call(Operation.PING, None) is True
    assert wire.call(Operation.PING, 12345) is True
    reply = wire.register(2)
    assert (reply["shm_name"], reply["pool_size"]) == (wire.server.shm_name, 8 * 4096)
    assert ("null_block_id" in reply) == wire.packed
    assert wire.call(Operation.CLEAR, False) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_a_pool_the_data_travels_inside_the_messages(protocol: str) -> None:
    codec: Any = pickle if protocol == "0.5.6" else inline
    tokens = list(range(2 * CHUNK))
    chunks = [torch.randn(SHAPE).to(LAYOUT.dtype) for _ in range(2)]
    with serve(protocol, shared=False) as server:
        wire = Wire(server)
        reply = wire.register()
        assert (reply["shm_name"], reply["pool_size"]) == ("", 0)
        key = wire.key(tokens, "r")
        assert wire.prepare_store(key) == {}
        assert wire.commit_store(key, b"\x80\x05garbage") is False
        assert wire.commit_store(key, bytes(codec.encode_chunks(chunks[:1]))) is False
        assert wire.commit_store(key, bytes(codec.encode_chunks(chunks))) is True
        assert wire.lookup(key) == 2
        grant = wire.call(Operation.PREPARE_RETRIEVE, key, 1)
        assert grant["success"] and grant["context"] == {}
        found = codec.decode_chunks(grant["data"], LAYOUT, CHUNK)
        assert all(torch.equal(a, b) for a, b in zip(found, chunks, strict=True))
        assert wire.fast()["locked_objects"] == 0
        assert wire.call(Operation.COMMIT_RETRIEVE, key, 1) is True
        wire.close()


def test_status_tells_an_sdk_the_layout(wire: Wire) -> None:
    wire.register(7, num_kv_heads=2)
    wire.register(8, model_name="latent", use_mla=True)
    status = httpx.get(f"{wire.server.http_url}/status").json()
    meta = status["cache_context_meta"]
    assert next(iter(meta)) == "7"  # the one that knows its heads comes first
    layout = meta["7"]["kv_cache_layout"]
    (group,) = layout["kernel_groups"]
    assert layout["num_layers"] == 3
    assert (group["dtype"], group["tokens_per_block"]) == ("torch.bfloat16", 2)
    assert group["engine_kv_format"] == "NL_X_NB_TWO_BS_NH_HS"
    assert group["engine_kv_concrete_shape"] == "3 x [1, 2, 2, 2, 8]"
    (latent,) = meta["8"]["kv_cache_layout"]["kernel_groups"]
    assert latent["is_mla"] and latent["engine_kv_concrete_shape"] == "3 x [1, 2, 16]"
    assert set(status["non_cuda_context_meta"]) == {"1", "7", "8"}


def test_http_says_what_a_real_server_says(wire: Wire) -> None:
    url, config = wire.server.http_url, wire.server.config
    assert httpx.get(f"{url}/version").json() == f"{config.protocol}-fast"
    assert httpx.get(f"{url}/healthcheck").json() == {"status": "healthy"}
    mp = httpx.get(f"{url}/config").json()["mp"]
    assert (mp["chunk_size"], mp["shm_name"], mp["transport"]) == (CHUNK, config.shm_name, "zmq")
    store(wire, list(range(CHUNK)))
    assert httpx.post(f"{url}/cache/clear").json()["status"] == "ok"
    assert wire.fast()["objects"] == 0


def test_closing_removes_the_segment() -> None:
    with serve("0.5.6", shared=True) as server:
        path = f"/dev/shm/{server.shm_name}"
        assert os.path.exists(path)
    server.close()
    assert not os.path.exists(path)
