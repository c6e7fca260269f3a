"""Encoded tokens and keys, and decoded replies."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.errors import InvalidInputError, ProtocolError, UnsupportedServerError
from lmcache_fast.protocol import messages
from lmcache_fast.protocol.dialect import DIALECTS, dialect_for
from lmcache_fast.protocol.messages import Key, Registration, Slot
from lmcache_fast.protocol.operations import Operation
from lmcache_fast.protocol.tokens import PackedTokens

decode = msgspec.msgpack.decode
encode = msgspec.msgpack.encode
ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
KEY = Key("org/model", 1, None, PackedTokens([1, 2**32 - 1, 3]), 0, 2, "r", "salt", None, 2)
SLOT = {"offset": 4096, "length": 64, "shape": [2, 4], "dtype": "bfloat16"}


@given(ids, st.data())
def test_tokens_and_their_prefixes_read_back_in_both_forms(
    tokens: list[int], data: st.DataObject
) -> None:
    packed = PackedTokens(tokens)
    count = data.draw(st.integers(0, len(tokens)))
    for part, expected in (
        (packed, tokens),
        (packed.prefix(count), tokens[:count]),
        (packed.prefix(count, nonce=7), [*tokens[:count], 7]),
    ):
        assert len(part) == len(expected)
        assert decode(part.as_msgpack_array()) == expected
        assert np.frombuffer(part.as_big_endian(), ">u4").tolist() == expected


def test_tokens_do_not_follow_later_changes_of_the_array_they_came_from() -> None:
    source = np.array([1, 2, 3], np.uint32)
    packed = PackedTokens(source)
    source[0] = 9
    assert decode(packed.as_msgpack_array()) == [1, 2, 3]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], "12"])
def test_what_are_no_token_ids_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidInputError, match="PackedTokens"):
        PackedTokens(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.release)
def test_a_key_has_the_fields_of_its_release(dialect: object) -> None:
    release = dialect.release  # type: ignore[attr-defined]
    fields = decode(dialect.key(KEY))  # type: ignore[attr-defined]
    expected = {
        "model_name": "org/model",
        "world_size": 1,
        "worker_id": None,
        "start": 0,
        "end": 2,
        "request_id": "r",
        "cache_salt": "salt",
    }
    if release >= "0.5.5":
        expected |= {"request_configs": None, "num_kv_readers": 2}
    if release >= "0.5.7":
        expected["token_bytes"] = bytes.fromhex("00000001ffffffff00000003")
    else:
        expected["token_ids"] = [1, 2**32 - 1, 3]
    assert fields == expected


def test_releases_differ_where_the_protocol_does() -> None:
    registration = Registration(5, "m", 1, 16, 2, 8, "float16", False)
    old, new = dialect_for("0.5.2"), dialect_for("0.5.7rc2-gabc")
    assert old.name(Operation.LOOKUP) == 5 and new.name(Operation.LOOKUP) == 8
    assert len(old.free_lookup_locks(KEY)) == 2 and len(new.free_lookup_locks(KEY)) == 3
    assert len(old.prepare_store(KEY, 5)) == 2
    assert decode(new.prepare_store(KEY, 5)[2]) == []
    assert "num_physical_slots" not in decode(old.register(registration)[0])
    assert decode(new.register(registration)[0])["group_layouts"] == []
    assert decode(old.commit_store(KEY, 5, None)[2]) == b""
    assert decode(old.commit_store(KEY, 5, old.data_head(6) + b"pickle")[2]) == b"pickle"


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.5.2", "0.5.2"), ("0.5.6-g3e11e108", "0.5.6"), ("0.5.7rc2", "0.5.7"), ("v0.5.5", "0.5.5")],
)
def test_a_version_selects_its_release(version: str, release: str) -> None:
    assert dialect_for(version).release == release


@pytest.mark.parametrize("version", ["0.5.8", "0.6", "1.0.0-gabc"])
def test_a_newer_release_is_taken_for_the_newest_known_with_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match="newer than any"):
        assert dialect_for(version).release == "0.5.7"


@pytest.mark.parametrize("version", ["0.5.1", "0.4.9", "unknown", ""])
def test_older_or_nameless_releases_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedServerError, match=r"expected"):
        dialect_for(version)


def test_replies_are_decoded() -> None:
    slot = Slot(4096, 64, (2, 4), "bfloat16")
    store = {"context": {"slots": [SLOT, SLOT], "chunk_indices": [1, 3]}}
    reservation = messages.decode_store_reservation(encode(store), 7)
    assert reservation == messages.StoreReservation([slot, slot], [1, 3], 7)
    empty = messages.decode_store_reservation(encode({"context": {}}))
    assert empty.slots == [] and empty.chunk_indices == []
    grant = {"success": True, "data": b"", "context": {"slots": [SLOT]}}
    assert messages.decode_read_grant(encode(grant)).slots == [slot]
    pickled = messages.decode_read_grant(encode({"success": True, "data": b"p", "context": {}}))
    assert pickled.data == b"p"
    frame = encode({"success": True, "data": bytes(1 << 16), "context": {}})
    data = messages.decode_read_grant(memoryview(frame)).data
    assert isinstance(data, memoryview) and data.obj is frame, "it was copied"
    pool = encode({"shm_name": "x", "pool_size": 9, "null_block_id": 0})
    assert messages.decode_pool_info(pool) == messages.PoolInfo("x", 9)
    assert messages.decode_chunks(None) is None and messages.decode_chunks(encode(3)) == 3


@pytest.mark.parametrize(
    "reply",
    [
        {"slots": [{**SLOT, "offset": -1}], "chunk_indices": [0]},
        {"slots": [{**SLOT, "shape": "2"}], "chunk_indices": [0]},
        {"slots": [{"offset": 0}], "chunk_indices": [0]},
        {"slots": [SLOT], "chunk_indices": [0, 1]},
        {"slots": [SLOT, SLOT], "chunk_indices": [1, 0]},
        {"slots": [SLOT, SLOT], "chunk_indices": [1, 1]},
    ],
)
def test_a_wrong_reservation_is_refused(reply: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="prepare_store"):
        messages.decode_store_reservation(encode({"context": reply}))


@given(st.binary(max_size=60) | st.none())
def test_any_bytes_decode_or_raise_protocol_error(frame: bytes | None) -> None:
    for decoder in (
        messages.decode_pool_info,
        messages.decode_store_reservation,
        messages.decode_read_grant,
        messages.decode_chunks,
    ):
        with contextlib.suppress(ProtocolError):
            decoder(frame)


def test_keys_of_one_request_share_the_encoded_tokens() -> None:
    tokens = PackedTokens([1, 2, 3])
    assert tokens.as_msgpack_array() is tokens.as_msgpack_array()
    assert decode(dialect_for("0.5.6").key(replace(KEY, tokens=tokens, end=1)))["end"] == 1
