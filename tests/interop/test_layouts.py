"""Packed, MLA and tensor-parallel caches on real servers, stored as their engines store them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import KVClient, KVLayout
from lmcache_fast.edits import Rope, keep
from lmcache_fast.protocol.messages import Key
from lmcache_fast.protocol.tokens import PackedTokens
from tests.interop.conftest import Connect
from tests.interop.samples import same_bits
from tests.interop.servers import CHUNK, Server
from tests.interop.status_proxy import registration, serving_status

# The fallback is told about with a warning, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

HEADS, HEAD_DIM, LAYERS = 4, 32, 3
TOKENS = list(range(5 * CHUNK))
#: Every way that a run can lie: whole chunks, over a border, and a rest that is not stored.
KEPT = [*range(CHUNK + 3), *range(CHUNK + 7, 3 * CHUNK), *range(4 * CHUNK - 1, 5 * CHUNK)]
STORED = KEPT[: len(KEPT) // CHUNK * CHUNK]
HEADS_ROPE = Rope(HEAD_DIM, theta=1e6)
MLA_ROPE = Rope.from_hf_config(
    {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "head_dim": 96, "rope_theta": 1e4}
)


def numbers(layout: KVLayout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(layout.kv_shape(len(TOKENS)), generator=generator).to(layout.dtype)


def turned(keys: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``keys [L, T, D]`` of the stored tokens moved to their new places, in double precision."""
    start, size = rope.rotary_offset, rope.rotary_dim or rope.head_dim
    result: torch.Tensor = keys.double().unflatten(2, (-1, rope.head_dim)).clone()
    part = result[..., start : start + size]
    pairs = part.unflatten(-1, (-1, 2) if rope.interleaved else (2, -1))
    x, y = pairs.unbind(-1 if rope.interleaved else -2)
    shifts = torch.arange(len(STORED)) - torch.tensor(STORED)
    frequencies = rope.theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.outer(shifts.double(), frequencies).unsqueeze(1)
    moved = (x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin())
    result[..., start : start + size] = torch.stack(moved, -1 if rope.interleaved else -2).flatten(
        -2
    )
    return result.flatten(2)


def assert_edited(found: torch.Tensor | None, kv: torch.Tensor, rope: Rope) -> None:
    """Bit for bit what the plain function makes, and within one unit of the true rotation."""
    assert found is not None
    expected, _ = keep(KEPT, rope=rope)(kv, TOKENS)
    assert same_bits(found, expected[:, :, : len(STORED)])
    source = kv[:, :, STORED]
    assert same_bits(found[1:], source[1:])
    truth = turned(source[0], rope)
    step = torch.finfo(kv.dtype).eps * truth.abs().clamp_min(1e-2)
    assert ((found[0].double() - truth).abs() <= step).all()


def edit_and_retrieve(client: KVClient, rope: Rope, salt: str) -> torch.Tensor | None:
    result = client.edit(TOKENS, keep(KEPT, rope=rope), salt, target_salt=f"{salt}e")
    assert (result.tokens, result.num_cached) == (KEPT, len(STORED))
    return client.retrieve(result.tokens, f"{salt}e")


def test_a_packed_cache(connect: Connect, salt: str) -> None:
    layout = KVLayout.packed(LAYERS, HEADS, HEAD_DIM, "bfloat16")
    # What the engine registers and stores: one plane, of each head the key and then the value.
    engine = connect("packed", KVLayout(LAYERS, 1, 2 * HEADS * HEAD_DIM, torch.bfloat16, planes=1))
    client = connect("packed", layout)
    kv = numbers(layout)
    by_head = kv.unflatten(3, (HEADS, HEAD_DIM))
    stored = torch.stack((by_head[0], by_head[1]), dim=3).flatten(2).unsqueeze(0)
    assert engine.store(stored, TOKENS, salt)
    found = client.retrieve(TOKENS, salt)
    assert found is not None and same_bits(found, kv)

    edited = edit_and_retrieve(client, HEADS_ROPE, salt)
    assert_edited(edited, kv, HEADS_ROPE)

    assert client.store(kv, TOKENS, f"{salt}s")
    found = engine.retrieve(TOKENS, f"{salt}s")
    assert found is not None and same_bits(found, stored)


