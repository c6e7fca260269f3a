"""KVClient: fetch, store and edit requests' KV caches on one server."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.arguments import (
    TokenIds,
    check_configs,
    check_kv,
    check_min_tokens,
    check_model_name,
    check_salt,
    check_timeout,
    check_tokens,
)
from lmcache_fast.buffers import TensorPool
from lmcache_fast.closing import Closing
from lmcache_fast.errors import InvalidInputError, StoreIncompleteError
from lmcache_fast.interrupts import interruptible, shielded
from lmcache_fast.layout import KVLayout
from lmcache_fast.lease import Lease
from lmcache_fast.links import Links
from lmcache_fast.observe import ClientStats, Counters
from lmcache_fast.protocol.connection import Connection
from lmcache_fast.request import Link, Request
from lmcache_fast.transport.base import ChunkWriter
from lmcache_fast.transport.ranks import paired

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


class KVClient(Closing):
    """One model's KV caches on one LMCache server; a context manager, safe from many threads.

    Args:
        url: the server's address: ``tcp://localhost:6555``, ``ipc://path``, or where it runs with
            ``--transport grpc``, ``grpc://localhost:6555`` (needs the extra ``grpc``).
        http_url: the server's HTTP address, e.g. ``http://localhost:8080``.
        model_name: the model as its engine registered it (vLLM: the value of ``--model``).
        layout: the whole cache's shape; None takes it from the engine's entry on ``/status``, and
            ``"opaque"`` does too and takes its rows for no tokens (vLLM on a CPU).
        timeout: seconds that one answer of the server may take.
        world_size: tensor-parallel ranks that store a share of the cache each; None takes it from
            ``/status``, 1 where that says nothing.

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
        layout: KVLayout | Literal["opaque"] | None = None,
        timeout: float = 60.0,
        world_size: int | None = None,
    ) -> None:
        self.model_name = check_model_name("KVClient", model_name)
        self.timeout = check_timeout("KVClient", timeout)
        self._counters = Counters()
        self._buffers = TensorPool()
        with shielded():
            self._connection = Connection(url, http_url, model_name, layout, timeout, world_size)
            # Whoever forgets to close a client does not keep its thread and its registration.
            self._last_will = weakref.finalize(self, self._connection.close)
            try:
                self._links = Links(self._connection, self._counters)
            except BaseException:
                self._connection.close()
                raise
        logger.info(
            "connected to %s, LMCache %s: model %r as instance %d, %s, chunks of %d tokens, "
            "transport %s",
            url, self.server_version, model_name, self.instance_id, self.layout, self.chunk_size,
            self.transport_name,
        )  # fmt: skip

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._links.current.chunk_size

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
        return self._links.current.transport.name

    def stats(self) -> ClientStats:
        """Return what the client has done so far: a snapshot of its counters."""
        return self._counters.snapshot()

    def lookup(self, tokens: TokenIds, cache_salt: str = "") -> int:
        """Return how many leading tokens are cached: whole chunks. No lock stays.

        Args:
            tokens: token ids of the request from its first one on.
            cache_salt: keeps users apart; "" for none.
        """
        array = check_tokens("lookup", tokens)
        check_salt("lookup", cache_salt)
        return self._links.call("lookup", lambda link: self._lookup(link, array, cache_salt))

    def lease(self, tokens: TokenIds, cache_salt: str = "") -> Lease:
        """Lock the cached prefix of ``tokens`` on the server and view its chunks in place.

        Use it in a ``with`` block; :class:`lmcache_fast.lease.Lease`. An empty lease means that
        nothing is cached.
        """
        array = check_tokens("lease", tokens)
        check_salt("lease", cache_salt)
        return self._links.call("lease", lambda link: self._lease(link, array, cache_salt))

    def retrieve(
        self,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
        *,
        out: torch.Tensor | None = None,
        min_tokens: int = 1,
    ) -> torch.Tensor | None:
        """Fetch the KV of the cached prefix of ``tokens``.

        Args:
            tokens: token ids of the request from its first one on.
            cache_salt: keeps users apart; "" for none.
            request_configs: what the server passes on to its storage, from release 0.5.5 on.
            out: where to put it: ``[planes, L, T, D]`` with room for the hit, contiguous.
            min_tokens: with fewer cached ones nothing is copied.

        Returns:
            ``[planes, L, hit, D]`` (a view of ``out`` where that is given), the caller's own; None
            when not one chunk is cached, or fewer than ``min_tokens``.

        Raises:
            InvalidInputError: an argument is wrong, or ``out`` is too small for the hit.
            LeaseExpiredError: twice, the server's lock ran out before the copy was done.
            ServerTimeoutError, RequestDroppedError, ServerGoneError: the server did not answer.
        """
        array = check_tokens("retrieve", tokens)
        check_salt("retrieve", cache_salt)
        check_configs("retrieve", request_configs)
        check_min_tokens("retrieve", min_tokens)
        if out is not None:
            self._check_out(out)

        def attempt(link: Link) -> torch.Tensor | None:
            with self._lease(link, array, cache_salt, request_configs) as lease:
                if lease.num_tokens < max(1, min_tokens):
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

        return self._links.call("retrieve", attempt)

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
            LeaseExpiredError: twice, the server's reservation ran out before the copy was done.
            ServerTimeoutError, RequestDroppedError, ServerGoneError: the server did not answer.
        """
        array = check_tokens("store", tokens)
        check_salt("store", cache_salt)
        check_configs("store", request_configs)
        kv = check_kv("store", kv, self.layout, len(array))

        return self._links.call(
            "store", lambda link: self._store(link, kv, array, cache_salt, request_configs)
        )

    def edit(
        self,
        tokens: TokenIds,
        edit: Edit,
        cache_salt: str = "",
        *,
        target_salt: str | None = None,
        min_tokens: int = 0,
    ) -> EditResult:
        """Edit the cached prefix of ``tokens`` and store the result, from slot to slot.

        Over shared memory no tensor is built; elsewhere the edit runs as the ordinary function that
        it is. The source stays cached as it was.

        Args:
            tokens: token ids of the request from its first one on.
            edit: what to do; see :mod:`lmcache_fast.edits`.
            cache_salt: keeps users apart; "" for none.
            target_salt: the salt to store the result under; None for ``cache_salt``.
            min_tokens: with fewer cached ones nothing is edited.

        Returns:
            The kept tokens of the cached prefix, and how many of them are cached now: none with
            ``num_source`` below ``min_tokens``.

        Raises:
            InvalidInputError: an argument or the edit's selection is wrong; nothing was stored.
            LeaseExpiredError: twice, the source's lock ran out before the copy was done; nothing
                was stored.
            StoreIncompleteError: the pool had no room for all of it.
        """
        from lmcache_fast.edits.edit import apply_plan
        from lmcache_fast.edits.plan import compile_plan
        from lmcache_fast.edits.view import LeaseView

        array = check_tokens("edit", tokens)
        check_salt("edit", cache_salt)
        new_salt = check_salt("edit", cache_salt if target_salt is None else target_salt)
        check_min_tokens("edit", min_tokens)

        def attempt(link: Link) -> EditResult:
            with self._lease(link, array, cache_salt) as source:
                if source.num_tokens < min_tokens:
                    return EditResult([], 0, source.num_tokens)
                cached = array[: source.num_tokens]
                with interruptible():  # the user's own function chooses
                    view = LeaseView(source, self.layout)
                    plan = edit.plan(cached.tolist(), link.chunk_size, view)
                compiled = compile_plan(plan, self._connection.rank_layout, link.chunk_size)
                kept = cached[plan.positions]
                target = link.whole_chunks(kept)
                if not len(target):
                    return EditResult(kept.tolist(), 0, source.num_tokens)
                if source.in_slots:
                    self._write_all(
                        link,
                        "edit",
                        target,
                        new_salt,
                        lambda writer: self._edit_into(writer, source, compiled),
                    )
                else:
                    kv = self._buffers.empty(
                        self.layout.kv_shape(source.num_tokens), self.layout.dtype
                    )
                    source.copy_to(kv)
                    self._store(link, apply_plan(plan, kv), kept, new_salt)
                return EditResult(kept.tolist(), len(target), source.num_tokens)

        return self._links.call("edit", attempt)

    def close(self) -> None:
        """Take leave of the server and release everything; again: nothing. Takes under 2 s.

        Calls under way in other threads raise ClosedError.
        """
        if self._connection.is_foreign:  # a fork: the parent's locks may never be released here
            return
        with shielded():
            self._last_will()
            if self._links.close():
                self._buffers.clear()

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

    def _request(
        self, link: Link, tokens: _Tokens, cache_salt: str, configs: _Configs = None
    ) -> Request:
        return Request(link, self.model_name, tokens, cache_salt, configs)

    def _lookup(
        self, link: Link, tokens: _Tokens, cache_salt: str, configs: _Configs = None
    ) -> int:
        tokens = link.whole_chunks(tokens)
        if not len(tokens):
            return 0
        with self._request(link, tokens, cache_salt, configs) as request:
            return request.lookup() * link.chunk_size

    def _lease(
        self, link: Link, tokens: _Tokens, cache_salt: str, configs: _Configs = None
    ) -> Lease:
        tokens = link.whole_chunks(tokens)
        request = self._request(link, tokens, cache_salt, configs)
        try:
            reader, num_chunks = None, 0
            # A prefix may be evicted between the lookup and the read: one fresh lookup tells.
            for _ in range(2):
                num_chunks = request.lookup() if len(tokens) else 0
                if not num_chunks:
                    break
                reader = request.open_read(num_chunks)
                if reader is not None:
                    break
            if reader is None:
                num_chunks = 0
            num_bytes = num_chunks * link.chunk_size * self.layout.token_bytes
            self._counters.add(bytes_read=num_bytes)
            return Lease(request, reader, num_chunks, self.layout, link.chunk_size, self._counters)
        except BaseException:
            request.close()
            raise

    def _store(
        self,
        link: Link,
        kv: torch.Tensor,
        tokens: _Tokens,
        cache_salt: str,
        configs: _Configs = None,
    ) -> bool:
        """Store the whole chunks of checked arguments."""
        tokens = link.whole_chunks(tokens)
        if not len(tokens):
            return False
        part = kv[:, :, : len(tokens)]
        return self._write_all(
            link, "store", tokens, cache_salt, lambda writer: writer.copy_from(part), configs
        )

    def _edit_into(self, writer: ChunkWriter, source: Lease, compiled: CompiledEdit) -> None:
        """Write the edit of ``source`` into the slots that the server has reserved."""
        for rank_reader, rank_writer in paired(source.reader("edit"), writer):
            runs, rotation = compiled.for_chunks(rank_writer.chunk_indices, source.chunk_size)
            rank_reader.edit_to(rank_writer, runs, rotation)
        # Bytes that may have been someone else's are not published; the slots' TTL frees them.
        source.check("edit")

    def _write_all(
        self,
        link: Link,
        where: str,
        tokens: _Tokens,
        cache_salt: str,
        fill: Callable[[ChunkWriter], None],
        configs: _Configs = None,
    ) -> bool:
        """Write until a lookup would find all of ``tokens``; True if something new is stored.

        ``fill`` puts the bytes into the chunks that are to be written.
        """
        anything_new = False
        covered = 0
        chunk_bytes = link.chunk_size * self.layout.token_bytes

        def counted(writer: ChunkWriter) -> None:
            fill(writer)
            self._counters.add(bytes_written=len(writer.chunk_indices) * chunk_bytes)

        for retries_left in range(STORE_RETRIES, -1, -1):
            with self._request(link, tokens, cache_salt, configs) as request:
                stored, complete = request.write(counted)
            anything_new |= stored
            if stored and complete:
                return True
            # A chunk is left out when it is cached already, when someone else is writing it, and
            # when the pool is full.
            covered = self._lookup(link, tokens, cache_salt, configs)
            if covered == len(tokens):
                return anything_new
            if retries_left:
                self._counters.add(retries=1)
                with interruptible():
                    time.sleep(EVICTION_PAUSE)
        raise StoreIncompleteError(
            f"{where}: only {covered} of {len(tokens)} tokens are stored: the server's pool is "
            "full of chunks that are in use (then give it more --l1-size-gb), or another client "
            "has begun to store the same and not finished",
            covered,
            len(tokens),
        )
