"""A batch over three machines, each with a real LMCache server, a pool and an engine of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import ray
import ray.data
import torch

from lmcache_fast import BatchError, ConnectError, KVClient, NodeLostError
from lmcache_fast.cluster import (
    ClusterBatchedStream,
    ClusterMetrics,
    ClusterStream,
    CompletePrompts,
    Fleet,
    Node,
    nodes_from_coordinator,
)
from lmcache_fast.edits import drop_middle_chunks
from lmcache_fast.sdk.batch import LMCacheBatchedStream
from lmcache_fast.sdk.stream import create_request
from lmcache_fast.serve.engine.model import PRESETS
from lmcache_fast.vllm import make_post_completion
from tests.cluster.machines import LARGER_MODEL, Engine, Machines
from tests.interop.processes import wait_until
from tests.interop.servers import CHUNK

PREFILL = {"temperature": 0.0}
DECODE = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
EDIT = drop_middle_chunks(0.5)
STREAMS = 60
#: Streams that share their first chunk.
GROUP = 4
TINY = PRESETS["tiny"].layout(torch.float32)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 4 to 5 chunks, of which each ``GROUP`` begin alike."""
    draw = random.Random(seed)
    tokens = range(1, PRESETS["tiny"].vocab_size)
    prompts: list[list[int]] = []
    for index in range(count):
        first = prompts[-1][:CHUNK] if index % GROUP else draw.choices(tokens, k=CHUNK)
        prompts.append(first + draw.choices(tokens, k=3 * CHUNK + draw.randrange(CHUNK)))
    return prompts


PROMPTS = make_prompts(STREAMS)


@pytest.fixture(scope="module")
def expected(running: Machines) -> list[list[int]]:
    """What one machine gives, in one process and without Ray."""
    node = running[0].node
    engine = make_post_completion(node.engine_url, node.model)
    with KVClient(node.url, node.http_url, node.model, layout=node.layout) as client:
        batch = LMCacheBatchedStream()
        streams = [create_request(client, engine, prompt, "one-node") for prompt in PROMPTS]
        for stream in streams:
            batch.add(stream)
        batch.prefill(PREFILL)
        batch.modify(EDIT)
        batch.decode(DECODE)
    engine.http.close()
    return [list(stream.output_tokens) for stream in streams]


@pytest.fixture(scope="module")
def fleet(running: Machines) -> Iterator[Fleet]:
    """The actors of all machines, for the tests that kill none."""
    with Fleet(running.nodes, streams_per_node=8) as started:
        yield started


@pytest.fixture
def salt() -> str:
    """A salt of this test's own, so that tests do not find each other's KV."""
    return uuid.uuid4().hex


def outputs(streams: Sequence[ClusterStream]) -> list[list[int]]:
    return [stream.output_tokens for stream in streams]


def counted(machines: Machines, what: str) -> dict[str, int]:
    return {machine.name: machine.chunks(what) for machine in machines}


def settled(machines: Machines, what: str) -> dict[str, int]:
    """Return the servers' counts once they stay: a server counts a little later than it works."""
    counts = counted(machines, what)
    for _ in range(60):
        time.sleep(0.5)
        before, counts = counts, counted(machines, what)
        if before == counts:
            return counts
    raise TimeoutError(f"the servers' counts of chunks {what} do not settle: {counts}")


def gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def test_three_nodes_give_what_one_gives_and_edit_where_the_kv_is(
    cluster: Machines, fleet: Fleet, expected: list[list[int]], salt: str
) -> None:
    assert fleet.transports == {machine.name: "shm" for machine in cluster}
    with ClusterBatchedStream(fleet) as batch:
        streams = [batch.add(prompt, salt) for prompt in PROMPTS]
        prefill = batch.prefill(PREFILL)
        assert prefill.input_tokens == sum(map(len, PROMPTS))
        assert set(prefill.nodes) == {machine.name for machine in cluster}
        homes = [stream.node for stream in streams]
        for first in range(0, STREAMS, GROUP):
            # Equal prefixes meet, unless the node has its share.
            assert len(set(homes[first : first + GROUP])) <= 2
        share = Counter(homes)
        assert max(share.values()) <= 1.25 * STREAMS / 3 + 1

        read, written = settled(cluster, "read"), settled(cluster, "write")
        modify = batch.modify(EDIT)
        # Each server read its own streams' chunks, as often a stream as the others, and stored what
        # the edit kept of them; the first of those was there.
        chunks, kept = Counter[str](), dict[str, set[tuple[int, ...]]]()
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            cached = prompt[: len(prompt) // CHUNK * CHUNK]
            chunks[stream.node] += len(cached) // CHUNK
            left = [cached[at] for at in EDIT.plan(cached, CHUNK).positions]
            for end in range(CHUNK, len(left) + 1, CHUNK):
                if left[:end] != cached[:end]:
                    kept.setdefault(stream.node, set()).add(tuple(left[:end]))
        seen = gained(read, settled(cluster, "read"))
        times = {seen[name] / count for name, count in chunks.items()}
        assert len(times) == 1
        assert min(times) >= 1
        stored = {name: len(prefixes) for name, prefixes in kept.items()}
        assert gained(written, settled(cluster, "write")) == stored
        decode = batch.decode(DECODE)
        assert outputs(streams) == expected
        assert decode.output_tokens == STREAMS * DECODE["max_tokens"]
        assert [stream.node for stream in streams] == homes
        assert prefill.num_moved == modify.num_moved == decode.num_moved == 0
        assert {name: tally.streams for name, tally in decode.nodes.items()} == dict(share)


def test_streams_go_where_their_prefix_is_cached(
    cluster: Machines, fleet: Fleet, salt: str
) -> None:
    prompts = make_prompts(12, seed=1)
    # Of each prompt some machine holds more than the others.
    holders = [cluster[index % 3] for index in range(len(prompts))]
    for prompt, holder in zip(prompts, holders, strict=True):
        for machine in cluster:
            node, end = machine.node, (3 if machine is holder else 2) * CHUNK
            with KVClient(node.url, node.http_url, node.model, layout=node.layout) as client:
                client.store(torch.zeros(TINY.kv_shape(end)), prompt[:end], salt)
    with ClusterBatchedStream(fleet) as batch:
        streams = [batch.add(prompt, salt) for prompt in prompts]
        batch.prefill(PREFILL)
        assert [stream.node for stream in streams] == [machine.name for machine in holders]


def test_what_travels_does_not_grow_with_the_model(
    cluster: Machines, salt: str, tmp_path: Path
) -> None:
    machine = cluster[0]
    larger = Engine(machine.server, "small", LARGER_MODEL, tmp_path)
    try:
        layouts = {"tiny": TINY, "small": PRESETS["small"].layout(torch.float32)}
        nodes = {
            "tiny": machine.node,
            "small": Node(
                machine.server.url,
                machine.server.http_url,
                larger.url,
                LARGER_MODEL,
                machine.name,
                layouts["small"],
            ),
        }
        travelled = {}
        for name, node in nodes.items():
            with ClusterBatchedStream([node], ask_nodes=False) as batch:
                streams = [batch.add(prompt, salt) for prompt in PROMPTS[:8]]
                phases = [batch.prefill(PREFILL), batch.modify(EDIT), batch.decode(DECODE)]
                # Text is as long as the words of the vocabulary are.
                text = sum(len(stream.output_text) for stream in streams)
            sent = sum(phase.bytes_sent for phase in phases)
            received = sum(phase.bytes_received for phase in phases) - text
            travelled[name] = (sent, received)
            per_stream = (sent + received + text) / len(streams)
            kv = len(PROMPTS[0]) * layouts[name].token_bytes
            print(f"{name}: {per_stream:.0f} bytes a stream; its KV has {kv}")
            assert per_stream < 4096
        assert layouts["small"].token_bytes == 32 * layouts["tiny"].token_bytes
        # A token or a time may take a byte more or less.
        assert travelled["tiny"][0] == travelled["small"][0]
        assert abs(travelled["tiny"][1] - travelled["small"][1]) < 0.05 * travelled["tiny"][1]
    finally:
        larger.program.stop()


def test_each_actor_is_on_the_node_that_its_resource_names(cluster: Machines, fleet: Fleet) -> None:
    with Fleet([_second(cluster[2].node)]) as again:  # where there is one already
        actors = {**fleet._actors, **again._actors}
        found = {
            name: ray.get(actor.__ray_call__.remote(_where), timeout=60)
            for name, actor in actors.items()
        }
    expected = {machine.name: machine.ray_node_id for machine in cluster}
    assert found == {**expected, "south-2": expected["south"]}


def _second(node: Node) -> Node:
    """Return the node under another name: two actors on one machine."""
    urls = (node.url, node.http_url, node.engine_url)
    return Node(*urls, node.model, node.resource, node.layout, name=f"{node.name}-2")


def _where(actor: object) -> str:
    return str(ray.get_runtime_context().get_node_id())


def test_nodes_come_from_a_coordinator(cluster: Machines) -> None:
    engines = {machine.name: machine.engine.url for machine in cluster}
    names = set(engines)

    def found() -> list[Node]:
        return nodes_from_coordinator(
            cluster.coordinator_url, cluster[0].node.model, resource="{instance_id}", layout=TINY
        )

    wait_until(lambda: {node.name for node in found()} == names, 60, "servers to register")
    for node in found():
        assert node.url == cluster.called(node.name).server.url
        assert node.http_url == cluster.called(node.name).server.http_url
        assert (node.resource, node.engine_url) == (node.name, "http://127.0.0.1:8000")


def test_a_node_whose_server_is_down_is_left_out_with_a_warning(
    cluster: Machines, salt: str
) -> None:
    down = Node("tcp://127.0.0.1:9", "http://127.0.0.1:9", "http://127.0.0.1:9", "m", "north")
    nodes = [cluster[0].node, _named(down, "down")]
    with pytest.warns(UserWarning, match="node down is left out: .*127.0.0.1:9"):
        batch = ClusterBatchedStream(nodes)
    with batch:
        assert list(batch.fleet.left_out) == ["down"]
        streams = [batch.add(prompt, salt) for prompt in PROMPTS[:4]]
        batch.prefill(PREFILL)
        assert {stream.node for stream in streams} == {"north"}
    with pytest.warns(UserWarning), pytest.raises(ConnectError, match="no node can be used"):
        ClusterBatchedStream([down])


def _named(node: Node, name: str) -> Node:
    urls = (node.url, node.http_url, node.engine_url)
    return Node(*urls, node.model, node.resource, node.layout, name=name)


def test_ray_data_completes_prompts_and_keeps_rows_that_fail(
    cluster: Machines, expected: list[list[int]], salt: str
) -> None:
    rows = [
        {"row": index, "prompt_token_ids": prompt, "salt": salt}
        for index, prompt in enumerate([*PROMPTS[:23], [1, 2, 3]])  # the last has no whole chunk
    ]
    before = node_workers()
    done = (
        ray.data.from_items(rows)
        .map_batches(
            CompletePrompts,
            fn_constructor_kwargs={
                "nodes": cluster.nodes,
                "edit": EDIT,
                "prefill": PREFILL,
                "decode": DECODE,
                "salt_column": "salt",
            },
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0,
            batch_size=8,
        )
        .take_all()
    )
    done.sort(key=lambda row: row["row"])
    assert [list(row["completion_token_ids"]) for row in done[:23]] == expected[:23]
    assert all(
        row["completion"].split() == [f"t{token}" for token in tokens]
        for row, tokens in zip(done[:23], expected[:23], strict=True)
    )
    assert [row["error"] for row in done[:23]] == [""] * 23
    assert "InvalidInputError" in done[23]["error"]
    assert {row["node"] for row in done} == {machine.name for machine in cluster}
    wait_until(lambda: node_workers() <= before, 60, "the actors of the pipeline to end")


def node_workers() -> set[str]:
    """Return the processes that run actors of this test run."""
    mark = f"LMCACHE_FAST_TEST_RUN={os.environ['LMCACHE_FAST_TEST_RUN']}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::NodeWorker") and mark in environment:
                found.add(folder.name)
    return found


