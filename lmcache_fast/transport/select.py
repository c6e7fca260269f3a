"""Which transport fits a server, and why not a faster one."""

from __future__ import annotations

import ipaddress
import os
import socket
import warnings
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_fast.errors import ConnectError, InvalidInputError, SharedMemoryError
from lmcache_fast.transport.message import CODECS, MessageTransport
from lmcache_fast.transport.shm import ShmTransport

if TYPE_CHECKING:
    from lmcache_fast.protocol.connection import Connection
    from lmcache_fast.transport.base import Transport

VARIABLE = "LMCACHE_FAST_TRANSPORT"
NAMES = ("shm", *CODECS)


def choose_transport(connection: Connection) -> Transport:
    """Return the fastest transport that works with the server behind ``connection``.

    Shared memory is used only where the server must be on this machine: a segment of the same name
    may belong to some other server. Where it cannot be used, one warning says why and what would
    help. ``LMCACHE_FAST_TRANSPORT`` set to ``shm``, ``inline`` or ``pickle`` forces one.

    Raises:
        InvalidInputError: the variable holds something else.
        SharedMemoryError: ``shm`` is forced and the pool cannot be mapped.
        ConnectError: a format is forced that this server does not speak.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in NAMES:
        raise InvalidInputError(f"{VARIABLE} is {forced!r}; expected one of {', '.join(NAMES)}")
    spoken = connection.info.dialect.inline_format
    spoken = "inline" if spoken == "envelope" else spoken
    if forced == "shm":
        return _shm(connection)
    if forced and forced != spoken:
        raise ConnectError(
            f"{VARIABLE} is {forced!r}, but server {connection.info.version} speaks {spoken!r}"
        )
    if not forced:
        try:
            if connection.pool.shm_name and not is_local(connection.url):
                raise SharedMemoryError(
                    f"{connection.url} is not an address of this machine (if its /dev/shm is ours "
                    f"all the same, set {VARIABLE}=shm)"
                )
            return _shm(connection)
        except SharedMemoryError as error:
            warnings.warn(_advice(connection, spoken, error), UserWarning, stacklevel=3)
    return MessageTransport(CODECS[spoken], connection.rank_layout, connection.info.chunk_size)


def is_local(url: str) -> bool:
    """Whether the server at ``url`` is on this machine: ipc, loopback or one of our addresses."""
    parts = urlsplit(url)
    if parts.scheme in ("ipc", "inproc", "grpc+unix"):
        return True
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return False
    return bool(found) and all(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    if ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:  # only an address of our own can be bound to
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _shm(connection: Connection) -> ShmTransport:
    pool = connection.pool
    if not pool.shm_name or not pool.pool_size:
        raise SharedMemoryError("the server has no shared-memory pool")
    return ShmTransport(pool, connection.rank_layout, connection.info.chunk_size)


def _advice(connection: Connection, spoken: str, error: SharedMemoryError) -> str:
    text = f"lmcache_fast: no shared memory: {error}. Falling back to the slower {spoken!r}"
    if not connection.pool.shm_name:
        return f"{text}; start the server with --shm-name NAME --no-l1-use-lazy"
    return (
        f"{text}, which can store but not retrieve here, as this server hands out chunks in its "
        "pool only: run on its host, as its user and with its /dev/shm, or start it without "
        "--shm-name"
    )
