"""Fuzz targets: each takes any bytes and must return, or raise an error of ours; nothing else.

What it returned is then checked: a decoder that lets something wrong through is as bad as one that
fails. ``SEEDS`` has valid input of each target for the fuzzer to start from.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import torch

from lmcache_fast._extension import native
from lmcache_fast.errors import LMCacheFastError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol import messages
from lmcache_fast.protocol.dialect import DIALECTS, dialect_for
from lmcache_fast.protocol.grpc_dialect import GrpcDialect, read_reply
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.registrations import models_of, resolve
from lmcache_fast.sse import SSEParser
from lmcache_fast.transport import inline
from lmcache_fast.transport import pickle as pickles
from lmcache_fast.transport.shm import ShmTransport

Target = Callable[[bytes], None]

CHUNK = 4
LAYOUT = KVLayout(2, 1, 8, "bfloat16")
ONE_PLANE = KVLayout(1, 1, 8, "float32", planes=1)
LAYOUTS = (LAYOUT, ONE_PLANE)
POOL_BYTES = 1 << 16


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Let errors of the package pass; their text must be short enough to log."""
    try:
        yield
    except LMCacheFastError as error:
        assert len(str(error)) < 4000, "an error as long as what caused it"


def check_chunks(chunks: list[torch.Tensor], layout: KVLayout) -> None:
    for chunk in chunks:
        assert chunk.dtype == layout.dtype and tuple(chunk.shape) == layout.object_shape(CHUNK)
        chunk.view(torch.uint8).sum()  # every byte is there to be read


def fuzz_pickle(data: bytes) -> None:
    """Chunks of servers up to 0.5.6."""
    for layout in LAYOUTS:
        with ours():
            check_chunks(pickles.decode_chunks(data, layout, CHUNK), layout)


def fuzz_inline(data: bytes) -> None:
    """Chunks of servers from 0.5.7 on, packed and unpacked."""
    for layout in LAYOUTS:
        with ours():
            check_chunks(inline.decode_chunks(data, layout, CHUNK), layout)
        with contextlib.suppress(Exception):
            unpacked = msgspec.msgpack.decode(data)
            if isinstance(unpacked, dict):
                with ours():
                    check_chunks(inline.decode_chunks(unpacked, layout, CHUNK), layout)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def fuzz_replies(data: bytes) -> None:
    """Replies to every operation."""
    with ours():
        pool = messages.decode_pool_info(data)
        assert isinstance(pool.shm_name, str) and _is_count(pool.pool_size)
    with ours():
        reservation = messages.decode_store_reservation(data)
        indices = reservation.chunk_indices
        assert indices == sorted(set(indices)) and all(_is_count(index) for index in indices)
        assert not reservation.slots or len(reservation.slots) == len(indices)
    with ours():
        grant = messages.decode_read_grant(data)
        for slot in grant.slots:
            assert _is_count(slot.offset) and _is_count(slot.length)
        for layout in LAYOUTS:
            if grant.data is not None:
                with ours():
                    check_chunks(inline.decode_chunks(grant.data, layout, CHUNK), layout)
    with ours():
        chunks = messages.decode_chunks(data)
        assert chunks is None or _is_count(chunks)
    with ours():
        assert messages.decode_bool("fuzz", data) in (True, False)


