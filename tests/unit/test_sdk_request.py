"""The second generation's streams, and what they share with the first's."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import lmcache_fast.sdk as sdk
import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.request as lmc_request
import lmcache_fast.sdk.stream as lmc_stream
from lmcache_fast import edits, errors
from lmcache_fast.errors import InvalidInputError, LMCacheFastError, ModifyTimeoutError
from lmcache_fast.sdk.accessors import CallableBool, CallableInt, CallableList, CallableStr
from tests.unit.sdk_fakes import CHUNK, FakeClient, FakeEngine, as_client, kv_for

KV, QUERY = sdk.LMCacheSDKCacheKind.KV, sdk.LMCacheSDKCacheKind.QUERY
ONE = {"max_tokens": 1}
Tensors = Mapping[sdk.LMCacheSDKCacheKind, torch.Tensor]


class Engine(FakeEngine):
    """Stores its prompts' queries too."""

    def __init__(self, client: FakeClient, queries: FakeClient | None = None) -> None:
        super().__init__(client)
        self.queries = queries

    def __call__(self, prompt: list[int], params: dict[str, Any], cache_salt: str) -> Any:
        if self.queries is not None:
            self.queries.store(kv_for(prompt, self.queries.layout), prompt, cache_salt)
        return super().__call__(prompt, params, cache_salt)


def make(
    prompt: Sequence[int], with_queries: bool = True, **options: Any
) -> tuple[lmc_request.LMCacheRequestStream, Engine]:
    clients = [FakeClient(KV), FakeClient(QUERY)][: 2 if with_queries else 1]
    engine = Engine(*clients)
    contexts = [as_client(client) for client in clients]
    return lmc_request.create_request(contexts, engine, prompt, **options), engine


