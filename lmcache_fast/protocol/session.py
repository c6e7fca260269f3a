"""Session: one request's conversation, and what still has to happen before it may end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from lmcache_fast.errors import ClosedError, LMCacheFastError, ServerGoneError, ServerTimeoutError
from lmcache_fast.protocol import messages
from lmcache_fast.protocol.channel import Reply
from lmcache_fast.protocol.messages import Frame, Key
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.silence import Listener

#: Longest time in seconds that one wait_prefetch_status occupies a thread of the server.
WAIT_STEP = 2.0
_LATE_WAITS = 300


def is_late(error: BaseException) -> bool:
    """Whether the answer that ``error`` kept us from waiting for may still come."""
    return isinstance(error, ServerTimeoutError) or not isinstance(error, LMCacheFastError)


@dataclass
class Session:
    """One request's state: all its operations go to the server that saw the first of them.

    Locks that an answer brings after its time-out are given back when it comes.
    """

    listener: Listener
    generation: int
    #: What has to be answered before the session may end.
    unanswered: list[Future[Any]] = field(default_factory=list)
    #: Ranks whose locks of the lookup belong to a transfer whose answer is still to come.
    handed_over: set[int | None] = field(default_factory=set)

    @property
    def instance_id(self) -> int:
        """What the server knows us by."""
        return self.listener.registration.instance_id

    def request(self, operation: Operation, payloads: Sequence[Frame]) -> Frame | None:
        """Send a request and wait for its raw result."""
        return self.wait(operation, self.listener.submit(operation, payloads))

    def wait(
        self, operation: Operation, reply: Reply, timeout: float | None = None
    ) -> Frame | None:
        """Wait for a reply; one that comes later must still come before the session may end."""
        try:
            return self.listener.wait(operation, reply, timeout)
        except BaseException as error:
            if is_late(error):
                self.unanswered.append(reply)
            raise

    def post(self, operation: Operation, payloads: Sequence[Frame]) -> None:
        """Send a request whose answer nobody waits for; a server that has gone needs none."""
        with contextlib.suppress(ServerGoneError, ClosedError):
            self.unanswered.append(self.listener.submit(operation, payloads))

    def wait_prefetch(self, key: Key, seconds: float) -> Reply:
        """Ask for the outcome of a lookup, for which the server may take ``seconds``."""
        payloads = self.listener.info.dialect.wait_prefetch_status(key.request_id, seconds)
        return self.listener.submit(Operation.WAIT_PREFETCH_STATUS, payloads)

    def unlock(self, key: Key) -> None:
        """Give back the lookup's locks on ``key``'s range."""
        payloads = self.listener.info.dialect.free_lookup_locks(key)
        self.post(Operation.FREE_LOOKUP_LOCKS, payloads)

    def release_read(self, key: Key) -> None:
        """Give back a transfer's locks."""
        payloads = self.listener.info.dialect.transfer(key, self.instance_id)
        self.post(Operation.COMMIT_RETRIEVE, payloads)

    def release_read_later(self, key: Key, reply: Reply) -> None:
        """Give back what a late answer to prepare_retrieve grants."""
        self.handed_over.add(key.worker_id)
        released = self._promise()

        def release(reply: Reply) -> None:
            if reply.exception() is None:
                self.release_read(key)
            released.set_result(None)

        reply.add_done_callback(release)

    def unlock_later(self, key: Key, reply: Reply) -> None:
        """Give back what a late answer to a lookup, or to the wait for it, has locked."""
        released = self._promise()
        waits = 0

        def step(reply: Reply) -> None:
            nonlocal waits
            waits += 1
            num_chunks: int | None = 0
            with contextlib.suppress(LMCacheFastError):
                num_chunks = messages.decode_chunks(reply.result())
                if num_chunks is None and waits < _LATE_WAITS:
                    self.wait_prefetch(key, WAIT_STEP).add_done_callback(step)
                    return
            if num_chunks:
                hit = key.start + num_chunks * self.listener.info.chunk_size
                self.unlock(replace(key, end=min(hit, key.end)))
            released.set_result(None)

        reply.add_done_callback(step)

    def end(self, request_id: str, ended: Callable[[object], None]) -> None:
        """Tell the server that the request is over, once all else was answered; then ``ended``."""

        def send() -> None:
            payloads = self.listener.info.dialect.session(request_id)
            try:
                reply = self.listener.submit(Operation.END_SESSION, payloads)
            except (ServerGoneError, ClosedError) as error:
                ended(error)
            else:
                reply.add_done_callback(ended)

        _when_all_done(self.unanswered, send)

    def _promise(self) -> Future[None]:
        promise: Future[None] = Future()
        self.unanswered.append(promise)
        return promise


def _when_all_done(futures: list[Future[Any]], action: Callable[[], None]) -> None:
    """Run ``action`` when all of ``futures``, and what is added to them meanwhile, are done."""
    for future in futures:
        if not future.done():
            future.add_done_callback(lambda _: _when_all_done(futures, action))
            return
    action()
