"""The SDK's main job over every transport, against the embedded server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.kvcache as lmc_sdk
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import KVClient, edits
from tests.integration.conftest import CHUNK, LAYOUT


class StoringEngine:
    """An engine that stores its prompt as an engine would, and generates a counter."""

    def __init__(self, client: KVClient) -> None:
        self.client = client
        self.prompts: list[list[int]] = []

    def __call__(
        self, prompt: list[int], sampling_params: dict[str, int], cache_salt: str
    ) -> Iterator[lmc_stream.TokenEvent]:
        self.prompts.append(prompt)
        self.client.store(kv_for(prompt), prompt, cache_salt)
        for number in range(sampling_params["max_tokens"]):
            yield lmc_stream.TokenEvent(500 + number)


def kv_for(tokens: Sequence[int]) -> torch.Tensor:
    row = torch.tensor(tokens, dtype=torch.float32).to(LAYOUT.dtype).reshape(1, 1, -1, 1)
    return row.expand(LAYOUT.kv_shape(len(tokens))).contiguous()


@pytest.mark.parametrize("as_function", [False, True], ids=["edit", "function"])
def test_prefill_modify_decode(client: KVClient, as_function: bool) -> None:
    engine = StoringEngine(client)
    batch = lmc_batch.LMCacheBatchedStream()
    prompts = [list(range(n, n + 4 * CHUNK + 3)) for n in (0, 100, 200)]
    streams = [lmc_stream.create_request(client, engine, prompt) for prompt in prompts]
    for stream in streams:
        batch.add(stream)

    assert batch.prefill({}).input_tokens == 3 * (4 * CHUNK + 3)
    edit = edits.drop_middle_chunks(0.5, chunk_size=CHUNK)
    batch.modify((lambda kv, tokens: edit(kv, tokens)) if as_function else edit)
    for prompt, stream in zip(prompts, streams, strict=True):
        kept = prompt[:CHUNK] + prompt[3 * CHUNK : 4 * CHUNK]
        assert stream.tokens == kept
        assert stream.suffix_tokens() == [*prompt[4 * CHUNK :], 500]
        kv = lmc_sdk.retrieve(client, stream.tokens)
        assert kv is not None
        assert torch.equal(kv, kv_for(kept))
    assert batch.decode({"max_tokens": 5}).output_tokens == 15
    assert {len(prompt) for prompt in engine.prompts[3:]} == {2 * CHUNK + 4}
