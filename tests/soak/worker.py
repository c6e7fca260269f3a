"""One process of the soak: threads that store, retrieve, lease and edit, and check every byte.

``python -m tests.soak.worker URL HTTP_URL SEED THREADS`` works until its standard input ends, then
prints one JSON line with what it did and what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lmcache_fast import (
    ConnectError,
    KVClient,
    KVLayout,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    StoreIncompleteError,
    edits,
)

MODEL = "soak/model"
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")
TIMEOUT = 20.0
#: What a server that is full, or killed under a call, may lead to.
EXPECTED = (
    ConnectError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
    StoreIncompleteError,
)


def pattern(tokens: Sequence[int]) -> torch.Tensor:
    """Return KV whose every element is told by its token, plane, layer and place in the row.

    It does not depend on the token's position, so it also tells what an edit must leave.
    """
    shape = LAYOUT.kv_shape(len(tokens))
    ids = np.asarray(tokens, np.uint64)
    place = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape[0], shape[1], 1)
    rows = (ids * np.uint64(2654435761) + place * np.uint64(40503)) & np.uint64(0x7FFF)
    column = np.arange(shape[3], dtype=np.uint64)
    bits = (rows[..., None] ^ column).astype(np.uint16).view(np.int16)
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int16), right.contiguous().view(torch.int16)
    )


class Soak:
    """Threads over one client, and the counts of what they saw."""

    def __init__(self, client: KVClient, seed: int, threads: int) -> None:
        self._client = client
        self._stop = threading.Event()
        self._counts: Counter[str] = Counter()
        self._failures: list[str] = []
        self._lock = threading.Lock()
        self._busy_since: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(seed * 1000 + number,), daemon=True)
            for number in range(threads)
        ]

    def run(self) -> dict[str, object]:
        """Work until the standard input ends; return the report."""
        for thread in self._threads:
            thread.start()
        sys.stdin.read()
        self._stop.set()
        deadline = time.monotonic() + 6 * TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = sum(thread.is_alive() for thread in self._threads)
        return {"counts": dict(self._counts), "failures": self._failures, "hung": hung}

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            name = rng.choice(("store", "retrieve", "retrieve", "lease", "edit"))
            started = time.monotonic()
            try:
                getattr(self, f"_{name}")(rng)
                outcome = name
            except EXPECTED as error:
                outcome = type(error).__name__
                self._stop.wait(0.05)
            except BaseException:
                outcome = "failure"
                self._failures.append(traceback.format_exc()[-2000:])
            if time.monotonic() - started > 5 * TIMEOUT:
                self._failures.append(f"{name} took {time.monotonic() - started:.0f} s")
            with self._lock:
                self._counts[outcome] += 1

    def _request(self, rng: random.Random) -> list[int]:
        # Few distinct requests, so that processes meet on the same chunks.
        base = rng.randrange(40)
        length = rng.randrange(1, 9) * self._client.chunk_size + rng.choice((-1, 0, 1))
        return list(range(base * 10_000, base * 10_000 + length))

    def _store(self, rng: random.Random) -> None:
        tokens = self._request(rng)
        self._client.store(pattern(tokens), tokens)

    def _retrieve(self, rng: random.Random) -> None:
        tokens = self._request(rng)
        kv = self._client.retrieve(tokens)
        if kv is not None:
            assert same(kv, pattern(tokens[: kv.shape[2]])), f"wrong bytes: {tokens[0]}"

    def _lease(self, rng: random.Random) -> None:
        tokens = self._request(rng)
        with self._client.lease(tokens) as lease:
            for chunk in lease:
                start = chunk.index * self._client.chunk_size
                expected = pattern(tokens[start : start + self._client.chunk_size])
                assert same(chunk.tensor(), expected), f"wrong bytes: {tokens[0]}"

    def _edit(self, rng: random.Random) -> None:
        tokens = self._request(rng)
        step = rng.choice((2, 3))
        result = self._client.edit(tokens, edits.keep(lambda total, _: range(0, total, step)))
        kv = self._client.retrieve(result.tokens)
        if kv is not None:
            assert same(kv, pattern(result.tokens[: kv.shape[2]])), f"wrong edit: {tokens[0]}"


def handles() -> dict[str, int]:
    """Count this process's threads and descriptors."""
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}


def memory() -> int:
    """Private memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Run one worker and print its report."""
    url, http_url, seed, threads = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = handles()
    with KVClient(url, http_url, MODEL, layout=LAYOUT, timeout=TIMEOUT) as client:
        print(json.dumps("ready"), flush=True)
        report = Soak(client, int(seed), int(threads)).run()
    after = handles()
    deadline = time.monotonic() + 10
    while after["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.1)
        after = handles()
    report |= {"before": before, "after": after, "memory": memory()}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
