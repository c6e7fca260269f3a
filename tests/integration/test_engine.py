"""The embedded engine against the embedded server: the cache changes the time, not the tokens."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import lmcache_fast.sdk.kvcache as lmc_sdk
from lmcache_fast.client import KVClient
from lmcache_fast.serve.demo.parts import Parts, start_parts
from lmcache_fast.serve.engine.model import PRESETS
from lmcache_fast.serve.processes import ChildGroup

CHUNK = 16
VOCABULARY = PRESETS["tiny"].vocab_size


@pytest.fixture(scope="module")
def children() -> Iterator[ChildGroup]:
    group = ChildGroup()
    yield group
    group.close()


@pytest.fixture(scope="module")
def parts(children: ChildGroup) -> Parts:
    return start_parts(
        children,
        model="tiny",
        chunk_size=CHUNK,
        pool_bytes=64 << 20,
        kv_budget_tokens=2000,
        seed=3,
    )


@pytest.fixture(scope="module")
def uncached_url(children: ChildGroup) -> str:
    """The same engine without a server."""
    engine = children.start("engine", ["engine", "--port", "0", "--model", "tiny", "--seed", "3"])
    return engine.wait_for_line("lmcache-fast engine ready on ", 180).split()[4]


@pytest.fixture
def client(parts: Parts) -> Iterator[KVClient]:
    with lmc_sdk.connect(parts.url, parts.http_url, parts.model_name) as client:
        yield client


def prompt_of(count: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, VOCABULARY, count)]


def complete(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def tokens_of(reply: dict[str, Any]) -> list[int]:
    (choice,) = reply["choices"]
    tokens: list[int] = choice["token_ids"]
    return tokens


def cached_of(reply: dict[str, Any]) -> int:
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 3])
def test_output_is_the_same_without_a_cache_and_with_a_cold_and_a_warm_one(
    parts: Parts, uncached_url: str, length: int
) -> None:
    prompt = prompt_of(length, seed=length)
    without = complete(uncached_url, prompt)
    cold = complete(parts.engine_url, prompt)
    warm = complete(parts.engine_url, prompt)
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(without)
    assert (cached_of(without), cached_of(cold)) == (0, 0)
    assert cached_of(warm) == min(length - length % CHUNK, length - 1)


def test_a_prompts_whole_chunks_are_on_the_server_when_the_response_ends(
    parts: Parts, client: KVClient
) -> None:
    prompt = prompt_of(3 * CHUNK + 5, seed=100)
    complete(parts.engine_url, prompt, max_tokens=1, cache_salt="mine")
    assert client.lookup(prompt, "mine") == 3 * CHUNK
    assert client.lookup(prompt, "other") == client.lookup(prompt) == 0


def test_the_sdk_learns_the_engines_layout_from_the_server(client: KVClient) -> None:
    layout = PRESETS["tiny"].layout(client.layout.dtype)
    assert (client.layout.num_layers, client.layout.width) == (layout.num_layers, layout.width)


def test_the_engine_goes_on_from_what_the_sdk_stored(parts: Parts, client: KVClient) -> None:
    prompt = prompt_of(4 * CHUNK, seed=101)
    original = tokens_of(complete(parts.engine_url, prompt, cache_salt="source"))
    kv = client.retrieve(prompt, "source")
    assert kv is not None
    client.store(kv, prompt, "same")
    same = complete(parts.engine_url, prompt, cache_salt="same")
    assert tokens_of(same) == original
    client.store(kv * 0.5, prompt, "changed")
    changed = complete(parts.engine_url, prompt, cache_salt="changed")
    assert cached_of(same) == cached_of(changed) == len(prompt) - 1
    assert tokens_of(changed) != original


DIES_IN_A_STORE = """
import os, signal, sys
import lmcache_fast.sdk.kvcache as lmc_sdk
from lmcache_fast.protocol.connection import Connection

url, http_url, model, *words = sys.argv[1:]
tokens = [int(word) for word in words]
client = lmc_sdk.connect(url, http_url, model)
kv = client.retrieve(tokens, "shared")
Connection.commit_store = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
client.store(kv * 0.5, tokens[:kv.shape[2]], "half stored")
"""


def test_clients_that_close_or_die_leave_a_live_engine_of_their_model_alone(
    parts: Parts, client: KVClient
) -> None:
    prompt = prompt_of(3 * CHUNK + 1, seed=103)
    first = complete(parts.engine_url, prompt, cache_salt="shared")
    lmc_sdk.connect(parts.url, parts.http_url, parts.model_name).close()
    done = subprocess.run(
        [
            *(sys.executable, "-c", DIES_IN_A_STORE),
            *(parts.url, parts.http_url, parts.model_name, *map(str, prompt)),
        ],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = complete(parts.engine_url, prompt, cache_salt="shared")
    assert tokens_of(again) == tokens_of(first) and cached_of(again) == 3 * CHUNK
    # What the dead client had begun is neither found nor in the engine's way.
    begun = complete(parts.engine_url, prompt, cache_salt="half stored")
    assert tokens_of(begun) == tokens_of(first) and cached_of(begun) == 0
    # The engine's registration is still there, for the next client to learn the layout from.
    with lmc_sdk.connect(parts.url, parts.http_url, parts.model_name) as other:
        assert other.layout == client.layout
        assert other.lookup(prompt, "shared") == 3 * CHUNK


def test_the_engine_serves_on_when_its_server_is_gone(children: ChildGroup) -> None:
    group = ChildGroup()
    try:
        server_and_engine = start_parts(
            group,
            model="tiny",
            chunk_size=CHUNK,
            pool_bytes=16 << 20,
            kv_budget_tokens=500,
            seed=3,
        )
        prompt = prompt_of(2 * CHUNK, seed=102)
        before = complete(server_and_engine.engine_url, prompt)
        group.child("server").stop()
        after = complete(server_and_engine.engine_url, prompt)
        assert tokens_of(after) == tokens_of(before)
        assert cached_of(after) == 0
    finally:
        group.close()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_fast", "engine", "--port", port],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port chooses another" in done.stderr and "Traceback" not in done.stderr
