"""LMCache servers as processes: upstream's of any release, and ours."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.interop.peer import Peer
from tests.interop.processes import Program, fetch, free_ports, wait_until

CHUNK = 64
_UPSTREAM = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
#: Has upstream's server listen on a socket too, which its own flags cannot ask for.
_ON_A_SOCKET = """
import grpc
make = grpc.server
def server(*arguments, **options):
    made = make(*arguments, **options)
    assert made.add_insecure_port({address!r})
    return made
grpc.server = server
"""


class Server:
    """A server on free ports, with a pool name of its own.

    Args:
        version: the release it should say it is.
        command: what runs it, without flags.
        environment: its whole environment.
        folder: takes its log.
        shared_memory: whether it keeps its cache in a shared segment.
        chunk_size: tokens a chunk.
        flags: further flags.
        transport: ``"zmq"``, ``"grpc"``, or ``"grpc+unix"`` for gRPC over a socket in the folder.
    """

    def __init__(
        self,
        version: str,
        command: Sequence[object],
        environment: dict[str, str],
        folder: Path,
        shared_memory: bool,
        chunk_size: int = CHUNK,
        flags: tuple[str, ...] = (),
        transport: str = "zmq",
    ) -> None:
        self.port, http_port = free_ports(2)
        self.version = version
        self.chunk_size = chunk_size
        self.url = f"{'grpc' if transport == 'grpc' else 'tcp'}://127.0.0.1:{self.port}"
        if transport == "grpc+unix":
            self.url = f"grpc+unix://{folder}/socket"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.log = folder / f"server-{version}-{self.port}.log"
        name = f"lmcache_fast_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self.segment = Path("/dev/shm") / f"lmcache_l1_pool_{name}"
        self._environment = environment
        self._command = [
            *command,
            *("--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--chunk-size", chunk_size),
            *("--port", self.port, "--http-port", http_port),
            *(("--shm-name", name, "--no-l1-use-lazy") if shared_memory else ("--shm-name", "")),
            *(("--transport", "grpc") if transport != "zmq" else ()),
            *flags,
        ]
        self.start()

    def start(self) -> None:
        """Start the server (again, on the same ports) and wait until it answers."""
        self._program = Program(self._command, self._environment, self.log)
        try:
            self._program.wait_ready(f"{self.http_url}/healthcheck", 120)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End the server as a crash would."""
        self._program.kill()
        self.segment.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children."""
        self._program.signal(number)

    def stop(self) -> None:
        """End the server and remove what it left behind."""
        self._program.stop()
        self.segment.unlink(missing_ok=True)

    def status(self) -> Any:
        """Return what ``GET /status`` says."""
        return json.loads(fetch(f"{self.http_url}/status"))

    def clear(self) -> None:
        """Drop everything that is cached and not locked."""
        fetch(f"{self.http_url}/cache/clear", "POST")

    def held(self) -> dict[str, int]:
        """Return how many locks and sessions clients hold on it, by kind; those above zero."""
        status = self.status()
        cache = status["storage_manager"]["l1_manager"]
        counts = {
            "read locks": cache["read_locked_count"],
            "write locks": cache["write_locked_count"],
            "sessions": status.get("active_sessions", 0),
        }
        return {what: count for what, count in counts.items() if count}

    def wait_nothing_held(self) -> None:
        """Fail if clients still hold something on it: what they give back is not waited for."""
        wait_until(lambda: not self.held(), 30, f"locks on {self.version} to be given back")


class RealServer(Server):
    """Upstream's server.

    Args:
        peer: the release to run.
        folder: takes its log.
        shared_memory: whether it keeps its cache in a shared segment.
        chunk_size: tokens a chunk.
        flags: further flags; they win over ours.
        transport: ``"zmq"``, ``"grpc"`` or ``"grpc+unix"``.
        prelude: Python code to run in the server's process before it starts.
    """

    def __init__(
        self,
        peer: Peer,
        folder: Path,
        shared_memory: bool = True,
        chunk_size: int = CHUNK,
        flags: tuple[str, ...] = (),
        transport: str = "zmq",
        prelude: str = "",
    ) -> None:
        self.peer = peer
        if transport == "grpc+unix":
            prelude += _ON_A_SOCKET.format(address=f"unix:{folder}/socket")
        command = (peer.python, "-c", prelude + _UPSTREAM, "server")
        if peer.version[:5] > "0.5.3":  # whose default is to copy in the server, on a GPU
            flags = ("--supported-transfer-mode", "auto", *flags)
        environment = peer.environment()
        super().__init__(
            peer.version, command, environment, folder, shared_memory, chunk_size, flags, transport
        )


@contextmanager
def real_server(peer: Peer, folder: Path, **options: Any) -> Iterator[RealServer]:
    """Run upstream's server for the length of a ``with`` block."""
    server = RealServer(peer, folder, **options)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def embedded_server(folder: Path, shared_memory: bool = True) -> Iterator[Server]:
    """Run our own server for the length of a ``with`` block."""
    command = (sys.executable, "-m", "lmcache_fast", "server")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = Server("embedded", command, environment, folder, shared_memory)
    try:
        yield server
    finally:
        server.stop()