def test_ctrl_c_ends_the_actors_and_leaves_no_lock(cluster: Machines, tmp_path: Path) -> None:
    before = node_workers()
    script = tmp_path / "driver.py"
    marker = tmp_path / "editing"
    script.write_text(_DRIVER)
    (tmp_path / "nodes").write_bytes(pickle.dumps(cluster.nodes))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen(
        [sys.executable, script, cluster.address, tmp_path / "nodes", marker],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: marker.exists() or driver.poll() is not None, 120, "an edit to begin")
        assert sum(machine.server.held().get("read locks", 0) for machine in cluster) > 0
        assert len(node_workers() - before) == len(cluster)
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait(30)
    assert "KeyboardInterrupt" in errors
    wait_until(lambda: node_workers() <= before, 30, "the actors to end")
    # That nothing is locked is what the fixture looks at.


_DRIVER = """
import pickle, sys, time
from dataclasses import dataclass
import ray
from lmcache_fast.cluster import ClusterBatchedStream
from lmcache_fast.edits import Edit

address, nodes, marker = sys.argv[1:]

@dataclass(frozen=True)
class Slow(Edit):
    # It sleeps while its chunks are locked.
    def select(self, tokens, chunk_size):
        open(marker, "w").close()
        time.sleep(1.0)
        return range(0, len(tokens), 2)

if __name__ == "__main__":
    ray.init(address=address, logging_level="WARNING", log_to_driver=False)
    with open(nodes, "rb") as file:
        batch = ClusterBatchedStream(pickle.load(file))
    for first in range(60):
        batch.add([first + 1, *range(1, 300)])
    batch.prefill({"temperature": 0.0})
    batch.modify(Slow())
"""


