"""Which transport is chosen, and what the client is told; message transports at work."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from lmcache_fast.errors import (
    ConnectError,
    InvalidInputError,
    PayloadError,
    SharedMemoryError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.dialect import dialect_for
from lmcache_fast.protocol.messages import Key, PoolInfo, ReadGrant, Slot
from lmcache_fast.protocol.server_info import ServerInfo
from lmcache_fast.protocol.tokens import PackedTokens
from lmcache_fast.transport import message, select
from lmcache_fast.transport.message import CODECS, MessageTransport
from lmcache_fast.transport.payload import assemble
from lmcache_fast.transport.select import choose_transport, is_local

CHUNK = 4
LAYOUT = KVLayout(2, 1, 8, torch.float16)


class FakeConnection:
    """What transports use of a connection; stores whole chunks as a server without a pool."""

    world_size = 1

    def __init__(
        self, url: str = "tcp://127.0.0.1:1", version: str = "0.5.6", pool: PoolInfo | None = None
    ) -> None:
        self.url = url
        self.info = ServerInfo(
            version, dialect_for(version), CHUNK, "", "auto", "zmq", read_ttl=300, write_ttl=600
        )
        self.pool = pool or PoolInfo()
        self.layout = self.rank_layout = LAYOUT
        self.room = 100
        self.locked = 0
        self.messages: list[int] = []
        self.chunks: dict[int, torch.Tensor] = {}

    def lookup(self, key: Key) -> int:
        assert key.worker_id is None
        hit = 0
        while hit in self.chunks and hit < (key.end - key.start) // CHUNK:
            hit += 1
        self.locked += hit
        return hit

    def free_lookup_locks(self, key: Key) -> None:
        self.locked -= (key.end - key.start) // CHUNK

    def send_chunks(self, key: Key, data: memoryview) -> Callable[[], bool]:
        codec = CODECS["pickle" if self.info.version < "0.5.7" else "inline"]
        head = self.info.dialect.data_head(0)
        chunks = codec.decode(data[len(head) :], LAYOUT, CHUNK)
        self.messages.append(len(chunks))
        first = key.start // CHUNK
        assert len(chunks) == key.end // CHUNK - first
        for index, chunk in enumerate(chunks, first):
            if len(self.chunks) < self.room:
                self.chunks.setdefault(index, chunk.clone())
        return lambda: True


def choose(connection: FakeConnection) -> Any:
    return choose_transport(cast(Any, connection))


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(select.VARIABLE, raising=False)


class FakeShm:
    name = "shm"

    def __init__(self, pool: PoolInfo, layout: KVLayout, chunk_size: int) -> None:
        if pool.shm_name == "missing":
            raise SharedMemoryError("cannot map 'missing': no such file")


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shared memory that works unless the pool is called missing."""
    monkeypatch.setattr(select, "ShmTransport", FakeShm)
    yield


