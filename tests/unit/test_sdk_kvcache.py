"""The first-generation functions, and the shape of the public surface."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.kvcache as lmc_sdk
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import KVClient
from lmcache_fast.layout import KVLayout
from lmcache_fast.vllm import make_post_completion
from tests.unit.sdk_fakes import FakeClient, as_client, kv_for


def test_store_and_retrieve_go_to_the_context() -> None:
    ctx = as_client(FakeClient())
    assert lmc_sdk.retrieve(ctx, [1, 2, 3, 4]) is None
    assert lmc_sdk.store(ctx, kv_for([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5]) is True
    assert lmc_sdk.store(ctx, kv_for([1, 2, 3, 4]), [1, 2, 3, 4]) is False
    kv = lmc_sdk.retrieve(ctx, [1, 2, 3, 4, 5])
    assert kv is not None
    assert torch.equal(kv, kv_for([1, 2, 3, 4]))
    assert lmc_sdk.retrieve(ctx, [1, 2, 3, 4], "salt") is None


def test_connect_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    closed: list[KVClient] = []
    monkeypatch.setattr(
        KVClient, "__init__", lambda self, *arguments, **named: made.append((arguments, named))
    )
    monkeypatch.setattr(KVClient, "close", lambda self: closed.append(self))
    layout = KVLayout(1, 1, 8, torch.bfloat16)
    ctx = lmc_sdk.connect("tcp://host:1", "http://host:2", "model", 5.0, layout=layout)
    lmc_sdk.connect("tcp://host:1", "http://host:2", "model")
    addresses = ("tcp://host:1", "http://host:2", "model")
    assert made == [
        (addresses, {"layout": layout, "timeout": 5.0, "world_size": None}),
        (addresses, {"layout": None, "timeout": 60.0, "world_size": None}),
    ]
    lmc_sdk.close(ctx)
    assert closed == [ctx]


REPORT = "fmt='terminal', width=80, stream_ids=None"
WAIT = "timeout=30.0, poll_interval=0.2"
STREAM = lmc_stream.LMCacheStream
BATCH = lmc_batch.LMCacheBatchedStream


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lmc_sdk.connect,
            "url, http_url, model_name, timeout=60.0, *, layout=None, world_size=None",
        ),
        (lmc_sdk.close, "ctx"),
        (lmc_sdk.retrieve, "ctx, tokens, cache_salt=''"),
        (lmc_sdk.store, "ctx, kv, tokens, cache_salt=''"),
        (
            lmc_stream.create_request,
            "ctx, post_completion, prompt_token_ids, cache_salt='', *, isolate_edits=False",
        ),
        (lmc_stream.TokenEvent, "token_id, text=''"),
        (STREAM.generate, "self, sampling_params, suffix_tokens=()"),
        (STREAM.retrieve_kv, f"self, {WAIT}"),
        (STREAM.update_kv, "self, kv, tokens"),
        (STREAM.modify_kv, f"self, fn, {WAIT}, allow_partial=False"),
        (BATCH, ""),
        (BATCH.add, "self, stream=None, *, request_stream=None"),
        (BATCH.prefill, f"self, sampling_params, {REPORT}"),
        (BATCH.modify, f"self, fn, {REPORT}, {WAIT}, allow_partial=False"),
        (BATCH.decode, f"self, sampling_params, {REPORT}"),
        (make_post_completion, "base_url, model, timeout=60, tokenizer=None, api_key=None"),
    ],
)
def test_names_order_and_defaults_are_the_published_ones(function: Any, expected: str) -> None:
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    without_types = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(without_types) == f"({expected})"


def test_stream_metrics_have_the_published_fields() -> None:
    assert list(inspect.signature(lmc_stream.StreamPerfMetrics).parameters) == [
        "duration",
        "input_tokens",
        "output_tokens",
        "input_tput",
        "output_tput",
        "tpot",
        "ttft",
    ]