def keep_first_half(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    half = len(tokens) // 2
    return tensors[KV][:, :, :half], tokens[:half]


def no_engine(prompt: list[int], params: dict[str, Any], cache_salt: str) -> list[Any]:
    return []


def double(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    return kv * 2, tokens


def test_an_edit_function_sees_every_kind_by_name() -> None:
    stream, engine = make(range(10))
    stream.generate(ONE)
    assert engine.queries is not None
    seen: list[Any] = []

    def edit(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        seen.append((set(tensors), tokens))
        assert torch.equal(tensors[KV], kv_for(range(8)))
        assert tensors[QUERY].shape == (1, *tensors[KV].shape[1:])
        return keep_first_half(tensors, tokens)

    stream.modify_kv(edit)
    assert seen == [({KV, QUERY}, list(range(8)))]
    assert stream.tokens == [0, 1, 2, 3]
    assert stream.suffix_tokens == [8, 9, 100]
    stream.generate(ONE)
    assert engine.prompts[-1] == [0, 1, 2, 3, 8, 9, 100]
    assert set(engine.queries.calls) == {"store", "retrieve"}


def test_queries_end_where_the_keys_do() -> None:
    stream, engine = make(range(8))
    stream.generate(ONE)
    assert engine.queries is not None
    longer = [*range(8), 100, 1, 2, 3]
    engine.queries.store(kv_for(longer, engine.queries.layout), longer)
    stream.tokens = longer
    lengths: list[int] = []

    def edit(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        lengths.extend(tensor.shape[2] for tensor in tensors.values())
        return keep_first_half(tensors, tokens)

    stream.modify_kv(edit)
    assert lengths == [8, 8]


def test_missing_queries_are_waited_for_and_named() -> None:
    stream, engine = make(range(10))
    stream.generate(ONE)
    assert engine.queries is not None
    engine.queries.chunks.clear()
    with pytest.raises(ModifyTimeoutError, match=r"modify_kv \(query\).*0 of 2 chunks"):
        stream.modify_kv(keep_first_half, timeout=0)
    assert stream.tokens == [*range(10), 100]


def test_edit_objects_run_from_slot_to_slot_and_ask_for_no_queries() -> None:
    stream, engine = make(range(10))
    stream.generate(ONE)
    assert engine.queries is not None
    for client in (engine.client, engine.queries):
        client.calls.clear()
    stream.modify_kv(edits.keep([0, 1, 6, 7]))
    assert engine.client.calls == ["edit"]
    assert engine.queries.calls == []
    assert stream.tokens == [0, 1, 6, 7]


def test_retrieve_and_update_take_the_kind() -> None:
    stream, _ = make(range(9))
    stream.generate(ONE)
    assert torch.equal(stream.retrieve(KV), kv_for(range(8)))
    assert stream.retrieve(QUERY).shape[0] == 1
    stream.done = True
    stream.update(KV, kv_for([5, 6, 7, 8]), [5, 6, 7, 8])
    assert stream.tokens == [5, 6, 7, 8]
    assert not stream.done
    assert torch.equal(stream.retrieve(kind=KV, timeout=0, poll_interval=0), kv_for([5, 6, 7, 8]))


def test_a_kind_without_a_context_is_refused_by_name() -> None:
    stream, _ = make(range(9), with_queries=False)
    stream.generate(ONE)
    with pytest.raises(InvalidInputError, match=r"retrieve: .*no context of kind .*QUERY"):
        stream.retrieve(QUERY)
    with pytest.raises(InvalidInputError, match=r"update: .*no context of kind"):
        stream.update(QUERY, kv_for([1, 2, 3, 4]), [1, 2, 3, 4])
    queries_only = lmc_request.create_request([as_client(FakeClient(QUERY))], no_engine, range(9))
    with pytest.raises(InvalidInputError, match=r"modify_kv: .*no context of kind .*KV"):
        queries_only.modify_kv(keep_first_half)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (3, "contexts is a int; expected a list"),
        ([as_client(FakeClient()), as_client(FakeClient())], "two contexts are of kind .*KV"),
    ],
)
def test_contexts_are_one_of_each_kind(contexts: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        lmc_request.create_request(contexts, no_engine, range(9))


# Both generations


def streams_of_both() -> tuple[FakeClient, list[Any], FakeEngine]:
    client = FakeClient()
    engine = FakeEngine(client)
    return (
        client,
        [
            lmc_stream.create_request(as_client(client), engine, range(9)),
            lmc_request.create_request([as_client(client)], engine, range(10, 19)),
        ],
        engine,
    )


def test_what_a_stream_tells_is_read_and_called_in_both_generations() -> None:
    for stream in streams_of_both()[1]:
        stream.generate({"max_tokens": 2})
        assert stream.stream_id == stream.stream_id() == stream.request_stream_id
        assert type(stream.stream_id()) is str
        assert stream.decoded_tokens == stream.decoded_tokens() == 2
        assert stream.output_text == stream.output_text() == "<0><1>"
        assert stream.output_tokens == stream.output_tokens() == [100, 101]
        assert stream.suffix_tokens == stream.suffix_tokens() == []
        assert not stream.is_done
        assert stream.is_done() is False
        stream.done = True
        assert stream.is_done
        assert stream.is_done() is True


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (CallableStr("text"), "text"),
        (CallableInt(7), 7),
        (CallableBool(2), True),
        (CallableBool([]), False),
        (CallableList([1, 2]), [1, 2]),
    ],
)
def test_a_callable_value_behaves_as_the_plain_one(value: Any, plain: Any) -> None:
    assert value == plain
    assert type(value()) is type(plain)
    assert value() == plain
    assert (repr(value), str(value), f"{value}") == (repr(plain), str(plain), f"{plain}")
    assert json.loads(json.dumps(value)) == plain
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == plain
    if not isinstance(plain, list):
        assert hash(value) == hash(plain)


def test_one_batch_holds_streams_of_both_generations() -> None:
    client, streams, engine = streams_of_both()
    batch = lmc_batch.LMCacheBatchedStream()
    batch.add(streams[0])
    batch.add(request_stream=streams[1])
    assert batch.request_streams == batch.streams
    assert batch.get_request_stream(streams[1].request_stream_id) is streams[1]
    assert batch.prefill({}).input_tokens == 18
    batch.modify(edits.keep([0, 1, 2, 3]))
    assert client.calls.count("edit") == 2
    assert batch.run_request_streams({"max_tokens": 3}) > 0
    report = batch.get_perf_metrics(2.0, "json", 80, "decode")
    assert report.results == {"duration": 2.0, "output_tokens": 6, "output_tput": 3.0}
    only = batch.get_perf_metrics(
        duration=2.0, fmt="json", width=80, mode="prefill", stream_ids=[streams[0].stream_id]
    )
    assert only.results == {"duration": 2.0, "input_tokens": 6, "input_tput": 3.0}
    assert batch.run_streams({"max_tokens": 1}, [streams[0].stream_id]) > 0
    assert len(engine.prompts) == 5


def test_each_generation_gets_its_own_kind_of_function() -> None:
    _, streams, _ = streams_of_both()
    batch = lmc_batch.LMCacheBatchedStream()
    for stream in streams:
        batch.add(stream)
    batch.prefill({})
    got: list[type] = []

    def edit(kv: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        got.append(type(kv))
        tensor = kv if isinstance(kv, torch.Tensor) else kv[KV]
        return tensor[:, :, :CHUNK], tokens[:CHUNK]

    assert batch.modify_request_streams(edit, [streams[1].stream_id]) > 0
    assert batch.modify_stream(edit, stream_ids=[streams[0].stream_id]) > 0
    assert got == [dict, torch.Tensor]


def test_times_in_the_place_of_stream_ids_are_an_error_not_ids() -> None:
    batch = lmc_batch.LMCacheBatchedStream()
    modify: Any = batch.modify
    with pytest.raises(InvalidInputError, match=r"stream_ids is 30\.0; .*by keyword"):
        modify(keep_first_half, "terminal", 80, 30.0, 0.2)
    with pytest.raises(InvalidInputError, match="mode is 'both'"):
        batch.get_perf_metrics(1.0, "terminal", 80, "both")


# Isolated edits


@pytest.mark.parametrize("generation", [0, 1])
@pytest.mark.parametrize("as_edit", [True, False], ids=["edit", "function"])
def test_an_isolated_edit_is_found_under_its_own_salt_only(generation: int, as_edit: bool) -> None:
    client = FakeClient()
    engine = FakeEngine(client)
    create: Any = [
        lambda **options: lmc_stream.create_request(
            as_client(client), engine, range(9), "mine", **options
        ),
        lambda **options: lmc_request.create_request(
            [as_client(client)], engine, range(9), "mine", **options
        ),
    ][generation]
    stream = create(isolate_edits=True)
    stream.generate(ONE)
    assert engine.salts == ["mine"]
    edit = edits.keep(range(4, 8))
    stream.modify_kv(edit if as_edit else lambda kv, tokens: edit(kv, tokens))
    private = stream.cache_salt
    assert private not in ("", "mine")
    assert len(private) <= 128
    if as_edit:
        assert client.target_salts == [private]
    else:
        assert client.lookup(stream.tokens, private) == 4
    assert client.lookup(stream.tokens, "mine") == client.lookup(stream.tokens, "") == 0
    assert create().cache_salt == "mine"
    stream.generate(ONE)
    assert engine.salts == ["mine", private]


def test_each_isolated_edit_has_a_new_salt_so_that_changed_values_are_stored() -> None:
    client = FakeClient()
    stream = lmc_stream.create_request(
        as_client(client), FakeEngine(client), range(8), isolate_edits=True
    )
    stream.generate(ONE)
    salts = {stream.cache_salt}
    for factor in (2, 4):
        stream.modify_kv(double)
        salts.add(stream.cache_salt)
        assert torch.equal(stream.retrieve_kv(), kv_for(range(8)) * factor)
    assert len(salts) == 3


def test_a_failed_edit_leaves_the_salt() -> None:
    stream, engine = make(range(9), with_queries=False, isolate_edits=True)
    stream.generate(ONE)

    def fail() -> None:
        raise ConnectionResetError

    engine.client.before_store = fail
    with pytest.raises(ConnectionResetError):
        stream.modify_kv(keep_first_half)
    assert stream.cache_salt == ""


# Errors


UPSTREAM_ERRORS = [
    "LMCacheSDKError",
    "KVCacheSDKError",
    "LMCacheStreamError",
    "LMCacheRequestStreamError",
    "LMCacheBatchedStreamError",
]


def test_every_error_is_caught_by_upstreams_names() -> None:
    ours = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [value for value in ours if issubclass(value, LMCacheFastError)]
    assert len(ours) > 15
    for name in UPSTREAM_ERRORS:
        upstream = getattr(errors, name)
        assert issubclass(upstream, RuntimeError)
        for error in ours:
            assert issubclass(error, upstream)


def test_the_names_are_where_upstream_has_them() -> None:
    assert sdk.kvcache.KVCacheSDKError is sdk.KVCacheSDKError is errors.KVCacheSDKError
    assert sdk.context.LMCacheSDKError is errors.LMCacheSDKError
    assert lmc_stream.LMCacheStreamError is errors.LMCacheStreamError
    assert lmc_request.LMCacheRequestStreamError is errors.LMCacheRequestStreamError
    assert lmc_batch.LMCacheBatchedStreamError is errors.LMCacheBatchedStreamError
