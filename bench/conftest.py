"""Servers and clients that the benchmarks share."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from bench.workers.common import Geometry
from lmcache_fast import KVClient, KVLayout

#: One request's geometry of each model: of a 70B Llama one of eight tensor-parallel shards, of
#: DeepSeek-V2-Lite the latent rows, which have one plane.
GEOMETRIES = {
    "Qwen3-8B": KVLayout(36, 8, 128, "bfloat16"),
    "Llama-3-70B shard": KVLayout(80, 1, 128, "bfloat16"),
    "MLA": KVLayout(27, 1, 576, "bfloat16", planes=1),
}

#: Size of the server's pool, gigabytes.
POOL_GB = 6

Connect = Callable[[str, KVLayout], KVClient]


class Server:
    """An embedded server in a process of its own."""

    def __init__(self, transport: str, size_gb: int) -> None:
        protocol = "0.5.7" if transport == "inline" else "0.5.6"
        command = [
            sys.executable,
            "-m",
            "lmcache_fast",
            "server",
            "--port",
            "0",
            "--http-port",
            "0",
        ]
        command += ["--l1-size-gb", str(size_gb), "--chunk-size", str(Geometry().chunk)]
        command += ["--protocol", protocol]
        if transport == "shm":
            name = f"lmcache_fast_bench_{uuid.uuid4().hex[:8]}"
            command += ["--shm-name", name, "--no-l1-use-lazy"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"zmq (\S+) http (\S+)", line)
        assert match, f"the server said {line!r}"
        self.url, self.http_url = match.groups()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(30)


def _touch_pool(client: KVClient) -> None:
    """Have every page of the server's pool written once: first writes are no steady state."""
    tokens = 4 * client.chunk_size
    kv = torch.zeros(client.layout.kv_shape(tokens), dtype=client.layout.dtype)
    for number in range(POOL_GB * 10**9 // (kv.numel() * kv.element_size()) + 2):
        client.store(kv, range(number, number + tokens), "touches the pool")


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """Return a function that gives the client of a transport and layout, its server included.

    There is one server at a time, as each takes much memory: asking for another transport ends it.
    """
    made: dict[tuple[str, KVLayout], KVClient] = {}
    with ExitStack() as stack:

        def client(transport: str, layout: KVLayout) -> KVClient:
            if (transport, layout) not in made:
                made.clear()
                stack.close()
                server = Server(transport, POOL_GB)
                stack.callback(server.close)
                model = f"bench/{layout.num_layers}x{layout.width}"
                new = KVClient(server.url, server.http_url, model, layout=layout, timeout=120)
                made[transport, layout] = stack.enter_context(new)
                assert new.transport_name == transport
                _touch_pool(new)
            return made[transport, layout]

        yield client
