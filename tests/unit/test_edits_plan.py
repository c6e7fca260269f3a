"""Edits: what is kept, and that plain function, compiled plan and native kernel agree."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_fast.edits import Edit, Rope, chain, drop_middle_chunks, keep
from lmcache_fast.edits.plan import CompiledEdit, compile_plan
from lmcache_fast.errors import EditError, InvalidInputError
from lmcache_fast.layout import KVLayout

HEADS, HEAD_DIM, LAYERS, CHUNK = 2, 16, 2, 8
ROPE = Rope(HEAD_DIM)
LENGTH_DEPENDENT = Rope(
    HEAD_DIM,
    rotary_dim=8,
    interleaved=True,
    scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 20},
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_kv(num_tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LAYERS, num_tokens, HEADS * HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def layout_of(kv: torch.Tensor) -> KVLayout:
    return KVLayout(LAYERS, HEADS, HEAD_DIM, kv.dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def native_module() -> ModuleType:
    pytest.importorskip("lmcache_fast._native")
    from lmcache_fast._extension import native

    if native is None:
        pytest.skip("the native extension is turned off")
    return native


def run_reference(kv: torch.Tensor, compiled: CompiledEdit, chunks: list[int]) -> torch.Tensor:
    """Execute a compiled plan for some target chunks in numpy, one token at a time."""
    runs, rows = compiled.cut(chunks, CHUNK)
    out = torch.zeros(2, LAYERS, len(chunks) * CHUNK, HEADS * HEAD_DIM, dtype=kv.dtype)
    for (source, target, count), first_row in zip(runs.tolist(), rows.tolist(), strict=True):
        for i in range(count):
            out[:, :, target + i] = kv[:, :, source + i]
            if first_row < 0:
                continue
            rope = compiled.rope
            assert rope is not None and rope.rotary_dim is not None
            row = first_row + i * compiled.row_step
            half = rope.rotary_dim // 2
            first, second = slice(0, half), slice(half, 2 * half)
            if rope.interleaved:
                first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
            x = kv[0, :, source + i].float().numpy().reshape(LAYERS, -1, rope.head_dim)
            y = x.copy()
            c, s = compiled.cos[row], compiled.sin[row]
            y[..., first] = x[..., first] * c - x[..., second] * s
            y[..., second] = x[..., second] * c + x[..., first] * s
            out[0, :, target + i] = torch.from_numpy(y).reshape(LAYERS, -1).to(kv.dtype)
    return out


def run_native(kv: torch.Tensor, compiled: CompiledEdit, chunks: list[int]) -> torch.Tensor:
    """Execute a compiled plan for some target chunks with the native copy engine."""
    native = native_module()
    runs, rotation = compiled.for_chunks(chunks, CHUNK)
    out = torch.zeros(2, LAYERS, len(chunks) * CHUNK, kv.shape[3], dtype=kv.dtype)
    if not chunks:
        return out

    def side(tensor: torch.Tensor) -> Any:
        row = tensor.shape[3] * tensor.dtype.itemsize
        return native.ChunkedSide.from_addresses(
            np.array([tensor.data_ptr()], np.uint64),
            tensor,
            tokens_per_chunk=tensor.shape[2],
            planes=2,
            layers=LAYERS,
            row_bytes=row,
            plane_stride=LAYERS * tensor.shape[2] * row,
            layer_stride=tensor.shape[2] * row,
        )

    native.copy_runs(side(kv), side(out), runs, rotation)
    return out


@pytest.mark.parametrize(
    "selection",
    [
        [1, 2, 5],
        (1, 2, 5),
        np.array([1, 2, 5], np.int32),
        np.array([1, 2, 5], np.uint64),
        torch.tensor([1, 2, 5]),
        [False, True, True, False, False, True],
        torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool),
        lambda num_tokens, tokens: [i for i in range(num_tokens) if tokens[i] in (11, 12, 15)],
        lambda num_tokens, tokens: np.isin(tokens, (11, 12, 15)),
    ],
)
def test_keep_takes_positions_masks_and_functions(selection: Any) -> None:
    kv = random_kv(6)
    edited, tokens = keep(selection)(kv, [10, 11, 12, 13, 14, 15])
    assert tokens == [11, 12, 15]
    assert same_bytes(edited, kv[:, :, [1, 2, 5]])


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ([2, 1], r"unsorted: 1 at index 1 comes after 2"),
        ([1, 1], r"doubled: 1 at index 1"),
        ([0, 6], r"selection\[1\] is 6, out of range; expected 0 to 5"),
        ([-1, 2], r"selection\[0\] is -1, out of range"),
        ([True] * 5, "mask has 5 values; expected 6"),
        ([0.5], "dtype float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([[0], [1, 2]], "no flat list"),
        ("abc", "expected a flat list"),
        (lambda n, t: [n], r"selection\[0\] is 6"),
    ],
)
def test_a_wrong_selection_says_what_is_wrong(selection: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"edits.keep: .*{message}"):
        keep(selection)(random_kv(6), list(range(6)))


def test_tokens_come_back_as_the_kind_they_came_in() -> None:
    kv = random_kv(4)
    assert keep([1])(kv, (7, 8, 9, 10))[1] == [8]
    assert keep([1])(kv, np.array([7, 8, 9, 10], np.uint32))[1].dtype == np.uint32
    assert torch.equal(keep([1])(kv, torch.tensor([7, 8, 9, 10]))[1], torch.tensor([8]))


def test_an_edit_takes_the_kv_of_the_second_generations_dictionary() -> None:
    import enum

    class Kind(enum.Enum):
        KV = "kv"
        QUERY = "query"

    kv = random_kv(4)
    edited, _ = keep([1])({Kind.QUERY: kv[:1], Kind.KV: kv}, [1, 2, 3, 4])
    assert same_bytes(edited, kv[:, :, [1]])
    with pytest.raises(InvalidInputError, match="expected one called KV"):
        keep([1])({Kind.QUERY: kv}, [1, 2, 3, 4])


@pytest.mark.parametrize("kv", [random_kv(5), random_kv(6)[0], None])
def test_an_edit_refuses_a_cache_that_does_not_fit_the_tokens(kv: Any) -> None:
    with pytest.raises(InvalidInputError, match="edit: kv"):
        keep([1])(kv, list(range(6)))


@pytest.mark.parametrize(
    ("num_tokens", "fraction", "kept"),
    [
        (16 * CHUNK, 0.5, [0, 1, 2, 3, 12, 13, 14, 15]),
        (5 * CHUNK, 0.5, [0, 1, 4]),
        (5 * CHUNK, 0.6, [0, 4]),
        (5 * CHUNK, 1, [0, 4]),
        (5 * CHUNK, 0, [0, 1, 2, 3, 4]),
        (2 * CHUNK, 0.5, [0, 1]),
        (CHUNK, 1, [0]),
        (0, 0.5, []),
    ],
)
def test_the_middle_chunks_are_dropped_and_the_first_and_last_stay(
    num_tokens: int, fraction: float, kept: list[int]
) -> None:
    expected = [c * CHUNK + i for c in kept for i in range(CHUNK)]
    for rest in (0, 1, CHUNK - 1):
        plan = drop_middle_chunks(fraction).plan(range(num_tokens + rest), chunk_size=CHUNK)
        assert plan.positions.tolist() == expected + list(range(num_tokens, num_tokens + rest))


def test_an_explicit_chunk_size_comes_before_the_servers_and_256_is_the_last_resort() -> None:
    tokens = range(1024)
    assert len(drop_middle_chunks(0.5).plan(tokens).positions) == 512
    assert len(drop_middle_chunks(0.5).plan(tokens, chunk_size=512).positions) == 1024
    assert len(drop_middle_chunks(0.5, chunk_size=16).plan(tokens, 512).positions) == 512


@pytest.mark.parametrize("arguments", [{"fraction": -0.1}, {"fraction": 1.1}, {"chunk_size": 0}])
def test_drop_middle_chunks_refuses_wrong_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"edits.drop_middle_chunks"):
        drop_middle_chunks(**arguments)


@pytest.mark.parametrize("rope", [None, ROPE, LENGTH_DEPENDENT])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropping_nothing_changes_no_bit(rope: Rope | None, dtype: torch.dtype) -> None:
    kv = random_kv(3 * CHUNK, dtype)
    edit = keep(lambda num_tokens, tokens: range(num_tokens), rope=rope)
    edited, tokens = edit(kv, list(range(3 * CHUNK)))
    assert same_bytes(edited, kv)
    assert tokens == list(range(3 * CHUNK))
    compiled = compile_plan(edit.plan(tokens), layout_of(kv), CHUNK)
    assert compiled.num_unchanged_chunks == 3
    assert (compiled.run_rows < 0).all()


def test_an_edit_that_keeps_nothing_leaves_nothing() -> None:
    edited, tokens = keep([], rope=ROPE)(random_kv(5), list(range(5)))
    assert edited.shape == (2, LAYERS, 0, HEADS * HEAD_DIM)
    assert tokens == []
    compiled = compile_plan(keep([]).plan(range(5)), layout_of(edited), CHUNK)
    assert compiled.runs.shape == (0, 3)
    assert compiled.num_unchanged_chunks == 0


@pytest.mark.parametrize(
    ("dropped", "unchanged"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 1), (CHUNK + 1, 1), (23, 2)]
)
def test_chunks_before_the_first_dropped_token_are_unchanged(dropped: int, unchanged: int) -> None:
    kv = random_kv(3 * CHUNK)
    positions = [i for i in range(3 * CHUNK) if i != dropped]
    compiled = compile_plan(keep(positions, ROPE).plan(range(24)), layout_of(kv), CHUNK)
    assert compiled.num_unchanged_chunks == unchanged
    edited, _ = keep(positions, ROPE)(kv, list(range(24)))
    head = unchanged * CHUNK
    assert same_bytes(edited[:, :, :head], kv[:, :, :head])


def test_no_chunk_is_unchanged_where_the_frequencies_change_with_the_length() -> None:
    plan = keep(range(16), LENGTH_DEPENDENT).plan(range(24))
    compiled = compile_plan(plan, layout_of(random_kv(1)), CHUNK)
    assert compiled.num_unchanged_chunks == 0
    assert compiled.row_step == 1
    assert len(compiled.cos) == 16


def test_a_chain_rotates_and_rounds_once() -> None:
    kv, tokens = random_kv(6 * CHUNK), list(range(6 * CHUNK))
    thin_out = keep(lambda num_tokens, tokens: range(0, num_tokens, 2), rope=ROPE)
    both = chain(drop_middle_chunks(0.5, ROPE, chunk_size=CHUNK), thin_out)
    positions = both.plan(tokens).positions.tolist()
    assert positions == [*range(0, 16, 2), *range(40, 48, 2)]
    edited, kept = both(kv, tokens)
    directly, _ = keep(positions, ROPE)(kv, tokens)
    assert kept == positions
    assert same_bytes(edited, directly)


def test_a_chain_refuses_edits_that_one_rotation_cannot_do() -> None:
    with pytest.raises(InvalidInputError, match="no edits"):
        chain()
    with pytest.raises(InvalidInputError, match="argument 1 is function"):
        chain(keep([0]), lambda kv, tokens: (kv, tokens))  # type: ignore[arg-type]
    for other in (None, Rope(HEAD_DIM, 1e6)):
        with pytest.raises(InvalidInputError, match=r"argument 1 has rope .*expected the same"):
            chain(keep([0], ROPE), keep([0], other))


def test_edits_can_be_pickled() -> None:
    edit = chain(drop_middle_chunks(0.5, ROPE), keep([0, 1], ROPE))
    again: Edit = pickle.loads(pickle.dumps(edit))
    assert again.plan(range(2048)).positions.tolist() == [0, 1]
    assert again.rope == edit.rope


def test_a_layout_with_other_heads_than_the_ropes_is_refused() -> None:
    plan = keep([0], Rope(32)).plan(range(5))
    with pytest.raises(InvalidInputError, match="head_dim is 32; expected the layout's 16"):
        compile_plan(plan, KVLayout(LAYERS, 4, 16, torch.bfloat16), CHUNK)
    with pytest.raises(InvalidInputError, match="1 plane"):
        compile_plan(plan, KVLayout(LAYERS, 1, 576, torch.bfloat16, planes=1), CHUNK)


ropes = st.sampled_from([None, ROPE, LENGTH_DEPENDENT, Rope(8, 100.0, interleaved=True)])
masks = st.lists(st.booleans(), min_size=1, max_size=6 * CHUNK)
dtypes = st.sampled_from(DTYPES)


def check_against_the_function(
    run: Callable[[torch.Tensor, CompiledEdit, list[int]], torch.Tensor],
    mask: list[bool],
    rope: Rope | None,
    dtype: torch.dtype,
    chosen: set[int],
) -> None:
    """Compare the edit as a function with ``run`` executing its compiled plan, bit for bit."""
    kv = random_kv(len(mask), dtype, seed=len(mask))
    edit = keep(mask, rope)
    edited, kept = edit(kv, list(range(len(mask))))
    head_dim = rope.head_dim if rope else HEAD_DIM
    layout = KVLayout(LAYERS, HEADS * HEAD_DIM // head_dim, head_dim, dtype)
    compiled = compile_plan(edit.plan(range(len(mask))), layout, CHUNK)

    assert compiled.new_positions.tolist() == kept == np.flatnonzero(mask).tolist()
    chunks = sorted(c for c in chosen if (c + 1) * CHUNK <= len(kept))
    wanted = [edited[:, :, c * CHUNK : (c + 1) * CHUNK] for c in chunks]
    assert same_bytes(run(kv, compiled, chunks), torch.cat([kv[:, :, :0], *wanted], dim=2))
    head = compiled.num_unchanged_chunks * CHUNK
    assert same_bytes(edited[:, :, :head], kv[:, :, :head])


@settings(deadline=None, max_examples=60)
@given(mask=masks, rope=ropes, dtype=dtypes, chosen=st.sets(st.integers(0, 5)))
def test_the_compiled_plan_gives_the_functions_bytes(
    mask: list[bool], rope: Rope | None, dtype: torch.dtype, chosen: set[int]
) -> None:
    check_against_the_function(run_reference, mask, rope, dtype, chosen)


@settings(deadline=None, max_examples=60)
@given(mask=masks, rope=ropes, dtype=dtypes, chosen=st.sets(st.integers(0, 5)))
def test_the_native_kernel_gives_the_functions_bytes(
    mask: list[bool], rope: Rope | None, dtype: torch.dtype, chosen: set[int]
) -> None:
    native_module()
    check_against_the_function(run_native, mask, rope, dtype, chosen)


def random_bits(num_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache of all kinds of finite numbers: huge, tiny, subnormal, zeros of both signs."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limit = 2 ** (8 * dtype.itemsize - 1)
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(
        -limit, limit, (2, LAYERS, num_tokens, width), generator=generator, dtype=torch.int64
    )
    kv = bits.to(integers).view(dtype)
    # The largest numbers would overflow on the way, and what comes of infinity is no key.
    return torch.where(kv.abs() < torch.finfo(dtype).max / 4, kv, 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved"),
    [(128, 128, False), (128, 64, False), (80, 32, False), (64, 64, True), (48, 6, True)],
)
def test_every_native_kernel_gives_the_functions_bytes_for_any_finite_keys(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    native = native_module()
    rope = Rope(head_dim, 1e6, rotary_dim, interleaved)
    kv = random_bits(5 * CHUNK, 2 * head_dim, dtype)
    edit = keep([*range(3), *range(5, 20), *range(22, 40, 2)], rope)
    edited, kept = edit(kv, list(range(5 * CHUNK)))
    layout = KVLayout(LAYERS, 2, head_dim, dtype)
    compiled = compile_plan(edit.plan(range(5 * CHUNK)), layout, CHUNK)
    chunks = list(range(len(kept) // CHUNK))
    chosen = native.kernel_name()
    try:
        for kernel in native.kernels():
            native.set_kernel(kernel)
            out = run_native(kv, compiled, chunks)
            assert same_bytes(out, edited[:, :, : len(chunks) * CHUNK]), kernel
    finally:
        native.set_kernel(chosen)


def test_an_opaque_layout_takes_whole_chunks_only() -> None:
    layout = KVLayout.opaque(1, 8, "bfloat16")
    tokens = list(range(16))
    whole = compile_plan(keep([*range(4), *range(8, 12), 13]).plan(tokens), layout, 4)
    assert whole.runs.tolist() == [[0, 0, 4], [8, 4, 4], [13, 8, 1]]
    for positions in ([*range(4), *range(9, 13)], [0, 1, 2, 4], list(range(1, 5))):
        with pytest.raises(EditError, match=r"tokens \d+ to \d+; the layout is opaque"):
            compile_plan(keep(positions).plan(tokens), layout, 4)
    with pytest.raises(EditError, match="cannot be rotated"):
        compile_plan(keep([0], rope=Rope(8)).plan(tokens), layout, 4)
