"""Chunks as an envelope: strict both ways."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.errors import PayloadError
from lmcache_fast.layout import CACHE_DTYPES, KVLayout
from lmcache_fast.transport.inline import decode_chunks, encode_chunks
from tests.unit.transport_chunks import CHUNK, LAYOUT, make_chunks, raw


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_what_is_written_is_the_envelope_and_is_read_back(dtype: str, planes: int) -> None:
    layout = KVLayout(3, 2, 5, CACHE_DTYPES[dtype], planes=planes)
    for count in (0, 1, 3):
        chunks = make_chunks(layout, count)
        data = encode_chunks(chunks)
        assert msgspec.msgpack.decode(data) == {
            "version": 1,
            "tensors": [
                {"dtype": dtype, "shape": list(layout.object_shape(CHUNK)), "data": raw(chunk)}
                for chunk in chunks
            ],
        }
        assert [raw(chunk) for chunk in decode_chunks(data, layout, CHUNK)] == [
            raw(chunk) for chunk in chunks
        ]


def envelope(**changes: Any) -> bytes:
    shape = LAYOUT.object_shape(CHUNK)
    size = LAYOUT.token_bytes * CHUNK
    frame = {"dtype": "bfloat16", "shape": shape, "data": b"\0" * size, **changes}
    return msgspec.msgpack.encode({"version": 1, "tensors": [frame]})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({"version": 2, "tensors": []}),
        msgspec.msgpack.encode({"tensors": []}),
        msgspec.msgpack.encode({"version": 1}),
        msgspec.msgpack.encode({"version": 1, "tensors": [], "more": 1}),
        msgspec.msgpack.encode({"version": 1, "tensors": [None]}),
        msgspec.msgpack.encode({"version": True, "tensors": []}),
        envelope() + b"x",
        envelope()[:-1],
        envelope(dtype="float16"),
        envelope(dtype="torch.bfloat16"),
        envelope(dtype=None),
        envelope(shape=(2, 3, CHUNK, 11)),
        envelope(shape=(2, 3, CHUNK)),
        envelope(shape=(2, 3, CHUNK, -10)),
        envelope(shape=(2, 3, CHUNK, 10.0)),
        envelope(data=b""),
        envelope(data=b"\0" * (LAYOUT.token_bytes * CHUNK + 1)),
        envelope(data="text"),
        envelope(device="cuda"),
        b"\x82\xa7version\x01\xa7tensors\xdd\xff\xff\xff\xff",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PayloadError, match="inline"):
        decode_chunks(data, LAYOUT, CHUNK)


def test_an_unpacked_envelope_is_read_as_strictly() -> None:
    unpacked = msgspec.msgpack.decode(envelope())
    assert len(decode_chunks(unpacked, LAYOUT, CHUNK)) == 1
    for wrong in ({}, {**unpacked, "version": 2}, {**unpacked, "more": 1}):
        with pytest.raises(PayloadError):
            decode_chunks(wrong, LAYOUT, CHUNK)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_list_or_an_error(data: bytes) -> None:
    with contextlib.suppress(PayloadError):
        assert isinstance(decode_chunks(data, LAYOUT, CHUNK), list)
