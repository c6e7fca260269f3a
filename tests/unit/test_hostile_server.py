"""A server that lies: a clear error, no byte outside the slots, nothing left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from lmcache_fast import KVClient, KVLayout, ProtocolError, edits
from lmcache_fast._extension import native
from lmcache_fast.protocol.channel import ZmqChannel
from lmcache_fast.protocol.operations import Operation
from tests.unit.protocol_fake import FakeServer, until

pytestmark = pytest.mark.skipif(native is None, reason="needs the native extension")

LAYOUT = KVLayout(2, 1, 4, "bfloat16")
CHUNK = 4
CHUNK_BYTES = LAYOUT.token_bytes * CHUNK
POOL = 1 << 16
TOKENS = list(range(2 * CHUNK))
KV = torch.ones(LAYOUT.kv_shape(len(TOKENS)), dtype=LAYOUT.dtype)


def slot(offset: int, **changes: Any) -> dict[str, Any]:
    return {
        "offset": offset,
        "length": CHUNK_BYTES,
        "shape": list(LAYOUT.object_shape(CHUNK)),
        "dtype": "bfloat16",
        **changes,
    }


class Liar(FakeServer):
    """A scripted server with a real pool, all of it 0xAB."""

    def __init__(self) -> None:
        self.segment = Path(f"/dev/shm/lmcache_fast_test_{uuid.uuid4().hex[:8]}")
        self.segment.write_bytes(b"\xab" * POOL)
        self.slots = [slot(0), slot(4096)]
        self.indices = [0, 1]
        super().__init__(shm_name="liar")
        self.on[Operation.REGISTER] = self._welcome
        self.on[Operation.PREPARE_STORE] = lambda *_: {
            "context": {"slots": self.slots, "chunk_indices": self.indices}
        }
        self.on[Operation.PREPARE_RETRIEVE] = lambda *_: {
            "success": True,
            "data": b"",
            "context": {"slots": self.slots},
        }

    def _welcome(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.instances.add(payload["instance_id"])
        return {"shm_name": self.segment.name, "pool_size": POOL}

    def close(self) -> None:
        super().close()
        self.segment.unlink(missing_ok=True)


@pytest.fixture
def server() -> Iterator[Liar]:
    server = Liar()
    yield server
    server.close()


@pytest.fixture
def client(server: Liar) -> Iterator[KVClient]:
    with KVClient(server.url, server.http_url, "m", layout=LAYOUT, timeout=30) as client:
        yield client


LIES: dict[str, list[dict[str, Any]]] = {
    "behind the pool": [slot(0), slot(POOL)],
    "partly behind the pool": [slot(0), slot(POOL - CHUNK_BYTES + 2)],
    "an offset that overflows": [slot(0), slot(2**64 - CHUNK_BYTES)],
    "misaligned": [slot(0), slot(4097)],
    "the same twice": [slot(4096), slot(4096)],
    "overlapping": [slot(0), slot(CHUNK_BYTES - 2)],
    "too short": [slot(0), slot(4096, length=CHUNK_BYTES - 2)],
    "too long": [slot(0), slot(4096, length=POOL)],
    "another shape": [slot(0), slot(4096, shape=[2, 1, CHUNK, 8])],
    "another dtype": [slot(0), slot(4096, dtype="float16")],
    "one too few": [slot(0)],
    "one too many": [slot(0), slot(4096), slot(8192)],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.retrieve(TOKENS),
        lambda client: client.store(KV, TOKENS),
        lambda client: client.edit(TOKENS, edits.keep(range(len(TOKENS)))),
    ],
    ids=["retrieve", "store", "edit"],
)
def test_slots_that_cannot_be_are_refused_before_a_byte_is_touched(
    server: Liar, client: KVClient, lie: str, call: Callable[[KVClient], object]
) -> None:
    server.slots = LIES[lie]
    with pytest.raises(ProtocolError, match="prepare_"):
        call(client)
    assert server.segment.read_bytes() == b"\xab" * POOL
    until(lambda: Operation.END_SESSION in server.operations(), "the end of the session")


@pytest.mark.parametrize("indices", [[1, 0], [0, 0], [0, 2], [0, 2**63], [0]])
def test_chunks_that_were_not_asked_for_are_refused(
    server: Liar, client: KVClient, indices: list[int]
) -> None:
    server.indices = indices
    with pytest.raises(ProtocolError, match="prepare_store"):
        client.store(KV, TOKENS)
    assert server.segment.read_bytes() == b"\xab" * POOL


@pytest.mark.parametrize("found", [3, 2**31, 2**64 - 1, -1, "2", 1.5, [2], True])
def test_a_hit_that_cannot_be_is_refused(server: Liar, client: KVClient, found: Any) -> None:
    server.on[Operation.WAIT_PREFETCH_STATUS] = lambda *_: found
    for call in (client.lookup, client.retrieve):
        with pytest.raises(ProtocolError):
            call(TOKENS)


@pytest.mark.parametrize("operation", [Operation.PREPARE_RETRIEVE, Operation.PREPARE_STORE])
@pytest.mark.parametrize(
    "reply", [None, True, 7, "text", [], {}, {"context": None}, {"success": 1, "context": 5}]
)
def test_a_reply_of_another_form_is_an_error_of_ours(
    server: Liar, client: KVClient, operation: Operation, reply: Any
) -> None:
    server.on[operation] = lambda *_: reply
    with pytest.raises(ProtocolError):
        client.retrieve(TOKENS)
        client.store(KV, TOKENS)


def test_a_pool_size_beyond_64_bits_is_an_error_of_ours(server: Liar) -> None:
    server.on[Operation.REGISTER] = lambda payload: {"shm_name": "x", "pool_size": 2**64 - 1}
    with pytest.warns(UserWarning, match="no shared memory"):
        client = KVClient(server.url, server.http_url, "m", layout=LAYOUT, timeout=30)
    client.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", ".", "x\0y", "no such segment"])
def test_a_segment_of_a_strange_name_is_not_mapped(server: Liar, name: str) -> None:
    server.on[Operation.REGISTER] = lambda payload: {"shm_name": name, "pool_size": POOL}
    with pytest.warns(UserWarning, match="no shared memory"):
        client = KVClient(server.url, server.http_url, "m", layout=LAYOUT, timeout=30)
    assert client.transport_name == "pickle"
    client.close()


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("l1", "read_ttl_seconds", float("nan")),
        ("l1", "read_ttl_seconds", -1),
        ("l1", "write_ttl_seconds", 0),
        ("l1", "write_ttl_seconds", float("inf")),
        ("mp", "chunk_size", 0),
        ("mp", "chunk_size", -256),
        ("mp", "chunk_size", 2**40),
        ("mp", "chunk_size", "256"),
    ],
)
def test_settings_that_would_break_a_check_are_refused(
    server: Liar, section: str, field: str, value: Any
) -> None:
    sections = {
        "mp": server.config["mp"],
        "l1": server.config["storage_manager"]["l1_manager_config"],
    }
    sections[section][field] = value
    with pytest.raises(ProtocolError, match=r"/config"):
        KVClient(server.url, server.http_url, "m", layout=LAYOUT, timeout=30)


def test_replies_that_nobody_asked_for_change_nothing(
    server: Liar, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = client._connection._listener.channel
    assert isinstance(channel, ZmqChannel)
    strange: list[list[bytes]] = [
        [b""],
        [b"\xff", b"", b""],
        [msgspec.msgpack.encode(10**6), b"\x00", msgspec.msgpack.encode(True)],
        [b"x" * 1000] * 50,
    ]
    ours, receive = channel._socket, type(channel._socket).recv_multipart

    def with_more(socket: Any, *arguments: Any, **options: Any) -> Any:
        if strange and socket is ours:
            return [zmq.Frame(part) for part in strange.pop()]
        return receive(socket, *arguments, **options)

    monkeypatch.setattr(type(ours), "recv_multipart", with_more)
    assert client.lookup(TOKENS) == len(TOKENS)
    assert not strange


def test_a_segment_cut_short_under_a_client_is_an_error(server: Liar, client: KVClient) -> None:
    with client.lease(TOKENS) as lease:
        os.truncate(server.segment, 100)
        for use in (
            lambda: lease[0].numpy(),
            lambda: lease[1].tensor(),
            lambda: lease.copy_to(torch.empty_like(KV)),
        ):
            with pytest.raises(Exception, match="shorter than the 65536 bytes"):
                use()
    for call in (
        lambda: client.retrieve(TOKENS),
        lambda: client.store(KV, TOKENS),
        lambda: client.edit(TOKENS, edits.keep(range(len(TOKENS)))),
    ):
        with pytest.raises(Exception, match="shorter than"):
            call()
    assert client.lookup(TOKENS) == len(TOKENS)


def test_a_segment_cut_short_in_the_middle_of_a_copy_is_an_error(
    server: Liar, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = client._links.current.transport
    check = type(transport).check  # type: ignore[attr-defined]

    def check_and_cut(self: Any) -> None:
        check(self)
        os.truncate(server.segment, 100)

    monkeypatch.setattr(type(transport), "check", check_and_cut)
    with pytest.raises(Exception, match="went away under the copy"):
        client.retrieve(TOKENS)
