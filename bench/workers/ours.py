"""Times this package: ``python -m bench.workers.ours URL HTTP_URL MODEL``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from bench.workers.bare_socket import WAITED_FOR, round_trips
from bench.workers.common import Geometry, added_memory, serve, timed
from lmcache_fast import KVClient, KVLayout, edits
from lmcache_fast._native import ChunkedSide, copy_runs
from lmcache_fast.edits.plan import compile_plan
from lmcache_fast.sdk.batch import LMCacheBatchedStream
from lmcache_fast.sdk.stream import create_request

geometry = Geometry()
layout = KVLayout(geometry.layers, geometry.heads, geometry.head_dim, geometry.dtype)
client = KVClient(sys.argv[1], sys.argv[2], sys.argv[3], layout=layout, timeout=120.0)
rope = edits.Rope(geometry.head_dim, theta=1e6)
_kv: dict[int, torch.Tensor] = {}


def _request(chunks: int) -> torch.Tensor:
    if chunks not in _kv:
        _kv[chunks] = geometry.kv(chunks)
    return _kv[chunks]


def _edit(which: str) -> edits.Edit:
    if which == "second":
        return edits.keep(lambda total, tokens: range(0, total, 2), rope=rope)
    return edits.drop_middle_chunks(0.5, rope=rope)


def prepare(chunks: int) -> None:
    """Make a request's KV, which is no part of what is timed."""
    _request(chunks)


def store(seed: int, chunks: int) -> float:
    kv, tokens = _request(chunks), geometry.tokens(seed, chunks)
    seconds, stored = timed(lambda: client.store(kv, tokens))
    assert stored, "nothing was stored"
    return seconds


def retrieve(seed: int, chunks: int) -> float:
    tokens = geometry.tokens(seed, chunks)
    seconds, kv = timed(lambda: client.retrieve(tokens))
    assert kv is not None and kv.shape[2] == len(tokens), "not all was found"
    return seconds


def lease(seed: int, chunks: int) -> float:
    """Every chunk as a view, nothing copied."""
    tokens = geometry.tokens(seed, chunks)

    def run() -> None:
        with client.lease(tokens) as held:
            assert sum(chunk.numpy().shape[2] for chunk in held) == len(tokens)

    return timed(run)[0]


def modify(seed: int, chunks: int, which: str) -> float:
    tokens, edit = geometry.tokens(seed, chunks), _edit(which)
    seconds, result = timed(lambda: client.edit(tokens, edit))
    assert result.num_cached == len(tokens) // 2, "not all was stored"
    return seconds


def modify_memory(seed: int, chunks: int) -> int:
    """Bytes of private memory that one edit adds at its highest."""
    return added_memory(lambda: modify(seed, chunks, "middle"))


def batch(seeds: list[int], chunks: int) -> dict[str, Any]:
    """Edit several streams at once with the batch of the SDK."""
    streams = LMCacheBatchedStream()
    for seed in seeds:
        tokens = geometry.tokens(seed, chunks)
        streams.add(create_request(client, lambda *_: iter(()), tokens))
    seconds, _ = timed(lambda: streams.modify(_edit("middle")))
    return {"seconds": seconds}


def batch_memory(seeds: list[int], chunks: int) -> int:
    """Bytes of private memory that a batch adds at its highest, as plain functions need tensors."""
    return added_memory(lambda: batch(seeds, chunks))


def waits(seed: int, chunks: int) -> dict[str, float]:
    """Seconds that a store and a retrieve wait for the server over a bare socket."""
    steps = round_trips(client, geometry.tokens(seed, chunks))
    return {name: sum(steps[name][each.value] for each in WAITED_FOR[name]) for name in steps}


def kernel(chunks: int, which: str) -> dict[str, float]:
    """Seconds of the fused edit and of a plain copy between warm buffers, and the bytes of each."""
    source = _request(chunks)
    total = source.shape[2]
    target = torch.empty_like(source).fill_(0)
    tokens = np.arange(total, dtype=np.uint32)
    plan = _edit(which).plan(tokens.tolist(), chunk_size=geometry.chunk)
    compiled = compile_plan(plan, layout, geometry.chunk)
    target_chunks = len(plan.positions) // geometry.chunk
    # All chunks are rewritten here, so that what is timed is the edit of the whole half.
    runs, rotation = compiled.for_chunks(range(target_chunks), geometry.chunk)
    whole = np.array([[0, 0, total]], np.int64)
    copy_seconds = [
        timed(lambda: copy_runs(_side(source), _side(target), whole))[0] for _ in range(9)
    ]
    edit_seconds = [
        timed(lambda: copy_runs(_side(source), _side(target), runs, rotation))[0] for _ in range(9)
    ]
    libc_seconds = [timed(lambda: target.copy_(source))[0] for _ in range(9)]
    size = float(source.numel() * source.element_size())
    return {
        "copy_seconds": float(np.median(copy_seconds)),
        "copy_bytes": size,
        "edit_seconds": float(np.median(edit_seconds)),
        "edit_bytes": size * len(plan.positions) / total,
        "torch_copy_seconds": float(np.median(libc_seconds)),
    }


def _side(kv: torch.Tensor) -> ChunkedSide:
    """A request of whole chunks, each chunk where a slot would be: ``[chunks, 2, L, chunk, D]``."""
    chunk_bytes = layout.token_bytes * geometry.chunk
    chunks = kv.shape[2] // geometry.chunk
    return ChunkedSide.from_addresses(
        kv.data_ptr() + np.arange(chunks, dtype=np.uint64) * np.uint64(chunk_bytes),
        kv,
        tokens_per_chunk=geometry.chunk,
        planes=2,
        layers=layout.num_layers,
        row_bytes=layout.row_bytes,
        plane_stride=chunk_bytes // 2,
        layer_stride=layout.row_bytes * geometry.chunk,
        token_stride=layout.row_bytes,
    )


if __name__ == "__main__":
    with client:
        serve(
            {
                "prepare": prepare,
                "store": store,
                "retrieve": retrieve,
                "lease": lease,
                "modify": modify,
                "modify_memory": modify_memory,
                "batch": batch,
                "batch_memory": batch_memory,
                "kernel": kernel,
                "waits": waits,
                "transport": lambda: client.transport_name,
            }
        )
