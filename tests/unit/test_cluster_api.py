"""What a user of the cluster meets before any node does."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from lmcache_fast.cluster import ClusterMetrics, Fleet, Node, nodes_from_coordinator
from lmcache_fast.cluster.messages import plain
from lmcache_fast.cluster.report import NodeTally
from lmcache_fast.errors import ConnectError, InvalidInputError, ProtocolError
from tests.interop.status_proxy import serving

URLS = ("tcp://localhost:6555", "http://localhost:8080", "http://localhost:8000")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_and_the_cluster_does_not_import_ray() -> None:
    code = "import lmcache_fast.cluster, sys; print('ray' in sys.modules)"
    assert run_python(code) == "False"


def test_without_ray_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from lmcache_fast.cluster import ClusterBatchedStream, Node\n"
        "try: ClusterBatchedStream([Node('tcp://a:1', 'http://a:2', 'http://a:3', 'm', 'r')])\n"
        "except ConnectionError as error: print(error)"
    )
    assert "pip install 'lmcache_fast[ray]'" in run_python(code)


def test_a_node_is_called_what_its_resource_is_and_serves_what_it_registers() -> None:
    node = Node(*URLS, "m", "lmcache-1")
    assert (node.name, node.served_model) == ("lmcache-1", "m")
    assert Node(*URLS, "m", "lmcache-1", served_model="short", name="first").name == "first"


@pytest.mark.parametrize("field", ["url", "http_url", "engine_url", "model", "resource"])
@pytest.mark.parametrize("value", ["", None, 5])
def test_a_node_without_one_of_its_fields_is_refused(field: str, value: Any) -> None:
    names = ("url", "http_url", "engine_url", "model", "resource")
    fields = dict(zip(names, (*URLS, "m", "r"), strict=True))
    with pytest.raises(InvalidInputError):
        Node(**{**fields, field: value})


@pytest.mark.parametrize(
    ("nodes", "options", "says"),
    [
        ([], {}, "no nodes"),
        (["tcp://localhost:6555"], {}, "got str"),
        ([Node(*URLS, "m", "r"), Node(*URLS, "n", "r")], {}, "two nodes are called 'r'"),
        ([Node(*URLS, "m", "r")], {"streams_per_node": 0}, "streams_per_node"),
        ([Node(*URLS, "m", "r")], {"timeout": -1}, "timeout"),
    ],
)
def test_a_fleet_refuses_wrong_arguments_before_it_starts_anything(
    nodes: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        Fleet(nodes, **options)


def test_sampling_parameters_that_cannot_be_sent_are_refused() -> None:
    assert plain({"stop": ("a", "b"), "n": 1}, "decode") == {"stop": ["a", "b"], "n": 1}
    with pytest.raises(InvalidInputError, match="decode: sampling_params"):
        plain({"processor": object()}, "decode")


def test_metrics_have_a_table_of_the_nodes() -> None:
    nodes = {"north": NodeTally(streams=3, bytes_sent=4096), "east": NodeTally(moved_in=1)}
    results = {"duration": 1.0, "bytes_sent": 4096}
    metrics = ClusterMetrics("Cluster decode", {"num_nodes": 2}, results, "terminal", 80, nodes)
    assert metrics.bytes_sent == 4096
    assert metrics.to_dict()["metrics"]["nodes"]["north"]["streams"] == 3
    out = io.StringIO()
    metrics.emit(out)
    assert "moved_in" in out.getvalue()
    assert any(line.startswith("north") and "4096" in line for line in out.getvalue().splitlines())
    metrics.fmt = "json"
    out = io.StringIO()
    metrics.emit(out)
    assert json.loads(out.getvalue()) == metrics.to_dict()


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[str]:
    """Serve JSON by path; a missing one is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as url:
        yield url


def instance(url: str, name: str, ip: str = "127.0.0.1") -> dict[str, Any]:
    return {"instance_id": name, "ip": ip, "http_port": int(url.rpartition(":")[2])}


def test_a_coordinators_servers_become_nodes() -> None:
    with answering({"/config": {"mp": {"port": 7001}}}) as server:
        listed = {"instances": [instance(server, "mp-1"), instance(server, "mp-2", "127.0.0.2")]}
        warning = pytest.warns(UserWarning, match="mp-2 is left out: GET http://127.0.0.2")
        with answering({"/instances": listed}) as url, warning:
            (node,) = nodes_from_coordinator(url, "m", engine_url="http://{ip}:9000")
    assert node == Node(
        "tcp://127.0.0.1:7001", server, "http://127.0.0.1:9000", "m", "node:127.0.0.1", name="mp-1"
    )


@pytest.mark.parametrize("answer", [None, [], {}, {"instances": 1}, {"instances": [{"ip": "a"}]}])
def test_a_coordinator_that_says_something_else_is_a_protocol_error(answer: Any) -> None:
    with answering({"/instances": answer}) as url, pytest.raises(ProtocolError):
        nodes_from_coordinator(url, "m")


def test_a_coordinator_that_is_not_there_is_a_connect_error() -> None:
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:9"):
        nodes_from_coordinator("http://127.0.0.1:9", "m")
