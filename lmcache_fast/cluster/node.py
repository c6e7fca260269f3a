"""Node: one machine of a cluster, and where the list of them comes from."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import httpx

from lmcache_fast.arguments import check_model_name, check_timeout
from lmcache_fast.errors import ConnectError, InvalidInputError, ProtocolError

if TYPE_CHECKING:
    from lmcache_fast.layout import KVLayout

_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Node:
    """One machine: its engine, its LMCache server, and the Ray resource that pins work to it.

    The addresses are used on the node itself, so ``localhost`` is right where each machine runs
    one server and one engine.

    Args:
        url: the server's address, ``tcp://host:port``, ``ipc://path`` or ``grpc://host:port``.
        http_url: the server's HTTP address.
        engine_url: the engine's address, ``http://host:port``.
        model: the model as its engine registered it with the server (vLLM: ``--model``).
        resource: a custom resource that only this machine's Ray node offers, from
            ``ray start --resources '{"lmcache-7": 1}'``; or ``node:IP``, which is always there.
        layout: the cache's shape, where the server's ``/status`` does not tell it.
        served_model: what the engine's HTTP side calls the model, where that is not ``model``.
        name: what reports call the node; the resource by default.

    Raises:
        InvalidInputError: an address, the model or the resource is empty or no string.
    """

    url: str
    http_url: str
    engine_url: str
    model: str
    resource: str
    layout: KVLayout | Literal["opaque"] | None = None
    served_model: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        check_model_name("Node", self.model)
        for field in ("url", "http_url", "engine_url", "resource"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"Node: {field} is {value!r}; expected a string")
        object.__setattr__(self, "name", self.name or self.resource)
        object.__setattr__(self, "served_model", self.served_model or self.model)


def nodes_from_coordinator(
    coordinator_url: str,
    model: str,
    *,
    engine_url: str = "http://{ip}:8000",
    resource: str = "node:{ip}",
    layout: KVLayout | Literal["opaque"] | None = None,
    served_model: str = "",
    timeout: float = 10.0,
) -> list[Node]:
    """Return the nodes whose servers are registered with an LMCache coordinator.

    A coordinator knows where its servers' HTTP sides are (``GET /instances``). The port of the
    message queue is asked of each server; one that does not answer is left out with a warning.

    Args:
        coordinator_url: the coordinator's address, e.g. ``http://coordinator:9300``.
        model: the model as its engines registered it.
        engine_url: each engine's address; ``{ip}`` and ``{instance_id}`` are filled in.
        resource: each node's Ray resource; the same are filled in. ``node:IP`` is there by itself.
        layout: as for :class:`Node`.
        served_model: as for :class:`Node`.
        timeout: seconds that one answer may take.

    Raises:
        ConnectError: the coordinator cannot be reached.
        ProtocolError: it answers something else.
        InvalidInputError: an argument is wrong.
    """
    check_timeout("nodes_from_coordinator", timeout)

    def node_of(instance: Any) -> Node | None:
        try:
            ip, http_port = str(instance["ip"]), int(instance["http_port"])
            names = {"ip": ip, "instance_id": str(instance["instance_id"])}
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"{coordinator_url}/instances: no instance: {instance!r}"
            ) from error
        http_url = f"http://{ip}:{http_port}"
        try:
            port = _queue_port(http_url, timeout)
        except (ConnectError, ProtocolError) as error:
            warnings.warn(f"{names['instance_id']} is left out: {error}", stacklevel=3)
            return None
        return Node(
            f"tcp://{ip}:{port}",
            http_url,
            engine_url.format(**names),
            model,
            resource.format(**names),
            layout,
            served_model,
            name=names["instance_id"],
        )

    answer = _get(f"{coordinator_url.rstrip('/')}/instances", timeout)
    instances = answer.get("instances") if isinstance(answer, dict) else None
    if not isinstance(instances, list):
        raise ProtocolError(f"{coordinator_url}/instances: got {answer!r}; expected a list")
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as executor:
        return [node for node in executor.map(node_of, instances) if node is not None]


def _queue_port(http_url: str, timeout: float) -> int:
    settings = _get(f"{http_url}/config", timeout)
    try:
        return int(settings["mp"]["port"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{http_url}/config names no port of the message queue") from error


def _get(url: str, timeout: float) -> Any:
    try:
        # Proxies of the environment are for the internet, not for machines of the cluster.
        answer = httpx.get(url, timeout=timeout, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectError(f"GET {url}: {error or type(error).__name__}") from error
    try:
        return answer.json()
    except ValueError as error:
        raise ProtocolError(f"GET {url}: the answer is no JSON: {error}") from error
