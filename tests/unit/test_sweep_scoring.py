"""The scorer asks about the same continuation whatever comes back, and says what does not fit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lmcache_fast.errors import EngineError
from lmcache_fast.sweep.scoring import Scorer
from lmcache_fast.vllm import make_post_completion

GOOD: dict[str, Any] = {
    "choices": [
        {"logprobs": {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5}]}},
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
}

Handler = Callable[[httpx.Request], httpx.Response]


def scorer(handler: Handler) -> Scorer:
    engine = make_post_completion("http://engine:1/v1", "a-model")
    engine.http = httpx.Client(transport=httpx.MockTransport(handler))
    return Scorer(engine, 5)


def answer(**fields: Any) -> Handler:
    return lambda request: httpx.Response(200, json={**GOOD, **fields})


def test_each_token_of_the_continuation_is_asked_about_after_those_before_it() -> None:
    bodies = []
    lock = threading.Lock()

    def handler(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://engine:1/v1/completions"
        with lock:
            bodies.append(json.loads(request.content))
        return httpx.Response(200, json=GOOD)

    found = scorer(handler).score([1, 2, 3], [4, 5, 6], "salty", 2)
    assert [token.token_id for token in found] == [7, 7, 7]
    assert found[0].logprobs == {7: -0.5}
    prompts = sorted((body.pop("prompt") for body in bodies), key=len)
    assert prompts == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    for body in bodies:
        assert body == {
            "model": "a-model",
            "cache_salt": "salty",
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }


def logprobs(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"logprobs": {**GOOD["choices"][0]["logprobs"], **fields}}]}


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda request: httpx.Response(503, text="too busy"), "answered 503: too busy"),
        (lambda request: httpx.Response(200, text="{"), "no reply that can be read"),
        (answer(choices=[]), "no reply that can be read"),
        (answer(choices=[{"logprobs": None}]), "gave no top_logprobs"),
        (answer(**logprobs(top_logprobs=None)), "gave no top_logprobs"),
        (answer(**logprobs(tokens=["the"])), "calls a token 'the'; expected token_id:N"),
        (answer(**logprobs(top_logprobs=[{"a": 0.0}])), "calls a token 'a'"),
        (
            answer(usage={"prompt_tokens_details": {"cached_tokens": 1}}),
            "took 1 of 2 cached tokens from the cache",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_why(handler: Handler, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        scorer(handler).score([1, 2, 3], [4], "", 2)


def test_a_prompt_that_is_cached_whole_may_lose_its_end() -> None:
    handler = answer(usage={"prompt_tokens_details": {"cached_tokens": 2}})
    assert len(scorer(handler).score([1, 2, 3], [4], "", 3)) == 1


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens_details": None}])
def test_an_engine_that_does_not_tell_what_was_cached_is_believed(usage: Any) -> None:
    assert len(scorer(answer(usage=usage)).score([1, 2, 3], [4], "", 2)) == 1


def test_an_engine_that_is_gone_is_an_engine_error() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineError, match="http://engine:1/v1/completions failed: refused"):
        scorer(gone).score([1], [2], "", 0)


def test_a_text_is_cut_into_tokens_by_the_engine() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://engine:1/tokenize"
        assert json.loads(request.content) == {"model": "a-model", "prompt": "some text"}
        return httpx.Response(200, json={"tokens": [4, 5], "count": 2})

    assert scorer(handler).tokenize("some text") == [4, 5]
    with pytest.raises(EngineError, match="no reply that can be read"):
        scorer(answer()).tokenize("some text")
