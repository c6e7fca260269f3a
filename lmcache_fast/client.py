"""KVClient: fetch, store and edit requests' KV caches on one server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast._extension import native
from lmcache_fast.arguments import (
    TokenIds,
    check_configs,
    check_kv,
    check_model_name,
    check_salt,
    check_timeout,
    check_tokens,
)
from lmcache_fast.buffers import TensorPool
from lmcache_fast.errors import (
    ClosedError,
    InvalidInputError,
    LeaseExpiredError,
    ServerGoneError,
    StoreIncompleteError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.lease import Lease
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.request import Request
from lmcache_fast.transport.select import choose_transport

if TYPE_CHECKING:
    from lmcache_fast.edits import Edit
    from lmcache_fast.edits.plan import CompiledEdit

logger = logging.getLogger(__name__)

#: A full server evicts in the background, about once a second: a store that met a full pool is
#: tried again this often, with this pause in seconds.
STORE_RETRIES = 2
EVICTION_PAUSE = 1.1

_Configs = Mapping[str, Any] | None
_Tokens = npt.NDArray[np.uint32]
_T = TypeVar("_T")


@dataclass(frozen=True)
class EditResult:
    """What an edit left.

    Attributes:
        tokens: the kept tokens of the source.
        num_cached: how many of them are cached now: whole chunks.
        num_source: how many leading tokens were cached and edited; what is behind them was not.
    """

    tokens: list[int]
    num_cached: int
    num_source: int


class KVClient:
    """One model's KV caches on one LMCache server; a context manager, safe from many threads.

    Args:
        url: the server's ZMQ address, e.g. ``tcp://localhost:6555``.
        http_url: the server's HTTP address, e.g. ``http://localhost:8080``.
        model_name: the model as its engine registered it (vLLM: the value of ``--model``).
        layout: the cache's shape; None takes it from the engine's entry on ``/status``.
        timeout: seconds that one answer of the server may take.

    Raises:
        InvalidInputError: an argument is wrong.
        UnknownModelError: no engine registered ``model_name`` and no layout is given.
        UnsupportedServerError: the server runs a mode or release that cannot be spoken to.
        ConnectError: the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        http_url: str,
        model_name: str,
        *,
        layout: KVLayout | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.model_name = check_model_name("KVClient", model_name)
        self.timeout = check_timeout("KVClient", timeout)
        self._lock = threading.Lock()
        self._closed = False
        self._buffers = TensorPool()
        self._connection = Connection(url, http_url, model_name, layout, timeout)
        try:
            self._transport = choose_transport(self._connection)
        except BaseException:
            self._connection.close()
            raise
        self._generation = self._connection.generation

    def __enter__(self) -> KVClient:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._connection.info.chunk_size

    @property
    def layout(self) -> KVLayout:
        """The shape of the model's cache."""
        return self._connection.layout

    @property
    def instance_id(self) -> int:
        """What the server knows this client by."""
        return self._connection.instance_id

    @property
    def server_version(self) -> str:
        """The server's release, as it says itself."""
        return self._connection.info.version

    @property
    def transport_name(self) -> str:
        """How chunks travel: ``shm``, ``inline`` or ``pickle``."""
        return self._transport.name

    def lookup(self, tokens: TokenIds, cache_salt: str = "") -> int:
        """Return how many leading tokens are cached: whole chunks. No lock stays.

        Args:
            tokens: token ids of the request from its first one on.
            cache_salt: keeps users apart; "" for none.
        """
        array = check_tokens("lookup", tokens)
        check_salt("lookup", cache_salt)
        return self._retry("lookup", lambda: self._lookup(array, cache_salt))

    def lease(self, tokens: TokenIds, cache_salt: str = "") -> Lease:
        """Lock the cached prefix of ``tokens`` on the server and view its chunks in place.

        Use it in a ``with`` block; :class:`lmcache_fast.lease.Lease`. An empty lease means that
        nothing is cached.
        """
        array = check_tokens("lease", tokens)
        check_salt("lease", cache_salt)
        return self._retry("lease", lambda: self._lease(array, cache_salt))

    def retrieve(
        self,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Fetch the KV of the cached prefix of ``tokens``.

        Args:
            tokens: token ids of the request from its first one on.
            cache_salt: keeps users apart; "" for none.
            request_configs: what the server passes on to its storage, from release 0.5.5 on.
            out: where to put it: ``[planes, L, T, D]`` with room for the hit, contiguous.

        Returns:
            ``[planes, L, hit, D]`` (a view of ``out`` where that is given), the caller's own; None
            when not one chunk is cached.

        Raises:
            InvalidInputError: an argument is wrong, or ``out`` is too small for the hit.
            LeaseExpiredError: twice, the server's lock ran out before the copy was done.
            ServerTimeoutError, RequestDroppedError, ServerGoneError: the server did not answer.
        """
        array = check_tokens("retrieve", tokens)
        check_salt("retrieve", cache_salt)
        check_configs("retrieve", request_configs)
        if out is not None:
            self._check_out(out)

        def attempt() -> torch.Tensor | None:
            with self._lease(array, cache_salt, request_configs) as lease:
                if not len(lease):
                    return None
                if out is None:
                    shape = self.layout.kv_shape(lease.num_tokens)
                    target = self._buffers.empty(shape, self.layout.dtype)
                elif out.shape[2] < lease.num_tokens:
                    raise InvalidInputError(
                        f"retrieve: out has room for {out.shape[2]} tokens; the hit has "
                        f"{lease.num_tokens}"
                    )
                else:
                    target = out[:, :, : lease.num_tokens]
                lease.copy_to(target)
                return target

        try:
            return self._retry("retrieve", attempt)
        except LeaseExpiredError:
            return self._retry("retrieve", attempt)

    def store(
        self,
        kv: torch.Tensor,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Store the whole chunks of ``kv``; what lies behind the last whole chunk is left out.

        Args:
            kv: ``[planes, L, T, D]`` of the layout's dtype; a CUDA or non-contiguous tensor is
                copied first.
            tokens: the ``T`` token ids.
            cache_salt: keeps users apart; "" for none.
            request_configs: what the server passes on to its storage, from release 0.5.5 on.

        Returns:
            True if something new was stored, False if all was cached already or not one chunk is
            whole. After it a lookup covers every whole chunk.

        Raises:
            InvalidInputError: an argument is wrong; nothing was sent.
            StoreIncompleteError: the pool had no room for all of it.
            ServerTimeoutError, RequestDroppedError, ServerGoneError: the server did not answer.
        """
        array = check_tokens("store", tokens)
        check_salt("store", cache_salt)
        check_configs("store", request_configs)
        kv = check_kv("store", kv, self.layout, len(array))

        def attempt() -> bool:
            aligned = self._whole_chunks(array)
            num_chunks = len(aligned) // self.chunk_size
            part = kv[:, :, : len(aligned)]

            def write(request: Request) -> tuple[bool, bool]:
                writer = request.open_write()
                if writer is None:
                    return False, False
                writer.copy_from(part)
                return writer.commit(), len(writer.chunk_indices) == num_chunks

            return num_chunks > 0 and self._write_all(
                "store", aligned, cache_salt, write, request_configs
            )

        return self._retry("store", attempt)

    def edit(
        self,
        tokens: TokenIds,
        edit: Edit,
        cache_salt: str = "",
        *,
        target_salt: str | None = None,
    ) -> EditResult:
        """Edit the cached prefix of ``tokens`` and store the result, from slot to slot.

        Over shared memory no tensor is built; elsewhere the edit runs as the ordinary function that
        it is. The source stays cached as it was.

        Args:
            tokens: token ids of the request from its first one on.
            edit: what to do; see :mod:`lmcache_fast.edits`.
            cache_salt: keeps users apart; "" for none.
            target_salt: the salt to store the result under; None for ``cache_salt``.

        Returns:
            The kept tokens of the cached prefix, and how many of them are cached now.

        Raises:
            InvalidInputError: an argument or the edit's selection is wrong; nothing was stored.
            LeaseExpiredError: the source's lock ran out before the copy was done.
            StoreIncompleteError: the pool had no room for all of it.
        """
        from lmcache_fast.edits.edit import apply_plan
        from lmcache_fast.edits.plan import compile_plan

        array = check_tokens("edit", tokens)
        check_salt("edit", cache_salt)
        new_salt = check_salt("edit", cache_salt if target_salt is None else target_salt)

        def attempt() -> EditResult:
            with self._lease(array, cache_salt) as source:
                cached = array[: source.num_tokens]
                plan = edit.plan(cached.tolist(), chunk_size=self.chunk_size)
                compiled = compile_plan(plan, self.layout, self.chunk_size)
                kept = cached[plan.positions]
                target = self._whole_chunks(kept)
                if not len(target):
                    return EditResult(kept.tolist(), 0, source.num_tokens)
                if source.side is not None:
                    self._write_all(
                        "edit", target, new_salt, lambda r: self._edit_into(r, source, compiled)
                    )
                else:
                    kv = self._buffers.empty(
                        self.layout.kv_shape(source.num_tokens), self.layout.dtype
                    )
                    source.copy_to(kv)
                    self.store(apply_plan(plan, kv), kept, new_salt)
                return EditResult(kept.tolist(), len(target), source.num_tokens)

        return self._retry("edit", attempt)

    def close(self) -> None:
        """Take leave of the server and release everything; again: nothing. Takes under 2 s."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._connection.close()
        self._transport.close()
        self._buffers.clear()

    def _whole_chunks(self, tokens: _Tokens) -> _Tokens:
        return tokens[: len(tokens) // self.chunk_size * self.chunk_size]

    def _check_out(self, out: torch.Tensor) -> None:
        if not isinstance(out, torch.Tensor) or out.dim() != 4 or out.device.type != "cpu":
            raise InvalidInputError("retrieve: out is no CPU tensor [planes, L, T, D]")
        expected = self.layout.kv_shape(out.shape[2])
        if tuple(out.shape) != expected or out.dtype != self.layout.dtype:
            raise InvalidInputError(
                f"retrieve: out is {out.dtype} {list(out.shape)}; expected {self.layout.dtype} "
                f"{list(expected)}"
            )
        if not out.is_contiguous():
            raise InvalidInputError("retrieve: out is not contiguous")

    def _request(self, tokens: _Tokens, cache_salt: str, configs: _Configs = None) -> Request:
        return Request(
            self._connection, self._transport, self.model_name, tokens, cache_salt, configs
        )

    def _lookup(self, tokens: _Tokens, cache_salt: str, configs: _Configs = None) -> int:
        tokens = self._whole_chunks(tokens)
        if not len(tokens):
            return 0
        with self._request(tokens, cache_salt, configs) as request:
            return request.lookup() * self.chunk_size

    def _lease(self, tokens: _Tokens, cache_salt: str, configs: _Configs = None) -> Lease:
        tokens = self._whole_chunks(tokens)
        request = self._request(tokens, cache_salt, configs)
        try:
            # A prefix may be evicted between the lookup and the read: one fresh lookup tells.
            for _ in range(2):
                num_chunks = request.lookup() if len(tokens) else 0
                if not num_chunks:
                    break
                grant = request.open_read(num_chunks)
                if grant.success:
                    reader = self._transport.reader(grant, num_chunks)
                    return Lease(request, reader, num_chunks, self.layout, self.chunk_size)
            return Lease(request, None, 0, self.layout, self.chunk_size)
        except BaseException:
            request.close()
            raise

    def _edit_into(
        self, request: Request, source: Lease, compiled: CompiledEdit
    ) -> tuple[bool, bool]:
        """Write the edit of ``source`` into the slots that the server reserves."""
        writer = request.open_write()
        if writer is None:
            return False, False
        runs, rotation = compiled.for_chunks(writer.chunk_indices, self.chunk_size)
        assert native is not None and source.side is not None and writer.side is not None
        native.copy_runs(source.side, writer.side, runs, rotation)
        # Bytes that may have been someone else's are not published; the slots' TTL frees them.
        source.check("edit")
        num_chunks = len(compiled.new_positions) // self.chunk_size
        return writer.commit(), len(writer.chunk_indices) == num_chunks

    def _write_all(
        self,
        where: str,
        tokens: _Tokens,
        cache_salt: str,
        write: Callable[[Request], tuple[bool, bool]],
        configs: _Configs = None,
    ) -> bool:
        """Write until a lookup would find all of ``tokens``; True if something new is stored.

        ``write`` returns whether something was stored, and whether that was every chunk.
        """
        anything_new = False
        covered = 0
        for retries_left in range(STORE_RETRIES, -1, -1):
            with self._request(tokens, cache_salt, configs) as request:
                stored, complete = write(request)
            anything_new |= stored
            if stored and complete:
                return True
            # A chunk is left out when it is cached already and when the pool is full.
            covered = self._lookup(tokens, cache_salt, configs)
            if covered == len(tokens):
                return anything_new
            if retries_left:
                time.sleep(EVICTION_PAUSE)
        raise StoreIncompleteError(
            f"{where}: only {covered} of {len(tokens)} tokens are stored: the server's pool is "
            "full of chunks that are in use; give it more --l1-size-gb",
            covered,
            len(tokens),
        )

    def _retry(self, where: str, attempt: Callable[[], _T]) -> _T:
        """Run ``attempt``; once more if the server went away under it and is back."""
        self._renew(where)
        try:
            return attempt()
        except ServerGoneError as error:
            logger.warning("%s: %s; trying once more", where, error)
            self._renew(where)
            return attempt()

    def _renew(self, where: str) -> None:
        """Make sure of a live connection, and of a transport that belongs to it."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{where}: the client was closed")
            self._connection.ensure_open()
            if self._connection.generation != self._generation:
                # The old transport is not closed: other threads may still read from its pool.
                self._transport = choose_transport(self._connection)
                self._generation = self._connection.generation
