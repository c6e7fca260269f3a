"""Connection: one instance's typed conversation with one server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

from lmcache_fast.arguments import check_model_name, check_timeout
from lmcache_fast.errors import (
    ClosedError,
    LMCacheFastError,
    ServerGoneError,
    ServerTimeoutError,
    UnknownModelError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol import messages
from lmcache_fast.protocol.channel import ZmqChannel
from lmcache_fast.protocol.messages import Key, PoolInfo, ReadGrant, Registration, StoreReservation
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.server_info import (
    RegisteredModel,
    ServerInfo,
    read_models,
    read_server_info,
)
from lmcache_fast.protocol.session import WAIT_STEP, Session
from lmcache_fast.protocol.silence import Listener, UnknownInstanceError

logger = logging.getLogger(__name__)

#: Seconds between two registrations, by which the server sees that we live.
HEARTBEAT = 30.0
_CLOSE_STEP = 0.5


class Connection:
    """Talks to one server as one registered instance; safe from many threads.

    When the server goes away, calls under way raise ServerGoneError, and so do all others until
    :meth:`ensure_open` has opened the connection anew, which counts :attr:`generation` up.

    Args:
        url: the server's ZMQ address.
        http_url: the server's HTTP address.
        model_name: the model as its engine registered it.
        layout: the cache's shape; None takes it from the engine's registration.
        timeout: seconds that one answer of the server may take.

    Attributes:
        info: release and settings of the server.
        pool: the server's shared pool.
        layout: shape of the model's cache.
        instance_id: what the server knows us by.
        num_kv_readers: readers of each stored object, as the engine published it.
        generation: how often the connection has been opened anew.

    Raises:
        UnknownModelError: no layout was given and none is registered under ``model_name``.
        UnsupportedServerError: the server runs a release or mode that we cannot speak.
        ConnectError: it cannot be reached.
    """

    world_size = 1

    def __init__(
        self, url: str, http_url: str, model_name: str, layout: KVLayout | None, timeout: float
    ) -> None:
        self.url = url
        self.http_url = http_url
        self.model_name = check_model_name("Connection", model_name)
        self.timeout = check_timeout("Connection", timeout)
        self.instance_id = secrets.randbits(48) | 1
        self.generation = 0
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._state = threading.Lock()
        self._closed = threading.Event()
        self._sessions: dict[str, Session] = {}
        self._endings: set[Future[None]] = set()
        self._reservations: set[tuple[str, int, int]] = set()
        self.info, models = self._ask()
        self.layout = layout or _find_layout(model_name, models)
        self.num_kv_readers = models.get(model_name, RegisteredModel(None)).num_kv_readers
        self._listener, self.pool = self._dial()
        threading.Thread(
            target=_beat,
            args=(weakref.ref(self), self._closed),
            name="lmcache_fast-heartbeat",
            daemon=True,
        ).start()

    # Opening and closing

    def ensure_open(self) -> None:
        """Open the connection anew if the server has gone away since.

        Raises:
            ClosedError: :meth:`close` was called, or we are a fork of the process that connected.
            ConnectError: the server is not back, or not one we can talk to.
        """
        self._check_open()
        if self._listener.channel.is_open:
            return
        with self._opening:
            self._check_open()
            if self._listener.channel.is_open:
                return
            info, models = self._ask()
            self.info = info
            listener, pool = self._dial()
            with self._state:
                if not self._closed.is_set():
                    readers = models.get(self.model_name)
                    self.num_kv_readers = readers.num_kv_readers if readers else 1
                    self._listener, self.pool = listener, pool
                    self._reservations.clear()
                    self.generation += 1
                    return
        listener.channel.close()
        self._check_open()

    def close(self) -> None:
        """Unregister if the server answers, and close; takes less than 2 s. Again: nothing.

        With a store begun and not committed the registration is left to run out: taking it back
        would make the server publish chunks that nobody has finished writing.
        """
        with self._state:
            if self._closed.is_set():
                return
            self._closed.set()
            listener, endings = self._listener, list(self._endings)
            may_unregister = not self._reservations
        if listener.channel.is_open:
            concurrent.futures.wait(endings, _CLOSE_STEP)
            if may_unregister:
                with contextlib.suppress(LMCacheFastError, concurrent.futures.TimeoutError):
                    payloads = listener.info.dialect.instance(self.instance_id)
                    listener.submit(Operation.UNREGISTER, payloads).result(_CLOSE_STEP)
        listener.channel.close()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"the connection to {self.url} belongs to the parent process")
        if self._closed.is_set():
            raise ClosedError(f"the connection to {self.url} was closed")

    def _ask(self) -> tuple[ServerInfo, dict[str, RegisteredModel]]:
        info = read_server_info(self.http_url, self.timeout)
        return info, read_models(self.http_url, self.timeout)

    def _dial(self) -> tuple[Listener, PoolInfo]:
        """Open a channel and register; nothing is sent before the release is known."""
        layout = self.layout
        registration = Registration(
            instance_id=self.instance_id,
            model_name=self.model_name,
            world_size=self.world_size,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            hidden_dim_size=layout.width,
            dtype_str=layout.dtype_name,
            use_mla=layout.planes == 1,
        )
        channel = ZmqChannel(self.url, self.timeout)
        listener = Listener(channel, self.info, self.http_url, registration, self.timeout)
        try:
            return listener, _register(listener)
        except BaseException:
            channel.close()
            raise

    # Operations of the instance

    def register(self) -> PoolInfo:
        """Tell the server that we live and what our chunks look like; as often as one likes."""
        self.ensure_open()
        return _register(self._listener)

    def unregister(self) -> None:
        """Take the registration back. Chunks reserved and not committed are published by it."""
        self._check_open()
        payloads = self.info.dialect.instance(self.instance_id)
        self._listener.call(Operation.UNREGISTER, payloads)

    def ping(self) -> bool:
        """Whether the server answers; our registration is not touched by it."""
        self._check_open()
        frame = self._listener.call(Operation.PING, self.info.dialect.instance(None))
        return messages.decode_bool("ping", frame)

    # Operations of a request

    def lookup(self, key: Key) -> int:
        """Ask how many leading chunks of the range are cached.

        They stay read-locked for this request until it retrieves them, gives them back with
        :meth:`free_lookup_locks`, or the lock's time is over.

        Raises:
            ServerGoneError, RequestDroppedError, ServerTimeoutError: no answer; locks that a late
                answer brings are given back.
        """
        deadline = time.monotonic() + self.timeout
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.lookup(key)
        reply = session.listener.submit(Operation.LOOKUP, payloads)
        try:
            session.wait(Operation.LOOKUP, reply)
            while (remaining := deadline - time.monotonic()) > 0:
                step = max(0.05, min(WAIT_STEP, remaining / 2))
                reply = session.wait_prefetch(key, step)
                frame = session.wait(
                    Operation.WAIT_PREFETCH_STATUS, reply, max(remaining, step + 1)
                )
                num_chunks = messages.decode_chunks(frame)
                if num_chunks is not None:
                    return num_chunks
            raise ServerTimeoutError(
                f"lookup: the server at {self.url} was still fetching after {self.timeout:g} s; "
                "it answers, so its storage is slow"
            )
        except ServerTimeoutError:
            session.unlock_later(key, reply)
            raise

    def free_lookup_locks(self, key: Key) -> None:
        """Give the lookup's locks back; ``key`` names exactly the hit. Does not wait."""
        session = self._sessions.get(key.request_id)
        if session is not None and not session.handed_over:
            session.unlock(key)

    def end_session(self, request_id: str) -> None:
        """End the request once everything sent for it was answered. Does not wait."""
        with self._state:
            session = self._sessions.pop(request_id, None)
            if session is None:
                return
            ending: Future[None] = Future()
            self._endings.add(ending)

        def ended(_: object) -> None:
            self._endings.discard(ending)
            ending.set_result(None)

        session.end(request_id, ended)

    def prepare_retrieve(self, key: Key) -> ReadGrant:
        """Turn the locks of a lookup into access to the chunks; ``key`` names exactly the hit."""
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.transfer(key, self.instance_id)
        try:
            frame = _send_twice(session, Operation.PREPARE_RETRIEVE, payloads)
        except ServerTimeoutError:
            session.release_read_later(key, session.unanswered[-1])
            raise
        envelope = session.listener.info.dialect.inline_format == "envelope"
        return messages.decode_read_grant(frame, envelope, session.generation)

    def commit_retrieve(self, key: Key) -> bool:
        """Give the locks of a transfer back and wait for the answer."""
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.transfer(key, self.instance_id)
        frame = session.request(Operation.COMMIT_RETRIEVE, payloads)
        return messages.decode_bool("commit_retrieve", frame)

    def release_read(self, key: Key) -> None:
        """Give the locks of a transfer back. Does not wait."""
        session = self._sessions.get(key.request_id)
        if session is not None:
            session.release_read(key)

    def prepare_store(self, key: Key) -> StoreReservation:
        """Reserve the chunks that are not cached yet, as far as the server has room."""
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.prepare_store(key, self.instance_id)
        place = (key.request_id, key.start, key.end)
        self._reservations.add(place)
        try:
            frame = _send_twice(session, Operation.PREPARE_STORE, payloads)
            reservation = messages.decode_store_reservation(frame, session.generation)
        except ServerTimeoutError:
            raise  # the answer may still come: it counts as reserved
        except LMCacheFastError:
            self._reservations.discard(place)
            raise
        if not reservation.chunk_indices:
            self._reservations.discard(place)
        return reservation

    def commit_store(self, key: Key, data: bytes | bytearray | dict[str, Any] | None) -> bool:
        """Publish chunks: those reserved before, or the ones in ``data``.

        Returns:
            False where the server reserved, or stored, nothing.
        """
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.commit_store(key, self.instance_id, data)
        place = (key.request_id, key.start, key.end)
        reply = session.listener.submit(Operation.COMMIT_STORE, payloads)
        reply.add_done_callback(lambda _: self._reservations.discard(place))
        frame = session.wait(Operation.COMMIT_STORE, reply)
        return messages.decode_bool("commit_store", frame)

    def _session(self, request_id: str) -> Session:
        self._check_open()
        with self._state:
            session = self._sessions.get(request_id)
            if session is None:
                session = self._sessions[request_id] = Session(self._listener, self.generation)
            return session


