"""Policies on a server keep what they keep as plain functions, over every transport."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_fast import KVClient, KVLayout, edits
from lmcache_fast.errors import InvalidInputError, LeaseExpiredError
from lmcache_fast.sdk import kvcache, qcache, request
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import CHUNK, LAYOUT, Connect

TOKENS = list(range(300, 300 + 6 * CHUNK))
HEADS: dict[str, Any] = {"chunk_size": CHUNK, "head_dim": LAYOUT.head_dim}
QUERY_LAYOUT = replace(LAYOUT, num_kv_heads=2 * LAYOUT.num_kv_heads, planes=1)
POLICIES = [
    (edits.StreamingLLM, {}),
    (edits.Random, {}),
    (edits.Knorm, {}),
    (edits.Knorm, {"reduce": "max"}),
    (edits.KeyDiff, {}),
    (edits.LagKV, {"lag_size": 8}),
    (edits.SnapKV, {"window_size": 5}),
    (edits.TOVA, {}),
]


def random_kv(layout: KVLayout = LAYOUT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(layout.kv_shape(len(TOKENS)), generator=generator).to(layout.dtype)


def random_queries() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    shape = (1, LAYOUT.num_layers, len(TOKENS), 2 * LAYOUT.width)
    return torch.randn(shape, generator=generator).to(LAYOUT.dtype)


def check(client: KVClient, kv: torch.Tensor, edit: edits.Edit, plain: edits.Edit) -> None:
    client.store(kv, TOKENS)
    expected, kept = plain(kv, TOKENS)
    result = client.edit(TOKENS, edit)
    assert result.tokens == kept
    assert 0 < len(kept) < len(TOKENS)
    cached = client.retrieve(kept)
    assert cached is not None
    assert torch.equal(cached, expected[:, :, : result.num_cached])


@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_a_policy_on_the_server_keeps_what_the_function_keeps(
    client: KVClient, policy: Any, options: dict[str, Any]
) -> None:
    rope = edits.Rope(LAYOUT.head_dim)
    edit = policy(0.5, rope=rope, **options)
    plain = policy(0.5, rope=rope, chunk_size=CHUNK, **options)
    if issubclass(policy, edits.SnapKV):
        edit = edits.with_queries(edit, random_queries())
        plain = edits.with_queries(plain, random_queries())
    check(client, random_kv(), edit, plain)


@pytest.mark.parametrize("transport", ["shm", "pickle"], indirect=True)
def test_a_policy_of_ones_own_and_a_chain_see_the_servers_chunks(client: KVClient) -> None:
    def last_value(view: edits.KVView) -> torch.Tensor:
        return torch.stack([view.values(i)[:, -1].float() for i in range(view.num_layers)])

    def both(**size: Any) -> edits.Edit:
        own = edits.from_scores(last_value, 0.5, **size)
        return edits.chain(own, edits.Knorm(0.3, head_dim=LAYOUT.head_dim, **size))

    check(client, random_kv(), both(), both(chunk_size=CHUNK))


@pytest.mark.parametrize("transport", ["shm", "inline"], indirect=True)
def test_queries_may_lie_in_a_lease_of_their_own(connect: Connect) -> None:
    queries = random_queries()
    layout = QUERY_LAYOUT
    policy = edits.SnapKV(0.5, window_size=5)
    plain = edits.SnapKV(0.5, window_size=5, **HEADS)
    with (
        connect(layout=LAYOUT) as client,
        connect(model_name="model##query", layout=layout) as query_client,
    ):
        query_client.store(queries, TOKENS)
        with query_client.lease(TOKENS) as lease:
            view = edits.LeaseView(lease, layout)
            check(
                client,
                random_kv(),
                edits.with_queries(policy, view),
                edits.with_queries(plain, queries),
            )


@pytest.mark.parametrize("transport", ["shm", "inline"], indirect=True)
def test_a_stream_gives_a_policy_the_queries_of_its_query_context(server: EmbeddedServer) -> None:
    kv, queries = random_kv(), random_queries()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no shared memory.*")
        contexts = [
            kvcache.connect(server.url, server.http_url, "model", 30.0, layout=LAYOUT),
            qcache.connect(server.url, server.http_url, "model", 30.0, layout=QUERY_LAYOUT),
        ]
    with contexts[0] as kv_context, contexts[1] as query_context:
        kv_context.store(kv, TOKENS)
        query_context.store(queries, TOKENS)
        for policy in (edits.SnapKV, edits.TOVA):
            stream = request.create_request(contexts, lambda *_: iter(()), TOKENS)
            _, kept = policy(0.5, **HEADS)(kv, TOKENS, queries=queries)
            stream.modify_kv(edits.chain(edits.keep(range(len(TOKENS))), policy(0.5)))
            assert list(stream.tokens) == kept


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_packed_chunks_are_scored_where_they_are(connect: Connect) -> None:
    layout = KVLayout.packed(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, LAYOUT.dtype)
    with connect(layout=layout) as client:
        for policy in (edits.KeyDiff, edits.LagKV):
            check(client, random_kv(layout), policy(0.4), policy(0.4, **HEADS))


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_opaque_rows_are_not_scored(connect: Connect) -> None:
    layout = KVLayout(2, 1, 8, "bfloat16", planes=1, rows="opaque")
    with connect(layout=layout) as client:
        client.store(torch.zeros(layout.kv_shape(2 * CHUNK), dtype=layout.dtype), range(2 * CHUNK))
        with pytest.raises(InvalidInputError, match="rows are opaque"):
            client.edit(range(2 * CHUNK), edits.Knorm(0.5))


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_nothing_cached_is_nothing_to_score(client: KVClient, server: EmbeddedServer) -> None:
    result = client.edit(TOKENS, edits.Knorm(0.5))
    assert (result.tokens, result.num_cached, result.num_source) == ([], 0, 0)


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_scores_of_chunks_that_may_be_someone_elses_meanwhile_are_not_used(
    client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.store(random_kv(), TOKENS)

    def slow(view: edits.KVView) -> torch.Tensor:
        monkeypatch.setattr(view._lease._request, "deadline", 0.0)  # type: ignore[attr-defined]
        return torch.zeros(view.num_tokens)

    with client.lease(TOKENS) as lease, pytest.raises(LeaseExpiredError):
        edits.from_scores(slow, 0.5).plan(TOKENS, CHUNK, edits.LeaseView(lease, LAYOUT))
