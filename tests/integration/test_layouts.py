"""Every way that a cache can be stored, through the client, over every transport."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import EditError, InvalidInputError, KVClient, KVLayout
from lmcache_fast.completion import TokenEvent
from lmcache_fast.edits import Rope, keep
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.tokens import PackedTokens
from lmcache_fast.sdk.stream import create_request
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import CHUNK

Open = Callable[..., KVClient]

SPLIT = KVLayout(2, 4, 16, torch.bfloat16)
PACKED = KVLayout.packed(2, 4, 16, "bfloat16")
MLA = KVLayout(2, 1, 64 + 32, torch.float16, planes=1)
OPAQUE = KVLayout.opaque(2, 128, "bfloat16")
HEADS_ROPE = Rope(16)
MLA_ROPE = Rope(96, rotary_dim=32, rotary_offset=64, interleaved=True)
CASES = {
    "split": (SPLIT, HEADS_ROPE, 1),
    "packed": (PACKED, HEADS_ROPE, 1),
    "MLA": (MLA, MLA_ROPE, 1),
    "split, 4 ranks": (SPLIT, HEADS_ROPE, 4),
    "packed, 2 ranks": (PACKED, HEADS_ROPE, 2),
    "MLA, 4 ranks": (MLA, MLA_ROPE, 4),
    "opaque, 2 ranks": (OPAQUE, None, 2),
}


@pytest.fixture
def open_client(server: EmbeddedServer) -> Iterator[Open]:
    """Open clients of the server that are closed before its locks are counted."""
    with ExitStack() as stack:

        def make(layout: KVLayout | None, world_size: int | None = None, **named: Any) -> KVClient:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*no shared memory.*")
                name = named.pop("model", "model")
                client = KVClient(
                    server.url, server.http_url, name, layout=layout, world_size=world_size,
                    timeout=30.0, **named,
                )  # fmt: skip
            return stack.enter_context(client)

        yield make


def numbers(layout: KVLayout, num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.kv_shape(num_tokens), generator=generator).to(layout.dtype)


@pytest.mark.parametrize("case", CASES)
def test_kv_comes_back_and_is_edited_like_any_tensor(open_client: Open, case: str) -> None:
    layout, rope, world_size = CASES[case]
    client = open_client(layout, world_size)
    tokens = list(range(4 * CHUNK))
    kv = numbers(layout, len(tokens))
    assert client.lookup(tokens) == 0
    assert client.store(kv, tokens)
    assert not client.store(kv, tokens)
    assert client.lookup(tokens) == len(tokens)
    found = open_client(layout).retrieve(tokens)  # the ranks are known from the registration
    assert found is not None and torch.equal(found, kv)
    with client.lease(tokens) as lease:
        assert torch.equal(lease[2].tensor(), kv[:, :, 2 * CHUNK : 3 * CHUNK])

    kept = [*range(CHUNK), *range(2 * CHUNK, 4 * CHUNK)]
    if rope is not None:
        kept = [*range(CHUNK + 3), *range(CHUNK + 5, 2 * CHUNK), *range(3 * CHUNK - 14, 4 * CHUNK)]
    edit = keep(kept, rope=rope)
    result = client.edit(tokens, edit, target_salt="edited")
    assert result.tokens == kept
    assert result.num_cached == len(kept) // CHUNK * CHUNK
    edited = client.retrieve(result.tokens, "edited")
    expected, _ = edit(kv, tokens)
    assert edited is not None
    assert torch.equal(edited, expected[:, :, : result.num_cached])


def test_what_ranks_store_is_their_share_of_the_heads(open_client: Open) -> None:
    client = open_client(SPLIT, 2)
    tokens = list(range(CHUNK))
    kv = numbers(SPLIT, CHUNK)
    client.store(kv, tokens)
    connection = client._connection
    for rank in range(2):
        packed = PackedTokens(np.array(tokens, np.uint32))
        key = Key("model", 2, None, packed, 0, CHUNK, f"rank-{rank}")
        assert connection.lookup(key) == 1
        for worker in (rank, 1 - rank):
            own = Key("model", 2, worker, packed, 0, CHUNK, key.request_id)
            grant = connection.prepare_retrieve(own)
            part = client._links.current.transport.reader(grant, 1)
            share = kv[..., 32 * worker : 32 * (worker + 1)]
            assert torch.equal(part.chunk(0), share)
            del part
            connection.commit_retrieve(own)
        connection.end_session(key.request_id)


def test_a_chunk_is_cached_when_every_rank_has_it(open_client: Open) -> None:
    client = open_client(SPLIT, 2)
    tokens = list(range(2 * CHUNK))
    kv = numbers(SPLIT, len(tokens))
    link = client._links.current
    key = Key(
        "model", 2, 0, PackedTokens(np.array(tokens, np.uint32)), 0, len(tokens), "rank 0 alone"
    )
    writer = link.transport.writer(client._connection, key, 2)
    assert writer is not None
    writer.copy_from(kv[..., :32])
    writer.commit()
    client._connection.end_session(key.request_id)
    assert client.lookup(tokens) == 0
    assert client.retrieve(tokens) is None
    assert client.store(kv, tokens)
    found = client.retrieve(tokens)
    assert found is not None and torch.equal(found, kv)


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows", ["plain", "packed"])
def test_eight_bit_caches_move_bit_for_bit(open_client: Open, dtype: str, rows: Any) -> None:
    layout = KVLayout(2, 2, 16, dtype, rows=rows)
    client = open_client(layout, model=f"{rows}-{dtype}")
    tokens = list(range(16 * CHUNK))
    bits = torch.arange(256, dtype=torch.uint8).repeat(2 * 2 * len(tokens) * 32 // 256)
    kv = bits.view(layout.dtype).view(layout.kv_shape(len(tokens)))
    assert client.store(kv, tokens)
    result = client.edit(tokens, keep(range(3, len(tokens))), target_salt="x")
    for salt, expected in (("", kv), ("x", kv[:, :, 3 : 3 + result.num_cached])):
        found = client.retrieve(tokens if not salt else result.tokens, salt)
        assert found is not None
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_opaque_rows_are_never_taken_apart(open_client: Open) -> None:
    client = open_client(OPAQUE)
    tokens = list(range(3 * CHUNK))
    client.store(numbers(OPAQUE, len(tokens)), tokens)
    with pytest.raises(EditError, match="only whole chunks of 16 can be kept"):
        client.edit(tokens, keep(range(1, 3 * CHUNK)))
    with pytest.raises(EditError, match="cannot be rotated"):
        client.edit(tokens, keep(range(CHUNK), rope=Rope(16)))
    assert client.lookup(tokens[1:]) == 0


def test_a_function_that_puts_opaque_chunks_together_anew_is_refused(open_client: Open) -> None:
    client = open_client(OPAQUE)
    tokens = list(range(3 * CHUNK))
    kv = numbers(OPAQUE, len(tokens))
    client.store(kv, tokens)
    stream = create_request(client, lambda *_: iter([TokenEvent(7)]), tokens)
    stream.generate({"max_tokens": 1})
    with pytest.raises(EditError, match=r"tokens 0 to 15 are no chunk of the source"):
        stream.modify_kv(lambda kv, tokens: (kv[:, :, 1:], tokens[1:]), timeout=30)
    stream.modify_kv(lambda kv, tokens: (kv[:, :, CHUNK:], tokens[CHUNK:]), timeout=30)
    found = client.retrieve(tokens[CHUNK:])
    assert found is not None and torch.equal(found, kv[:, :, CHUNK:])


def test_heads_that_the_ranks_cannot_share_are_refused(open_client: Open) -> None:
    with pytest.raises(InvalidInputError, match="num_kv_heads is 4; expected a multiple of the 3"):
        open_client(SPLIT, 3)


def test_locks_for_several_readers_are_given_back(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client(SPLIT, 2)
    monkeypatch.setattr(client._connection, "num_kv_readers", 3)
    tokens = list(range(2 * CHUNK))
    client.store(numbers(SPLIT, len(tokens)), tokens)
    assert client.lookup(tokens) == len(tokens)
    assert client.retrieve(tokens) is not None  # the fixture counts what stays locked