def _find_layout(model_name: str, models: dict[str, RegisteredModel]) -> KVLayout:
    model = models.get(model_name)
    if model is None:
        names = ", ".join(repr(name) for name in sorted(models)) or "none"
        raise UnknownModelError(
            f"no engine has registered the model {model_name!r}; registered: {names}. Start the "
            "engine first, or pass layout=..."
        )
    if model.layout is None:
        raise UnknownModelError(f"the layout of {model_name!r} cannot be told: {model.problem}")
    return model.layout


def _register(listener: Listener) -> PoolInfo:
    payloads = listener.info.dialect.register(listener.registration)
    return messages.decode_pool_info(listener.call(Operation.REGISTER, payloads))


def _send_twice(session: Session, operation: Operation, payloads: list[bytes]) -> bytes | None:
    """Send a request that may simply be sent again if the server did not know us."""
    try:
        return session.request(operation, payloads)
    except UnknownInstanceError as error:
        logger.warning("%s; sending it once more", error)
        return session.request(operation, payloads)


def _beat(connection: weakref.ref[Connection], closed: threading.Event) -> None:
    """Register again now and then; never ping, since servers soon forget instances that have."""
    while not closed.wait(HEARTBEAT):
        alive = connection()
        if alive is None:
            return
        listener = alive._listener
        with contextlib.suppress(ServerGoneError, ClosedError):
            payloads = listener.info.dialect.register(listener.registration)
            listener.submit(Operation.REGISTER, payloads)
        del alive, listener
