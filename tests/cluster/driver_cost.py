"""What a large batch costs its driver: CPU time and memory, over real actors that make up results.

``python -m tests.cluster.driver_cost --streams 10000 --nodes 4``. No server and no engine: the
actors answer at once, so that the driver is what takes the time.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported

import numpy as np
import ray

from lmcache_fast import __version__
from lmcache_fast.cluster import ClusterBatchedStream, ClusterMetrics, Fleet, Node
from lmcache_fast.cluster.messages import Hits, Opening, Outcome, Prompts, decode, encode, pack
from lmcache_fast.cluster.worker import NodeWorker
from lmcache_fast.edits import drop_middle_chunks

_OUTPUT_TOKENS = 128


class MakingUp(NodeWorker):
    """A worker without a server and an engine."""

    def connect(self) -> dict[str, Any]:
        return {"package": __version__, "chunk_size": 256, "transport": "none"}

    def hits(self, prompts: bytes) -> bytes:
        return encode(Hits(np.zeros(len(decode(prompts, Prompts).tokens), np.int64).tobytes()))

    def _sick(self) -> str:
        return ""

    def _advance(self, phase: Any, stream_id: str, opening: Opening | None) -> Outcome:
        count = 0 if phase.edit else phase.params["max_tokens"]
        tokens = pack(list(range(count)))
        return Outcome(tokens, "word " * count, 4096, False, 8192, 1.0, 0.1, is_known=True)


class MakingUpFleet(Fleet):
    """A fleet of them."""

    worker = MakingUp


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a prompt")
    parser.add_argument("--nodes", type=int, default=4)
    args = parser.parse_args()
    names = [f"node-{index}" for index in range(args.nodes)]
    ray.init(
        "local",
        num_cpus=1,
        object_store_memory=256 << 20,
        include_dashboard=False,
        logging_level=logging.WARNING,
        resources=dict.fromkeys(names, 1),
    )
    nodes = [Node("tcp://none:1", "http://none:1", "http://none:2", "m", name) for name in names]
    draw = np.random.default_rng(0)
    with MakingUpFleet(nodes) as fleet, ClusterBatchedStream(fleet) as batch:
        for _ in range(args.streams):
            batch.add(draw.integers(0, 150_000, args.tokens, np.uint32))
        print(f"{args.streams} streams of {args.tokens} tokens over {args.nodes} nodes")
        print(f"prompts {args.streams * args.tokens * 4 >> 20} MiB, process {_memory()} MiB")
        phases: list[tuple[str, Callable[[], ClusterMetrics]]] = [
            ("prefill", lambda: batch.prefill({"temperature": 0.0})),
            ("modify", lambda: batch.modify(drop_middle_chunks(0.5))),
            ("decode", lambda: batch.decode({"max_tokens": _OUTPUT_TOKENS})),
        ]
        for name, run in phases:
            metrics = run()
            print(
                f"{name}: {metrics.duration:.2f} s, driver {metrics.driver_seconds:.2f} s of CPU = "
                f"{metrics.driver_seconds / args.streams * 1e3:.3f} ms a stream; sent "
                f"{metrics.bytes_sent / args.streams:.0f} and received "
                f"{metrics.bytes_received / args.streams:.0f} bytes a stream; at most {_memory()} "
                "MiB in memory so far"
            )
    ray.shutdown()


def _memory() -> int:
    """Return the most MiB that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main()
