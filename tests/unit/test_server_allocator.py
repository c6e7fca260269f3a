"""The pool's allocator."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.errors import InvalidInputError
from lmcache_fast.serve.server.allocator import Allocator


def test_spans_are_aligned_and_rounded_up() -> None:
    allocator = Allocator(4 * 4096)
    assert [allocator.allocate(1), allocator.allocate(4097)] == [0, 4096]
    assert allocator.used_bytes == 3 * 4096


def test_a_full_pool_gives_nothing_until_something_is_freed() -> None:
    allocator = Allocator(2 * 4096)
    first, second = allocator.allocate(4096), allocator.allocate(4096)
    assert first is not None and second is not None
    assert allocator.allocate(1) is None
    allocator.free(first)
    assert allocator.allocate(4096) == first


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_become_one_span(order: tuple[int, ...]) -> None:
    allocator = Allocator(3 * 64, alignment=64)
    offsets = [allocator.allocate(64) for _ in range(3)]
    for index in order:
        offset = offsets[index]
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(3 * 64) == 0


def test_a_pool_smaller_than_the_alignment_holds_nothing() -> None:
    assert Allocator(100, alignment=4096).allocate(1) is None


@pytest.mark.parametrize("offset", [0, 64, 1])
def test_freeing_what_is_not_allocated_is_an_error(offset: int) -> None:
    with pytest.raises(InvalidInputError, match=str(offset)):
        Allocator(128, alignment=64).free(offset)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_live_spans_never_overlap_and_all_room_comes_back(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(16 * 64, alignment=64)
    live: dict[int, int] = {}
    for give_back, number in steps:
        if give_back and live:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            allocator.free(offset)
        elif (taken := allocator.allocate(number)) is not None:
            live[taken] = -(-number // 64) * 64
        spans = sorted(live.items())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert allocator.used_bytes == sum(live.values())
    for offset in live:
        allocator.free(offset)
    assert allocator.allocate(16 * 64) == 0
