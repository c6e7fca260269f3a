"""``lmcache-fast bench``: times a client's operations against a server, beside plain memcpy."""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.client import KVClient
from lmcache_fast.edits import drop_middle_chunks
from lmcache_fast.errors import InvalidInputError
from lmcache_fast.layout import KVLayout

#: Measured where no model is named: the shape of an 8-billion-parameter model.
MODEL = "lmcache_fast-bench"
LAYOUT = KVLayout(36, 8, 128, torch.bfloat16)
#: No further round begins after so many seconds.
BUDGET = 40.0
#: Rounds that count; one more goes before them.
ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("--url", default="tcp://localhost:6555", help="the server's address")
    parser.add_argument(
        "--http-url", default="http://localhost:8080", help="the server's HTTP address"
    )
    parser.add_argument("--model", help="take the layout of this registered model")
    parser.add_argument(
        "--chunks",
        type=int,
        default=4,
        help="chunks a request; the run stores about 13 times as many, under a salt of its own",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds one answer may take")


def run(args: argparse.Namespace) -> int:
    """Measure for under a minute, print a table, and return 0.

    Raises:
        InvalidInputError: ``--chunks`` is less than 2.
        LMCacheFastError: the server cannot be used.
    """
    if args.chunks < 2:
        raise InvalidInputError(f"bench: --chunks is {args.chunks}; expected at least 2")
    layout = None if args.model else LAYOUT
    model = args.model or MODEL
    with KVClient(args.url, args.http_url, model, layout=layout, timeout=args.timeout) as client:
        print(
            f"server {client.server_version}, transport {client.transport_name}, {args.chunks} "
            f"chunks of {client.layout.token_bytes * client.chunk_size / 1e6:.1f} MB"
        )
        figures = measure(client, args.chunks)
        report = {
            "server": client.server_version,
            "transport": client.transport_name,
            "chunks": args.chunks,
            "chunk_bytes": client.layout.token_bytes * client.chunk_size,
            "results": figures,
        }
    print(f"{'':20}{'median ms':>12}{'best ms':>12}{'GB/s':>10}{'of memcpy':>12}")
    for name, figure in figures.items():
        speed = figure["gb_per_s"]
        right = (
            "" if speed is None else f"{speed:10.2f}{speed / figures['memcpy']['gb_per_s']:12.0%}"
        )
        print(f"{name:20}{figure['median_ms']:12.2f}{figure['best_ms']:12.2f}{right}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(client: KVClient, num_chunks: int) -> dict[str, dict[str, Any]]:
    """Time each operation once a round, one after the other, so that all see the same machine.

    Args:
        client: where to measure.
        num_chunks: chunks a request, at least 2.

    Returns:
        By operation: ``median_ms``, ``best_ms``, ``rounds``, ``bytes`` moved (counted once), and
        ``gb_per_s`` at the median (None where next to no bytes move).
    """
    salt = f"{MODEL}-{secrets.token_hex(8)}"
    num_tokens = num_chunks * client.chunk_size
    layout = client.layout
    kv = torch.zeros((*layout.kv_shape(num_tokens)[:-1], layout.row_bytes), dtype=torch.uint8)
    kv += torch.arange(layout.row_bytes, dtype=torch.int64).to(torch.uint8)
    kv = kv.view(layout.dtype)
    out = torch.empty_like(kv)
    tokens = _fresh_tokens(num_tokens)
    one = tokens[: client.chunk_size]
    edit = drop_middle_chunks(0.5, chunk_size=client.chunk_size)

    def lease() -> None:
        with client.lease(tokens, salt):
            pass

    latest = tokens  # what was stored last: an edit of it has not been stored before

    def store_fresh() -> Callable[[], object]:
        nonlocal latest
        latest = _fresh_tokens(num_tokens)
        return lambda: client.store(kv, latest, salt)

    total = kv.nbytes
    half = total - int(0.5 * num_chunks) * (total // num_chunks)
    # Each makes, untimed, what is timed then; with how many bytes that moves.
    operations: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
        "memcpy": (lambda: lambda: out.copy_(kv), total),
        "retrieve": (lambda: lambda: client.retrieve(tokens, salt, out=out), total),
        "store": (store_fresh, total),
        "edit, half dropped": (lambda: lambda: client.edit(latest, edit, salt), half),
        "one chunk": (lambda: lambda: client.retrieve(one, salt, out=out), total // num_chunks),
        "lease": (lambda: lease, 0),
        "lookup": (lambda: lambda: client.lookup(tokens, salt), 0),
    }
    client.store(kv, tokens, salt)
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    end = time.monotonic() + BUDGET
    for round_number in range(ROUNDS + 1):
        if round_number > 1 and time.monotonic() > end:
            break
        for name, (prepare, _) in operations.items():
            timed = prepare()
            start = time.perf_counter()
            timed()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: _figure(seconds[name][1:], num_bytes) for name, (_, num_bytes) in operations.items()
    }


def _figure(seconds: list[float], num_bytes: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "median_ms": 1e3 * median,
        "best_ms": 1e3 * min(seconds),
        "rounds": len(seconds),
        "bytes": num_bytes,
        "gb_per_s": num_bytes / median / 1e9 if num_bytes else None,
    }


def _fresh_tokens(num_tokens: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(secrets.randbits(64)).integers(
        0, 2**31, num_tokens, dtype=np.uint32
    )
