"""A cluster of three machines on this one.

Each has a Ray node with a resource of its own, a real LMCache server with its own pool, and an
embedded engine. A real coordinator knows the servers.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # both before ray is imported
os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112 - that is how Ray spells it

import ray
import torch
from ray.cluster_utils import Cluster

from lmcache_fast.cluster import Node
from lmcache_fast.serve.engine.model import PRESETS
from tests.interop import peer
from tests.interop.processes import Program, fetch, free_ports
from tests.interop.servers import RealServer

MODEL = "cluster/tiny"
LARGER_MODEL = "cluster/small"
_STORE_BYTES = 80 << 20
#: Ray's own bookkeeping of a local cluster is for one thread.
_JOINING = threading.Lock()
_COORDINATOR = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"


class Engine:
    """An embedded engine as a process.

    Args:
        server: where it keeps its cache.
        preset: the model it makes up.
        model: the name that it registers it under.
        folder: takes its log.
    """

    def __init__(self, server: RealServer, preset: str, model: str, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "lmcache_fast", "engine", "--port", port]
        command += ["--url", server.url, "--http-url", server.http_url, "--num-threads", 1]
        command += ["--model", preset, "--model-name", model]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.program = Program(command, environment, folder / f"engine-{port}.log")
        self.program.wait_ready(f"{self.url}/health", 120)


class Machine:
    """One node of the cluster.

    Args:
        name: of the node, its resource and its server's instance.
        cluster: the Ray cluster that it joins.
        folder: takes logs.
        flags: of its server.
    """

    def __init__(self, name: str, cluster: Cluster, folder: Path, flags: tuple[str, ...]) -> None:
        self.name = name
        self._cluster = cluster
        self._folder = folder
        self.alive = True
        self._join()
        flags = ("--instance-id", name, *flags)
        self.server = RealServer(peer.ensure(), folder, flags=flags)
        self.engine = Engine(self.server, "tiny", MODEL, folder)

    @property
    def node(self) -> Node:
        """The machine as the package knows it."""
        layout = PRESETS["tiny"].layout(torch.float32)
        urls = (self.server.url, self.server.http_url, self.engine.url)
        return Node(*urls, MODEL, self.name, layout)

    @property
    def ray_node_id(self) -> str:
        """Ray's id of the machine's node."""
        return str(self._ray_node.node_id)

    def kill(self) -> None:
        """End all of it at once, as a power cut would."""
        self.alive = False
        self._cluster.remove_node(self._ray_node, allow_graceful=False)
        self.engine.program.kill()
        self.server.kill()

    def revive(self) -> None:
        """Start all of it again, empty, as a new Ray node."""
        self._join()
        self.server.start()
        self.engine = Engine(self.server, "tiny", MODEL, self._folder)
        self.alive = True

    def stop(self) -> None:
        """End the engine and the server; Ray ends its node."""
        if self.alive:
            self.engine.program.stop()
            self.server.stop()

    def _join(self) -> None:
        with _JOINING:
            self._ray_node = self._cluster.add_node(
                num_cpus=1, object_store_memory=_STORE_BYTES, resources={self.name: 1}, wait=False
            )

    def chunks(self, what: str) -> int:
        """Return how many chunks the server has counted: ``"read"`` or ``"write"``."""
        text = fetch(f"{self.server.http_url}/metrics").decode()
        found = re.findall(rf"^lmcache_mp_l1_{what}_chunks_total\{{.*\}} (\S+)$", text, re.M)
        return int(sum(map(float, found)))


class Machines(list[Machine]):
    """The machines, in order, and what they have in common.

    Attributes:
        address: where Ray is.
        coordinator_url: where the coordinator is.
    """

    address: str
    coordinator_url: str

    @property
    def nodes(self) -> list[Node]:
        """Every machine as the package knows it."""
        return [machine.node for machine in self]

    def called(self, name: str) -> Machine:
        """Return the machine with that name."""
        return next(machine for machine in self if machine.name == name)

    def revive(self) -> None:
        """Start those that were killed again."""
        for machine in self:
            if not machine.alive:
                machine.revive()


@contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[Machines]:
    """Run a cluster for the length of a ``with`` block, connected to this process."""
    # Ray keeps sockets there, whose paths may not be long.
    ray_folder = tempfile.mkdtemp(prefix="lmcf-", dir="/tmp")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
        head: dict[str, Any] = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
        head |= {"include_dashboard": False, "temp_dir": ray_folder}
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        coordinator, url = _coordinator(folder)
        stack.callback(coordinator.stop)
        flags = ("--coordinator-url", url, "--coordinator-advertise-ip", "127.0.0.1")
        with ThreadPoolExecutor(len(names)) as executor:
            starting = [executor.submit(Machine, name, cluster, folder, flags) for name in names]
        found = Machines()
        for machine in starting:
            if machine.exception() is None:
                found.append(machine.result())
                stack.callback(found[-1].stop)
        for machine in starting:
            machine.result()
        cluster.wait_for_nodes(120)
        coordinator.wait_ready(f"{url}/instances", 60)
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        found.address, found.coordinator_url = cluster.address, url
        yield found


def _coordinator(folder: Path) -> tuple[Program, str]:
    upstream = peer.ensure()
    (port,) = free_ports(1)
    command = [upstream.python, "-c", _COORDINATOR, "coordinator"]
    command += ["--host", "127.0.0.1", "--port", port, "--chunk-size", 64]
    program = Program(command, upstream.environment(), folder / "coordinator.log")
    return program, f"http://127.0.0.1:{port}"
