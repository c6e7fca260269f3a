"""Times upstream's SDK: ``python -m bench.workers.upstream URL HTTP_URL MODEL``."""

from __future__ import annotations

import logging
import sys

import torch
from lmcache.sdk import kvcache

from bench.workers.common import Geometry, serve, timed

geometry = Geometry()
context = kvcache.connect(sys.argv[1], sys.argv[2], sys.argv[3], timeout=120.0)
logging.disable(logging.INFO)
_kv: dict[int, torch.Tensor] = {}


def _request(chunks: int) -> torch.Tensor:
    if chunks not in _kv:
        _kv[chunks] = geometry.kv(chunks)
    return _kv[chunks]


def _rotate(keys: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Turn keys ``[T, D]`` by ``shifts`` positions, in float32: half-split, theta 1e6."""
    half = geometry.head_dim // 2
    frequencies = 1e6 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = shifts.to(torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    heads = keys.view(-1, geometry.heads, geometry.head_dim).float()
    low, high = heads[..., :half], heads[..., half:]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return turned.to(keys.dtype).view(keys.shape)


def _edit(
    kv: torch.Tensor, tokens: list[int], kept: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Keep some tokens and rotate their keys, layer by layer: the quicker of the torch ways."""
    shifts = torch.arange(len(kept)) - kept
    edited = torch.empty((*kv.shape[:2], len(kept), kv.shape[3]), dtype=kv.dtype)
    for layer in range(kv.shape[1]):
        edited[0, layer] = _rotate(kv[0, layer][kept], shifts)
        edited[1, layer] = kv[1, layer][kept]
    return edited, [tokens[index] for index in kept.tolist()]


def kept_tokens(which: str, chunks: int) -> torch.Tensor:
    """Positions that an edit keeps: all but the middle half of the chunks, or every second one."""
    total = chunks * geometry.chunk
    if which == "second":
        return torch.arange(0, total, 2)
    quarter = chunks // 4 * geometry.chunk
    return torch.cat((torch.arange(quarter), torch.arange(total - quarter, total)))


def prepare(chunks: int) -> None:
    """Make a request's KV, which is no part of what is timed."""
    _request(chunks)


def store(seed: int, chunks: int) -> float:
    kv, tokens = _request(chunks), geometry.tokens(seed, chunks)
    seconds, stored = timed(lambda: context.store(kv, tokens))
    assert stored, "nothing was stored"
    return seconds


def retrieve(seed: int, chunks: int) -> float:
    tokens = geometry.tokens(seed, chunks)
    seconds, kv = timed(lambda: context.retrieve(tokens))
    assert kv is not None and kv.shape[2] == len(tokens), "not all was found"
    return seconds


def modify(seed: int, chunks: int, which: str) -> float:
    tokens, kept = geometry.tokens(seed, chunks), kept_tokens(which, chunks)

    def run() -> None:
        kv = context.retrieve(tokens)
        assert kv is not None and kv.shape[2] == len(tokens)
        assert context.store(*_edit(kv, tokens, kept))

    return timed(run)[0]


if __name__ == "__main__":
    try:
        serve({"prepare": prepare, "store": store, "retrieve": retrieve, "modify": modify})
    finally:
        context.close()
