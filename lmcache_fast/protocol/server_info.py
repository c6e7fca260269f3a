"""What a server says about itself over HTTP, which is asked before anything is sent to it."""

from __future__ import annotations

import functools
import json
import os
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx

from lmcache_fast.errors import (
    ConnectError,
    InvalidInputError,
    ProtocolError,
    ServerTimeoutError,
    UnsupportedServerError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.dialect import Dialect, dialect_for
from lmcache_fast.protocol.grpc_dialect import GrpcDialect
from lmcache_fast.protocol.registrations import RegisteredModel, models_of

#: Environment variable with the key that servers from 0.5.7 on may ask for. It is part of no
#: message, error or representation.
API_KEY_VARIABLE = "LMCACHE_FAST_HTTP_API_KEY"

_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class ServerInfo:
    """A server's release and the settings that clients need; times in seconds."""

    version: str
    dialect: Dialect
    chunk_size: int
    shm_name: str
    transfer_mode: str
    transport: str
    read_ttl: float
    write_ttl: float
    #: Threads that serve lookups and pings; None where the server does not say.
    cpu_workers: int | None = None


def read_server_info(http_url: str, timeout: float, transport: str = "zmq") -> ServerInfo:
    """Ask a server for its release and settings.

    Args:
        http_url: the server's HTTP address, such as ``http://localhost:8080``.
        timeout: seconds to wait for each answer.
        transport: how we are going to speak to it, ``"zmq"`` or ``"grpc"``.

    Raises:
        ConnectError: no such server, or it refuses to tell.
        ServerTimeoutError: no answer in time.
        UnsupportedServerError: it runs a release, transfer mode or transport we cannot speak.
        ProtocolError: it answers something else.
    """
    with _client(http_url, timeout) as client:
        version = _get(client, "/version")
        if not isinstance(version, str):
            raise ProtocolError(
                f"{http_url}/version: got {type(version).__name__}; expected a string"
            )
        dialect = dialect_for(version)
        settings = dialect.settings(_get_map(client, "/config"))
    if settings.chunk_size < 1:
        raise ProtocolError(f"{http_url}/config: chunk_size is {settings.chunk_size}")
    if settings.transport != transport:
        raise UnsupportedServerError(
            f"the server at {http_url} (LMCache {version}) speaks {settings.transport!r}, but its "
            f"address was given as one for {transport!r}: {_other_transport(settings.transport)}"
        )
    if transport == "grpc":
        dialect = GrpcDialect.of(dialect)
    if settings.transfer_mode == "lmcache_driven":
        raise UnsupportedServerError(
            f"the server at {http_url} (LMCache {version}) serves lmcache_driven transfers only; "
            "start it with --supported-transfer-mode auto"
        )
    return ServerInfo(
        version=version,
        dialect=dialect,
        chunk_size=settings.chunk_size,
        shm_name=settings.shm_name,
        transfer_mode=settings.transfer_mode,
        transport=settings.transport,
        read_ttl=settings.read_ttl,
        write_ttl=settings.write_ttl,
        cpu_workers=settings.cpu_workers,
    )


def _other_transport(spoken: str) -> str:
    if spoken == "grpc":
        return "connect to grpc://HOST:PORT, or start the server with --transport zmq"
    if spoken == "zmq":
        return "connect to tcp://HOST:PORT, or start a server from 0.5.6 on with --transport grpc"
    return "start it with --transport zmq"


def read_layouts(http_url: str, timeout: float) -> dict[str, KVLayout | str]:
    """Ask for each registered model's layout, or the reason why it cannot be told.

    Raises: as :func:`read_server_info`.
    """
    models = read_models(http_url, timeout)
    return {name: model.layout or model.problem for name, model in models.items()}


def read_models(http_url: str, timeout: float) -> dict[str, RegisteredModel]:
    """Ask for the models that engines have registered.

    Raises: as :func:`read_server_info`.
    """
    with _client(http_url, timeout) as client:
        status = _get_map(client, "/status")
    return models_of(status)


def is_registered(http_url: str, instance_id: int, timeout: float) -> bool | None:
    """Whether the server knows an engine-driven instance; None where it does not tell."""
    try:
        with _client(http_url, timeout) as client:
            instances = _get_map(client, "/status").get("registered_non_cuda_instance_ids")
    except (ConnectError, ServerTimeoutError, ProtocolError):
        return None
    return instance_id in instances if isinstance(instances, list) else None


def _client(http_url: str, timeout: float) -> httpx.Client:
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if not (key.isascii() and (key.isprintable() or not key)):
        raise InvalidInputError(
            f"{API_KEY_VARIABLE} has characters that no HTTP header can carry; expected printable "
            "ASCII"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        url = httpx.URL(http_url)
        if url.scheme not in ("http", "https"):
            raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
        return httpx.Client(
            base_url=url,
            timeout=timeout,
            headers=headers,
            verify=_certificates() if url.scheme == "https" else False,  # plain HTTP has none
            # Proxies of the environment are for the internet, not for a cache server next door.
            trust_env=False,
        )
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise ConnectError(f"{http_url!r} is no HTTP address: {error}") from error


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The authorities to trust, read once: that takes longer than all else about connecting."""
    return httpx.create_ssl_context(trust_env=False)


def _get(client: httpx.Client, path: str) -> Any:
    url = f"{str(client.base_url).rstrip('/')}{path}"
    seconds = float(client.timeout.read or 0)
    late = f"GET {url}: no answer within {seconds:g} s"
    deadline = time.monotonic() + seconds
    body = bytearray()
    try:
        # As a stream: an answer may neither trickle in for ever nor fill the memory.
        with client.stream("GET", path) as response:
            status = response.status_code
            for piece in response.iter_bytes():
                body += piece
                if time.monotonic() > deadline:
                    raise ServerTimeoutError(late)
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ProtocolError(
                        f"GET {url}: the answer has more than {_MAX_ANSWER_BYTES >> 20} MiB"
                    )
    except httpx.TimeoutException as error:
        raise ServerTimeoutError(late) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "; is the server running?" if isinstance(error, httpx.ConnectError) else ""
        raise ConnectError(f"GET {url}: {error or type(error).__name__}{hint}") from error
    if status in (401, 403):
        wrong = "refuses the API key in" if os.environ.get(API_KEY_VARIABLE) else "asks for one in"
        raise ConnectError(
            f"GET {url}: HTTP status {status}: the server {wrong} {API_KEY_VARIABLE}; set it to "
            "the key that the server was started with"
        )
    if status != httpx.codes.OK:
        raise ConnectError(f"GET {url}: HTTP status {status}; expected an LMCache server's answer")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"GET {url}: the answer is no JSON: {error}") from error


def _get_map(client: httpx.Client, path: str) -> dict[str, Any]:
    value = _get(client, path)
    if not isinstance(value, dict):
        raise ProtocolError(
            f"GET {client.base_url}{path}: got {type(value).__name__}; expected an object"
        )
    return value
