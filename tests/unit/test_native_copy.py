"""The run-copy engine moves exactly the rows of a plan, whatever the kernel and the strides."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("lmcache_fast._native")

PLANES, LAYERS = 2, 3
Rows = npt.NDArray[np.uint8]


def tensor(tokens: int, row_bytes: int, fill: int | None = None) -> Rows:
    shape = (PLANES, LAYERS, tokens, row_bytes)
    if fill is not None:
        return np.full(shape, fill, np.uint8)
    return np.random.default_rng(tokens).integers(0, 256, shape, np.uint8)


def one_chunk(rows: Rows, writable: bool = True) -> Any:
    return native.ChunkedSide.from_addresses(
        [rows.ctypes.data],
        rows,
        tokens_per_chunk=rows.shape[2],
        planes=PLANES,
        layers=LAYERS,
        row_bytes=rows.shape[3],
        plane_stride=rows.strides[0],
        layer_stride=rows.strides[1],
        token_stride=rows.strides[2],
        writable=writable,
    )


def chunked(rows: Rows, chunk: int) -> Any:
    """The rows in chunks of their own, which the side keeps alive."""
    tokens = rows.shape[2]
    chunks = [np.ascontiguousarray(rows[:, :, i : i + chunk]) for i in range(0, tokens, chunk)]
    return native.ChunkedSide.from_addresses(
        [c.ctypes.data for c in chunks],
        chunks,
        tokens_per_chunk=chunk,
        planes=PLANES,
        layers=LAYERS,
        row_bytes=rows.shape[3],
        plane_stride=chunks[0].strides[0],
        layer_stride=chunks[0].strides[1],
    )


@pytest.fixture(params=native.kernels())
def kernel(request: pytest.FixtureRequest) -> Any:
    before = native.kernel_name()
    native.set_kernel(request.param)
    yield request.param
    native.set_kernel(before)


@settings(deadline=None, max_examples=60)
@given(
    keep=st.lists(st.booleans(), min_size=64, max_size=64),
    chunk=st.sampled_from([1, 8, 64]),
    row_bytes=st.sampled_from([1, 64, 100, 4096, 5000]),
    threads=st.integers(0, 3),
)
def test_kept_rows_arrive_in_order_and_nothing_else_is_written(
    keep: list[bool], chunk: int, row_bytes: int, threads: int
) -> None:
    source = tensor(64, row_bytes)
    target = tensor(66, row_bytes, fill=7)
    kept = np.flatnonzero(keep)
    runs = np.stack((kept, np.arange(kept.size), np.ones_like(kept)), axis=1)
    native.copy_runs(chunked(source, chunk), one_chunk(target), runs, None, threads)
    np.testing.assert_array_equal(target[:, :, : kept.size], source[:, :, kept])
    assert (target[:, :, kept.size :] == 7).all()


def test_large_copies_stream_and_small_ones_do_not_with_the_same_result(kernel: str) -> None:
    for tokens in (256, 1024):  # 3 MiB and 12 MiB: on both sides of the streaming threshold
        source = tensor(tokens, 2048)
        for offset in (0, 8):  # as numpy aligns it, and by no line of the cache
            memory = np.zeros(source.size + 128, np.uint8)
            target = memory[offset : offset + source.size].reshape(source.shape)
            native.copy_runs(chunked(source, 256), one_chunk(target), [[0, 0, tokens]])
            np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([0, 1, 8], "run 0 is 8 tokens from token 1 of the target, which has 8"),
        ([1, 0, 8], "of the source, which has 8"),
        ([-1, 0, 1], "from token -1 of the source"),
        ([0, 0, -1], "is -1 tokens"),
    ],
)
def test_a_run_out_of_bounds_names_its_numbers(run: list[int], message: str) -> None:
    source, target = tensor(8, 16), tensor(8, 16, fill=0)
    with pytest.raises(ValueError, match=message):
        native.copy_runs(one_chunk(source), one_chunk(target), [[0, 0, 8], run][1:])
    assert not target.any()


def test_bad_arguments_are_named() -> None:
    rows = tensor(8, 16)
    side = one_chunk(rows)
    other = one_chunk(rows.copy(), writable=False)
    with pytest.raises(ValueError, match="source and target overlap"):
        native.copy_runs(side, side, [[0, 0, 1]])
    with pytest.raises(ValueError, match="read-only"):
        native.copy_runs(side, other, [[0, 0, 1]])
    with pytest.raises(ValueError, match="row_bytes"):
        native.copy_runs(side, one_chunk(tensor(8, 32)), [[0, 0, 1]])
    with pytest.raises(ValueError, match=r"\[n, 3\]"):
        native.copy_runs(other, side, [0, 0, 1])
    with pytest.raises(TypeError, match="expected integers"):
        native.copy_runs(other, side, [[0.5, 0, 1]])
    with pytest.raises(ValueError, match="num_threads is -1"):
        native.copy_runs(other, side, [[0, 0, 1]], None, -1)
    with pytest.raises(ValueError, match="abacus"):
        native.set_kernel("abacus")


def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    source, target = tensor(1024, 2048), tensor(1024, 2048, fill=0)
    arguments = (one_chunk(source), one_chunk(target), [[0, 0, 1024]], None, 4)
    native.copy_runs(*arguments)
    target[:] = 0
    child = os.fork()
    if child == 0:
        native.copy_runs(*arguments)
        os._exit(0 if (target == source).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_number_of_threads_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_FAST_NUM_THREADS", "3")
    assert native.num_threads() == 3
    for nonsense in ("0", "-1", "many", ""):
        monkeypatch.setenv("LMCACHE_FAST_NUM_THREADS", nonsense)
        assert 1 <= native.num_threads() <= 8
