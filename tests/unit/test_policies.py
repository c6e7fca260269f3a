"""Policies: which tokens stay, as plain functions."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_fast import edits
from lmcache_fast.edits import (
    TOVA,
    KeyDiff,
    Knorm,
    KVView,
    LagKV,
    Policy,
    Random,
    Rope,
    SnapKV,
    StreamingLLM,
    TensorView,
    chain,
    from_scores,
    keep,
    with_queries,
)
from lmcache_fast.errors import InvalidInputError

LAYERS, HEADS, HEAD_DIM, CHUNK = 2, 2, 8, 8
ROPE = Rope(HEAD_DIM)
ALL = [
    StreamingLLM(0.5, chunk_size=CHUNK),
    Random(0.5, chunk_size=CHUNK),
    Knorm(0.5, chunk_size=CHUNK, head_dim=HEAD_DIM),
    KeyDiff(0.5, chunk_size=CHUNK, head_dim=HEAD_DIM),
    LagKV(0.5, chunk_size=CHUNK, head_dim=HEAD_DIM, lag_size=4),
    SnapKV(0.5, chunk_size=CHUNK, head_dim=HEAD_DIM, window_size=4),
    TOVA(0.5, chunk_size=CHUNK, head_dim=HEAD_DIM),
]


def random_kv(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, tokens, HEADS * HEAD_DIM, generator=generator).bfloat16()


def random_queries(tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(1, LAYERS, tokens, 2 * HEADS * HEAD_DIM, generator=generator).bfloat16()


def scored(scores: Any, ratio: float, **options: Any) -> list[int]:
    """Positions that the policy of these scores keeps."""
    tokens = torch.as_tensor(scores).shape[-1]
    policy = from_scores(lambda view: scores, ratio, **{"n_sink": 0, **options})
    return policy(torch.zeros(2, 1, tokens, 2), list(range(tokens)))[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 3])
def test_the_ratio_is_the_fraction_removed(policy: Policy, tokens: int) -> None:
    kv, short = policy(random_kv(tokens), list(range(tokens)), queries=random_queries(tokens))
    protected = {*range(min(4, tokens)), *range(tokens // CHUNK * CHUNK, tokens)}
    assert len(short) == max(1, int(tokens * 0.5), len(protected))
    assert short == sorted(short)
    assert protected <= set(short)
    assert torch.equal(kv, random_kv(tokens)[:, :, short])


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_a_ratio_of_0_keeps_everything_and_looks_at_nothing(policy: Policy) -> None:
    kv = torch.zeros(2, LAYERS, 16, 30, dtype=torch.float64)  # which the policies would refuse
    for all_of_it in (type(policy)(), type(policy)(compression_ratio=0.0)):
        assert all_of_it(kv, range(16))[0] is not None
        assert all_of_it(kv, range(16))[1] == list(range(16))


@settings(deadline=None, max_examples=60)
@given(
    scores=st.lists(
        st.floats(allow_nan=True) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=40
    ),
    ratio=st.floats(0, 1, exclude_max=True),
    n_sink=st.integers(0, 5),
    chunk=st.integers(1, 9),
)
def test_the_highest_scores_stay_and_of_equals_the_first(
    scores: list[float], ratio: float, n_sink: int, chunk: int
) -> None:
    tokens = len(scores)
    kept = scored(np.array(scores), ratio, n_sink=n_sink, chunk_size=chunk)
    count = max(1, int(tokens * (1 - ratio) + 1e-9))
    if count == tokens:
        assert kept == list(range(tokens))
        return
    sure = {*range(min(n_sink, tokens)), *range(tokens // chunk * chunk, tokens)}
    numbers = [-np.inf if np.isnan(score) else score for score in scores]
    others = sorted((-numbers[i], i) for i in range(tokens) if i not in sure)
    expected = sure | {i for _, i in others[: max(0, count - len(sure))]}
    assert kept == sorted(expected)


def test_fractions_that_floats_miss_by_a_bit_are_meant_as_written() -> None:
    assert len(scored(np.arange(10.0), 0.9, chunk_size=1)) == 1
    assert len(scored(np.arange(100.0), 0.71, chunk_size=1)) == 29


def test_scores_of_layers_and_heads_become_one_as_reduce_says() -> None:
    scores = torch.tensor([[[0.0, 5.0, 2.0], [0.0, 0.0, 2.0]], [[0.0, 0.0, 2.0], [1.0, 0.0, 2.0]]])
    assert scored(scores, 0.6, chunk_size=1, reduce="mean") == [2]
    assert scored(scores, 0.6, chunk_size=1, reduce="max") == [1]
    assert scored(scores.bfloat16(), 0.6, chunk_size=1) == [2]
    assert scored(np.array([1, 3, 2]), 0.6, chunk_size=1) == [1]
    not_a_number = scores.clone()
    not_a_number[0, 0, 2] = torch.nan
    assert scored(not_a_number, 0.6, chunk_size=1) == [1]


@pytest.mark.parametrize("scores", [torch.zeros(4), torch.zeros(3, 1), torch.tensor(1.0)])
def test_scores_of_another_shape_are_refused(scores: torch.Tensor) -> None:
    policy = from_scores(lambda view: scores, 0.5, chunk_size=1)
    with pytest.raises(InvalidInputError, match=r"from_scores: scores have shape .*expected \[9\]"):
        policy(torch.zeros(2, 1, 9, 2), range(9))


def test_streaming_llm_keeps_the_sinks_and_the_last() -> None:
    policy = StreamingLLM(0.5, n_sink=2, chunk_size=CHUNK)
    assert policy.plan(range(16)).positions.tolist() == [0, 1, 10, 11, 12, 13, 14, 15]
    eight_bit = torch.zeros(2, 1, 16, 4, dtype=torch.uint8)
    assert policy(eight_bit, range(16))[0].shape[2] == 8


def test_random_keeps_the_same_for_the_same_seed() -> None:
    kept = [Random(0.5, seed=seed).plan(range(512)).positions.tolist() for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2]
    assert len(kept[0]) == 256


def test_knorm_keeps_the_shortest_keys() -> None:
    kv = torch.ones(2, 1, 16, 8) * torch.tensor([5.0, 1.0] * 8).reshape(1, 1, 16, 1)
    policy = Knorm(0.5, n_sink=0, chunk_size=CHUNK, head_dim=4)
    assert policy(kv, list(range(16)))[1] == list(range(1, 16, 2))


def test_keydiff_keeps_the_keys_that_differ() -> None:
    kv = torch.ones(2, 1, 16, 8)
    kv[0, 0, [3, 7, 12]] = torch.tensor([1.0, -1.0] * 4)
    policy = KeyDiff(0.75, n_sink=1, chunk_size=CHUNK, head_dim=4)
    assert policy(kv, list(range(16)))[1] == [0, 3, 7, 12]


def test_lagkv_keeps_the_last_partition_and_the_latest_of_a_short_sequence() -> None:
    policy = LagKV(0.5, n_sink=0, lag_size=4, chunk_size=CHUNK, head_dim=HEAD_DIM)
    assert set(policy(random_kv(16), list(range(16)))[1]) >= {12, 13, 14, 15}
    long_lag = LagKV(0.5, n_sink=1, lag_size=100, chunk_size=CHUNK, head_dim=HEAD_DIM)
    assert long_lag(random_kv(16), list(range(16)))[1] == [0, 9, 10, 11, 12, 13, 14, 15]


def attended(where: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    kv, queries = torch.zeros(2, 1, 16, 8), torch.zeros(1, 1, 16, 16)
    kv[0, 0, where] = 3.0
    queries[0, 0, -1] = 3.0
    return kv, queries


def test_tova_keeps_what_the_last_token_attends_to() -> None:
    kv, queries = attended([5, 9])
    policy = TOVA(0.75, n_sink=1, chunk_size=CHUNK, head_dim=4)
    assert policy(kv, list(range(16)), queries=queries)[1] == [0, 5, 9, 15]


def test_snapkv_keeps_the_window_and_the_neighbours_of_what_it_attends_to() -> None:
    kv, queries = attended([6])
    policy = SnapKV(0.625, n_sink=1, chunk_size=CHUNK, head_dim=4, window_size=2, kernel_size=3)
    assert policy(kv, list(range(16)), queries=queries)[1] == [0, 5, 6, 7, 14, 15]
    only_a_window = SnapKV(0.5, n_sink=0, chunk_size=CHUNK, head_dim=4, window_size=99)
    assert only_a_window(kv, list(range(16)), queries=queries)[1] == list(range(8, 16))


class Kind(enum.Enum):
    KV = "kv"
    QUERY = "query"


def test_queries_come_by_name_by_kind_or_with_the_edit() -> None:
    kv, queries = random_kv(24), random_queries(30)
    policy = SnapKV(0.5, rope=ROPE, chunk_size=CHUNK, window_size=4)
    tokens = list(range(24))
    expected = policy(kv, tokens, queries=queries)
    for kept in (
        policy({Kind.KV: kv, Kind.QUERY: queries}, tokens),
        with_queries(policy, queries)(kv, tokens),
        with_queries(policy, TensorView(queries))(kv, tokens),
    ):
        assert kept[1] == expected[1]
        assert torch.equal(kept[0], expected[0])


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (None, "there are no queries"),
        (random_queries(23), "23 tokens"),
        (random_queries(24)[:, :1], "1 layers"),
        (random_queries(24)[..., :24], "rows of 24"),
        (random_queries(24)[0], "expected a tensor"),
        (random_queries(24).to(torch.complex64), "dtype complex64; expected floating-point"),
        (random_kv(24), "expected a tensor"),
    ],
)
@pytest.mark.parametrize("policy", [SnapKV, TOVA])
def test_queries_that_do_not_fit_are_refused(policy: Any, queries: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        policy(0.5, rope=ROPE, chunk_size=CHUNK)(random_kv(24), range(24), queries=queries)


@pytest.mark.parametrize("kv", [random_kv(24)[:, :0], random_kv(24)[..., :0]])
@pytest.mark.parametrize("policy", [Knorm, KeyDiff, SnapKV, TOVA])
def test_a_cache_of_nothing_is_refused(policy: Any, kv: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="expected at least one layer and one element"):
        policy(0.5, head_dim=4, chunk_size=CHUNK).scores(TensorView(kv))


def test_kept_keys_are_rotated_as_by_any_edit() -> None:
    kv, tokens = random_kv(32), list(range(32))
    edited, kept = Knorm(0.5, rope=ROPE, chunk_size=CHUNK)(kv, tokens)
    expected, _ = keep(kept, ROPE)(kv, tokens)
    assert torch.equal(edited, expected)


def test_in_a_chain_a_policy_sees_what_is_left() -> None:
    kv, queries = random_kv(48), random_queries(48)
    half = keep(range(0, 48, 2), ROPE)
    for policy in (
        Knorm(0.5, rope=ROPE, chunk_size=CHUNK),
        LagKV(0.5, rope=ROPE, chunk_size=CHUNK, lag_size=4),
        SnapKV(0.5, rope=ROPE, chunk_size=CHUNK, window_size=4),
    ):
        _, kept = with_queries(chain(half, policy), queries)(kv, list(range(48)))
        _, expected = policy(kv[:, :, ::2], range(0, 48, 2), queries=queries[:, :, ::2])
        assert kept == expected
    with pytest.raises(InvalidInputError, match="argument 0 has queries of its own"):
        chain(with_queries(policy, queries), half)


def test_a_policy_of_ones_own_sees_keys_and_values_layer_by_layer() -> None:
    def longest_values(view: KVView) -> torch.Tensor:
        assert (view.planes, view.num_layers, view.num_tokens) == (2, LAYERS, 32)
        assert view.keys(0).shape == (32, HEADS * HEAD_DIM)
        return torch.stack([view.values(i).float().norm(dim=1) for i in range(view.num_layers)])

    kv = random_kv(32)
    _, kept = from_scores(longest_values, 0.5, n_sink=0, chunk_size=CHUNK)(kv, list(range(32)))
    norms = kv[1].float().norm(dim=2).mean(0)
    assert kept == sorted(norms.topk(16).indices.tolist())
    with pytest.raises(InvalidInputError, match="1 plane"):
        from_scores(lambda view: view.values(0), 0.5, chunk_size=1)(kv[:1], range(32))


def test_one_row_for_all_heads_is_one_key() -> None:
    kv = random_kv(32)[:1]
    assert len(Knorm(0.5, chunk_size=CHUNK)(kv, range(32))[1]) == 16
    for policy in (LagKV(0.5, chunk_size=CHUNK), SnapKV(0.5, chunk_size=CHUNK)):
        with pytest.raises(InvalidInputError, match="1 plane; expected keys and values apart"):
            policy(kv, range(32), queries=random_queries(32))


@pytest.mark.parametrize(
    ("policy", "kv", "message"),
    [
        (Knorm(0.5, chunk_size=1), random_kv(9), "unknown heads; expected head_dim or rope"),
        (Knorm(0.5, chunk_size=1, head_dim=5), random_kv(9), "head_dim is 5"),
        (Knorm(0.5, chunk_size=1, head_dim=8), random_kv(9).double(), "dtype float64"),
    ],
)
def test_caches_that_cannot_be_scored_are_refused(policy: Policy, kv: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        policy(kv, range(9))


def test_a_policy_that_needs_the_cache_does_not_plan_without_one() -> None:
    with pytest.raises(InvalidInputError, match=r"edits.Knorm: looks at the cache"):
        Knorm(0.5, head_dim=8).plan(range(9))
    with pytest.raises(InvalidInputError, match="has 8 tokens; expected 9"):
        Knorm(0.5, head_dim=8).plan(range(9), view=TensorView(random_kv(8)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Knorm(1.0), "compression_ratio is 1.0; expected 0 to below 1"),
        (lambda: Knorm(-0.1), "compression_ratio is -0.1"),
        (lambda: Knorm("half"), "compression_ratio is 'half'"),  # type: ignore[arg-type]
        (lambda: StreamingLLM(0.5, n_sink=-1), "StreamingLLM: n_sink is -1"),
        (lambda: KeyDiff(0.5, chunk_size=0), "chunk_size is 0"),
        (lambda: KeyDiff(0.5, reduce="sum"), "reduce is 'sum'"),  # type: ignore[arg-type]
        (lambda: KeyDiff(0.5, head_dim=0), "head_dim is 0"),
        (lambda: LagKV(0.5, lag_size=0), "lag_size is 0"),
        (lambda: SnapKV(0.5, window_size=0), "window_size is 0"),
        (lambda: SnapKV(0.5, kernel_size=4), "kernel_size is 4; expected an odd number"),
        (lambda: SnapKV(0.5, kernel_size=2**31 + 1), "an odd number below"),
        (lambda: Random(0.5, seed=-1), "seed is -1"),
        (lambda: with_queries(Knorm(0.5), None), "are NoneType"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_policies_can_be_compared_and_pickled() -> None:
    for policy in ALL:
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert policy.compression_ratio == 0.5
    assert edits.Knorm(0.5) != edits.Knorm(0.4)
