"""The demo's two parts as child processes: a cache server and an engine."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass

from lmcache_fast._extension import available as native_available
from lmcache_fast.serve.processes import ChildError, ChildGroup

#: Seconds a part has to become ready: torch alone may take long to load from a cold disk.
READY_TIMEOUT = 180.0
_GIB = 1 << 30


@dataclass(frozen=True)
class Parts:
    """Where the running parts are.

    Args:
        url: the server's message queue.
        http_url: the server's HTTP side.
        engine_url: the engine's HTTP side.
        model_name: the model's name on the engine and on the server.
    """

    url: str
    http_url: str
    engine_url: str
    model_name: str


def start_parts(
    children: ChildGroup,
    *,
    model: str,
    chunk_size: int,
    pool_bytes: int,
    kv_budget_tokens: int,
    seed: int,
    store_queries: bool = False,
) -> Parts:
    """Start a server and an engine on free ports, and wait until both are ready.

    With ``store_queries`` the engine stores query caches beside those of keys and values.

    Raises:
        ChildError: one of them did not start; with what it printed.
    """
    arguments = [
        "server",
        *("--port", "0", "--http-port", "0"),
        *("--l1-size-gb", str(pool_bytes / _GIB), "--chunk-size", str(chunk_size)),
    ]
    if native_available() and _shared_memory_free() > pool_bytes:  # else chunks go in messages
        name = f"demo_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        arguments += ["--no-l1-use-lazy", "--shm-name", name]
    server = children.start("server", arguments)
    url, http_url = _found(server.wait_for_line("lmcache-fast server: ", READY_TIMEOUT))[:2]
    engine = children.start(
        "engine",
        [
            "engine",
            *("--port", "0", "--url", url, "--http-url", http_url),
            *("--model", model, "--seed", str(seed)),
            *("--kv-budget-tokens", str(kv_budget_tokens)),
            *(["--store-queries"] if store_queries else []),
        ],
    )
    line = engine.wait_for_line("lmcache-fast engine ready on ", READY_TIMEOUT)
    return Parts(url, http_url, _found(line)[0], line.rpartition(" ")[2])


def _found(line: str) -> list[str]:
    addresses = re.findall(r"(?:tcp|http)://\S+", line)
    if not addresses:
        raise ChildError(f"no address in the line {line!r}")
    return addresses


def _shared_memory_free() -> int:
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize
