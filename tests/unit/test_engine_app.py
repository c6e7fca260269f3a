"""The engine's HTTP side speaks OpenAI's completions, with token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from lmcache_fast.serve.engine.app import make_app
from lmcache_fast.serve.engine.cache import NoCache
from lmcache_fast.serve.engine.completions import text_of, tokens_of
from lmcache_fast.serve.engine.model import PRESETS, Model, random_weights
from lmcache_fast.serve.engine.scheduler import Scheduler

CONFIG = PRESETS["tiny"]


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(Model(CONFIG, random_weights(CONFIG, seed=1)), NoCache(16), 100)
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="module")
def client(scheduler: Scheduler) -> TestClient:
    return TestClient(make_app(scheduler, "a-model", CONFIG.vocab_size))


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "a-model",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def events_of(text: str) -> list[str]:
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_a_completion_has_text_token_ids_and_usage(client: TestClient) -> None:
    reply = client.post("/v1/completions", json=body(return_token_ids=True)).json()
    (choice,) = reply["choices"]
    assert choice["text"] == "".join(f"t{token} " for token in choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_gives_the_same_tokens_then_usage_then_done(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=body(return_token_ids=True)).json()
    reply = client.post(
        "/v1/completions",
        json=body(return_token_ids=True, stream=True, stream_options={"include_usage": True}),
    )
    *chunks, usage, done = events_of(reply.text)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == (
        whole["choices"][0]["token_ids"]
    )
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"] == whole["usage"]
    assert done == "[DONE]"


def test_token_ids_come_only_when_asked_for(client: TestClient) -> None:
    assert "token_ids" not in client.post("/v1/completions", json=body()).json()["choices"][0]


def test_logprobs_can_name_tokens_by_id(client: TestClient) -> None:
    reply = client.post(
        "/v1/completions",
        json=body(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True),
    ).json()
    choice = reply["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_likeliest_tokens_come_with_each_token(client: TestClient, count: int) -> None:
    drawn = body(return_tokens_as_token_ids=True, temperature=5.0, seed=3)
    some, every = (
        client.post("/v1/completions", json={**drawn, "logprobs": n}).json()["choices"][0]
        for n in (count, -1)
    )
    assert some["logprobs"]["tokens"] == every["logprobs"]["tokens"]
    for token, top, whole in zip(
        some["logprobs"]["tokens"],
        some["logprobs"]["top_logprobs"],
        every["logprobs"]["top_logprobs"],
        strict=True,
    ):
        assert len(whole) == CONFIG.vocab_size
        assert sum(map(math.exp, whole.values())) == pytest.approx(1, abs=1e-5)
        best_first = sorted(whole, key=lambda name: -whole[name])
        assert top == {name: whole[name] for name in {token, *best_first[:count]}}


def test_streamed_logprobs_are_those_of_the_whole_reply(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=body(logprobs=2)).json()["choices"][0]["logprobs"]
    reply = client.post("/v1/completions", json=body(logprobs=2, stream=True))
    pieces = [
        json.loads(event)["choices"][0]["logprobs"]
        for event in events_of(reply.text)
        if event != "[DONE]"
    ]
    assert {name: [each for piece in pieces for each in piece[name]] for name in whole} == whole
    assert whole["text_offset"][:2] == [0, len(whole["tokens"][0])]


def test_a_texts_tokens_can_be_asked_for(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"model": "a-model", "prompt": "t5 t17"}).json()
    assert reply == {"tokens": [5, 17], "count": 2, "max_model_len": 100}
    reply = client.post("/tokenize", json={"prompt": [1]})
    assert (reply.status_code, "expected a string" in reply.text) == (400, True)
    assert client.post("/tokenize", content=b"{").status_code == 400


def test_a_text_prompt_is_read_back_as_the_tokens_it_was_written_from(client: TestClient) -> None:
    assert tokens_of(text_of(5) + text_of(17), 512) == (5, 17)
    assert all(0 <= token < 512 for token in tokens_of("any other words t", 512))
    replies = [
        client.post("/v1/completions", json=body(prompt=prompt)).json()["choices"][0]["text"]
        for prompt in ("t1 t2 t3", ["t1 t2 t3"], [[1, 2, 3]])
    ]
    assert len(set(replies)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt is NoneType"),
        ({"prompt": []}, "prompt has no tokens"),
        ({"prompt": [1, "a"]}, r"prompt[1] is 'a'"),
        ({"prompt": [[1], [2]]}, "one prompt a request"),
        ({"prompt": [512]}, "prompt[0] is 512; expected 0 to 511"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "4"}, "max_tokens is '4'"),
        ({"max_tokens": 1000}, "room for 100"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stream": "yes"}, "stream is 'yes'"),
        ({"n": 2}, "n is 2"),
        ({"logprobs": True}, "logprobs is True"),
        ({"logprobs": 513}, "logprobs is 513; expected 0 to 512"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"cache_salt": "a@b"}, "cache_salt 'a@b'"),
    ],
)
def test_a_bad_field_is_named(client: TestClient, fields: dict[str, Any], message: str) -> None:
    reply = client.post("/v1/completions", json=body(**fields))
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_no_json_and_another_model_are_refused(client: TestClient) -> None:
    reply = client.post("/v1/completions", content=b"{")
    assert (reply.status_code, "no JSON" in reply.text) == (400, True)
    reply = client.post("/v1/completions", content=b"\xff")
    assert reply.status_code == 400
    reply = client.post("/v1/completions", json=body(model="other"))
    assert (reply.status_code, "this engine has 'a-model'" in reply.text) == (404, True)


def test_models_and_health(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("a-model", 100)
    assert client.get("/health").status_code == 200


def test_a_closed_engine_is_unhealthy_and_refuses() -> None:
    scheduler = Scheduler(Model(CONFIG, random_weights(CONFIG, seed=1)), NoCache(16), 100)
    client = TestClient(make_app(scheduler, "a-model", CONFIG.vocab_size))
    scheduler.close()
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json=body()).status_code == 503
