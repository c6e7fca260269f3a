"""Phases over nodes that live and die: workers are real, servers and engines are stand-ins."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from lmcache_fast.cluster import dispatch
from lmcache_fast.cluster.dispatch import MAX_MOVES, Dispatcher, Tally, next_phase_number
from lmcache_fast.cluster.messages import Phase
from lmcache_fast.cluster.routing import Router
from lmcache_fast.cluster.stream import ClusterStream
from lmcache_fast.edits import drop_middle_chunks
from lmcache_fast.errors import EngineError, NodeLostError
from tests.unit.cluster_fakes import FakeNodes
from tests.unit.sdk_fakes import CHUNK

NUM_TOKENS = 6 * CHUNK + 1
NAMES = ("a", "b", "c")


def prefill() -> Phase:
    return Phase(next_phase_number(), {"max_tokens": 1})


def modify(edit: object = drop_middle_chunks(0.5)) -> Phase:
    return Phase(next_phase_number(), edit=pickle.dumps(edit), timeout=5.0, poll_interval=0.01)


def decode(max_tokens: int = 5) -> Phase:
    return Phase(next_phase_number(), {"max_tokens": max_tokens})


class Batch:
    """Streams over fake nodes."""

    def __init__(
        self, *names: str, count: int = 24, cap: float = 1.5, ask_nodes: bool = False
    ) -> None:
        self.nodes = FakeNodes(*names)
        self.dispatcher = Dispatcher(self.nodes, Router(cap), ask_nodes)
        self.streams = [
            ClusterStream(np.arange(n * 7, n * 7 + NUM_TOKENS, dtype=np.uint32), "", False)
            for n in range(count)
        ]
        self.finished = 0

    def run(self, phase: Phase, streams: Sequence[ClusterStream] | None = None) -> Tally:
        return self.dispatcher.run(phase, streams or self.streams, self._note)

    def _note(self) -> None:
        self.finished += 1

    def lose_in(self, name: str, parcel: int) -> None:
        """Let a node die before it runs its next parcel but ``parcel``."""
        left = parcel

        def before(where: str) -> None:
            nonlocal left
            if where == name:
                left -= 1
                if left < 0 and name in self.nodes.alive:
                    self.nodes.lose(name)

        self.nodes.before = before

    @property
    def outputs(self) -> list[list[int]]:
        return [stream.output_tokens for stream in self.streams]


def whole_run(batch: Batch) -> list[list[int]]:
    for phase in (prefill(), modify(), decode()):
        assert not batch.run(phase).failures
    return batch.outputs


def test_many_nodes_give_what_one_gives() -> None:
    batch = Batch(*NAMES)
    assert whole_run(batch) == whole_run(Batch("a"))
    assert {stream.node for stream in batch.streams} == set(NAMES)
    assert {stream.moves for stream in batch.streams} == {0}
    assert batch.finished == 3 * len(batch.streams)


def test_what_is_under_way_is_bounded() -> None:
    batch = Batch(*NAMES, count=60)
    batch.run(prefill())
    assert set(batch.nodes.most_under_way.values()) == {FakeNodes.max_parcels}
    assert min(batch.nodes.parcels.values()) * FakeNodes.parcel_streams >= 10


@pytest.mark.parametrize("parcel", [0, 1])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_a_node_that_dies_costs_no_stream(phase: int, parcel: int) -> None:
    batch = Batch(*NAMES)
    tallies = []
    for number, one in enumerate((prefill(), modify(), decode())):
        if number == phase:
            batch.lose_in("b", parcel)
        tallies.append(batch.run(one))
        assert not tallies[-1].failures
    assert batch.outputs == whole_run(Batch("a"))
    assert tallies[phase].moved > 0
    assert {stream.moves for stream in batch.streams} == {0, 1}
    assert batch.finished == 3 * len(batch.streams)


def test_a_node_that_died_between_phases_costs_no_stream() -> None:
    batch = Batch(*NAMES)
    batch.run(prefill())
    batch.nodes.lose("c")
    at_rest = sum(stream.node == "c" for stream in batch.streams)
    tally = batch.run(modify())
    assert tally.moved == at_rest > 0
    assert sum(node.moved_in for node in tally.nodes.values()) == at_rest
    batch.run(decode())
    assert batch.outputs == whole_run(Batch("a"))


def test_streams_that_never_were_on_the_node_that_died_have_not_moved() -> None:
    batch = Batch(*NAMES, count=60)
    batch.lose_in("b", 0)
    tally = batch.run(prefill())
    under_way = FakeNodes.max_parcels * FakeNodes.parcel_streams
    assert tally.moved == sum(stream.moves for stream in batch.streams) == under_way


def test_what_was_generated_stays_when_a_stream_moves() -> None:
    batch = Batch("a", "b", cap=1e9)
    batch.nodes.workers["b"].engine.base = 10**6  # b would generate something else
    batch.run(prefill())
    batch.run(decode())
    moving = [stream for stream in batch.streams if stream.node == "a"]
    before = [stream.output_tokens for stream in moving]
    batch.nodes.lose("a")
    assert not batch.run(modify()).failures
    assert not batch.run(decode(3)).failures
    assert moving
    for stream, kept in zip(moving, before, strict=True):
        assert stream.output_tokens[: len(kept)] == kept
        assert [token >= 10**6 for token in stream.output_tokens[len(kept) :]] == [True] * 3
        assert stream.output_text == "<0><0><1><2><3><4>" + "<0><1><2>"


def test_the_engine_is_asked_again_only_for_the_kv_that_an_edit_needs() -> None:
    batch = Batch("a", "b", count=8)
    for phase in (prefill(), modify(), decode()):
        batch.run(phase)
    moving = sum(stream.node == "a" for stream in batch.streams)
    batch.nodes.lose("a")
    engine = batch.nodes.workers["b"].engine
    before = len(engine.prompts)
    batch.run(decode(), [stream for stream in batch.streams if stream.node == "a"])
    assert moving > 0
    # The prefill before the edit, and the decode that was asked for; not the one before it.
    assert len(engine.prompts) - before == 2 * moving


def test_an_edit_of_what_was_cached_before_prefills_where_the_stream_moves() -> None:
    batch = Batch("a", "b", count=8)
    batch.run(prefill())
    again = Batch("a", "b", count=8)
    for name in ("a", "b"):  # the same KV is there, and nobody has prefilled it in this batch
        again.nodes.workers[name].client.chunks.update(batch.nodes.workers[name].client.chunks)
    again.lose_in("a", 0)
    tally = again.run(modify())
    assert not tally.failures
    assert tally.moved > 0


def test_a_stream_moves_twice_at_most_and_is_then_reported_by_id() -> None:
    batch = Batch("a", "b", "c", "d", "e", count=6)
    (victim, *others) = batch.streams
    batch.run(prefill())
    for _ in range(MAX_MOVES):
        batch.nodes.lose(victim.node)
        batch.run(prefill(), [victim])
    assert victim.moves == MAX_MOVES
    batch.nodes.lose(victim.node)
    tally = batch.run(decode(), [victim])
    assert list(tally.failures) == [victim.stream_id]
    error = tally.failures[victim.stream_id]
    assert isinstance(error, NodeLostError)
    assert victim.stream_id in str(error)
    assert not batch.run(decode(), others).failures


def test_without_nodes_every_stream_is_reported() -> None:
    batch = Batch("a")
    batch.lose_in("a", 2)
    tally = batch.run(prefill())
    assert len(tally.outcomes) == 2 * FakeNodes.parcel_streams
    assert len(tally.outcomes) + len(tally.failures) == len(batch.streams)
    assert all(isinstance(error, NodeLostError) for error in tally.failures.values())
    assert batch.finished == len(batch.streams)


def test_a_node_whose_engine_is_gone_is_lost_and_its_streams_move() -> None:
    batch = Batch(*NAMES)
    batch.run(prefill())
    sick = batch.nodes.workers["b"]
    sick.engine.breaks_after, sick.problem = 2, "GET /health: connection refused"
    tally = batch.run(decode())
    assert not tally.failures
    assert batch.nodes.alive == ["a", "c"]
    assert tally.moved > 0
    well = Batch("a")
    well.run(prefill())
    well.run(decode())
    assert batch.outputs == well.outputs


def test_a_stream_that_breaks_off_on_a_healthy_node_is_reported_and_goes_on() -> None:
    batch = Batch("a", count=2)
    engine = batch.nodes.workers["a"].engine
    engine.breaks_after = 2
    tally = batch.run(decode())
    assert all(isinstance(error, EngineError) for error in tally.failures.values())
    assert [len(output) for output in batch.outputs] == [2, 2]
    assert tally.nodes["a"].failed == 2
    engine.breaks_after = None
    assert not batch.run(decode(3)).failures
    assert [len(output) for output in batch.outputs] == [5, 5]
    assert batch.nodes.alive == ["a"]


def test_an_edit_that_raises_is_the_callers_and_moves_nothing() -> None:
    batch = Batch(*NAMES)
    batch.run(prefill())
    tally = batch.run(modify(_fails_for_some))
    assert 0 < len(tally.failures) < len(batch.streams)
    assert {type(error) for error in tally.failures.values()} == {ZeroDivisionError}
    assert tally.moved == 0
    assert batch.nodes.alive == list(NAMES)
    left = [stream for stream in batch.streams if stream.stream_id not in tally.failures]
    assert not batch.run(decode(), left).failures


def _fails_for_some(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    tokens[0] % (tokens[0] % 2)  # even ones divide by zero
    return kv[:, :, :CHUNK], tokens[:CHUNK]


def test_a_call_that_fails_as_a_whole_fails_its_streams_alone() -> None:
    batch = Batch(*NAMES)

    def broken(parcel: bytes, *phases: bytes) -> bytes:
        raise ValueError("a bug")

    batch.nodes.workers["b"].run = broken  # type: ignore[method-assign]
    tally = batch.run(prefill())
    on_b = {stream.stream_id for stream in batch.streams if stream.node == "b"}
    assert set(tally.failures) == on_b
    assert on_b


def test_streams_go_where_the_longest_prefix_is_and_each_node_is_asked_once() -> None:
    batch = Batch(*NAMES, cap=1e9, ask_nodes=True)
    for index, stream in enumerate(batch.streams):
        worker = batch.nodes.workers[NAMES[index % 3]]
        worker.engine([*stream.prompt[: 3 * CHUNK].tolist()], {"max_tokens": 1}, "")
        list(worker.engine(stream.prompt[: 3 * CHUNK].tolist(), {"max_tokens": 1}, ""))
    batch.run(prefill())
    assert [stream.node for stream in batch.streams] == [NAMES[n % 3] for n in range(24)]
    assert batch.nodes.rounds == {name: 1 for name in NAMES}
    batch.run(modify())
    assert batch.nodes.rounds == {name: 1 for name in NAMES}


@pytest.mark.parametrize(
    ("prompts", "tokens", "calls"),
    [(5, 10**9, 5), (24, 10**9, 1), (512, 3 * NUM_TOKENS, 8), (512, 1, 24)],
)
def test_a_call_about_prompts_is_bounded_in_prompts_and_tokens(
    monkeypatch: pytest.MonkeyPatch, prompts: int, tokens: int, calls: int
) -> None:
    monkeypatch.setattr(dispatch, "_ASKED_PROMPTS", prompts)
    monkeypatch.setattr(dispatch, "_ASKED_TOKENS", tokens)
    batch = Batch(*NAMES, ask_nodes=True)
    list(batch.nodes.workers["b"].engine(batch.streams[-1].prompt.tolist(), {}, ""))
    batch.run(prefill())
    assert batch.nodes.rounds == {name: calls for name in NAMES}
    assert batch.streams[-1].node == "b"


def test_a_node_that_dies_while_it_is_asked_holds_nothing() -> None:
    batch = Batch(*NAMES, ask_nodes=True)
    batch.lose_in("b", 0)
    assert not batch.run(prefill()).failures
    assert {stream.node for stream in batch.streams} == {"a", "c"}


def test_a_lookup_that_fails_because_the_server_is_gone_costs_the_node() -> None:
    batch = Batch(*NAMES, ask_nodes=True)
    sick = batch.nodes.workers["c"]

    def gone() -> None:
        raise EngineError("the server is gone")

    sick.client.before_lookup, sick.problem = gone, "GET /healthcheck: connection refused"
    assert not batch.run(prefill()).failures
    assert batch.nodes.alive == ["a", "b"]


def test_bytes_are_counted_by_node_and_the_phase_once() -> None:
    batch = Batch(*NAMES)
    tally = batch.run(prefill())
    for name, node in tally.nodes.items():
        mine = [stream for stream in batch.streams if stream.node == name]
        assert node.streams == len(mine)
        assert node.bytes_sent > 4 * NUM_TOKENS * len(mine)
    first = sum(node.bytes_sent for node in tally.nodes.values())
    big = drop_middle_chunks(0.5)
    data = pickle.dumps((big, b"x" * 10_000))
    tally = batch.run(modify(_Heavy(data)))
    for node in tally.nodes.values():
        assert 10_000 < node.bytes_sent < 12_000
    assert first < 24 * (4 * NUM_TOKENS + 100) + 300


class _Heavy:
    """An edit that is long when pickled."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __call__(self, kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        return kv[:, :, :CHUNK], tokens[:CHUNK]


def test_dropped_streams_and_phases_are_forgotten() -> None:
    batch = Batch("a")
    batch.run(prefill())
    worker = batch.nodes.workers["a"]
    worker.drop([stream.stream_id for stream in batch.streams], batch.dispatcher.phases)
    assert not worker._streams
    assert not worker._phases


@pytest.mark.parametrize("run", [prefill, modify])
def test_a_stopped_worker_runs_nothing_more(run: Callable[[], Phase]) -> None:
    batch = Batch("a", count=2)
    batch.run(prefill())
    batch.nodes.workers["a"]._stopping.set()
    tally = batch.run(run())
    assert len(tally.failures) == 2
    assert all("cancelled" in str(error) for error in tally.failures.values())
