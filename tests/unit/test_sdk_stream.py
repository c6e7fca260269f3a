"""Request streams: what a stream knows after every kind of step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import edits
from lmcache_fast.errors import (
    EditError,
    EngineError,
    InvalidInputError,
    LMCacheFastError,
    ModifyTimeoutError,
)
from tests.unit.sdk_fakes import CHUNK, FakeClient, FakeEngine, as_client, kv_for

ONE = {"max_tokens": 1}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def make(
    client: FakeClient, prompt: Sequence[int], engine: FakeEngine | None = None, salt: str = ""
) -> lmc_stream.LMCacheStream:
    return lmc_stream.create_request(
        as_client(client), engine or FakeEngine(client), prompt, cache_salt=salt
    )


def state(stream: lmc_stream.LMCacheStream) -> tuple[Any, ...]:
    return (
        list(stream.tokens),
        stream.suffix_tokens(),
        stream.output_tokens(),
        stream.output_text(),
        stream.decoded_tokens(),
        stream.is_done(),
    )


def keep_first_half(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    half = len(tokens) // 2
    return kv[:, :, :half], tokens[:half]


def test_generated_tokens_are_added_to_the_stream_and_the_output_holds_only_them(
    client: FakeClient,
) -> None:
    stream = make(client, range(10))
    perf = stream.generate({"max_tokens": 3})
    assert stream.tokens == [*range(10), 100, 101, 102]
    assert stream.output_tokens() == [100, 101, 102]
    assert stream.output_text() == "<0><1><2>"
    assert stream.decoded_tokens() == 3
    assert not stream.is_done()
    assert (perf.input_tokens, perf.output_tokens, len(perf.tpot)) == (10, 3, 2)


@pytest.mark.parametrize(("stops_after", "done"), [(0, True), (2, True), (3, False)])
def test_done_means_fewer_than_max_tokens(client: FakeClient, stops_after: int, done: bool) -> None:
    stream = make(client, range(10), FakeEngine(client, stops_after=stops_after))
    stream.generate({"max_tokens": 3})
    assert stream.done is done


def test_after_an_edit_the_tail_is_kept_and_sent_again(client: FakeClient) -> None:
    engine = FakeEngine(client)
    stream = make(client, range(10), engine)
    stream.generate(ONE)
    seen: list[Sequence[int]] = []

    def edit(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        seen.append(tokens)
        assert torch.equal(kv, kv_for(range(8)))
        return keep_first_half(kv, tokens)

    stream.modify_kv(edit)
    assert seen == [list(range(8))]
    assert stream.tokens == [0, 1, 2, 3]
    assert stream.suffix_tokens() == [8, 9, 100]
    assert stream.output_tokens() == [100]
    stream.generate(ONE, [55])
    assert engine.prompts[-1] == [0, 1, 2, 3, 8, 9, 100, 55]
    assert stream.suffix_tokens() == []


def test_tokens_behind_the_last_whole_chunk_of_an_edit_stay_with_the_stream(
    client: FakeClient,
) -> None:
    engine = FakeEngine(client)
    stream = make(client, range(8), engine)
    stream.generate(ONE)
    stream.modify_kv(lambda kv, tokens: (kv[:, :, 2:], tokens[2:]))
    assert stream.tokens == [2, 3, 4, 5, 6, 7]
    assert client.lookup(stream.tokens) == 4
    stream.generate(ONE)
    assert engine.prompts[-1] == [2, 3, 4, 5, 6, 7, 100]


def test_an_edit_object_runs_from_slot_to_slot_with_the_same_outcome(client: FakeClient) -> None:
    edit = edits.keep([0, 1, 6, 7])
    by_slots, by_tensor = make(client, range(10)), make(client, range(10), salt="other")
    for stream, fn in ((by_slots, edit), (by_tensor, lambda kv, tokens: edit(kv, tokens))):
        stream.generate(ONE)
        client.calls.clear()
        stream.modify_kv(fn)
        assert ("edit" in client.calls) is (stream is by_slots)
        assert ("retrieve" in client.calls) is (stream is by_tensor)
    assert state(by_slots) == state(by_tensor)
    assert by_slots.tokens == [0, 1, 6, 7]
    assert by_slots.suffix_tokens() == [8, 9, 100]


def test_modify_waits_for_the_whole_prompt_but_not_for_generated_chunks(
    client: FakeClient,
) -> None:
    stream = make(client, range(8))
    stream.generate({"max_tokens": 5})  # 13 tokens: one more whole chunk, which is never cached
    late = client.chunks.pop(("", tuple(range(8))))
    polls: list[int] = []

    def store_at_third_poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            client.chunks["", tuple(range(8))] = late

    client.before_lookup = store_at_third_poll
    stream.modify_kv(keep_first_half, timeout=60, poll_interval=0)
    assert len(polls) == 3
    assert stream.tokens == [0, 1, 2, 3]
    assert stream.suffix_tokens() == [100, 101, 102, 103, 104]


def test_generated_chunks_that_are_cached_are_edited_too(client: FakeClient) -> None:
    stream = make(client, range(8))
    stream.generate({"max_tokens": 5})
    client.store(kv_for(stream.tokens), stream.tokens)
    stream.modify_kv(lambda kv, tokens: (kv[:, :, 4:], tokens[4:]))
    assert stream.tokens == [4, 5, 6, 7, 100, 101, 102, 103]
    assert stream.suffix_tokens() == [104]


def test_time_out_says_how_many_chunks_were_cached(client: FakeClient) -> None:
    stream = make(client, range(5 * CHUNK + 1))
    client.store(kv_for(range(3 * CHUNK)), list(range(3 * CHUNK)))
    before = state(stream)
    with pytest.raises(ModifyTimeoutError, match="3 of 5 chunks"):
        stream.modify_kv(keep_first_half, timeout=0.01, poll_interval=0.001)
    with pytest.raises(ModifyTimeoutError, match=r"retrieve_kv.*3 of 5 chunks"):
        stream.retrieve_kv(timeout=0)
    assert state(stream) == before
    stream.modify_kv(keep_first_half, timeout=0, allow_partial=True)
    assert stream.tokens == list(range(6))
    assert stream.suffix_tokens() == list(range(3 * CHUNK, 5 * CHUNK + 1))


@pytest.mark.parametrize("num_tokens", [0, 1, CHUNK - 1])
def test_less_than_a_chunk_is_refused_at_once(client: FakeClient, num_tokens: int) -> None:
    with pytest.raises(InvalidInputError, match=f"{num_tokens} tokens; expected at"):
        make(client, range(num_tokens)).modify_kv(keep_first_half)


@pytest.mark.parametrize("num_tokens", [CHUNK, CHUNK + 1])
def test_one_chunk_can_be_edited_down_to_less(client: FakeClient, num_tokens: int) -> None:
    stream = make(client, range(num_tokens))
    stream.generate(ONE)
    stream.modify_kv(keep_first_half)
    assert stream.tokens == [0, 1]
    assert stream.suffix_tokens() == [*range(CHUNK, num_tokens), 100]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda kv, tokens: kv, "got Tensor; expected \\(kv, tokens\\)"),
        (lambda kv, tokens: None, "got NoneType"),
        (lambda kv, tokens: (kv, tokens[:-1]), "8 tokens .*expected 7"),
        (lambda kv, tokens: (kv[0], tokens), "4 dimensions"),
        (lambda kv, tokens: (kv[:, :2], tokens), "2 layers"),
        (lambda kv, tokens: (kv.half(), tokens), "float16"),
        (lambda kv, tokens: (kv, [-1] * len(tokens)), "tokens\\[0\\] is -1"),
        (lambda kv, tokens: (kv.numpy(), tokens), "ndarray"),
    ],
)
def test_what_cannot_be_stored_leaves_the_stream_as_it_was(
    client: FakeClient, result: Any, message: str
) -> None:
    stream = make(client, range(9))
    stream.generate(ONE)
    before, chunks = state(stream), set(client.chunks)
    with pytest.raises(EditError, match=message):
        stream.modify_kv(result)
    assert state(stream) == before
    assert set(client.chunks) == chunks


def test_a_failing_edit_or_store_leaves_the_stream_as_it_was(client: FakeClient) -> None:
    stream = make(client, range(9))
    stream.generate(ONE)
    before = state(stream)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError):
        stream.modify_kv(fail)
    assert state(stream) == before

    client.before_store = fail
    with pytest.raises(ZeroDivisionError):
        stream.modify_kv(keep_first_half)
    with pytest.raises(ZeroDivisionError):
        stream.update_kv(kv_for([1, 2, 3, 4]), [1, 2, 3, 4])
    assert state(stream) == before


def test_retrieve_and_update_by_hand(client: FakeClient) -> None:
    stream = make(client, range(9), FakeEngine(client, stops_after=0))
    stream.generate(ONE)
    assert stream.done
    kv = stream.retrieve_kv()
    assert torch.equal(kv, kv_for(range(8)))
    stream.update_kv(kv[:, :, 4:], range(4, 8))
    assert stream.tokens == [4, 5, 6, 7]
    assert not stream.done
    assert torch.equal(stream.retrieve_kv(timeout=0), kv_for(range(4, 8)))


def test_when_the_engine_breaks_off_what_arrived_is_kept(client: FakeClient) -> None:
    engine = FakeEngine(client, breaks_after=2)
    stream = make(client, range(8), engine)
    with pytest.raises(EngineError, match="after 2 of at most 5 tokens: the line went dead"):
        stream.generate({"max_tokens": 5}, [8])
    assert stream.tokens == [*range(9), 100, 101]
    assert stream.output_text() == "<0><1>"
    assert not stream.done
    engine.breaks_after = None
    stream.generate({"max_tokens": 3})
    assert engine.prompts[-1] == [*range(9), 100, 101]
    assert stream.output_tokens() == [100, 101, 100, 101, 102]


def test_when_not_one_token_arrives_the_stream_is_as_it_was(client: FakeClient) -> None:
    stream = make(client, range(9), FakeEngine(client))
    stream.generate(ONE)
    stream.modify_kv(keep_first_half)
    before = state(stream)
    stream.post_completion = FakeEngine(client, breaks_after=0)
    with pytest.raises(EngineError):
        stream.generate(ONE, [1, 2])
    assert state(stream) == before


def test_an_engine_that_generates_nonsense_is_an_error(client: FakeClient) -> None:
    stream = make(client, range(9))
    stream.post_completion = lambda *_: [lmc_stream.TokenEvent(-5)]
    with pytest.raises(EngineError, match="-5"):
        stream.generate(ONE)
    assert stream.output_tokens() == []


def test_ctrl_c_keeps_what_arrived_and_ends_the_request(client: FakeClient) -> None:
    engine = FakeEngine(client)

    def interrupted(*arguments: Any) -> Any:
        for number, event in enumerate(engine(*arguments)):
            if number == 2:
                raise KeyboardInterrupt
            yield event

    stream = make(client, range(9))
    stream.post_completion = interrupted
    with pytest.raises(KeyboardInterrupt):
        stream.generate({"max_tokens": 5})
    assert stream.output_tokens() == [100, 101]
    assert engine.closed == 1
    stream.post_completion = engine
    stream.generate(ONE)


def test_a_second_call_at_the_same_time_is_refused(client: FakeClient) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        yield lmc_stream.TokenEvent(7)

    stream = make(client, range(9))
    stream.post_completion = slow
    thread = threading.Thread(target=stream.generate, args=(ONE,))
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(LMCacheFastError, match=r"modify_kv: .* is in use by another call"):
            stream.modify_kv(keep_first_half)
    finally:
        go_on.set()
        thread.join(30)
    assert stream.output_tokens() == [7]


def test_streams_with_different_salts_do_not_see_each_other(client: FakeClient) -> None:
    make(client, range(8), salt="a").generate(ONE)
    with pytest.raises(ModifyTimeoutError, match="0 of 2"):
        make(client, range(8), salt="b").modify_kv(keep_first_half, timeout=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: make(c, [-1]),
        lambda c: make(c, [1], salt="a@b"),
        lambda c: lmc_stream.create_request(as_client(c), None, [1]),  # type: ignore[arg-type]
        lambda c: make(c, [1]).generate({"max_tokens": 0}),
        lambda c: make(c, [1]).generate({}, [2**32]),
        lambda c: make(c, []).generate({}),
        lambda c: make(c, range(8)).modify_kv(None),  # type: ignore[arg-type]
        lambda c: make(c, range(8)).modify_kv(keep_first_half, timeout=-1),
        lambda c: make(c, range(8)).modify_kv(keep_first_half, poll_interval=float("nan")),
    ],
)
def test_wrong_arguments_are_refused(client: FakeClient, wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        wrong(client)


def test_functions_call_the_methods(client: FakeClient) -> None:
    stream = make(client, range(8))
    assert lmc_stream.generate(stream, ONE).output_tokens == 1
    kv = lmc_stream.get(stream)
    lmc_stream.update(stream, kv[:, :, 4:], [4, 5, 6, 7])
    assert stream.tokens == [4, 5, 6, 7]