def test_an_mla_cache(connect: Connect, salt: str) -> None:
    layout = KVLayout(LAYERS, 1, 128 + 32, torch.bfloat16, planes=1)
    client = connect("mla", layout)
    kv = numbers(layout)
    assert client.store(kv, TOKENS, salt)
    found = connect("mla", layout).retrieve(TOKENS, salt)
    assert found is not None and same_bits(found, kv)
    edited = edit_and_retrieve(client, MLA_ROPE, salt)
    assert_edited(edited, kv, MLA_ROPE)
    assert edited is not None and same_bits(edited[..., :128], kv[:, :, STORED, :128])


def rank_key(model: str, rank: int | None, salt: str, request: str) -> Key:
    tokens = PackedTokens(np.array(TOKENS, np.uint32))
    return Key(model, 4, rank, tokens, 0, len(TOKENS), request, salt)


@pytest.mark.parametrize("rows", ["plain", "packed"])
def test_a_cache_of_four_ranks(server: Server, connect: Connect, salt: str, rows: Any) -> None:
    layout = KVLayout(LAYERS, HEADS, HEAD_DIM, torch.bfloat16, rows=rows)
    model = f"ranks-{rows}"
    client = connect(model, layout, world_size=4)
    kv = numbers(layout)
    # As the engine does it: every rank stores its own share, under its own key.
    transport, connection = client._links.current.transport, client._connection
    keys = [rank_key(model, rank, salt, f"{salt}-{rank}") for rank in range(4)]
    writers = [transport.writer(connection, key, 5) for key in keys]
    for rank, (key, writer) in enumerate(zip(keys, writers, strict=True)):
        if server.version >= "0.5.6":  # before, a lookup of half a chunk keeps locks on that half
            assert client.lookup(TOKENS, salt) == 0
        assert writer is not None
        writer.copy_from(kv[..., rank * HEAD_DIM : (rank + 1) * HEAD_DIM].contiguous())
        writer.commit()
        connection.end_session(key.request_id)
    assert client.lookup(TOKENS, salt) == len(TOKENS)
    found = client.retrieve(TOKENS, salt)
    assert found is not None and same_bits(found, kv)

    edited = edit_and_retrieve(client, HEADS_ROPE, salt)
    assert_edited(edited, kv, HEADS_ROPE)

    # And what we store is what each rank reads.
    assert client.store(kv, TOKENS, f"{salt}s")
    request = f"{salt}-read"
    assert connection.lookup(rank_key(model, None, f"{salt}s", request)) == 5
    for rank in range(4):
        key = rank_key(model, rank, f"{salt}s", request)
        part = transport.reader(connection.prepare_retrieve(key), 5)
        share = torch.empty(LAYERS * 2 * len(TOKENS) * HEAD_DIM, dtype=kv.dtype)
        share = share.view(2, LAYERS, len(TOKENS), HEAD_DIM)
        part.copy_to(share)
        assert same_bits(share, kv[..., rank * HEAD_DIM : (rank + 1) * HEAD_DIM])
        del part
        connection.commit_retrieve(key)
    connection.end_session(request)


def test_ranks_and_layout_come_from_the_status(server: Server, connect: Connect, salt: str) -> None:
    whole = KVLayout(LAYERS, HEADS, HEAD_DIM, torch.bfloat16)
    entry = {**registration("status-ranks", whole.for_rank(4)), "world_size": 4}
    entries = {str(rank): {**entry, "num_kv_readers": 2} for rank in range(4)}
    kv = numbers(whole)
    with (
        serving_status(server.http_url, {"cache_context_meta": entries}) as http_url,
        KVClient(server.url, http_url, "status-ranks") as client,
    ):
        assert client.layout == whole
        assert client.store(kv, TOKENS, salt)
        # Two readers' locks are taken; the fixture sees if one of them stays.
        found = client.retrieve(TOKENS, salt)
        assert found is not None and same_bits(found, kv)


def test_a_replicated_cache_is_written_for_every_rank(connect: Connect, salt: str) -> None:
    layout = KVLayout(LAYERS, 1, 64, torch.float16, planes=1)
    client = connect("mla-ranks", layout, world_size=4)
    kv = numbers(layout)
    assert client.store(kv, TOKENS, salt)
    found = client.retrieve(TOKENS, salt)
    assert found is not None and same_bits(found, kv)
    result = client.edit(TOKENS, keep(KEPT), salt, target_salt=f"{salt}e")
    assert client.lookup(result.tokens, f"{salt}e") == len(STORED)
