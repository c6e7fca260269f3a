"""The scheduler: batching within the KV budget, the same tokens with and without a cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from lmcache_fast.errors import EngineError, InvalidInputError
from lmcache_fast.serve.engine.cache import NoCache
from lmcache_fast.serve.engine.model import PRESETS, Model, random_weights
from lmcache_fast.serve.engine.scheduler import Generated, GenerationRequest, Scheduler

CONFIG = PRESETS["tiny"]
CHUNK = 16


class MemoryCache:
    """Whole chunks in a dictionary by their prefix."""

    chunk_size = CHUNK

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.closed = False

    def load(self, tokens: Sequence[int], cache_salt: str) -> torch.Tensor | None:
        found = []
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            chunk = self.chunks.get((cache_salt, tuple(tokens[:end])))
            if chunk is None:
                break
            found.append(chunk)
        return torch.cat(found, dim=2) if found else None

    def save(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str) -> None:
        assert kv.shape[2] == len(tokens) and len(tokens) % CHUNK == 0
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            key = (cache_salt, tuple(tokens[:end]))
            self.chunks.setdefault(key, kv[:, :, end - CHUNK : end].clone())

    def close(self) -> None:
        self.closed = True


class CountingModel(Model):
    """Notes the size of each decoding batch; can be held up."""

    def __init__(self) -> None:
        super().__init__(CONFIG, random_weights(CONFIG, seed=1))
        self.batches: list[int] = []
        self.prefilled = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail = False

    def prefill(self, tokens, kv, start, queries=None):  # type: ignore[no-untyped-def]
        self.prefilled += len(tokens)
        super().prefill(tokens, kv, start, queries)

    def decode(self, tokens, kvs, lengths, queries=()):  # type: ignore[no-untyped-def]
        assert self.go_on.wait(30)
        if self.fail:
            raise RuntimeError("out of order")
        self.batches.append(len(tokens))
        return super().decode(tokens, kvs, lengths, queries)


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture
def cache() -> MemoryCache:
    return MemoryCache()


@pytest.fixture
def scheduler(model: CountingModel, cache: MemoryCache) -> Iterator[Scheduler]:
    scheduler = Scheduler(model, cache, kv_budget_tokens=200)
    yield scheduler
    scheduler.close()


class Listener:
    def __init__(self) -> None:
        self.events: queue.Queue[Generated | EngineError] = queue.Queue()
        self.put = self.events.put

    def tokens(self) -> list[Generated]:
        tokens: list[Generated] = []
        while not tokens or not tokens[-1].finish_reason:
            event = self.events.get(timeout=60)
            if isinstance(event, EngineError):
                raise event
            tokens.append(event)
        return tokens


def prompt_of(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, CONFIG.vocab_size, (count,), generator=generator).tolist())


def generate(scheduler: Scheduler, prompt: tuple[int, ...], **options: object) -> list[Generated]:
    listener = Listener()
    request = GenerationRequest(prompt, **{"max_tokens": 8, "ignore_eos": True, **options})  # type: ignore[arg-type]
    scheduler.submit(request, listener.put)
    return listener.tokens()


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_greedy_output_is_the_same_with_a_cached_prefix(
    model: CountingModel, cache: MemoryCache, scheduler: Scheduler, length: int
) -> None:
    prompt = prompt_of(length)
    plain = Scheduler(Model(CONFIG, random_weights(CONFIG, 1)), NoCache(CHUNK), 200)
    try:
        without = generate(plain, prompt)
    finally:
        plain.close()
    first, computed = generate(scheduler, prompt), model.prefilled
    second = generate(scheduler, prompt)
    assert [t.token_id for t in first] == [t.token_id for t in without]
    assert second == [
        Generated(t.token_id, t.logprob, second[0].cached_tokens, t.finish_reason) for t in first
    ]
    whole = length - length % CHUNK
    assert second[0].cached_tokens == min(whole, length - 1)
    assert model.prefilled - computed == length - 1 - second[0].cached_tokens


def test_chunks_that_generation_fills_are_saved_too(
    cache: MemoryCache, scheduler: Scheduler
) -> None:
    prompt = prompt_of(CHUNK - 2)
    tokens = generate(scheduler, prompt, max_tokens=CHUNK + 3)
    known = prompt + tuple(t.token_id for t in tokens)[:-1]  # nothing needed the last one's KV
    assert {len(key[1]) for key in cache.chunks} == {CHUNK, 2 * CHUNK}
    assert all(known[: len(key[1])] == key[1] for key in cache.chunks)


def test_queries_are_saved_beside_the_kv_of_what_is_computed_from_its_beginning(
    model: CountingModel, cache: MemoryCache
) -> None:
    queries = MemoryCache()
    scheduler = Scheduler(model, cache, kv_budget_tokens=200, query_cache=queries)
    try:
        prompt = prompt_of(2 * CHUNK + 3)
        generate(scheduler, prompt, max_tokens=CHUNK)
        assert queries.chunks.keys() == cache.chunks.keys() and len(cache.chunks) == 3
        width = CONFIG.num_attention_heads * CONFIG.head_dim
        shape = (1, CONFIG.num_hidden_layers, CHUNK, width)
        assert {chunk.shape for chunk in queries.chunks.values()} == {shape}
        longer = prompt[: 2 * CHUNK] + prompt_of(2 * CHUNK, seed=1)
        assert generate(scheduler, longer)[0].cached_tokens == 2 * CHUNK
        assert len(cache.chunks) == 5 and len(queries.chunks) == 3
    finally:
        scheduler.close()
    assert queries.closed


def test_salts_keep_prefixes_apart(scheduler: Scheduler) -> None:
    prompt = prompt_of(2 * CHUNK + 1)
    generate(scheduler, prompt, cache_salt="a")
    assert generate(scheduler, prompt, cache_salt="b")[0].cached_tokens == 0
    assert generate(scheduler, prompt, cache_salt="a")[0].cached_tokens == 2 * CHUNK


@pytest.mark.parametrize(("prompt_tokens", "together"), [(40, 4), (90, 2), (190, 1)])
def test_as_many_sequences_run_together_as_their_kv_fits_the_budget(
    model: CountingModel, scheduler: Scheduler, prompt_tokens: int, together: int
) -> None:
    model.go_on.clear()
    listeners = [Listener() for _ in range(4)]
    for seed, listener in enumerate(listeners):
        request = GenerationRequest(prompt_of(prompt_tokens, seed), 11, ignore_eos=True)
        scheduler.submit(request, listener.put)
    model.go_on.set()
    assert all(len(listener.tokens()) == 11 for listener in listeners)
    assert max(model.batches) == together


def test_the_end_of_sequence_token_stops_unless_ignored(scheduler: Scheduler) -> None:
    model = scheduler._model
    prompt = prompt_of(10)
    full = generate(scheduler, prompt)
    third = full[2].token_id
    first_place = [t.token_id for t in full].index(third)
    object.__setattr__(model, "config", type(CONFIG)(**{**vars(CONFIG), "eos_token_id": third}))
    stopped = generate(scheduler, prompt, ignore_eos=False)
    assert len(stopped) == first_place + 1
    assert (stopped[-1].token_id, stopped[-1].finish_reason) == (third, "stop")
    assert generate(scheduler, prompt)[-1].finish_reason == "length"


def test_a_seed_fixes_what_is_drawn(scheduler: Scheduler) -> None:
    draws = [
        [t.token_id for t in generate(scheduler, prompt_of(5), temperature=2.0, seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_cancelled_sequence_makes_room(model: CountingModel, scheduler: Scheduler) -> None:
    model.go_on.clear()
    gone, other = Listener(), Listener()
    handle = scheduler.submit(GenerationRequest(prompt_of(150), 50), gone.put)
    scheduler.submit(GenerationRequest(prompt_of(150), 2, ignore_eos=True), other.put)
    scheduler.cancel(handle)
    model.go_on.set()
    assert len(other.tokens()) == 2
    assert gone.events.empty()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 1, "prompt has no tokens"),
        ((1, CONFIG.vocab_size), 1, r"prompt\[1\] is 512; expected 0 to 511"),
        ((-1,), 1, r"prompt\[0\] is -1"),
        ((1,), 0, "max_tokens is 0"),
        ((1,) * 150, 52, "need the KV of 201 tokens; the engine has room for 200"),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    scheduler: Scheduler, prompt: tuple[int, ...], max_tokens: int, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        scheduler.submit(GenerationRequest(prompt, max_tokens), Listener().put)


def test_a_failing_step_fails_its_sequences_and_later_ones_run(
    model: CountingModel, scheduler: Scheduler
) -> None:
    model.fail = True
    with pytest.raises(EngineError, match="out of order"):
        generate(scheduler, prompt_of(5))
    model.fail = False
    assert len(generate(scheduler, prompt_of(5))) == 8


def test_closing_fails_what_is_under_way_and_closes_the_cache(
    model: CountingModel, cache: MemoryCache, scheduler: Scheduler
) -> None:
    model.go_on.clear()
    listener = Listener()
    scheduler.submit(GenerationRequest(prompt_of(5), 100), listener.put)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    while scheduler.is_healthy:
        time.sleep(0.01)
    model.go_on.set()
    closing.join(60)
    with pytest.raises(EngineError, match="shutting down"):
        listener.tokens()
    assert cache.closed and not scheduler.is_healthy
    with pytest.raises(EngineError, match="shutting down"):
        scheduler.submit(GenerationRequest((1,)), listener.put)
