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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from lmcache_fast import clock
from lmcache_fast.arguments import check_model_name, check_timeout
from lmcache_fast.errors import (
    ClosedError,
    LMCacheFastError,
    ProtocolError,
    ServerGoneError,
    ServerTimeoutError,
)
from lmcache_fast.interrupts import interruptible
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol import messages
from lmcache_fast.protocol.channel import Reply, open_channel, transport_of
from lmcache_fast.protocol.messages import (
    Frame,
    Key,
    PoolInfo,
    ReadGrant,
    Registration,
    StoreReservation,
)
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.registrations import RegisteredModel, resolve
from lmcache_fast.protocol.reservations import Reservations
from lmcache_fast.protocol.server_info import ServerInfo, read_models, read_server_info
from lmcache_fast.protocol.session import WAIT_STEP, Session, is_late
from lmcache_fast.protocol.silence import Listener, UnknownInstanceError

logger = logging.getLogger(__name__)

#: Seconds between two registrations, by which the server sees that we live.
HEARTBEAT = 30.0
_CLOSE_STEP = 0.4


class Connection:
    """Talks to one server as one registered instance; safe from many threads.

    When the server goes away, calls under way raise ServerGoneError, and so do all others until
    :meth:`ensure_open` has opened the connection anew, which counts :attr:`generation` up.

    Args:
        url: the server's address, ``tcp://`` and the like or ``grpc://``.
        http_url: the server's HTTP address.
        model_name: the model as its engine registered it.
        layout: the whole cache's shape; None takes it from the engine's registration, "opaque" does
            too and takes its rows for no tokens.
        timeout: seconds that one answer of the server may take.
        world_size: ranks that store a share of the cache each; None takes it from the engine's
            registration.

    Attributes:
        info: release and settings of the server.
        pool: the server's shared pool.
        layout: shape of the model's cache, all ranks together.
        rank_layout: what each rank stores of it.
        world_size: ranks that store a share each.
        instance_id: what the server knows us by.
        num_kv_readers: readers of each stored object, as the engine published it.
        generation: how often the connection has been opened anew.

    Raises:
        UnknownModelError: no layout was given and none is registered under ``model_name``.
        UnsupportedServerError: the server runs a release or mode that we cannot speak.
        ConnectError: it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        http_url: str,
        model_name: str,
        layout: KVLayout | Literal["opaque"] | None,
        timeout: float,
        world_size: int | None = None,
    ) -> None:
        self.url = url
        self.http_url = http_url
        self.model_name = check_model_name("Connection", model_name)
        self.timeout = check_timeout("Connection", timeout)
        self.instance_id = secrets.randbits(48) | 1
        self.generation = 0
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._state = threading.RLock()
        self._all_ended = threading.Condition(self._state)
        self._closed = threading.Event()
        self._sessions: dict[str, Session] = {}
        self._endings: set[Future[None]] = set()
        self._reservations = Reservations()
        self._last_sign_of_life = clock.now()
        self.info, models = self._ask()
        self.layout, self.world_size = resolve(model_name, models, layout, world_size)
        self.rank_layout = self.layout.for_rank(self.world_size)
        self.num_kv_readers = models.get(model_name, RegisteredModel(None)).num_kv_readers
        self._listener, self.pool = self._dial(self.info)
        threading.Thread(
            target=_beat,
            args=(weakref.ref(self), self._closed),
            name="lmcache_fast-heartbeat",
            daemon=True,
        ).start()

    # Opening and closing

    @property
    def is_foreign(self) -> bool:
        """Whether we are a fork of the process that connected."""
        return self._pid != os.getpid()

    def ensure_open(self) -> None:
        """Open the connection anew if the server has gone away since.

        Raises:
            ClosedError: :meth:`close` was called, or we are a fork of the process that connected.
            ConnectError: the server is not back, or not one we can talk to.
            ServerTimeoutError: another thread is still trying.
        """
        self._check_open()
        if not self._listener.channel.is_open:
            self._reopen()
        elif clock.now() - self._last_sign_of_life > 3 * HEARTBEAT:
            # We were stopped or asleep. A server that forgot us would call everything a miss.
            try:
                self.register()
            except ServerGoneError:
                self._reopen()

    def _reopen(self) -> None:
        # Many threads may queue here, each for an attempt of its own: not one behind all others.
        if not self._opening.acquire(timeout=self.timeout):
            raise ServerTimeoutError(
                f"no connection to {self.url} within {self.timeout:g} s: another thread is still "
                "trying"
            )
        try:
            self._check_open()
            if self._listener.channel.is_open:
                return
            info, models = self._ask()
            listener, pool = self._dial(info)
            with self._state:
                if not self._closed.is_set():
                    readers = models.get(self.model_name)
                    self.num_kv_readers = readers.num_kv_readers if readers else 1
                    self.info, self._listener, self.pool = info, listener, pool
                    self._reservations = Reservations()
                    self.generation += 1
                    return
        finally:
            self._opening.release()
        listener.channel.close()
        self._check_open()

    def check_current(self, where: str, generation: int) -> None:
        """Make sure that the server is still the one of that opening, and still there.

        Raises:
            ClosedError: the connection was closed, or belongs to the process we were forked from.
            ServerGoneError: the server went away since.
        """
        # While we are closing, what is under way may still end.
        if generation != self.generation or not self._listener.channel.is_open:
            self._check_open()
            raise ServerGoneError(f"{where}: the server at {self.url} went away meanwhile")

    def close(self) -> None:
        """Unregister if the server answers, and close; takes less than 2 s. Again: nothing.

        With a store begun and not committed the registration is left to run out: taking it back
        would make the server publish chunks that nobody has finished writing.
        """
        if self.is_foreign:  # a fork: the locks may be held by threads that are not here
            return
        with self._state:
            if self._closed.is_set():
                return
            self._closed.set()
            listener = self._listener
            if listener.channel.is_open:  # calls under way may still end as they should
                self._all_ended.wait_for(lambda: not self._sessions, _CLOSE_STEP)
                for request_id in list(self._sessions):
                    self.end_session(request_id)
                endings = list(self._endings)
        if listener.channel.is_open:
            concurrent.futures.wait(endings, _CLOSE_STEP)
            if not self._reservations:
                with contextlib.suppress(LMCacheFastError, concurrent.futures.TimeoutError):
                    payloads = listener.info.dialect.instance(self.instance_id)
                    listener.submit(Operation.UNREGISTER, payloads).result(_CLOSE_STEP)
        listener.channel.close()

    def _note_life(self, reply: Reply) -> None:
        if reply.exception() is None:
            self._last_sign_of_life = clock.now()

    def _check_open(self) -> None:
        if self.is_foreign:
            raise ClosedError(f"the connection to {self.url} belongs to the parent process")
        if self._closed.is_set():
            raise ClosedError(f"the connection to {self.url} was closed")

    def _ask(self) -> tuple[ServerInfo, dict[str, RegisteredModel]]:
        with interruptible():
            info = read_server_info(self.http_url, self.timeout, transport_of(self.url))
            return info, read_models(self.http_url, self.timeout)

    def _dial(self, info: ServerInfo) -> tuple[Listener, PoolInfo]:
        """Open a channel and register; nothing is sent before the release is known."""
        layout = self.rank_layout
        # One registration does for all ranks: each transfer's key says which one it is about.
        registration = Registration(
            instance_id=self.instance_id,
            model_name=self.model_name,
            world_size=self.world_size,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            hidden_dim_size=layout.object_width,
            dtype_str=layout.dtype_name,
            use_mla=layout.object_planes == 1,
        )
        channel = open_channel(self.url, self.timeout)
        listener = Listener(channel, info, self.http_url, registration, self.timeout)
        try:
            pool = _register(listener)
            self._last_sign_of_life = clock.now()
            return listener, pool
        except BaseException:
            channel.close()
            raise

    # Operations of the instance

    def register(self) -> PoolInfo:
        """Tell the server that we live and what our chunks look like; as often as one likes."""
        self._check_open()
        if not self._listener.channel.is_open:
            self._reopen()
        pool = _register(self._listener)
        self._last_sign_of_life = clock.now()
        return pool

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

    def begin(self, request_id: str, generation: int) -> None:
        """Begin a request that belongs to one opening of the connection.

        Without this, its first operation begins it with whichever is current then.

        Raises:
            ServerGoneError: the connection has been opened anew since.
        """
        self._check_open()
        with self._state:
            if generation != self.generation:
                raise ServerGoneError(f"the server at {self.url} went away meanwhile")
            self._sessions[request_id] = Session(self._listener, generation)

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
                    most = (key.end - key.start) // session.listener.info.chunk_size
                    if num_chunks > most:
                        raise ProtocolError(
                            f"lookup: the server found {num_chunks} chunks; expected at most {most}"
                        )
                    return num_chunks
            raise ServerTimeoutError(
                f"lookup: the server at {self.url} was still fetching after {self.timeout:g} s; "
                "it answers, so its storage is slow"
            )
        except BaseException as error:
            if is_late(error):
                session.unlock_later(key, reply)
            raise

    def free_lookup_locks(self, key: Key) -> None:
        """Give the lookup's locks back; ``key`` names exactly the hit. Does not wait."""
        session = self._sessions.get(key.request_id)
        if session is not None and key.worker_id not in session.handed_over:
            session.unlock(key)

    def end_session(self, request_id: str) -> None:
        """End the request once everything sent for it was answered. Does not wait."""
        if self.is_foreign:
            return
        with self._state:
            session = self._sessions.pop(request_id, None)
            if session is None:
                return
            ending: Future[None] = Future()
            self._endings.add(ending)
            if not self._sessions:
                self._all_ended.notify_all()

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
        except BaseException as error:
            if is_late(error) and session.unanswered:
                session.release_read_later(key, session.unanswered[-1])
            raise
        return messages.decode_read_grant(frame, session.generation)

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
        """Reserve the chunks that are not cached yet, as far as the server has room.

        Chunks that an earlier attempt on the same range had reserved and did not commit are
        reserved still: they are handed out again, under that attempt's key.
        """
        reservations = self._reservations
        kept = reservations.take(key)
        if kept is not None:
            return kept
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.prepare_store(key, self.instance_id)
        deadline = clock.deadline(session.listener.info.write_ttl)
        reservations.begin(key)

        def decode(frame: Frame | None) -> StoreReservation:
            reservation = messages.decode_store_reservation(frame, session.generation)
            return replace(reservation, key=key, deadline=deadline)

        def keep(reply: Reply) -> None:
            with contextlib.suppress(LMCacheFastError):
                self.keep_reservation(decode(reply.result()))

        try:
            frame = _send_twice(session, Operation.PREPARE_STORE, payloads)
            reservation = decode(frame)
        except BaseException as error:
            if not is_late(error):
                reservations.end(key)
            elif session.unanswered:
                session.unanswered[-1].add_done_callback(keep)
            raise
        if not reservation.chunk_indices:
            reservations.end(key)
        return reservation

    def keep_reservation(self, reservation: StoreReservation) -> None:
        """Keep what is reserved and will not be committed for the next store of the same range."""
        with self._state:
            if reservation.generation == self.generation:
                self._reservations.keep(reservation)

    def commit_store(self, key: Key) -> bool:
        """Publish the chunks that were reserved with ``key``.

        Returns:
            False where the server had reserved nothing.
        """
        reservations = self._reservations
        is_ours = key.request_id in self._sessions
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.commit_store(key, self.instance_id, None)
        try:
            reply = session.listener.submit(Operation.COMMIT_STORE, payloads)
            reply.add_done_callback(lambda _: reservations.end(key))
            frame = session.wait(Operation.COMMIT_STORE, reply)
        finally:
            if not is_ours:  # an earlier request's reservation: that request is over
                self.end_session(key.request_id)
        return messages.decode_bool("commit_store", frame)

    def send_chunks(self, key: Key, data: Frame) -> Callable[[], bool]:
        """Send chunks to be stored, and don't wait. Over gRPC they may be taken in any order.

        Args:
            key: names the chunks' range.
            data: the dialect's ``data_head`` and the chunks, not to be changed any more.

        Returns:
            A function that waits for the answer: False where the server stored nothing.
        """
        session = self._session(key.request_id)
        payloads = session.listener.info.dialect.commit_store(key, self.instance_id, data)
        reply = session.listener.submit(Operation.COMMIT_STORE, payloads)
        session.unanswered.append(reply)  # whether or not anybody waits

        def stored() -> bool:
            frame = session.wait(Operation.COMMIT_STORE, reply)
            return messages.decode_bool("commit_store", frame)

        return stored

    def _session(self, request_id: str) -> Session:
        if self.is_foreign:
            self._check_open()
        with self._state:
            session = self._sessions.get(request_id)
            if session is None:
                self._check_open()
                session = self._sessions[request_id] = Session(self._listener, self.generation)
            return session


def _register(listener: Listener) -> PoolInfo:
    payloads = listener.info.dialect.register(listener.registration)
    return messages.decode_pool_info(listener.call(Operation.REGISTER, payloads))


def _send_twice(session: Session, operation: Operation, payloads: Sequence[Frame]) -> Frame | None:
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
            reply = listener.submit(Operation.REGISTER, payloads)
            reply.add_done_callback(alive._note_life)
            del reply
        del alive, listener
