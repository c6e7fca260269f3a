"""The second generation and isolated edits over every transport, against the embedded server."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import lmcache_fast.sdk as sdk
from lmcache_fast import KVClient, edits
from lmcache_fast.sdk import batch as lmc_batch
from lmcache_fast.sdk import kvcache, qcache
from lmcache_fast.sdk import request as lmc_request
from lmcache_fast.sdk import stream as lmc_stream
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import CHUNK, LAYOUT, Connect

KV, QUERY = sdk.LMCacheSDKCacheKind.KV, sdk.LMCacheSDKCacheKind.QUERY
#: Three times as many heads as there are keys.
QUERY_LAYOUT = replace(LAYOUT, num_kv_heads=3 * LAYOUT.num_kv_heads, planes=1)
PROMPT = list(range(4 * CHUNK + 3))

pytestmark = pytest.mark.filterwarnings("ignore:.*no shared memory.*")


def tensor_for(tokens: Sequence[int], client: KVClient, factor: int = 1) -> torch.Tensor:
    row = torch.tensor(tokens, dtype=torch.float32) * factor
    shape = client.layout.kv_shape(len(tokens))
    return row.to(client.layout.dtype).reshape(1, 1, -1, 1).expand(shape).contiguous()


class StoringEngine:
    """An engine that stores its prompt's KV and queries, and generates a counter."""

    def __init__(self, *clients: KVClient) -> None:
        self.clients = clients
        self.cached: list[int] = []

    def __call__(
        self, prompt: list[int], sampling_params: dict[str, int], cache_salt: str
    ) -> Iterator[lmc_request.TokenEvent]:
        self.cached.append(self.clients[0].lookup(prompt, cache_salt))
        for client in self.clients:
            client.store(tensor_for(prompt, client), prompt, cache_salt)
        for number in range(sampling_params["max_tokens"]):
            yield lmc_request.TokenEvent(500 + number)


@pytest.fixture
def queries(connect: Connect) -> KVClient:
    """Stores an engine's queries."""
    return connect("model##query", QUERY_LAYOUT)


def test_an_edit_sees_queries_beside_keys(
    client: KVClient, queries: KVClient, server: EmbeddedServer
) -> None:
    engine = StoringEngine(client, queries)
    with (
        kvcache.connect(server.url, server.http_url, "model", layout=LAYOUT) as kv_context,
        sdk.connect(QUERY, server.url, server.http_url, "model", 30.0) as query_context,
    ):
        assert query_context.kind is QUERY
        assert query_context.model_name == "model##query"
        assert query_context.layout.kv_shape(1) == QUERY_LAYOUT.kv_shape(1)  # from /status
        stream = lmc_request.create_request([kv_context, query_context], engine, PROMPT, "salt")
        stream.generate({"max_tokens": 1})

        def edit(
            tensors: Mapping[sdk.LMCacheSDKCacheKind, torch.Tensor], tokens: Sequence[int]
        ) -> tuple[torch.Tensor, Sequence[int]]:
            assert torch.equal(tensors[KV], tensor_for(tokens, client))
            assert torch.equal(tensors[QUERY], tensor_for(tokens, queries))
            return tensors[KV][:, :, CHUNK:], tokens[CHUNK:]

        stream.modify_kv(edit)
        assert stream.tokens == PROMPT[CHUNK : 4 * CHUNK]
        kept = kv_context.retrieve(stream.tokens, "salt", {"lmcache.tag": 1})
        assert kept is not None
        assert torch.equal(kept, tensor_for(stream.tokens, client))
        assert query_context.retrieve(stream.tokens, "salt") is None
        stream.generate({"max_tokens": 2})
        assert engine.cached == [0, 3 * CHUNK]


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_queries_that_nobody_registered_are_as_wide_as_the_keys(
    client: KVClient, server: EmbeddedServer
) -> None:
    with pytest.warns(UserWarning, match=r"taken to be as wide as the keys of 'model', 16"):
        context = qcache.connect(server.url, server.http_url, "model")
    with context:
        assert context.layout.kv_shape(1) == (1, *LAYOUT.kv_shape(1)[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qcache.connect(server.url, server.http_url, "model", layout=QUERY_LAYOUT).close()


@pytest.mark.parametrize("as_edit", [True, False], ids=["edit", "function"])
def test_an_isolated_edit_is_decoded_from_and_found_by_nobody_else(
    client: KVClient, as_edit: bool
) -> None:
    engine = StoringEngine(client)
    edit = edits.drop_middle_chunks(0.5, chunk_size=CHUNK)
    stream = lmc_stream.create_request(client, engine, PROMPT, "mine", isolate_edits=True)
    stream.generate({"max_tokens": 1})
    stream.modify_kv(edit if as_edit else lambda kv, tokens: edit(kv, tokens))
    kept = PROMPT[:CHUNK] + PROMPT[3 * CHUNK : 4 * CHUNK]
    assert stream.tokens == kept
    stream.generate({"max_tokens": 1})
    assert engine.cached == [0, 2 * CHUNK]  # also the first chunk, which the edit left as it was
    found = client.retrieve(kept, stream.cache_salt)
    assert found is not None
    assert torch.equal(found, tensor_for(kept, client))
    for salt in ("", "mine"):
        assert client.lookup(kept, salt) <= CHUNK  # the unedited beginning at most


def test_an_isolated_edit_may_change_values_and_keep_the_tokens(client: KVClient) -> None:
    stream = lmc_request.create_request([client], StoringEngine(client), PROMPT, isolate_edits=True)
    stream.generate({"max_tokens": 1})
    for factor in (2, 4):
        stream.modify_kv(lambda tensors, tokens: (tensors[KV] * 2, tokens))
        expected = tensor_for(PROMPT[: 4 * CHUNK], client, factor)
        assert torch.equal(stream.retrieve(KV), expected)


def test_one_batch_holds_both_generations_over_one_context(client: KVClient) -> None:
    engine = StoringEngine(client)
    batch = lmc_batch.LMCacheBatchedStream()
    batch.add(lmc_stream.create_request(client, engine, PROMPT, "first"))
    batch.add(lmc_request.create_request([client], engine, PROMPT, "second"))
    batch.prefill({})
    batch.modify(edits.drop_middle_chunks(0.5, chunk_size=CHUNK))
    assert batch.decode({"max_tokens": 3}).output_tokens == 6
    first, second = batch.streams.values()
    assert first.tokens == second.tokens
    assert sorted(engine.cached) == [0, 0, 2 * CHUNK, 2 * CHUNK]