@pytest.mark.parametrize("url", ["ipc:///run/x", "tcp://127.0.0.1:1", "tcp://localhost:1"])
def test_a_usable_pool_is_used_without_a_word(url: str, shm: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(FakeConnection(url, pool=PoolInfo("pool", 4096))).name == "shm"


@pytest.mark.parametrize(("version", "name"), [("0.5.6", "pickle"), ("0.5.7rc2", "inline")])
def test_without_a_pool_messages_carry_the_chunks_and_one_warning_says_why(
    version: str, name: str
) -> None:
    with pytest.warns(UserWarning) as caught:
        assert choose(FakeConnection(version=version)).name == name
    (warning,) = caught
    assert "--shm-name" in str(warning.message) and "--no-l1-use-lazy" in str(warning.message)


def test_a_pool_that_cannot_be_mapped_is_named_with_the_cause(shm: None) -> None:
    with pytest.warns(UserWarning, match=r"'missing': no such file.*cannot|.*not retrieve") as seen:
        transport = choose(FakeConnection(pool=PoolInfo("missing", 4096)))
    assert (len(seen), transport.name) == (1, "pickle")


def test_the_pool_of_a_server_elsewhere_is_not_touched(
    shm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = FakeConnection("tcp://192.0.2.1:1", pool=PoolInfo("pool", 4096))
    with pytest.warns(UserWarning, match=r"192\.0\.2\.1.*LMCACHE_FAST_TRANSPORT=shm"):
        assert choose(connection).name == "pickle"
    monkeypatch.setenv(select.VARIABLE, "shm")
    assert choose(connection).name == "shm"


def test_a_transport_can_be_forced_and_an_impossible_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, shm: None
) -> None:
    monkeypatch.setenv(select.VARIABLE, "pickle")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(FakeConnection(pool=PoolInfo("pool", 4096))).name == "pickle"
    with pytest.raises(ConnectError, match=r"'pickle'.*0\.5\.7.*'inline'"):
        choose(FakeConnection(version="0.5.7"))
    monkeypatch.setenv(select.VARIABLE, "shm")
    for pool in (PoolInfo(), PoolInfo("missing", 4096), PoolInfo("pool", 0)):
        with pytest.raises(SharedMemoryError):
            choose(FakeConnection(pool=pool))
    monkeypatch.setenv(select.VARIABLE, "smoke signals")
    with pytest.raises(InvalidInputError, match=r"smoke signals.*shm, inline, pickle"):
        choose(FakeConnection())


def test_only_this_machine_is_local() -> None:
    assert is_local("ipc:///tmp/socket") and is_local("tcp://127.3.2.1:5")
    assert not is_local("tcp://192.0.2.1:5")
    assert not is_local("tcp://no-such-host.invalid:5")
    assert not is_local("tcp://:5") and not is_local("nonsense")
    if socket.has_ipv6:
        assert is_local("tcp://[::1]:5") and not is_local("tcp://[2001:db8::1]:5")


def test_an_address_of_our_own_is_local() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; picks the outgoing interface
        except OSError:
            pytest.skip("no network interface but loopback")
        address = probe.getsockname()[0]
    assert is_local(f"tcp://{address}:5")


def key_of(num_chunks: int) -> Key:
    tokens = PackedTokens(np.arange(num_chunks * CHUNK + 1, dtype=np.uint32))
    return Key("model", 1, 0, tokens, 0, num_chunks * CHUNK, "request")


def make_kv(layout: KVLayout, num_chunks: int) -> torch.Tensor:
    return torch.randn(layout.kv_shape(num_chunks * CHUNK)).to(layout.dtype)


def store(connection: FakeConnection, kv: torch.Tensor) -> bool | None:
    num_chunks = kv.shape[2] // CHUNK
    transport = MessageTransport(
        CODECS["pickle" if connection.info.version < "0.5.7" else "inline"], LAYOUT, CHUNK
    )
    writer = transport.writer(cast(Any, connection), key_of(num_chunks), num_chunks)
    if writer is None:
        return None
    assert writer.side is None
    writer.copy_from(kv)
    return writer.commit()


@pytest.mark.parametrize("version", ["0.5.2", "0.5.7"])
@pytest.mark.parametrize("limit", [1, 2 * CHUNK * LAYOUT.token_bytes, 1 << 30])
def test_a_store_sends_what_is_missing_in_messages_of_limited_size(
    version: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message, "MESSAGE_BYTES", limit)
    connection = FakeConnection(version=version)
    kv = make_kv(LAYOUT, 5)
    assert store(connection, kv[:, :, : 2 * CHUNK]) is True
    assert store(connection, kv) is True
    assert store(connection, kv) is None
    assert sum(connection.messages) == 5
    assert max(connection.messages) == {1: 1, 1 << 30: 3}.get(limit, 2)
    assert torch.equal(torch.cat([connection.chunks[i] for i in range(5)], dim=2), kv)
    assert connection.locked == 0


def test_a_server_without_room_that_says_yes_is_not_believed() -> None:
    connection = FakeConnection()
    connection.room = 2
    assert store(connection, make_kv(LAYOUT, 3)) is False
    assert connection.locked == 0


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("planes", "by_server"), [(1, False), (1, True), (2, False)])
def test_a_read_gives_chunks_and_the_whole(name: str, planes: int, by_server: bool) -> None:
    layout = KVLayout(2, 1, 8, torch.bfloat16, planes=planes)
    kv = make_kv(layout, 3)
    chunks = [kv[:, :, i * CHUNK : (i + 1) * CHUNK] for i in range(3)]
    shape = layout.kv_shape(CHUNK) if by_server else layout.object_shape(CHUNK)
    stored = [chunk.view(shape) for chunk in map(torch.clone, chunks)]
    data = assemble(CODECS[name].parts(stored))
    transport = MessageTransport(CODECS[name], layout, CHUNK)
    reader = transport.reader(ReadGrant(True, data, []), 3)
    assert reader.side is None
    assert torch.equal(reader.chunk(1), chunks[1])
    larger = torch.zeros(layout.kv_shape(4 * CHUNK), dtype=layout.dtype)
    reader.copy_to(larger[:, :, : 3 * CHUNK])
    assert torch.equal(larger[:, :, : 3 * CHUNK], kv) and not larger[:, :, 3 * CHUNK :].any()
    with pytest.raises(PayloadError, match="3 chunks came; expected 2"):
        transport.reader(ReadGrant(True, data, []), 2)


def test_a_server_that_answers_with_slots_only_is_explained() -> None:
    transport = MessageTransport(CODECS["pickle"], LAYOUT, CHUNK)
    slots = [Slot(0, 8, (1,), "float16")]
    for data in (b"", None):
        with pytest.raises(SharedMemoryError, match="--shm-name"):
            transport.reader(ReadGrant(True, data, slots), 1)
    with pytest.raises(PayloadError, match="expected bytes"):
        transport.reader(ReadGrant(True, {"version": 1}, []), 1)
    with pytest.raises(PayloadError, match="no chunks came"):
        transport.reader(ReadGrant(True, None, []), 1)
