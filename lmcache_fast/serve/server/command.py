"""``lmcache-fast server``: the embedded server as a process."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, named as the real server's."""
    parser.add_argument("--l1-size-gb", type=float, default=1.0, help="GiB of cache (default 1)")
    parser.add_argument("--eviction-policy", choices=["LRU"], default="LRU")
    parser.add_argument("--chunk-size", type=int, default=256, help="tokens a chunk (default 256)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the message port")
    parser.add_argument("--port", type=int, default=6555, help="message port; 0: a free one")
    parser.add_argument("--http-host", default="127.0.0.1", help="address of the HTTP side")
    parser.add_argument("--http-port", type=int, default=8080, help="HTTP port; 0: a free one")
    parser.add_argument(
        "--shm-name", default="", help="share the pool as /dev/shm/lmcache_l1_pool_NAME"
    )
    parser.add_argument(
        "--l1-use-lazy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take memory only when it is written; shared memory needs --no-l1-use-lazy",
    )
    parser.add_argument("--l1-read-ttl-seconds", type=float, default=300.0)
    parser.add_argument("--l1-write-ttl-seconds", type=float, default=600.0)
    parser.add_argument(
        "--supported-transfer-mode", choices=["auto", "engine_driven"], default="auto"
    )
    parser.add_argument(
        "--protocol",
        choices=["0.5.6", "0.5.7"],
        default="0.5.6",
        help="release to speak (default 0.5.6)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises:
        LMCacheFastError: a setting is wrong, an address is taken, or the segment is another's.
    """
    # Here, so that asking for --help needs neither torch nor the server extra.
    from lmcache_fast.serve.server import EmbeddedServer, ServerConfig

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    config = ServerConfig(
        pool_bytes=int(args.l1_size_gb * (1 << 30)),
        chunk_size=args.chunk_size,
        shm_name=args.shm_name,
        lazy=args.l1_use_lazy,
        host=args.host,
        port=args.port,
        http_host=args.http_host,
        http_port=args.http_port,
        protocol=args.protocol,
        transfer_mode=args.supported_transfer_mode,
        read_ttl=args.l1_read_ttl_seconds,
        write_ttl=args.l1_write_ttl_seconds,
    )
    with EmbeddedServer(config) as server:
        memory = f"shared memory {server.shm_name}" if server.shm_name else "private memory"
        print(
            f"lmcache-fast server: zmq {server.url} http {server.http_url} "
            f"{memory} ({server.config.pool_bytes} bytes)",
            flush=True,
        )
        if args.shm_name and not server.shm_name:
            print(
                "lmcache-fast server: --shm-name without --no-l1-use-lazy shares no memory",
                file=sys.stderr,
            )
        stopped.wait()
    return 0
