"""The experiment: the same prompts decoded from their whole KV, and from half of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.kvcache as lmc_sdk
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import edits
from lmcache_fast.metrics import Metrics
from lmcache_fast.serve.demo.parts import start_parts
from lmcache_fast.serve.engine.model import PRESETS
from lmcache_fast.serve.processes import ChildGroup
from lmcache_fast.vllm import VLLMPostCompletion, make_post_completion

_TIMEOUT = 600.0
_BLOCK = 16


@dataclass(frozen=True)
class Settings:
    """What is run.

    Args:
        model: one of the engine's made-up models.
        requests: how many prompts there are.
        prompt_tokens: length of each prompt.
        output_tokens: tokens that each request decodes.
        chunk_size: tokens a chunk.
        kv_budget_tokens: tokens of KV that the engine's running requests share; 0 for as much as
            all requests need once half of their prompts is dropped.
        seed: of the model's weights and of the prompts.
    """

    model: str = "small"
    requests: int = 8
    prompt_tokens: int = 2600
    output_tokens: int = 96
    chunk_size: int = 256
    kv_budget_tokens: int = 0
    seed: int = 0

    @property
    def kept_tokens(self) -> int:
        """How many tokens of a prompt are left when the middle half of its chunks is dropped."""
        chunks = self.prompt_tokens // self.chunk_size
        return self.prompt_tokens - min(chunks // 2, max(chunks - 2, 0)) * self.chunk_size

    @property
    def budget(self) -> int:
        """The engine's KV budget in tokens, never too small for one whole request."""
        one = self.prompt_tokens + self.output_tokens + _BLOCK
        return self.kv_budget_tokens or max(
            one, self.requests * (self.kept_tokens + self.output_tokens + _BLOCK)
        )

    @property
    def pool_bytes(self) -> int:
        """Room for the KV of both runs, the dropped copies and what decoding adds."""
        import torch

        chunks = (self.prompt_tokens + self.output_tokens) // self.chunk_size + 1
        token_bytes = PRESETS[self.model].layout(torch.float32).token_bytes
        return (3 * self.requests + 1) * chunks * self.chunk_size * token_bytes + (64 << 20)


@dataclass(frozen=True)
class Run:
    """The reports of one run, and what the engine says about its cache.

    Args:
        reports: metrics by step.
        cached_tokens: prompt tokens of all requests that decoding took from the cache.
        prompt_tokens: prompt tokens of all requests when decoding.
    """

    reports: dict[str, Metrics]
    cached_tokens: int
    prompt_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON's types."""
        return {
            "reports": {step: report.to_dict() for step, report in self.reports.items()},
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(frozen=True)
class Result:
    """Both runs, and what dropping half of the KV gained."""

    settings: Settings
    transport: str
    baseline: Run
    dropped: Run

    @property
    def decode_gain(self) -> float:
        """Decoded tokens a second with half of the KV, over those with all of it."""
        after = self.dropped.reports["decode"].output_tput
        return float(after / self.baseline.reports["decode"].output_tput)

    @property
    def decode_gain_with_modify(self) -> float:
        """The same with the time that the edit took counted as decoding time."""
        modify, decode = self.dropped.reports["modify"], self.dropped.reports["decode"]
        after = decode.output_tokens / (decode.duration + modify.duration)
        return float(after / self.baseline.reports["decode"].output_tput)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        return {
            "settings": {**asdict(self.settings), "kv_budget_tokens": self.settings.budget},
            "transport": self.transport,
            "baseline": self.baseline.to_dict(),
            "dropped": self.dropped.to_dict(),
            "decode_gain": self.decode_gain,
            "decode_gain_with_modify": self.decode_gain_with_modify,
        }


def run_experiment(children: ChildGroup, settings: Settings) -> Result:
    """Start the parts, run both, and return what was measured.

    Raises:
        ChildError: a part did not start.
        LMCacheFastError: a request failed.
    """
    _say("starting a cache server and an engine ...")
    parts = start_parts(
        children,
        model=settings.model,
        chunk_size=settings.chunk_size,
        pool_bytes=settings.pool_bytes,
        kv_budget_tokens=settings.budget,
        seed=settings.seed,
    )
    config = PRESETS[settings.model]
    generator = np.random.default_rng(settings.seed)
    prompts = generator.integers(
        1, config.vocab_size, (settings.requests, settings.prompt_tokens)
    ).tolist()
    post_completion = make_post_completion(parts.engine_url, parts.model_name, timeout=_TIMEOUT)
    ctx = lmc_sdk.connect(parts.url, parts.http_url, parts.model_name)
    try:
        _warm_up(post_completion, prompts[0][:64])
        _say(f"baseline: {settings.requests} prompts of {settings.prompt_tokens} tokens ...")
        baseline = _run(ctx, post_completion, prompts, settings, "baseline", None)
        _say("the same with the middle half of the chunks dropped ...")
        edit = edits.drop_middle_chunks(0.5, rope=edits.Rope(config.head_dim, config.rope_theta))
        dropped = _run(ctx, post_completion, prompts, settings, "dropped", edit)
        return Result(settings, ctx.transport_name, baseline, dropped)
    finally:
        lmc_sdk.close(ctx)
        post_completion.close()


def _run(
    ctx: lmc_sdk.LMCacheKVCacheContext,
    post_completion: VLLMPostCompletion,
    prompts: Sequence[list[int]],
    settings: Settings,
    salt: str,
    edit: edits.Edit | None,
) -> Run:
    """Prefill, edit if there is an edit, decode. The salt keeps the runs' caches apart."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    batch = lmc_batch.LMCacheBatchedStream()
    for prompt in prompts:
        batch.add(lmc_stream.create_request(ctx, post_completion, prompt, salt))
    reports = {"prefill": batch.prefill({**sampling, "max_tokens": 1})}
    if edit is not None:
        reports["modify"] = batch.modify(edit, timeout=_TIMEOUT)
    reports["decode"] = batch.decode({**sampling, "max_tokens": settings.output_tokens})
    for report in reports.values():
        report.emit()
    usages = [stream.usage or {} for stream in batch.streams.values()]
    return Run(
        reports,
        sum(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in usages),
        sum(usage.get("prompt_tokens", 0) for usage in usages),
    )


def _warm_up(post_completion: VLLMPostCompletion, prompt: list[int]) -> None:
    parameters = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    for _ in post_completion(prompt, parameters, "warm-up"):
        pass


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
