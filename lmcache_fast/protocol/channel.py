"""What a channel is; ZmqChannel: requests and replies over one DEALER socket and one thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_fast.errors import ClosedError, ConnectError, ServerGoneError
from lmcache_fast.interrupts import interruptible
from lmcache_fast.protocol.messages import Frame

#: Raw result frame of a reply; None where the reply has none.
Reply = Future["Frame | None"]

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_LOST |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_CLOSE_SECONDS = 0.8
_LARGE = 1 << 16
_encode = msgspec.msgpack.Encoder().encode


class Channel(Protocol):
    """One connection to a server, by whatever it goes."""

    url: str
    #: Whether each request is answered, if only with an error; silence means slowness then.
    answers_all: bool

    @property
    def is_open(self) -> bool:
        """Whether requests can still be sent."""

    def submit(self, name: int | str, payloads: Sequence[Frame]) -> Reply:
        """Send a request; never blocks."""

    def close(self) -> None:
        """Close the connection, in less than 2 s; missing replies fail."""


def transport_of(url: str) -> str:
    """Which transport a server's address is of: ``"grpc"`` or ``"zmq"``."""
    return "grpc" if url.partition("://")[0] in ("grpc", "grpc+unix") else "zmq"


def open_channel(url: str, timeout: float) -> Channel:
    """Connect to the server at ``url`` within ``timeout`` seconds.

    Raises:
        ConnectError: nobody answers there, or gRPC is asked for and not installed.
    """
    if transport_of(url) == "grpc":
        from lmcache_fast.protocol.grpc_channel import GrpcChannel

        return GrpcChannel(url, timeout)
    return ZmqChannel(url, timeout)


class ZmqChannel:
    """One connection to a server; many requests may be in flight.

    It never reconnects: a server that comes back is another one, which must not see old requests.
    When the server goes away, every reply that is still missing fails with ServerGoneError, and so
    does each later :meth:`submit`.

    Args:
        url: ZeroMQ address, such as ``tcp://localhost:6555``.
        timeout: seconds to wait for the connection.

    Raises:
        ConnectError: the address is malformed, or nobody answers there in time.
    """

    #: Requests that a server cannot handle are dropped.
    answers_all = False

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._outgoing: deque[list[Frame]] = deque()
        self._pending: dict[bytes, Reply] = {}
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._closing = False
        self._connected = threading.Event()
        self._context = zmq.Context()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._open_socket()
        except zmq.ZMQError as error:
            self._release()
            raise ConnectError(f"cannot connect to {url!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="lmcache_fast-io", daemon=True)
        self._thread.start()
        try:
            with interruptible():
                in_time = self._connected.wait(timeout)
            if not in_time or self._error is not None:
                why = self._error or f"no connection within {timeout:g} s"
                raise ConnectError(f"cannot connect to {url}: {why}")
        except BaseException:
            self.close()
            raise

    def _open_socket(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # submit() never blocks
        self._socket.reconnect_ivl = -1
        # A dead host is noticed by the kernel; a stopped process still answers it, and is slow.
        # Without the first of these it would go on sending what is not confirmed for 15 minutes.
        self._socket.set(zmq.TCP_MAXRT, 30_000)
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle = 30
        self._socket.tcp_keepalive_intvl = 10
        self._socket.tcp_keepalive_cnt = 3
        self._monitor = self._socket.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self.url)

    @property
    def is_open(self) -> bool:
        """Whether requests can still be sent."""
        return self._error is None and self._pid == os.getpid()

    def submit(self, name: int | str, payloads: Sequence[Frame]) -> Reply:
        """Send a request to the operation ``name``; never blocks.

        Returns:
            A future of the reply's raw result frame, None where it has none.

        Raises:
            ServerGoneError: the server went away before.
            ClosedError: the channel was closed, or belongs to the process we were forked from.
        """
        if self._pid != os.getpid():
            raise ClosedError(f"the connection to {self.url} belongs to the parent process")
        number = _encode(next(self._numbers))
        future: Reply = Future()
        with self._lock:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            self._pending[number] = future
            self._outgoing.append([number, _encode(name), *payloads])
            self._wake()
        return future

    def close(self) -> None:
        """Close the socket and end the thread, in less than 2 s; missing replies fail."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                if self._wakeup >= 0:
                    self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _wake(self) -> None:
        # A full counter means that the thread has been woken already.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wakeup, 1)

    # Everything below runs in the I/O thread.

    def _run(self) -> None:
        error: Exception = ClosedError(f"the connection to {self.url} was closed")
        try:
            poller = zmq.Poller()
            for readable in (self._socket, self._monitor, self._wakeup):
                poller.register(readable, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                    self._send()
                if self._socket in ready:
                    self._receive()
                if self._monitor in ready and self._is_lost():
                    self._receive()  # what had arrived before
                    what = "went away" if self._connected.is_set() else "accepts no connection"
                    error = ServerGoneError(f"the server at {self.url} {what}")
                    break
        except Exception as failure:
            error = ServerGoneError(f"the connection to {self.url} broke: {failure!r}")
        finally:
            self._fail(error)
            self._release()

    def _send(self) -> None:
        while self._outgoing:
            # pyzmq copies what is small all the same.
            self._socket.send_multipart(self._outgoing.popleft(), zmq.NOBLOCK, copy=False)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            future = self._pending.pop(frames[0].bytes, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(_content(frames[2]) if len(frames) > 2 else None)

    def _is_lost(self) -> bool:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return False
            if event["event"] & _LOST:
                return True
            self._connected.set()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            pending, self._pending = list(self._pending.values()), {}
            self._outgoing.clear()
        self._connected.set()
        for future in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(type(error)(*error.args))

    def _release(self) -> None:
        with self._lock:
            os.close(self._wakeup)
            self._wakeup = -1
        self._context.destroy(linger=0)


def _content(frame: zmq.Frame) -> Frame:
    """What a frame that came says; a large one's bytes stay where they are."""
    return frame.bytes if len(frame) < _LARGE else frame.buffer
