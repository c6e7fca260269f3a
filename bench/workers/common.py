"""What both workers share: the requests, and the loop that serves commands. Needs torch only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache: what a request of it looks like."""

    layers: int = 36
    heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    chunk: int = 256

    def kv(self, chunks: int) -> torch.Tensor:
        """Return one request's KV, ``[2, L, T, D]``: random, every page touched."""
        shape = (2, self.layers, chunks * self.chunk, self.heads * self.head_dim)
        generator = torch.Generator().manual_seed(1)
        layer = torch.randn(shape[2:], generator=generator).to(getattr(torch, self.dtype))
        return layer.expand(shape).contiguous()

    def tokens(self, seed: int, chunks: int) -> list[int]:
        """Return token ids that no other seed shares a prefix with."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 150_000, (chunks * self.chunk,), generator=generator).tolist()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Run ``call``; return the seconds it took and what it returned."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def added_memory(call: Callable[[], Any]) -> int:
    """Run ``call``; return by how many bytes private memory grew at its highest."""
    import threading

    def private() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("/proc/self/status has no RssAnon")

    before = private()
    highest = before
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, private())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        done.set()
        sampler.join()
    return max(highest, private()) - before


def serve(operations: dict[str, Callable[..., Any]]) -> None:
    """Answer commands ``{"do": name, **arguments}`` until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = operations[command.pop("do")](**command)
        print(json.dumps(result), file=answers, flush=True)
