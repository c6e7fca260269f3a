"""Real servers for the tests: one for each release and transport, shared by the tests of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_fast import KVClient, KVLayout
from tests.interop import peer
from tests.interop.servers import Server, real_server

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
MODEL = "interop/model"

Connect = Callable[..., KVClient]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test over every release, shared memory and the fallback, and both transports.

    Of the releases that speak gRPC only the last does here; the matrix has them all. The marker
    ``shared_memory_only`` leaves the fallback out.
    """
    if "running_server" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--server-version") or peer.CI_VERSIONS
        only = metafunc.definition.get_closest_marker("shared_memory_only")
        kinds = ("shm",) if only else ("shm", "fallback")
        cases = [(version, kind, "zmq") for version in versions for kind in kinds]
        grpc = [version for version in versions if "grpc" in peer.transports(version)][-1:]
        cases += [(version, kind, "grpc") for version in grpc for kind in kinds]
        ids = ["-".join(case) for case in cases]
        metafunc.parametrize("running_server", cases, ids=ids, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on the shared servers, so that the others can run beside them."""
    for item in items:
        if "running_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared_server)


@pytest.fixture(scope="session")
def running_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One of upstream's servers, started for all tests of its release, memory and transport."""
    version, kind, transport = request.param
    folder = tmp_path_factory.mktemp("server")
    options = {"shared_memory": kind == "shm", "transport": transport}
    with real_server(peer.ensure(version), folder, **options) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """One of upstream's servers; after the test nothing may be locked on it."""
    yield running_server
    running_server.wait_nothing_held()


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    """Open clients of the server that are closed before its locks are counted."""
    clients: list[KVClient] = []

    def open_client(model: str = MODEL, layout: KVLayout = LAYOUT, **options: Any) -> KVClient:
        client = KVClient(server.url, server.http_url, model, layout=layout, **options)
        clients.append(client)
        return client

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def salt() -> str:
    """A salt of this test's own, so that tests on one server do not meet."""
    return uuid.uuid4().hex
