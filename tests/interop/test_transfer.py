"""Store and retrieve against real servers, over shared memory and over the fallback."""

from __future__ import annotations

import pytest
import torch

from lmcache_fast import KVClient, KVLayout
from tests.interop.conftest import LAYOUT, Connect
from tests.interop.samples import random_kv, same_bits
from tests.interop.servers import CHUNK, Server

# The fallback is told about with a warning, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def kv_for(client: KVClient, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return random_kv(client.layout.kv_shape(num_tokens), client.layout.dtype, seed)


def test_the_transport_is_the_one_that_the_server_offers(server: Server, connect: Connect) -> None:
    client = connect()
    if server.segment.exists():
        assert client.transport_name == "shm"
    else:
        assert client.transport_name == ("inline" if server.version >= "0.5.7" else "pickle")
    assert client.chunk_size == CHUNK


@pytest.mark.parametrize("num_tokens", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_whole_chunks_come_back_bit_for_bit(connect: Connect, salt: str, num_tokens: int) -> None:
    client = connect()
    whole = num_tokens // CHUNK * CHUNK
    tokens = list(range(num_tokens))
    kv = kv_for(client, num_tokens)
    assert client.retrieve(tokens, salt) is None
    assert client.store(kv, tokens, salt) is (whole > 0)
    assert client.lookup(tokens, salt) == whole
    assert client.store(kv, tokens, salt) is False
    found = connect().retrieve(tokens, salt)
    if whole == 0:
        assert found is None
    else:
        assert found is not None
        assert same_bits(found, kv[:, :, :whole])


def test_a_longer_request_adds_its_new_chunks_only(connect: Connect, salt: str) -> None:
    client = connect()
    tokens = list(range(1000, 1000 + 4 * CHUNK))
    first, second = kv_for(client, 4 * CHUNK, 1), kv_for(client, 4 * CHUNK, 2)
    assert client.store(first[:, :, : 2 * CHUNK], tokens[: 2 * CHUNK], salt)
    assert client.store(second, tokens, salt)
    out = torch.empty(client.layout.kv_shape(4 * CHUNK), dtype=client.layout.dtype)
    found = client.retrieve(tokens, salt, out=out)
    assert found is not None
    assert found.data_ptr() == out.data_ptr()
    assert same_bits(found[:, :, : 2 * CHUNK], first[:, :, : 2 * CHUNK])
    assert same_bits(found[:, :, 2 * CHUNK :], second[:, :, 2 * CHUNK :])


def test_a_request_finds_the_prefix_that_it_shares(connect: Connect, salt: str) -> None:
    client = connect()
    stored = list(range(2000, 2000 + 3 * CHUNK))
    kv = kv_for(client, len(stored))
    client.store(kv, stored, salt)
    other = stored[: 2 * CHUNK + 5] + [7] * CHUNK
    found = client.retrieve(other, salt)
    assert found is not None
    assert same_bits(found, kv[:, :, : 2 * CHUNK])


def test_another_salt_finds_nothing(connect: Connect, salt: str) -> None:
    client = connect()
    tokens = list(range(CHUNK))
    client.store(kv_for(client, CHUNK), tokens, salt)
    assert client.lookup(tokens, salt + "x") == 0
    assert client.retrieve(tokens) is None


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(2, 1, 96, torch.float16, planes=1),
        KVLayout(1, 4, 8, torch.float32),
        KVLayout(2, 2, 32, torch.float8_e4m3fn),
    ],
    ids=["one plane of float16", "float32", "float8"],
)
def test_other_layouts_travel_too(connect: Connect, salt: str, layout: KVLayout) -> None:
    client = connect(f"interop/{layout.dtype_name}-{layout.planes}", layout)
    tokens = list(range(2 * CHUNK))
    kv = kv_for(client, len(tokens))
    assert client.store(kv, tokens, salt)
    found = client.retrieve(tokens, salt)
    assert found is not None
    assert same_bits(found, kv)


def test_a_lease_shows_the_chunks_and_gives_its_locks_back(
    server: Server, connect: Connect, salt: str
) -> None:
    client = connect()
    tokens = list(range(3000, 3000 + 3 * CHUNK))
    kv = kv_for(client, len(tokens))
    client.store(kv, tokens, salt)
    with client.lease(tokens, salt) as lease:
        assert lease.num_tokens == len(tokens)
        assert len(lease) == 3
        if client.transport_name == "shm":
            assert server.held().get("read locks") == 3
        target = torch.empty(LAYOUT.kv_shape(len(tokens)), dtype=LAYOUT.dtype)
        lease.copy_to(target)
    assert same_bits(target, kv)
    server.wait_nothing_held()
    server.clear()
    assert client.lookup(tokens, salt) == 0