def fuzz_grpc(data: bytes) -> None:
    """The same replies as protobuf: the first byte chooses the method."""
    if not data:
        return
    dialect = GrpcDialect.of(dialect_for("0.5.7"))
    operations = list(Operation)
    path = dialect.name(operations[data[0] % len(operations)])
    with ours():
        frame = read_reply(path, data[1:])
        if frame is not None:
            fuzz_replies(frame)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def fuzz_config(data: bytes) -> None:
    """``/config`` and ``/version``."""
    with ours(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dialect_for(data.decode("utf-8", "replace"))
    config = _json(data)
    if isinstance(config, dict):
        for dialect in DIALECTS.values():
            with ours():
                settings = dialect.settings(config)
                assert 1 <= settings.chunk_size <= 1 << 24
                for seconds in (settings.read_ttl, settings.write_ttl):
                    assert 0 < seconds < 1e10


def fuzz_status(data: bytes) -> None:
    """``/status``: which models there are, and what their caches look like."""
    status = _json(data)
    if not isinstance(status, dict):
        return
    models = models_of(status)
    for name, model in models.items():
        assert isinstance(name, str) and (model.layout is not None or model.problem)
        for layout in (None, LAYOUT):
            with ours():
                found, world_size = resolve(name, models, layout, None)
                assert world_size >= 1 and found.token_bytes > 0


def fuzz_events(data: bytes) -> None:
    """An event stream, split at every place that the first byte chooses."""
    if not data:
        return
    step, stream = data[0] % 16 + 1, data[1:]

    def parse(pieces: list[bytes]) -> list[str | None]:
        parser = SSEParser()
        events: list[str | None] = [event for piece in pieces for event in parser.feed(piece)]
        return [*events, parser.close()]

    whole = parse([stream])
    assert whole == parse([stream[at : at + step] for at in range(0, len(stream), step)])
    assert sum(len(event or "") for event in whole) <= len(stream)


class _Slots:
    """A transport over a real segment of :data:`POOL_BYTES`, without a server."""

    def __init__(self) -> None:
        assert native is not None
        self.transport = object.__new__(ShmTransport)
        self.transport._native = native
        self.transport._layout = LAYOUT
        self.transport._chunk_size = CHUNK
        self.transport._chunk_bytes = LAYOUT.token_bytes * CHUNK
        name = f"lmcache_fast_fuzz_{os.getpid()}"
        with open(f"/dev/shm/{name}", "wb") as file:
            file.truncate(POOL_BYTES)
        self.transport._region = native.SharedRegion(name, POOL_BYTES)
        os.unlink(f"/dev/shm/{name}")


_slots: _Slots | None = None


def fuzz_slots(data: bytes) -> None:
    """Slots that point outside the pool, overlap, are misaligned, or lie about their size."""
    global _slots
    if native is None:
        return
    _slots = _slots or _Slots()
    transport = _slots.transport
    with ours():
        slots = messages.decode_store_reservation(data).slots
        offsets = [int(offset) for offset in transport._offsets("fuzz", slots)]
        length = transport._chunk_bytes
        assert all(0 <= offset <= POOL_BYTES - length for offset in offsets)
        assert all(offset % LAYOUT.dtype.itemsize == 0 for offset in offsets)
        places = sorted(offsets)
        assert all(b - a >= length for a, b in itertools.pairwise(places))
        if offsets:
            side = transport.side(np.array(offsets, np.uint64))
            out = torch.empty(LAYOUT.kv_shape(len(offsets) * CHUNK), dtype=LAYOUT.dtype)
            transport.copy(
                side, transport.tensor_side(out), np.array([[0, 0, out.shape[2]]], np.int64)
            )


#: What a field may hold in place of what it should.
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.5, 1e308,
    float("nan"), float("inf"), "", "x", "\u2028", "torch.bfloat16", "9" * 5000, b"", b"\x80", [],
    [[]], [0], [1, 2, 3, 4], {}, {"": None}, [None] * 100,
]  # fmt: skip


def spoil(value: Any, choices: Iterator[int]) -> Any:
    """Return a copy of ``value`` with nasty values where ``choices``, bytes, want them."""
    choice = next(choices, 255)
    if choice < len(NASTY):
        return NASTY[choice]
    if isinstance(value, dict):
        kept = {key: spoil(item, choices) for key, item in value.items()}
        if choice == 100 and kept:
            kept.pop(next(iter(kept)))
        return {**kept, "more": 1} if choice == 101 else kept
    if isinstance(value, list):
        return [spoil(item, choices) for item in value] * (2 if choice == 102 else 1)
    return value