def test_an_actor_that_hangs_is_given_up_and_its_streams_move(
    cluster: Machines, expected: list[list[int]], salt: str
) -> None:
    before = node_workers()
    with ClusterBatchedStream(cluster.nodes, timeout=12) as batch:
        streams = [batch.add(prompt, salt) for prompt in PROMPTS]
        batch.prefill(PREFILL)
        hanging = int((node_workers() - before).pop())
        os.kill(hanging, signal.SIGSTOP)
        try:
            batch.modify(EDIT)
            batch.decode(DECODE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hanging, signal.SIGKILL)
        assert outputs(streams) == expected
        (reason,) = batch.fleet.lost.values()
        assert "no sign of life for 24 s" in reason


def test_streams_without_a_node_are_reported_by_id_and_the_rest_is_untouched(
    cluster: Machines, salt: str
) -> None:
    with ClusterBatchedStream(cluster.nodes[:1]) as batch:
        streams = [batch.add(prompt, salt) for prompt in PROMPTS[:6]]
        some = [stream.stream_id for stream in streams[:3]]
        batch.prefill(PREFILL, stream_ids=some)
        batch.fleet.lose("north", "the test took it away")
        with pytest.raises(BatchError, match="no node is left") as caught:
            batch.prefill(PREFILL)
        assert set(caught.value.failures) == set(batch.streams)
        assert all(isinstance(error, NodeLostError) for error in caught.value.failures.values())
        assert [len(stream.output_tokens) for stream in streams] == [1, 1, 1, 0, 0, 0]


class Killer(threading.Thread):
    """Kills the machine of the first stream that is through with a phase, while others are not.

    Args:
        machines: the cluster.
        streams: the batch's streams.
        is_through: whether a stream is through with the phase.
    """

    def __init__(
        self,
        machines: Machines,
        streams: Sequence[ClusterStream],
        is_through: Callable[[ClusterStream], bool],
    ) -> None:
        super().__init__()
        self._machines = machines
        self._streams = streams
        self._is_through = is_through
        self.victim = ""
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while not self.victim and time.monotonic() < deadline:
            self.victim = next((s.node for s in self._streams if self._is_through(s)), "")
            time.sleep(0.002)
        self._machines.called(self.victim).kill()


@pytest.mark.parametrize("phase", ["prefill", "modify", "decode"])
def test_a_node_that_dies_in_a_phase_costs_time_and_no_stream(
    cluster: Machines, expected: list[list[int]], salt: str, phase: str
) -> None:
    # One stream at a time, so that the victim has much left to do.
    with ClusterBatchedStream(cluster.nodes, streams_per_node=1, timeout=20) as batch:
        streams = [batch.add(prompt, salt) for prompt in PROMPTS]
        through: dict[str, Callable[[ClusterStream], bool]] = {
            "prefill": lambda stream: len(stream.phases) == 1,
            "modify": lambda stream: len(stream.phases) == 2,
            "decode": lambda stream: len(stream.phases) == 3,
        }
        killer: Killer | None = None
        moved = {}
        phases: list[tuple[str, Callable[[], ClusterMetrics]]] = [
            ("prefill", lambda: batch.prefill(PREFILL)),
            ("modify", lambda: batch.modify(EDIT)),
            ("decode", lambda: batch.decode(DECODE)),
        ]
        for name, run in phases:
            if name == phase:
                killer = Killer(cluster, streams, through[phase])
            metrics = run()
            moved[name] = metrics.num_moved
            assert not any(tally.failed for tally in metrics.nodes.values())
        assert killer is not None
        killer.join(60)
        assert outputs(streams) == expected
        assert moved[phase] > 0
        assert killer.victim in batch.fleet.lost
        assert {stream.moves for stream in streams} == {0, 1}
        # Streams that were through with their last phase have nothing to move for.
        assert phase == "decode" or killer.victim not in {stream.node for stream in streams}
