"""The main job on a real vLLM: prefill, keep half of the chunks, decode on from the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.kvcache as lmc_sdk
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast.vllm import make_post_completion
from tests.interop import peer
from tests.interop.processes import wait_until
from tests.interop.servers import Server, real_server
from tests.interop.vllm_engine import CHUNK, LAYOUT, Engine, vllm_engine

pytestmark = pytest.mark.timeout(1200)  # on a loaded machine vLLM takes minutes to start
CHUNKS = 8
TAIL = 20


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Engine]]:
    folder = tmp_path_factory.mktemp("vllm")
    with (
        real_server(peer.ensure(), folder, chunk_size=CHUNK) as server,
        vllm_engine(server, folder) as engine,
    ):
        yield server, engine


def first_and_last_quarter(
    kv: torch.Tensor, tokens: Sequence[int]
) -> tuple[torch.Tensor, Sequence[int]]:
    quarter = len(tokens) // CHUNK // 4 * CHUNK
    kept = [*range(quarter), *range(len(tokens) - quarter, len(tokens))]
    return kv[:, :, torch.tensor(kept)], [tokens[position] for position in kept]


def test_vllm_decodes_from_the_chunks_that_were_kept(parts: tuple[Server, Engine]) -> None:
    server, engine = parts
    prompts = [[(i * 7 + 13 * n) % 1000 + 2 for i in range(CHUNKS * CHUNK + TAIL)] for n in (1, 2)]
    ctx = lmc_sdk.connect(server.url, server.http_url, engine.model, layout=LAYOUT)
    try:
        assert ctx.transport_name == "shm"
        post_completion = make_post_completion(engine.url, engine.model, timeout=240.0)
        batch = lmc_batch.LMCacheBatchedStream()
        streams = [lmc_stream.create_request(ctx, post_completion, prompt) for prompt in prompts]
        for stream in streams:
            batch.add(stream)

        prefill = batch.prefill({"temperature": 0.0})
        assert prefill.input_tokens == sum(map(len, prompts))
        batch.modify(first_and_last_quarter, timeout=120.0)

        kept = CHUNKS // 2 * CHUNK
        for prompt, stream in zip(prompts, streams, strict=True):
            quarter = kept // 2
            assert list(stream.tokens[:kept]) == [
                *prompt[:quarter],
                *prompt[CHUNKS * CHUNK - quarter : CHUNKS * CHUNK],
            ]
            # One more token than is cached, since an engine computes at least one.
            assert engine.cached_tokens([*stream.tokens[:kept], 5]) == kept

        decode = batch.decode({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True})
        assert decode.output_tokens == 16
        assert [stream.decoded_tokens() for stream in streams] == [9, 9]
        assert [len(stream.output_tokens()) for stream in streams] == [9, 9]
    finally:
        lmc_sdk.close(ctx)
    # vLLM ends its own sessions when it likes; locks are what must not stay.
    wait_until(lambda: not any("lock" in what for what in server.held()), 60, "locks to go")
