"""The names of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.serve.server.hashing import chunk_hashes
from lmcache_fast.serve.server.messages import ListKey, MessageError, PackedKey

CHUNK = 4
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def packed(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype=">u4").tobytes()


def hashes(tokens: list[int], model: str = "m", world: int = 1, salt: str = "") -> list[bytes]:
    return chunk_hashes(packed(tokens), CHUNK, model, world, salt)


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)]
)
def test_only_whole_chunks_have_a_hash(tokens: int, chunks: int) -> None:
    assert len(hashes(list(range(tokens)))) == chunks


@given(TOKENS, TOKENS)
def test_prompts_share_hashes_exactly_as_far_as_they_share_chunks(
    left: list[int], right: list[int]
) -> None:
    common = 0
    while (
        common + CHUNK <= min(len(left), len(right))
        and left[common : common + CHUNK] == right[common : common + CHUNK]
    ):
        common += CHUNK
    pairs = zip(hashes(left), hashes(right), strict=False)
    assert [a == b for a, b in pairs] == [
        index * CHUNK < common for index in range(min(len(left), len(right)) // CHUNK)
    ]


def test_equal_chunks_at_different_places_have_different_hashes() -> None:
    first, second = hashes([7] * 2 * CHUNK)
    assert first != second


def test_model_ranks_and_salt_keep_chunks_apart() -> None:
    tokens = list(range(CHUNK))
    names = [("m", 1, ""), ("m1", 1, ""), ("m", 11, ""), ("m", 1, "s"), ("", 1, "m")]
    assert len({hashes(tokens, *name)[0] for name in names}) == len(names)


def fields(**changes: object) -> dict[str, object]:
    return {
        "model_name": "m", "world_size": 1, "worker_id": 0, "start": 0, "end": 8,
        "request_id": "r", **changes,
    }  # fmt: skip


def test_both_releases_keys_name_the_same_chunks() -> None:
    tokens = [0, 1, 2**32 - 1, 5, 6, 7, 8, 9]
    as_list = ListKey(**fields(), token_ids=tokens)  # type: ignore[arg-type]
    as_bytes = PackedKey(**fields(), token_bytes=packed(tokens))  # type: ignore[arg-type]
    assert as_list.hashes(CHUNK) == as_bytes.hashes(CHUNK) == hashes(tokens)


def test_a_range_names_its_own_chunks_of_the_chain() -> None:
    tokens = list(range(8))
    key = ListKey(**fields(start=4), token_ids=tokens)  # type: ignore[arg-type]
    assert key.hashes(CHUNK) == hashes(tokens)[1:]
    assert key.hashes(CHUNK, whole=True) == hashes(tokens)


@pytest.mark.parametrize("changes", [{"end": 9}, {"start": -1}, {"start": 8, "end": 4}])
def test_a_range_outside_the_tokens_is_refused(changes: dict[str, object]) -> None:
    key = ListKey(**fields(**changes), token_ids=list(range(8)))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="range"):
        key.hashes(CHUNK)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "s" * 129])
def test_a_bad_salt_is_refused(salt: str) -> None:
    with pytest.raises(MessageError, match="cache_salt"):
        ListKey(**fields(cache_salt=salt), token_ids=[])  # type: ignore[arg-type]
