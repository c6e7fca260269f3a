"""A scripted LMCache server: its HTTP side, and a ROUTER that answers as tests tell it to."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from lmcache_fast.protocol.dialect import dialect_for
from lmcache_fast.protocol.operations import Operation

MAIN_LOOP = {Operation.REGISTER, Operation.UNREGISTER, Operation.GET_CHUNK_SIZE}
TRANSFERS = {
    Operation.PREPARE_STORE,
    Operation.COMMIT_STORE,
    Operation.PREPARE_RETRIEVE,
    Operation.COMMIT_RETRIEVE,
}
SLOT = {"offset": 4096, "length": 64, "shape": [2, 1, 4, 4], "dtype": "bfloat16"}


class Dropped(Exception):
    """Raised by a handler: the request gets no reply."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait up to 30 s for a condition."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)


def confirmation_limits(port: int) -> list[int]:
    """How long each of our connections to a port may go unconfirmed, in milliseconds."""
    limits = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as ours:
            if ours.getpeername()[1:2] == (port,):
                limits.append(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return limits


class FakeServer:
    """Handles registrations in order in its main loop, transfers in one thread, others in a pool.

    ``on[operation]`` is what it does: a function of the decoded payloads that returns the reply,
    waits as long as it likes, or raises Dropped. ``seen`` lists the operations as they came in.
    """

    def __init__(self, version: str = "0.5.6", cpu_workers: int = 1, **mp: Any) -> None:
        self.version = version
        self.config: dict[str, Any] = {
            "mp": {
                "chunk_size": 4,
                "shm_name": "fake",
                "supported_transfer_mode": "auto",
                "max_cpu_workers": cpu_workers,
                **mp,
            },
            "storage_manager": {
                "l1_manager_config": {"read_ttl_seconds": 30, "write_ttl_seconds": 60}
            },
        }
        self.status: dict[str, Any] = {"cache_context_meta": {}, "non_cuda_context_meta": {}}
        self.instances: set[int] = set()
        self.seen: list[tuple[Operation, list[Any]]] = []
        self.on: dict[Operation, Callable[..., Any]] = {
            Operation.REGISTER: self._register,
            Operation.UNREGISTER: lambda instance: self.instances.discard(instance),
            Operation.GET_CHUNK_SIZE: lambda: 4,
            Operation.PING: lambda instance: True,
            Operation.LOOKUP: lambda key, size: None,
            Operation.WAIT_PREFETCH_STATUS: lambda request_id, timeout: 2,
            Operation.FREE_LOOKUP_LOCKS: lambda key, size, *more: None,
            Operation.END_SESSION: lambda request_id: None,
            Operation.PREPARE_STORE: lambda key, instance, *more: {
                "context": {"slots": [SLOT], "chunk_indices": [0]}
            },
            Operation.COMMIT_STORE: lambda key, instance, data: True,
            Operation.PREPARE_RETRIEVE: lambda key, instance: {
                "success": True,
                "data": b"",
                "context": {"slots": [SLOT, SLOT]},
            },
            Operation.COMMIT_RETRIEVE: lambda key, instance: True,
        }
        self._workers = cpu_workers
        self._names = {
            number: operation for operation, number in dialect_for(version).numbers.items()
        }
        self._port = 0
        self._start_http()
        self.start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def operations(self) -> list[Operation]:
        return [operation for operation, _ in self.seen]

    def payloads(self, operation: Operation) -> list[list[Any]]:
        return [payloads for name, payloads in self.seen if name is operation]

    def start(self) -> None:
        """Start the ROUTER, on the same port as before."""
        self._stopping = threading.Event()
        self._replies: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        if self._port:
            socket.bind(self.url)
        else:
            self._port = socket.bind_to_random_port("tcp://127.0.0.1")
        pool: queue.SimpleQueue[Any] = queue.SimpleQueue()
        transfers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queues = [pool] * self._workers + [transfers]
        for jobs in self._queues:
            threading.Thread(target=self._work, args=(jobs, self._replies), daemon=True).start()
        self._loop = threading.Thread(
            target=self._run,
            args=(socket, pool, transfers, self._replies, self._stopping),
            daemon=True,
        )
        self._loop.start()

    def stop(self) -> None:
        """End the ROUTER as a server that is killed does."""
        self._stopping.set()
        self._loop.join()
        for jobs in self._queues:
            jobs.put(None)
        self._context.destroy(linger=0)
        self.instances.clear()

    def close(self) -> None:
        if not self._stopping.is_set():
            self.stop()
        self._http.shutdown()
        self._http.server_close()

    def _register(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.instances.add(payload["instance_id"])
        return {"shm_name": "fake_pool", "pool_size": 1 << 20}

    def _run(
        self,
        socket: zmq.Socket[bytes],
        pool: queue.SimpleQueue[Any],
        transfers: queue.SimpleQueue[Any],
        replies: queue.SimpleQueue[list[bytes]],
        stopping: threading.Event,
    ) -> None:
        while not stopping.is_set():
            while not replies.empty():
                socket.send_multipart(replies.get())
            if not socket.poll(2):
                continue
            identity, uid, number, *frames = socket.recv_multipart()
            operation = self._names[msgspec.msgpack.decode(number)]
            payloads = [msgspec.msgpack.decode(frame) for frame in frames]
            self.seen.append((operation, payloads))
            address = [identity, uid, number]
            job = (operation, payloads, address)
            if operation in MAIN_LOOP:
                self._answer(operation, payloads, address, replies)
            else:
                (transfers if operation in TRANSFERS else pool).put(job)
        socket.close()

    def _work(self, jobs: queue.SimpleQueue[Any], replies: queue.SimpleQueue[list[bytes]]) -> None:
        while (job := jobs.get()) is not None:
            operation, payloads, address = job
            self._answer(operation, payloads, address, replies)

    def _answer(
        self,
        operation: Operation,
        payloads: list[Any],
        frames: list[bytes],
        replies: queue.SimpleQueue[list[bytes]],
    ) -> None:
        if operation in TRANSFERS and payloads[1] not in self.instances:
            return
        try:
            result = self.on[operation](*payloads)
        except Dropped:
            return
        result = None if operation is Operation.UNREGISTER else result
        replies.put(frames if result is None else [*frames, msgspec.msgpack.encode(result)])

    def _start_http(self) -> None:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                registered = {"registered_non_cuda_instance_ids": sorted(server.instances)}
                pages = {
                    "/version": server.version,
                    "/config": server.config,
                    "/status": server.status | registered,
                }
                body = json.dumps(pages.get(self.path)).encode()
                self.send_response(200 if self.path in pages else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
