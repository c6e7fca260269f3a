"""This package against upstream's SDK 0.5.6, on one real server, in one run.

``python -m bench.compare_upstream`` starts the servers and one worker for each SDK, lets them take
turns, and writes ``bench/results/upstream.json``: medians of the pairs' ratios. Needs about 20 GB
of memory and 15 quiet minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmcache_fast import KVLayout
from tests.interop.peer import ensure
from tests.interop.servers import RealServer, real_server
from tests.interop.status_proxy import status_proxy

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "upstream.json"
MODEL = "bench/qwen3-8b"
LAYOUT = KVLayout(36, 8, 128, torch.bfloat16)
CHUNKS = 16


class Worker:
    """A worker process, driven over its standard input."""

    def __init__(
        self, name: str, python: Path | str, arguments: list[str], environment: Any
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(python), "-m", f"bench.workers.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._answer()

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have the worker do something; return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the worker."""
        self._process.communicate(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker {self.name!r} ended with {self._process.wait()}")
        return json.loads(line)


class Comparison:
    """Two workers on one server, and what they measured."""

    def __init__(self, server: RealServer, pairs: int) -> None:
        self.server = server
        self.pairs = pairs
        self._seed = 0
        self._proxy = status_proxy(server.http_url, {MODEL: LAYOUT})
        self._proxy_url = self._proxy.__enter__()
        self.upstream = self.start("upstream")
        self.ours = self.start("ours")

    def start(self, sdk: str) -> Worker:
        """Return a worker of ``"ours"`` or ``"upstream"`` that has just connected."""
        server, environment = self.server, dict(os.environ)
        if sdk == "ours":
            arguments = [server.url, server.http_url, MODEL]
            return Worker(sdk, sys.executable, arguments, environment)
        environment = {**server.peer.environment(), "PYTHONPATH": str(ROOT)}
        arguments = [server.url, self._proxy_url, MODEL]
        return Worker(sdk, server.peer.python, arguments, environment)

    def close(self) -> None:
        """End both workers."""
        self.ours.close()
        self.upstream.close()
        self._proxy.__exit__(None, None, None)

    def seed(self) -> int:
        """Return tokens' seed that was not used yet."""
        self._seed += 1
        return self._seed

    def pair(
        self,
        measure: str,
        ours: Callable[[], float],
        upstream: Callable[[], float],
        warm_ups: int = 2,
    ) -> dict[str, Any]:
        """Time both, in turns; the first rounds are thrown away."""
        rounds: list[tuple[float, float]] = []
        for number in range(warm_ups + self.pairs):
            both = _in_turn(ours, upstream, first=number % 2 == 0)
            if number >= warm_ups:
                rounds.append(both)
        ratios = [theirs / mine for mine, theirs in rounds]
        result = {
            "ours_ms": round(statistics.median(mine for mine, _ in rounds) * 1e3, 2),
            "upstream_ms": round(statistics.median(theirs for _, theirs in rounds) * 1e3, 2),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
        print(f"{measure:>28}: {result['ratio']:6.2f}x   {result}", flush=True)
        return result

    def prepare(self, chunks: int, stored: bool) -> int:
        """Empty the server but for one request, if ``stored``; return its tokens' seed."""
        self.server.clear()
        seed = self.seed()
        if stored:
            self.ours("store", seed=seed, chunks=chunks)
        return seed

    def fresh(self, worker: Worker, do: str, chunks: int, stored: bool, **arguments: Any) -> float:
        """Time something on tokens of their own, in a server that holds nothing else."""
        return float(worker(do, seed=self.prepare(chunks, stored), chunks=chunks, **arguments))

    def first(self, sdk: str, do: str, chunks: int, stored: bool) -> float:
        """Time the first thing that a client does after it has connected."""
        worker = self.start(sdk)
        try:
            worker("prepare", chunks=chunks)
            return self.fresh(worker, do, chunks, stored)
        finally:
            worker.close()


def _in_turn(
    ours: Callable[[], float], upstream: Callable[[], float], first: bool
) -> tuple[float, float]:
    if first:
        return ours(), upstream()
    theirs = upstream()
    return ours(), theirs


def over_shared_memory(server: RealServer, pairs: int, only: set[str]) -> dict[str, Any]:
    """Everything that is measured over shared memory."""
    compare = Comparison(server, pairs)
    results: dict[str, Any] = {}
    ours, upstream, fresh = compare.ours, compare.upstream, compare.fresh

    def wanted(measure: str) -> bool:
        return not only or measure in only

    def both(
        measure: str, do: str, chunks: int = CHUNKS, stored: bool = True, **arguments: Any
    ) -> None:
        if wanted(measure):
            results[measure] = compare.pair(
                measure,
                lambda: fresh(ours, do, chunks, stored, **arguments),
                lambda: fresh(upstream, do, chunks, stored, **arguments),
            )

    try:
        assert ours("transport") == "shm"
        # Steady state: every page of the pool has been written once.
        for _ in range(14):
            ours("store", seed=compare.seed(), chunks=CHUNKS)
        both("retrieve", "retrieve")
        if wanted("lease"):
            results["lease"] = compare.pair(
                "lease",
                lambda: fresh(ours, "lease", CHUNKS, True),
                lambda: fresh(upstream, "retrieve", CHUNKS, True),
            )
        both("store", "store", stored=False)
        if wanted("first_store"):
            results["first_store"] = compare.pair(
                "first_store",
                lambda: compare.first("ours", "store", CHUNKS, False),
                lambda: compare.first("upstream", "store", CHUNKS, False),
                warm_ups=1,
            )
        both("modify_middle", "modify", which="middle")
        both("modify_second", "modify", which="second")
        both("retrieve_one_chunk", "retrieve", chunks=1)
        both("store_one_chunk", "store", chunks=1, stored=False)
        if wanted("waits"):
            server.clear()
            waits = [ours("waits", seed=compare.seed(), chunks=1) for _ in range(3 * pairs)]
            for name in ("store", "retrieve"):
                median = statistics.median(each[name] for each in waits)
                results[f"{name}_one_chunk_server_ms"] = round(median * 1e3, 2)
            print(f"{'server alone, one chunk':>28}: {waits[-1]}", flush=True)
        if wanted("kernel"):
            for which in ("middle", "second"):
                ours("kernel", chunks=CHUNKS, which=which)
                figures = ours("kernel", chunks=CHUNKS, which=which)
                roofline = figures["copy_bytes"] / figures["copy_seconds"]
                figures["share_of_roofline"] = round(
                    figures["edit_bytes"] / figures["edit_seconds"] / roofline, 3
                )
                results[f"kernel_{which}"] = figures
                print(f"{'kernel_' + which:>28}: {figures}", flush=True)
        if wanted("memory"):
            server.clear()
            seed = compare.seed()
            ours("store", seed=seed, chunks=CHUNKS)
            results["modify_added_bytes"] = ours("modify_memory", seed=seed, chunks=CHUNKS)
            print(f"{'modify_added_bytes':>28}: {results['modify_added_bytes']}", flush=True)
        if wanted("batch"):
            results["batch_of_8"] = batch_of_eight(compare)
    finally:
        compare.close()
    return results


def batch_of_eight(compare: Comparison) -> dict[str, Any]:
    """Eight streams edited by one batch, against eight edits one after the other."""
    ours, ratios = compare.ours, []

    def stored() -> list[int]:
        seeds = [compare.seed() for _ in range(8)]
        for seed in seeds:
            ours("store", seed=seed, chunks=CHUNKS)
        return seeds

    for _ in range(compare.pairs):
        compare.server.clear()
        single = sum(ours("modify", seed=s, chunks=CHUNKS, which="middle") for s in stored())
        compare.server.clear()
        ratios.append(ours("batch", seeds=stored(), chunks=CHUNKS)["seconds"] / single)
    compare.server.clear()
    result = {
        "ratio_to_eight_singles": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "added_bytes": ours("batch_memory", seeds=stored(), chunks=CHUNKS),
    }
    print(f"{'batch_of_8':>28}: {result}", flush=True)
    return result


def over_pickle(server: RealServer, pairs: int) -> dict[str, Any]:
    """Store and retrieve on a server without a pool: chunks travel as pickles."""
    compare = Comparison(server, pairs)
    try:
        assert compare.ours("transport") == "pickle"
        rounds = []
        for number in range(1 + pairs):
            workers = [compare.ours, compare.upstream][:: 1 if number % 2 else -1]
            times = {}
            for worker in workers:
                compare.server.clear()
                seed = compare.seed()
                store = worker("store", seed=seed, chunks=CHUNKS)
                times[worker.name] = (store, store + worker("retrieve", seed=seed, chunks=CHUNKS))
            if number:
                rounds.append(times)
        results = {}
        for measure, index in (("pickle_store", 0), ("pickle_store_and_retrieve", 1)):
            ratios = [times["upstream"][index] / times["ours"][index] for times in rounds]
            results[measure] = {
                f"{name}_ms": round(statistics.median(t[name][index] for t in rounds) * 1e3, 1)
                for name in ("ours", "upstream")
            } | {
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
            }
            print(f"{measure:>28}: {results[measure]}", flush=True)
        return results
    finally:
        compare.close()


def main() -> None:
    """Run the comparison and write its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="measure these only; writes nothing")
    arguments = parser.parse_args()
    only = set(arguments.only)
    peer = ensure("0.5.6")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"chunk_size": 256, "flags": ("--l1-size-gb", "8")}
        results: dict[str, Any] = {}
        if only != {"pickle"}:
            with real_server(peer, Path(folder), **options) as server:
                results |= over_shared_memory(server, arguments.pairs, only)
        if not only or "pickle" in only:
            with real_server(peer, Path(folder), shared_memory=False, **options) as server:
                results |= over_pickle(server, arguments.pairs)
    if only:
        return
    machine = {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
    }
    report = {
        "server": "lmcache 0.5.6",
        "chunks": CHUNKS,
        "pairs": arguments.pairs,
        "machine": machine,
    }
    RESULTS.write_text(json.dumps(report | {"results": results}, indent=2) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
