"""The main job on a real vLLM: prefill, keep half of the chunks, decode on from the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.kvcache as lmc_sdk
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import cli, edits
from lmcache_fast.serve.engine.model import Model, random_weights
from lmcache_fast.vllm import make_post_completion
from tests.interop import peer
from tests.interop.processes import wait_until
from tests.interop.servers import Server, real_server
from tests.interop.vllm_engine import CHUNK, LAYOUT, MODEL, SEED, Engine, vllm_engine
from tests.teacher import logprobs_of

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


def test_a_sweep_tells_how_far_the_chunks_that_were_kept_move_vllms_output(
    parts: tuple[Server, Engine], tmp_path: Path
) -> None:
    server, engine = parts
    prompt = [(i * 5 + 3) % 1000 + 2 for i in range(4 * CHUNK + TAIL)]
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(prompt)}\n")
    policies = ["StreamingLLM", "Knorm", "SnapKV", "drop_middle_chunks"]
    arguments = [
        *("--engine-url", engine.url, "--url", server.url, "--http-url", server.http_url),
        *("--model", engine.model, "--opaque", "--hf-config", engine.model),
        *("--prompts", str(tmp_path / "prompts.jsonl"), "--json", str(tmp_path / "sweep.json")),
        *("--policies", ",".join(policies), "--ratios", "0.5", "--max-tokens", "4"),
        *("--logprobs", "-1"),
    ]
    assert cli.main(["sweep", *arguments]) == 0
    result = json.loads((tmp_path / "sweep.json").read_text())

    reasons = {one["policy"]: one["reason"] for one in result["left_out"]}
    assert "only whole chunks of 256 can be kept or dropped" in reasons["StreamingLLM"]
    assert "the engine's rows are opaque" in reasons["Knorm"]
    assert "the engine stores none" in reasons["SnapKV"]
    unedited, dropped = result["rows"]
    assert unedited["kl"] < 1e-3 and unedited["covered"] == pytest.approx(1, abs=1e-3)
    assert (dropped["policy"], dropped["kept"]) == ("drop_middle_chunks", 0.5)

    # The same model in single precision, on the same tokens: half precision is all that differs.
    weights = {name: one.bfloat16().float() for name, one in random_weights(MODEL, SEED).items()}
    model = Model(MODEL, weights)
    kv = torch.empty(MODEL.layout(torch.float32).kv_shape(4 * CHUNK))
    model.prefill(torch.tensor(prompt[: 4 * CHUNK]), kv, 0)
    half, _ = edits.drop_middle_chunks(0.5, chunk_size=CHUNK)(kv, prompt[: 4 * CHUNK])
    (continuation,) = result["continuations"]
    p, q = (logprobs_of(model, one, prompt[4 * CHUNK :], continuation) for one in (kv, half))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert kl > 0.01
    assert dropped["kl"] == pytest.approx(kl, rel=0.2)
