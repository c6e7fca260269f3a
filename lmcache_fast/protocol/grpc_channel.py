"""GrpcChannel: requests and replies over gRPC, for servers started with ``--transport grpc``."""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from lmcache_fast.errors import (
    ClosedError,
    ConnectError,
    LMCacheFastError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
)
from lmcache_fast.protocol.channel import Reply
from lmcache_fast.protocol.grpc_dialect import read_reply
from lmcache_fast.protocol.messages import Frame

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Requests are never sent again by themselves, nor to another server than the one we opened.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # Proxies of the environment are for the internet, not for a cache server next door.
    ("grpc.enable_http_proxy", 0),
    # A dead host is noticed by the kernel, by what is sent to it and not confirmed for this long:
    # the heartbeat sends something every 30 s, and a stopped process still confirms. gRPC asks the
    # kernel for that only if its own pings are on. Those cannot tell a dead host from a stopped
    # process, and servers end connections that bring many, so they come once a day.
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_time_ms", 24 * 3600 * 1000),
)
#: By this the server tells clients apart; it handles the transfers of each in order.
_CLIENT_ID = "lmcache-client-id-bin"
_FORK_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
#: The process in which gRPC was started, whose forks it does not work in.
_started_in: int | None = None


class GrpcChannel:
    """One connection to a server; many requests may be in flight.

    Like :class:`~lmcache_fast.protocol.channel.ZmqChannel` it never reconnects. Unlike there, the
    server answers each request it refuses, so that such replies fail with RequestDroppedError.

    Args:
        url: ``grpc://host:port`` or ``grpc+unix:///path``.
        timeout: seconds to wait for the connection.

    Raises:
        ConnectError: grpcio is not installed, the address is malformed, or nobody answers in time.
    """

    #: No request is dropped in silence.
    answers_all = True

    def __init__(self, url: str, timeout: float) -> None:
        self._grpc = _load_grpc()
        target = _target(url)
        self.url = url
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._error: LMCacheFastError | None = None
        self._settled = threading.Event()
        self._connected = False
        self._metadata = ((_CLIENT_ID, uuid.uuid4().bytes),)
        self._channel = self._grpc.insecure_channel(target, options=_OPTIONS)
        self._channel.subscribe(self._on_state, try_to_connect=True)
        if not self._settled.wait(timeout) or self._error is not None:
            why = self._error or f"no connection within {timeout:g} s"
            self.close()
            raise ConnectError(f"cannot connect to {url}: {why}")

    @property
    def is_open(self) -> bool:
        """Whether requests can still be sent."""
        return self._error is None and self._pid == os.getpid()

    def submit(self, name: int | str, payloads: Sequence[Frame]) -> Reply:
        """Call the method ``name``, a path, with one message; never blocks.

        Returns:
            A future of the result as the ZeroMQ channel would bring it.

        Raises:
            ServerGoneError: the server went away before.
            ClosedError: the channel was closed, or belongs to the process we were forked from.
        """
        if self._pid != os.getpid():
            raise ClosedError(f"the connection to {self.url} belongs to the parent process")
        path = str(name)
        reply: Reply = Future()
        with self._lock:  # the channel is not closed between the check and the call
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            if not self._is_ready():
                raise ServerGoneError(f"the server at {self.url} went away")
            # No deadline: a request given up may still lock chunks, which its answer tells us of.
            call = self._channel.unary_unary(path).future(payloads[0], metadata=self._metadata)
        call.add_done_callback(functools.partial(self._on_reply, path, reply))
        return reply

    def close(self) -> None:
        """Close the connection, in less than 2 s; missing replies fail."""
        if self._pid == os.getpid():
            self._end(ClosedError(f"the connection to {self.url} was closed"))

    def _is_ready(self) -> bool:
        """Whether gRPC is connected right now; if not, a call would make it connect again.

        It tells the subscriber in its own time. After our process was stopped for a while, that may
        be too late, and there is no public way to ask.
        """
        ask = getattr(getattr(self._channel, "_channel", None), "check_connectivity_state", None)
        return ask is None or ask(False) == self._grpc.ChannelConnectivity.READY.value[0]

    def _end(self, error: LMCacheFastError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._settled.set()
        self._channel.close()  # ends all calls, which lets their replies fail

    # Everything below runs in threads of gRPC.

    def _on_state(self, state: Any) -> None:
        states = self._grpc.ChannelConnectivity
        if state is states.READY:
            self._connected = True
            self._settled.set()
        elif self._connected:
            self._end(ServerGoneError(f"the server at {self.url} went away"))
        elif state is states.TRANSIENT_FAILURE:
            self._end(ServerGoneError(f"the server at {self.url} accepts no connection"))

    def _on_reply(self, path: str, reply: Reply, call: Any) -> None:
        if not reply.set_running_or_notify_cancel():
            return
        try:
            frame = read_reply(path, self._result(path, call))
        except Exception as error:
            reply.set_exception(error)
        else:
            reply.set_result(frame)

    def _result(self, path: str, call: Any) -> bytes:
        """Return the reply's message, or raise what its status means."""
        codes = self._grpc.StatusCode
        code = call.code()
        if code is codes.OK:
            message: bytes = call.result()
            return message
        if code in (codes.UNAVAILABLE, codes.CANCELLED):
            self._end(ServerGoneError(f"the server at {self.url} went away: {call.details()}"))
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        what = f"{path.rpartition('/')[2]}: the server at {self.url}"
        why = f"{code.name}: {call.details()}"
        if code is codes.DEADLINE_EXCEEDED:
            raise ServerTimeoutError(f"{what} gave the request up: {why}")
        raise RequestDroppedError(f"{what} refused the request: {why}")


def _load_grpc() -> ModuleType:
    """Import grpcio where it is installed and can work."""
    global _started_in
    # Otherwise gRPC's core prepares for forks that its Python side is not made for.
    supports_forks = os.environ.setdefault(_FORK_VARIABLE, "0") != "0"
    if _started_in not in (None, os.getpid()) and not supports_forks:
        raise ConnectError(
            "gRPC was used in the process that this one was forked from, and would hang here; "
            f"start processes with 'spawn', or set {_FORK_VARIABLE}=1 before the first connection"
        )
    try:
        import grpc
    except ImportError as error:
        raise ConnectError(
            f"grpc:// needs grpcio ({error}): pip install 'lmcache_fast[grpc]'"
        ) from error
    _started_in = os.getpid()
    module: ModuleType = grpc
    return module


def _target(url: str) -> str:
    """Return gRPC's name for an address."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "grpc+unix" and parts.netloc + parts.path:
            return "unix:/" + f"{parts.netloc}{parts.path}".lstrip("/")
        if parts.scheme == "grpc" and parts.hostname and parts.port:
            return parts.netloc
    except ValueError:
        pass
    raise ConnectError(f"cannot connect to {url!r}: expected grpc://host:port or grpc+unix:///path")
