"""What a server's silence means.

A handler that raises sends no reply, so a request that was dropped and a server that is slow look
alike. They can be told apart by sending something behind the request that queues in the same place:
if that is answered first, the request was dropped.

- Registrations are handled by the server's main loop, in order.
- Lookups, unlocks and pings share a pool of threads: in order only if it has one thread.
- Transfers are handled in order for each client.

None of this is needed where the channel brings the server's refusals, as gRPC does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED
from dataclasses import dataclass

from lmcache_fast.errors import (
    ClosedError,
    RequestDroppedError,
    ServerGoneError,
    ServerTimeoutError,
)
from lmcache_fast.interrupts import interruptible
from lmcache_fast.protocol.channel import Channel, Reply
from lmcache_fast.protocol.messages import Frame, Key, Registration
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.server_info import ServerInfo, is_registered
from lmcache_fast.protocol.tokens import PackedTokens

#: Seconds of silence before asking what it means.
PATIENCE = 0.5
_STATUS_TIMEOUT = 2.0
_UNKNOWN = (
    "cause: it did not know instance {} (a restart, or no sign of life for too long), which is "
    "registered again now"
)

_MAIN_LOOP = frozenset((Operation.REGISTER, Operation.UNREGISTER, Operation.GET_CHUNK_SIZE))
_TRANSFERS = frozenset(
    (
        Operation.PREPARE_STORE,
        Operation.COMMIT_STORE,
        Operation.PREPARE_RETRIEVE,
        Operation.COMMIT_RETRIEVE,
    )
)


class UnknownInstanceError(RequestDroppedError):
    """A transfer was dropped for want of our registration, which has been renewed since."""


@dataclass(frozen=True)
class Listener:
    """Waits for the replies on one channel.

    Args:
        channel: where the requests went.
        info: what the server says about itself.
        http_url: where its status can be read.
        registration: what we are registered with.
        timeout: seconds that one answer may take.
    """

    channel: Channel
    info: ServerInfo
    http_url: str
    registration: Registration
    timeout: float

    def submit(self, operation: Operation, payloads: Sequence[Frame]) -> Reply:
        """Send a request; see :meth:`Channel.submit`."""
        return self.channel.submit(self.info.dialect.name(operation), payloads)

    def call(self, operation: Operation, payloads: Sequence[Frame]) -> Frame | None:
        """Send a request and :meth:`wait` for its raw result."""
        return self.wait(operation, self.submit(operation, payloads))

    def wait(
        self, operation: Operation, reply: Reply, timeout: float | None = None
    ) -> Frame | None:
        """Return the raw result of ``reply``.

        Raises:
            ServerGoneError: the server went away.
            RequestDroppedError: it certainly dropped the request.
            ServerTimeoutError: no answer within ``timeout`` seconds, for whatever reason.
        """
        timeout = self.timeout if timeout is None else timeout
        # Not interruptible: most calls end within this, and should be whole.
        concurrent.futures.wait((reply,), min(PATIENCE, timeout))
        try:
            if reply.done():
                return reply.result()
            deadline = time.monotonic() + timeout - min(PATIENCE, timeout)
            return self._diagnose(operation, reply, timeout, deadline)
        except RequestDroppedError as refusal:
            if self.channel.answers_all and operation in _TRANSFERS:
                self._renew_registration(refusal)
            raise

    def _renew_registration(self, refusal: RequestDroppedError) -> None:
        """Register again if that is why a transfer was refused, and say so."""
        instance_id = self.registration.instance_id
        if is_registered(self.http_url, instance_id, _STATUS_TIMEOUT) is False:
            self.call(Operation.REGISTER, self.info.dialect.register(self.registration))
            raise UnknownInstanceError(f"{refusal}; {_UNKNOWN.format(instance_id)}") from refusal

    def _diagnose(
        self, operation: Operation, reply: Reply, timeout: float, deadline: float
    ) -> Frame | None:
        registered: bool | None = None
        if operation in _TRANSFERS and not self.channel.answers_all:
            seconds = min(_STATUS_TIMEOUT, max(0.1, deadline - time.monotonic()))
            registered = is_registered(self.http_url, self.registration.instance_id, seconds)
        signs = self._send_behind(operation)
        proof = signs[-1]
        _wait_for(deadline, reply, proof)
        if not reply.done() and proof.done() and self._is_in_order(operation):
            proof.result()  # the server may just as well have gone away
            raise self._dropped(operation, registered)
        _wait_for(deadline, reply)
        if reply.done():
            return reply.result()
        raise ServerTimeoutError(
            f"{operation.value}: no answer from {self.channel.url} within {timeout:g} s; "
            + self._describe(signs)
        )

    def _send_behind(self, operation: Operation) -> list[Reply]:
        """Send what queues behind ``operation``; the last answer is the proof."""
        dialect = self.info.dialect
        if operation in _MAIN_LOOP and not self.channel.answers_all:
            return [self.submit(Operation.GET_CHUNK_SIZE, [])]
        ping = self.submit(Operation.PING, dialect.instance(None))
        if operation not in _TRANSFERS or self.channel.answers_all:
            return [ping]
        # Transfers of an unknown instance are all dropped, so register first: if we are known, that
        # changes nothing. Ending a transfer that does not exist is answered and changes nothing.
        self.submit(Operation.REGISTER, dialect.register(self.registration))
        request_id = f"lmcache_fast-probe-{uuid.uuid4().hex}"
        key = Key(self.registration.model_name, 1, 0, PackedTokens([]), 0, 0, request_id)
        payloads = dialect.transfer(key, self.registration.instance_id)
        proof = self.submit(Operation.COMMIT_RETRIEVE, payloads)
        proof.add_done_callback(lambda _: self._forget(request_id))
        return [ping, proof]

    def _forget(self, request_id: str) -> None:
        """End the session that the server has made for a probe."""
        with contextlib.suppress(ServerGoneError, ClosedError):
            self.submit(Operation.END_SESSION, self.info.dialect.session(request_id))

    def _is_in_order(self, operation: Operation) -> bool:
        if self.channel.answers_all:
            return False
        return operation in _MAIN_LOOP | _TRANSFERS or self.info.cpu_workers == 1

    def _dropped(self, operation: Operation, registered: bool | None) -> RequestDroppedError:
        what = (
            f"{operation.value}: the server at {self.channel.url} dropped the request "
            "(it answered one sent later)"
        )
        refusal = f"it refused what was asked, or speaks otherwise than LMCache {self.info.version}"
        if operation is Operation.REGISTER:
            return RequestDroppedError(
                f"{what}; likely causes: it serves no engine-driven transfers (start it with "
                f"--supported-transfer-mode auto), or {refusal}"
            )
        if operation in _TRANSFERS and registered is False:
            return UnknownInstanceError(f"{what}; {_UNKNOWN.format(self.registration.instance_id)}")
        return RequestDroppedError(f"{what}; likely cause: {refusal}; its log tells")

    def _describe(self, signs: list[Reply]) -> str:
        if not signs[0].done() or signs[0].exception() is not None:
            return "a ping was not answered either: the server hangs or has too much to do"
        if len(signs) > 1 and not signs[-1].done():
            return "a ping was answered, other transfers were not: its transfers hang or are slow"
        slow = "a ping was answered: the server is slow"
        return slow if self.channel.answers_all else f"{slow}, or dropped the request"


def _wait_for(deadline: float, *replies: Reply) -> None:
    """Wait until one of ``replies`` is done or the deadline has passed."""
    seconds = max(0.0, deadline - time.monotonic())
    with interruptible():
        concurrent.futures.wait(replies, seconds, return_when=FIRST_COMPLETED)
