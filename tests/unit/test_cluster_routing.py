"""Where streams go: the longest prefix, then the first chunk's hash, within the cap."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.cluster.routing import Router, prefix_key

NAMES = [f"node-{index}" for index in range(7)]
CHUNK = 4

keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60)
#: A cap that nothing reaches.
FREE = 1e9


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[str], list[int], list[int], list[list[int]]]:
    """Nodes, and each stream's key, weight and hits."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    found = draw(keys)
    one = st.tuples(st.integers(1, 5000), st.lists(st.integers(0, 3), min_size=7, max_size=7))
    rest = draw(st.lists(one, min_size=len(found), max_size=len(found)))
    hits = [stream_hits[: len(names)] for _, stream_hits in rest]
    return names, found, [weight for weight, _ in rest], hits


def assign(
    router: Router,
    names: list[str],
    found: list[int],
    weights: list[int],
    hits: list[list[int]] | None = None,
) -> list[str]:
    return router.assign(
        names,
        np.array(found, np.uint64),
        weights,
        None if hits is None else np.array(hits, np.int64),
    )


@given(batches())
def test_without_a_cap_each_stream_goes_to_a_node_with_the_longest_prefix(
    batch: tuple[list[str], list[int], list[int], list[list[int]]],
) -> None:
    names, _, _, hits = batch
    for name, stream_hits in zip(assign(Router(FREE), *batch), hits, strict=True):
        assert stream_hits[names.index(name)] == max(stream_hits)


@given(keys, st.integers(1, 7))
def test_without_hits_and_cap_equal_first_chunks_meet(found: list[int], count: int) -> None:
    names = NAMES[:count]
    chosen = assign(Router(FREE), names, [*found, *found], [1] * 2 * len(found))
    assert chosen[: len(found)] == chosen[len(found) :]


@given(batches(), st.floats(1.0, 3.0))
def test_no_node_gets_more_than_the_cap_and_one_stream(
    batch: tuple[list[str], list[int], list[int], list[list[int]]], cap: float
) -> None:
    names, _, weights, _ = batch
    router = Router(cap)
    chosen = assign(router, *batch)
    assert set(chosen) <= set(names)
    limit = cap * sum(weights) / len(names)
    for name in names:
        load = sum(w for w, where in zip(weights, chosen, strict=True) if where == name)
        assert load == router.loads[name]
        assert load <= limit + max(weights) * (1 + 1e-9)


@given(batches(), st.floats(1.0, 3.0))
def test_streams_that_come_later_count_what_is_there(
    batch: tuple[list[str], list[int], list[int], list[list[int]]], cap: float
) -> None:
    names, found, weights, hits = batch
    router = Router(cap)
    for round_number in range(1, 4):
        assign(router, names, found, weights, hits)
        total = round_number * sum(weights)
        assert sum(router.loads.values()) == total
        assert max(router.loads.values()) <= cap * total / len(names) + max(weights) * (1 + 1e-9)


@given(keys, st.integers(2, 7), st.data())
def test_a_node_that_leaves_moves_its_own_streams_only(
    found: list[int], count: int, data: st.DataObject
) -> None:
    names = NAMES[:count]
    gone = data.draw(st.sampled_from(names))
    before = assign(Router(FREE), names, found, [1] * len(found))
    left = [name for name in names if name != gone]
    after = assign(Router(FREE), left, found, [1] * len(found))
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone


@given(batches(), st.floats(1.0, 3.0))
def test_the_same_batch_goes_the_same_way(
    batch: tuple[list[str], list[int], list[int], list[list[int]]], cap: float
) -> None:
    assert assign(Router(cap), *batch) == assign(Router(cap), *batch)


def test_many_prefixes_spread_evenly() -> None:
    found = [prefix_key(np.array([n, n + 1], np.uint32), "", CHUNK) for n in range(7000)]
    chosen = assign(Router(FREE), NAMES, found, [1] * len(found))
    shares = [chosen.count(name) for name in NAMES]
    assert min(shares) > 850
    assert max(shares) < 1150


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
    st.sampled_from(["", "alice", "bob"]),
    st.sampled_from(["", "alice", "bob"]),
)
def test_keys_are_equal_where_the_first_chunk_and_the_salt_are(
    left: list[int], right: list[int], left_salt: str, right_salt: str
) -> None:
    keys_equal = prefix_key(np.array(left, np.uint32), left_salt, CHUNK) == prefix_key(
        np.array(right, np.uint32), right_salt, CHUNK
    )
    assert keys_equal == (left[:CHUNK] == right[:CHUNK] and left_salt == right_salt)
