"""Scores: the native scorers give the reference's bits, and the reference what the papers say."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_fast.edits import TOVA, KeyDiff, Knorm, LagKV, Policy, SnapKV, TensorView
from lmcache_fast.edits import scores as reference
from lmcache_fast.edits.view import KVView

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYERS = 2


class OnlyTorch(TensorView):
    """A tensor that the native scorers do not see."""

    @property
    def side(self) -> None:
        return None


def native_module() -> ModuleType:
    pytest.importorskip("lmcache_fast._native")
    from lmcache_fast._extension import native

    if native is None:
        pytest.skip("the native extension is turned off")
    return native


@pytest.fixture(params=["portable", "avx2", "avx512", "neon"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use one instruction set after the other."""
    native = native_module()
    if request.param not in native.kernels():
        pytest.skip("this processor has none")
    before = native.kernel_name()
    native.set_kernel(request.param)
    yield request.param
    native.set_kernel(before)


class Chunks(OnlyTorch):
    """A cache in chunks, as a server keeps it; rows in one piece, or keys beside values."""

    def __init__(self, kv: torch.Tensor, chunk: int, head_dim: int, packed: bool) -> None:
        super().__init__(kv)
        planes, layers, tokens, width = kv.shape
        assert tokens % chunk == 0
        parts = kv.unflatten(2, (tokens // chunk, chunk)).movedim(2, 0)
        size = kv.element_size()
        strides: dict[str, int] = {}
        if packed:  # [chunks, L, chunk, heads, planes, head_dim]
            parts = parts.unflatten(4, (-1, head_dim)).permute(0, 2, 3, 4, 1, 5)
            row = planes * width * size
            strides = {
                "row_pieces": width // head_dim,
                "piece_stride": planes * head_dim * size,
                "plane_stride": head_dim * size,
                "layer_stride": chunk * row,
                "token_stride": row,
            }
        else:
            strides = {
                "plane_stride": layers * chunk * width * size,
                "layer_stride": chunk * width * size,
            }
        self._chunks = parts.contiguous()
        chunk_bytes = planes * layers * chunk * width * size
        addresses = [self._chunks.data_ptr() + i * chunk_bytes for i in range(tokens // chunk)]
        self._side = native_module().ChunkedSide.from_addresses(
            np.array(addresses, np.uint64),
            self._chunks,
            tokens_per_chunk=chunk,
            planes=planes,
            layers=layers,
            row_bytes=width * size,
            **strides,
        )

    @property
    def side(self) -> Any:
        return self._side


def spoiled(kv: torch.Tensor, seed: int) -> torch.Tensor:
    """Put in what breaks arithmetic: repeats, zeros, huge and tiny numbers, NaN, infinities."""
    generator = torch.Generator().manual_seed(seed)
    kv = kv.clone()
    tokens = kv.shape[2]

    def somewhere() -> tuple[int, ...]:
        return tuple(int(torch.randint(n, (1,), generator=generator)) for n in kv.shape)

    for _ in range(tokens // 3):
        a, b = somewhere()[2], somewhere()[2]
        kv[:, :, a] = kv[:, :, b]
    limit = torch.finfo(kv.dtype)
    for value in (0.0, -0.0, limit.max, -limit.max, limit.tiny, limit.smallest_normal / 2):
        plane, layer, token, _ = somewhere()
        kv[plane, layer, token] = value
    for value in (np.nan, np.inf, -np.inf):
        kv[somewhere()] = value
    kv[:, :, :, int(somewhere()[3])] = 0.5  # a channel that does not vary
    return kv


def bits(scores: Any) -> npt.NDArray[np.int64]:
    array = np.asarray(scores).astype(np.float64) + 0.0  # no -0
    array[np.isnan(array)] = np.nan  # one NaN is as good as another
    return array.view(np.int64)


def make(name: str, reduce: Any, head_dim: int, lag: int, window: int) -> Policy:
    if name == "Knorm":
        return Knorm(0.5, reduce=reduce, head_dim=head_dim)
    if name == "KeyDiff":
        return KeyDiff(0.5, reduce=reduce, head_dim=head_dim)
    if name == "TOVA":
        return TOVA(0.5, reduce=reduce, head_dim=head_dim)
    if name == "SnapKV":
        return SnapKV(0.5, reduce=reduce, head_dim=head_dim, window_size=window, kernel_size=3)
    cross = name == "LagKV cross"
    return LagKV(0.5, reduce=reduce, head_dim=head_dim, lag_size=lag, cross_scoring=cross)


def check_equal(policy: Policy, reference_view: KVView, native_view: KVView) -> None:
    expected = policy.scores(reference_view)
    assert reference_view.side is None
    assert native_view.side is not None
    assert (bits(policy.scores(native_view)) == bits(expected)).all()
    tokens = range(reference_view.num_tokens)
    kept = [
        policy.plan(tokens, 8, view).positions.tolist() for view in (native_view, reference_view)
    ]
    assert kept[0] == kept[1]


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(["Knorm", "KeyDiff", "LagKV", "LagKV cross", "SnapKV", "TOVA"]),
    reduce=st.sampled_from(["mean", "max"]),
    dtype=st.sampled_from(DTYPES),
    chunks=st.integers(1, 4),
    chunk=st.sampled_from([1, 7, 16, 40]),
    heads=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([1, 8, 20, 32, 48]),
    group=st.sampled_from([1, 2, 3, 4]),
    lag=st.sampled_from([5, 16, 20]),
    packed=st.booleans(),
    adversarial=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_scores_are_the_references_bit_for_bit(
    kernel: str,
    name: str,
    reduce: str,
    dtype: torch.dtype,
    chunks: int,
    chunk: int,
    heads: int,
    head_dim: int,
    group: int,
    lag: int,
    packed: bool,
    adversarial: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tokens = chunks * chunk
    kv = (torch.randn(2, LAYERS, tokens, heads * head_dim) * 3).to(dtype)
    if adversarial:
        kv = spoiled(kv, seed)
    queries = torch.randn(1, LAYERS, tokens, group * heads * head_dim).to(dtype)
    policy = make(name, reduce, head_dim, lag, window=6)
    plain, native = OnlyTorch(kv), Chunks(kv, chunk, head_dim, packed)
    plain.queries = native.queries = TensorView(queries)
    check_equal(policy, plain, native)


@pytest.mark.parametrize("name", ["Knorm", "KeyDiff", "LagKV", "SnapKV"])
def test_threads_give_the_same_scores(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_FAST_NUM_THREADS", "3")
    torch.manual_seed(1)
    kv = torch.randn(2, 5, 400, 2 * 128).bfloat16()
    policy = make(name, "mean", 128, lag=128, window=40)  # more queries than are computed together
    plain, native = OnlyTorch(kv), Chunks(kv, 100, 128, packed=False)
    plain.queries = native.queries = TensorView(torch.randn(1, 5, 400, 4 * 128).bfloat16())
    check_equal(policy, plain, native)


@pytest.mark.parametrize("name", ["Knorm", "KeyDiff", "LagKV", "SnapKV", "TOVA"])
def test_a_strided_tensor_is_scored_where_it_is(name: str) -> None:
    native_module()
    whole = torch.randn(2, 3, 90, 40).half()
    kv = whole[:, 1:, 10:70, :32]
    policy = make(name, "mean", 16, lag=8, window=4)
    plain, native = OnlyTorch(kv), TensorView(kv)
    plain.queries = native.queries = TensorView(torch.randn(1, 2, 60, 32).half())
    check_equal(policy, plain, native)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_floating_point_mode_does_not_matter(threads: int) -> None:
    kv = torch.randn(2, 4, 60, 32) * torch.finfo(torch.float32).smallest_normal
    how: dict[str, Any] = {"head_dim": 16, "dtype": "float32", "reduce": "mean"}
    lag = {"num_sink": 0, "lag_size": 8, "cross_scoring": True, "num_threads": threads}
    side = TensorView(kv).side
    expected = native_module().lagkv_scores(side, **how, **lag)
    assert len(np.unique(expected)) > 30
    assert torch.set_flush_denormal(True)
    try:
        found = native_module().lagkv_scores(side, **how, **lag)
    finally:
        torch.set_flush_denormal(False)
    assert (bits(found) == bits(expected)).all()


@pytest.mark.parametrize("kernel_size", [59, 101, 2**31 - 1])
def test_a_kernel_may_be_wider_than_the_sequence(kernel_size: int) -> None:
    kv, queries = torch.randn(2, 1, 30, 16), torch.randn(1, 1, 30, 16)
    policy = SnapKV(0.5, head_dim=8, window_size=2, kernel_size=kernel_size)
    plain, native = OnlyTorch(kv), TensorView(kv)
    plain.queries = native.queries = TensorView(queries)
    check_equal(policy, plain, native)


def test_no_tokens_have_no_scores() -> None:
    nothing = torch.zeros(2, 3, 0, 16)
    for name in ("Knorm", "KeyDiff"):
        policy = make(name, "mean", 8, 5, 6)
        for view in (OnlyTorch(nothing), TensorView(nothing)):
            assert np.asarray(policy.scores(view)).shape == (3, 0)


def keys_of(tokens: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(5))


def test_knorm_is_minus_the_norm() -> None:
    keys = keys_of(50, 3, 24)
    expected = -keys.double().norm(dim=2)
    torch.testing.assert_close(reference.knorm(keys, "mean"), expected.mean(1))
    torch.testing.assert_close(reference.knorm(keys, "max"), expected.amax(1))


def test_keydiff_is_minus_the_cosine_to_the_mean_direction() -> None:
    keys = keys_of(50, 3, 24).double()
    anchor = torch.nn.functional.normalize(keys, dim=2).mean(0, keepdim=True)
    expected = -torch.nn.functional.cosine_similarity(keys, anchor, dim=2)
    torch.testing.assert_close(reference.keydiff(keys, "mean"), expected.mean(1))


@pytest.mark.parametrize("cross", [False, True])
def test_lagkv_ranks_each_partition_by_its_spread_against_the_next(cross: bool) -> None:
    lag, sink = 10, 4
    rows = [keys_of(57, 2, 24).double(), keys_of(57, 2, 24).flip(0).double()]
    expected = torch.zeros(57, 2, dtype=torch.float64)
    for begin in range(sink, 37, lag):
        both = []
        for each in rows:
            now, ahead = each[begin : begin + lag], each[begin + lag : begin + 2 * lag]
            low, high = ahead.amin(0), ahead.amax(0)
            both.append(((now - low) / (high - low)).std(2).softmax(0))
        combined = (both[0] + both[1]) / 2
        expected[begin : begin + lag] = (
            combined if cross else combined.argsort(0).argsort(0).double() / lag
        )
    scores = reference.lagkv(rows[0].float(), rows[1].float(), sink, lag, cross, "mean")
    torch.testing.assert_close(scores, expected.mean(1), rtol=1e-4, atol=1e-6)


def test_attention_is_the_windows_softmax_smoothed() -> None:
    heads, group, window, dim, tokens, kernel_size = 2, 3, 7, 24, 50, 5
    keys = keys_of(tokens, heads, dim)
    queries = torch.randn(heads * group, window, dim)
    logits = torch.einsum("qwd,tqd->qwt", queries, keys.repeat_interleave(group, 1)) / dim**0.5
    mask = torch.ones(window, tokens).triu(tokens - window + 1).bool()
    weights = logits.masked_fill(mask, -torch.inf).double().softmax(2)[..., :-window].mean(1)
    smooth = torch.nn.functional.avg_pool1d(weights, kernel_size, 1, kernel_size // 2)
    expected = smooth.unflatten(0, (heads, group)).mean(1)
    scores = reference.attention(keys, queries, kernel_size, "mean")
    torch.testing.assert_close(scores[:-window], expected.mean(0), rtol=1e-5, atol=1e-8)
    scores = reference.attention(keys, queries, kernel_size, "max")
    torch.testing.assert_close(scores[:-window], expected.amax(0), rtol=1e-5, atol=1e-8)
    assert (scores[-window:] == 0).all()


def test_the_exponential_is_accurate() -> None:
    x = -torch.logspace(-9, 1.93, 5000)
    torch.testing.assert_close(
        reference._exponential(x).double(), x.double().exp(), rtol=1.6e-7, atol=0
    )
    special = torch.tensor([0.0, -86.5, -3e38, -torch.inf])
    assert reference._exponential(special).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 3}, "head_dim is 3; expected whole heads"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"reduce": "sum"}, "reduce is 'sum'; expected mean or max"),
        ({"num_threads": -1}, "num_threads is -1"),
    ],
)
def test_native_scorers_refuse_what_makes_no_sense(change: dict[str, Any], message: str) -> None:
    side = TensorView(torch.zeros(2, 1, 4, 16)).side or native_module()
    arguments: dict[str, Any] = {"head_dim": 8, "dtype": "float32", "reduce": "mean"}
    with pytest.raises(ValueError, match=message):
        native_module().knorm_scores(side, **{**arguments, **change})


def test_native_attention_refuses_queries_of_another_shape() -> None:
    native = native_module()
    side = TensorView(torch.zeros(2, 1, 4, 16)).side
    how: dict[str, Any] = {"head_dim": 8, "dtype": "float32", "reduce": "mean"}
    for shape, kernel_size in (
        ((2, 2, 1, 8), 1),
        ((1, 3, 1, 8), 1),
        ((1, 2, 1, 8), 2),
        ((1, 2, 1, 8), 2**31 + 1),
    ):
        with pytest.raises(ValueError, match=r"expected|must be"):
            native.attention_scores(
                side, np.zeros(shape, np.float32), kernel_size=kernel_size, **how
            )