def fuzz_fields(data: bytes) -> None:
    """Well-formed messages with wrong fields: the first byte chooses the message."""
    if not data:
        return
    choices = iter(data[1:])
    samples = seeds()
    if data[0] % 3 == 0:
        fuzz_config(
            json.dumps(spoil(json.loads(samples["config"][0]), choices), default=str).encode()
        )
    elif data[0] % 3 == 1:
        fuzz_status(
            json.dumps(spoil(json.loads(samples["status"][0]), choices), default=str).encode()
        )
    else:
        replies = [*samples["replies"], *samples["slots"]]
        reply = msgspec.msgpack.decode(replies[data[0] // 3 % len(replies)])
        frame = msgspec.msgpack.encode(spoil(reply, choices))
        fuzz_replies(frame)
        fuzz_slots(frame)


TARGETS: dict[str, Target] = {
    "pickle": fuzz_pickle,
    "inline": fuzz_inline,
    "replies": fuzz_replies,
    "grpc": fuzz_grpc,
    "config": fuzz_config,
    "status": fuzz_status,
    "events": fuzz_events,
    "slots": fuzz_slots,
    "fields": fuzz_fields,
}


def _chunk(layout: KVLayout, fill: int) -> torch.Tensor:
    shape = layout.object_shape(CHUNK)
    return torch.full(shape, fill, dtype=layout.dtype)


def _slot(offset: int) -> dict[str, Any]:
    return {
        "offset": offset,
        "length": LAYOUT.token_bytes * CHUNK,
        "shape": list(LAYOUT.object_shape(CHUNK)),
        "dtype": LAYOUT.dtype_name,
    }


def _torch_pickle(layout: KVLayout) -> bytes:
    stream = io.BytesIO()
    pickle.dump([_chunk(layout, 1), _chunk(layout, 2)], stream)
    return stream.getvalue()


def _status() -> dict[str, Any]:
    def entry(kv_format: str, shape: str, **more: Any) -> dict[str, Any]:
        group = {
            "engine_kv_format": kv_format,
            "engine_kv_concrete_shape": shape,
            "tokens_per_block": 16,
            "dtype": "torch.bfloat16",
            **more,
        }
        layout = {"num_layers": 2, "kernel_groups": [group]}
        return {"model_name": kv_format, "world_size": 1, "kv_cache_layout": layout}

    return {
        "cache_context_meta": {
            "1": entry("NL_X_NB_TWO_BS_NH_HS", "2 x [8, 2, 16, 4, 32]"),
            "2": entry("NL_X_NB_NH_BS_CS", "2 x [8, 4, 16, 64]"),
            "3": entry("NL_X_NB_BS_HS", "2 x [8, 16, 576]", is_mla=True),
        },
        "q_context_meta": {},
        "non_cuda_context_meta": {"4": {"model_name": "other", "world_size": 2, "use_mla": True}},
    }


@functools.cache
def seeds() -> dict[str, list[bytes]]:
    """Return valid input for each target."""
    pack = msgspec.msgpack.encode
    context = {"slots": [_slot(0), _slot(4096)], "chunk_indices": [0, 2]}
    envelope = inline.encode_chunks([_chunk(LAYOUT, 1)])
    config = {
        "mp": {"chunk_size": 256, "shm_name": "a", "supported_transfer_mode": "auto"},
        "storage_manager": {
            "l1_manager_config": {"read_ttl_seconds": 300, "write_ttl_seconds": 600.0}
        },
    }
    replies = [
        pack({"shm_name": "pool", "pool_size": 4096}),
        pack({"context": context}),
        pack({"success": True, "data": envelope, "context": {"slots": context["slots"]}}),
        pack(7),
        pack(True),
    ]
    return {
        "pickle": [pickles.encode_chunks([_chunk(one, 3), _chunk(one, 4)]) for one in LAYOUTS]
        + [_torch_pickle(one) for one in LAYOUTS],
        "inline": [inline.encode_chunks([_chunk(one, 5), _chunk(one, 6)]) for one in LAYOUTS],
        "replies": replies,
        "grpc": [bytes([index]) + b"\x0a\x04pool\x10\x80\x20" for index in range(15)],
        "config": [json.dumps(config).encode(), b"0.5.6-gabc", b"v0.5"],
        "status": [json.dumps(_status()).encode()],
        "events": [
            b"\x00data: {}\r\n\r\n: x\n\ndata: a\ndata: b\n\n",
            b"\x03\xef\xbb\xbfdata: \xe2\x80\xa8\r\rdata:x",
        ],
        "fields": [bytes([index]) + b"\xff" * 40 for index in range(24)],
        "slots": [replies[1], pack({"context": {"slots": [_slot(8), _slot(16)]}})],
    }


def replay(target: str, data: bytes) -> None:
    """Run one input; what a failure says begins with how to get it again."""
    try:
        TARGETS[target](data)
    except BaseException as error:
        raise AssertionError(f"{target}: {quote(data[:200])}: {error!r}") from error
