"""MessageLoop: the ROUTER socket and the one thread that serves it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import msgspec
import zmq

from lmcache_fast.errors import ConnectError
from lmcache_fast.serve.server.messages import MessageError, decode_operation, payload_types
from lmcache_fast.serve.server.transfers import CacheService

logger = logging.getLogger(__name__)

_UPKEEP_SECONDS = 1


class MessageLoop:
    """Answers requests in the order they come, all in one thread.

    Nothing a handler does waits for anyone, so one thread is enough and clients may rely on the
    order. A request that cannot be served is logged and gets no reply, as with a real server.

    Args:
        service: what the operations do.
        host: an address to bind, or a whole ``ipc://`` address.
        port: 0 takes a free one.

    Raises:
        ConnectError: the address cannot be bound.
    """

    def __init__(self, service: CacheService, host: str, port: int) -> None:
        self._service = service
        self._decoders = {
            operation: [msgspec.msgpack.Decoder(kind) for kind in kinds]
            for operation, kinds in payload_types(service.config.protocol).items()
        }
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = self._router.rcvhwm = 0  # a full queue would lose replies
        address = host if "://" in host else f"tcp://{host}:{port or '*'}"
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConnectError(f"MessageLoop: cannot listen on {address}: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        #: Where a client on this machine connects to.
        self.url = endpoint.replace("//0.0.0.0:", "//127.0.0.1:")
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://stop")
        self._thread = threading.Thread(target=self._run, name="lmcache-fast-zmq", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the request under way."""
        self._wake.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        upkeep = time.monotonic() + _UPKEEP_SECONDS
        while True:
            ready = dict(poller.poll(_UPKEEP_SECONDS * 1000))
            if stop in ready:
                return
            if self._router in ready:
                self._serve(self._router.recv_multipart(copy=False))
            if time.monotonic() > upkeep:
                upkeep = time.monotonic() + _UPKEEP_SECONDS
                self._service.forget_silent()

    def _serve(self, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames) < 3:
                raise MessageError(f"{len(frames)} frames; expected 3 or more")
            result = self._answer(frames[2].bytes, frames[3:])
        except Exception as error:
            # One bad request must not stop the server for everybody else.
            expected = isinstance(error, (ValueError, msgspec.MsgspecError))
            logger.error("request dropped: %s", error, exc_info=not expected)
            self._service.count_dropped_request()
            return
        reply: list[Any] = frames[:3]
        if result is not None:
            reply.append(msgspec.msgpack.encode(result))
        self._router.send_multipart(reply, copy=False)

    def _answer(self, operation_frame: bytes, payloads: list[zmq.Frame]) -> Any:
        operation = decode_operation(operation_frame)
        decoders = self._decoders[operation]
        if len(payloads) != len(decoders):
            raise MessageError(
                f"{operation.value}: {len(payloads)} payloads; expected {len(decoders)}"
            )
        pairs = zip(decoders, payloads, strict=True)
        values = [decoder.decode(frame.buffer) for decoder, frame in pairs]
        return self._service.call(operation, values)
