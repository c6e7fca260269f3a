"""Batches: all streams at once, and one that fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast.completion import TokenEvent
from lmcache_fast.errors import BatchError, EngineError, InvalidInputError
from tests.unit.sdk_fakes import CHUNK, FakeClient, FakeEngine, as_client

Batch = tuple[lmc_batch.LMCacheBatchedStream, list[lmc_stream.LMCacheStream], FakeEngine]


def make(num_streams: int = 3) -> Batch:
    client = FakeClient()
    engine = FakeEngine(client)
    batch = lmc_batch.LMCacheBatchedStream()
    streams = [
        lmc_stream.create_request(as_client(client), engine, range(10 * n, 10 * n + 9))
        for n in range(num_streams)
    ]
    for stream in streams:
        batch.add(stream)
    return batch, streams, engine


def keep_first_chunk(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    return kv[:, :, :CHUNK], tokens[:CHUNK]


def fail(*_: Any) -> Any:
    raise ConnectionResetError("the line went dead")


def test_the_main_job() -> None:
    batch, streams, _ = make()
    prefill = batch.prefill({"temperature": 0.0, "max_tokens": 50})
    assert prefill.to_dict()["metrics"]["config"] == {"num_request_streams": 3}
    assert list(prefill.results) == ["duration", "input_tokens", "input_tput"]
    assert prefill.input_tokens == 27
    modify = batch.modify(keep_first_chunk)
    assert list(modify.results) == ["duration"]
    decode = batch.decode({"max_tokens": 5})
    assert list(decode.results) == ["duration", "output_tokens", "output_tput"]
    assert decode.output_tokens == 15
    assert {perf.output_tokens for perf in batch.perf_metrics.values()} == {5}
    for n, stream in enumerate(streams):
        kept = list(range(10 * n, 10 * n + CHUNK))
        assert stream.tokens == [*kept, 10 * n + 8, 100, *range(100, 105)]


def test_streams_generate_all_at_once() -> None:
    batch, streams, _ = make(6)
    together = threading.Barrier(6)

    def engine(*_: Any) -> Any:
        together.wait(60)
        yield TokenEvent(1)

    for stream in streams:
        stream.post_completion = engine
    assert batch.prefill({}).input_tokens == 54


def test_no_more_streams_are_edited_at_once_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    batch, _, _ = make(6)
    batch.prefill({})
    lock, running, most = threading.Lock(), 0, 0

    def edit(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1
        return keep_first_chunk(kv, tokens)

    batch.modify(edit)
    assert 1 <= most <= 2


def test_one_failing_stream_does_not_lose_the_others() -> None:
    batch, streams, engine = make()
    bad = streams[1]
    bad.post_completion = fail
    with pytest.raises(BatchError, match="prefill: 1 of 3 streams failed") as caught:
        batch.prefill({})
    assert f"stream {bad.stream_id()}: EngineError" in str(caught.value)
    assert list(caught.value.failures) == [bad.stream_id()]
    assert isinstance(caught.value.failures[bad.stream_id()], EngineError)
    assert caught.value.metrics.input_tokens == 18  # type: ignore[attr-defined]
    assert sorted(batch.perf_metrics) == sorted(s.stream_id() for s in streams if s is not bad)

    bad.post_completion = engine
    batch.prefill({}, stream_ids=[bad.stream_id()])

    def edit(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return fail() if tokens[0] == 0 else keep_first_chunk(kv, tokens)

    with pytest.raises(BatchError, match=r"modify: 1 of 3 streams failed.*line went dead"):
        batch.modify(edit)
    assert [len(stream.tokens) for stream in streams] == [10, CHUNK, CHUNK]


def test_only_the_chosen_streams_run() -> None:
    batch, streams, _ = make()
    chosen = [streams[2].stream_id()]
    metrics = batch.prefill({}, stream_ids=chosen)
    assert (metrics.num_request_streams, metrics.input_tokens) == (1, 9)
    assert [stream.decoded_tokens() for stream in streams] == [0, 0, 1]
    assert batch.get_stream(chosen[0]) is streams[2]


def test_an_empty_batch_gives_empty_metrics() -> None:
    batch = lmc_batch.LMCacheBatchedStream()
    assert batch.prefill({}).results == {"duration": 0.0, "input_tokens": 0, "input_tput": 0.0}
    assert batch.modify(keep_first_chunk).duration == 0.0
    assert batch.decode({}).output_tput == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda batch, stream: batch.add(stream),
        lambda batch, stream: batch.add("stream"),
        lambda batch, stream: batch.get_stream("unknown"),
        lambda batch, stream: batch.prefill({}, stream_ids=["unknown"]),
        lambda batch, stream: batch.decode({}, stream_ids=stream.stream_id()),
        lambda batch, stream: batch.decode({}, fmt="xml"),
        lambda batch, stream: batch.modify(keep_first_chunk, width=-1),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(wrong: Any) -> None:
    batch, streams, engine = make(1)
    with pytest.raises(InvalidInputError):
        wrong(batch, streams[0])
    assert engine.prompts == []


def press_ctrl_c() -> None:
    """Send SIGINT to the main thread; a flag alone would not wake it from a wait."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_ctrl_c_stops_every_stream_and_keeps_what_arrived() -> None:
    batch, streams, engine = make(2)
    both = threading.Barrier(2, action=press_ctrl_c)

    def endless(*_: Any) -> Any:
        yield TokenEvent(1)
        both.wait(60)
        while True:
            threading.Event().wait(0.01)
            yield TokenEvent(2)

    for stream in streams:
        stream.post_completion = endless
    with pytest.raises(KeyboardInterrupt):
        batch.decode({"max_tokens": 10**6})
    assert all(stream.output_tokens()[:1] == [1] for stream in streams)
    for stream in streams:
        stream.post_completion = engine
    batch.decode({"max_tokens": 1})


def test_progress_is_shown_on_a_terminal_only_and_can_be_switched_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _, _ = make()
    monkeypatch.delenv("LMCACHE_FAST_PROGRESS", raising=False)
    batch.prefill({})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    batch.decode({"max_tokens": 1})
    assert "decode" in capsys.readouterr().err
    monkeypatch.setenv("LMCACHE_FAST_PROGRESS", "0")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    batch.decode({"max_tokens": 1})
    assert capsys.readouterr().err == ""
