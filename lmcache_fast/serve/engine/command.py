"""``lmcache-fast engine``."""

from __future__ import annotations

import argparse
import os
import signal
import socket

import torch
import uvicorn

from lmcache_fast.errors import ConnectError
from lmcache_fast.layout import KVLayout, parse_dtype
from lmcache_fast.serve.engine.app import make_app
from lmcache_fast.serve.engine.cache import NoCache, PrefixCache, ServerCache
from lmcache_fast.serve.engine.model import PRESETS, Model, random_weights
from lmcache_fast.serve.engine.scheduler import Scheduler

#: The beginning of the line that is printed once requests are taken.
READY_LINE = "lmcache-fast engine ready on "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any")
    parser.add_argument(
        "--url", help="the cache server's ZMQ address; without it nothing is cached"
    )
    parser.add_argument(
        "--http-url", default="http://127.0.0.1:8080", help="the cache server's HTTP address"
    )
    parser.add_argument(
        "--model", choices=sorted(PRESETS), default="small", help="model to make up"
    )
    parser.add_argument("--model-name", help="name to serve and register it under (its own name)")
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="element type of the KV cache; the arithmetic is in float32",
    )
    parser.add_argument(
        "--kv-budget-tokens",
        type=int,
        default=32768,
        help="tokens of KV that running requests share; the others wait",
    )
    parser.add_argument(
        "--num-threads",
        type=int,
        default=0,
        help="threads to compute with; 0: all cores but one, which HTTP and the server need",
    )
    parser.add_argument(
        "--cache-timeout", type=float, default=30.0, help="seconds to wait for the cache server"
    )
    parser.add_argument(
        "--store-queries", action="store_true", help="store the queries of what is computed, too"
    )
    parser.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="write tokens in logprobs as token_id:N",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    torch.set_num_threads(args.num_threads or max(1, len(os.sched_getaffinity(0)) - 1))
    config = PRESETS[args.model]
    name = args.model_name or f"lmcache-fast-{args.model}"
    dtype = parse_dtype(args.dtype)
    model = Model(config, random_weights(config, args.seed))
    cache: PrefixCache = NoCache()
    query_cache: PrefixCache | None = None
    if args.url:
        cache = _server_cache(args, name, config.layout(dtype))
        if args.store_queries:
            query_cache = _server_cache(args, f"{name}##query", config.query_layout(dtype))
    scheduler = Scheduler(model, cache, args.kv_budget_tokens, dtype, query_cache)
    try:
        with _listen(args.host, args.port) as listener:
            app = make_app(scheduler, name, config.vocab_size, args.return_tokens_as_token_ids)
            server = uvicorn.Server(
                uvicorn.Config(
                    app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2
                )
            )
            # uvicorn shuts down on these and then raises them anew for the handlers from before.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)
            host, port = listener.getsockname()[:2]
            print(f"{READY_LINE}http://{host}:{port} model {name}", flush=True)
            server.run(sockets=[listener])
    finally:
        scheduler.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ConnectError(
            f"engine: cannot listen on {host}:{port}: {error}; --port chooses another"
        ) from error


def _server_cache(args: argparse.Namespace, name: str, layout: KVLayout) -> ServerCache:
    from lmcache_fast.client import KVClient

    return ServerCache(
        KVClient(args.url, args.http_url, name, layout=layout, timeout=args.cache_timeout)
    )
