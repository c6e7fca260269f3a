"""The copy engine on rows that stand in pieces, and on heads whose end is rotated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import KVLayout
from lmcache_fast._extension import native
from lmcache_fast.edits import Edit, Rope, keep
from lmcache_fast.edits.plan import compile_plan
from lmcache_fast.runs import whole

pytestmark = pytest.mark.skipif(native is None, reason="needs the extension")

CHUNK = 8
PACKED = KVLayout.packed(3, 4, 16, "bfloat16")
MLA = KVLayout(2, 1, 64 + 32, "float32", planes=1)


def random_kv(layout: KVLayout, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(layout.kv_shape(num_tokens), generator=generator).to(layout.dtype)


def stored_side(layout: KVLayout, stored: torch.Tensor) -> Any:
    """The chunks ``[n, *object]`` as the server keeps them."""
    assert native is not None
    row, head = layout.row_bytes, layout.head_dim * layout.dtype.itemsize
    strides = {"plane_stride": row * CHUNK * layout.num_layers, "layer_stride": row * CHUNK}
    if layout.rows == "packed":
        strides = {
            "plane_stride": head,
            "layer_stride": 2 * row * CHUNK,
            "token_stride": 2 * row,
            "row_pieces": layout.num_kv_heads,
            "piece_stride": 2 * head,
        }
    return native.ChunkedSide.from_addresses(
        np.array([chunk.data_ptr() for chunk in stored], np.uint64),
        stored,
        tokens_per_chunk=CHUNK,
        planes=layout.planes,
        layers=layout.num_layers,
        row_bytes=row,
        **strides,
    )


def tensor_side(kv: torch.Tensor) -> Any:
    assert native is not None
    size = kv.element_size()
    return native.ChunkedSide.from_addresses(
        np.array([kv.data_ptr()], np.uint64),
        kv,
        tokens_per_chunk=kv.shape[2],
        planes=kv.shape[0],
        layers=kv.shape[1],
        row_bytes=kv.shape[3] * size,
        plane_stride=kv.stride(0) * size,
        layer_stride=kv.stride(1) * size,
    )


def to_chunks(layout: KVLayout, kv: torch.Tensor) -> torch.Tensor:
    return torch.stack([layout.to_object(chunk) for chunk in kv.split(CHUNK, 2)]).contiguous()


def from_chunks(layout: KVLayout, stored: torch.Tensor) -> torch.Tensor:
    return torch.cat([layout.from_object(chunk) for chunk in stored], 2)


def test_packed_chunks_are_unpacked_and_packed_again() -> None:
    assert native is not None
    kv = random_kv(PACKED, 3 * CHUNK)
    stored = to_chunks(PACKED, kv)
    assert stored.shape == (3, 3, CHUNK, 4 * 2 * 16)
    assert torch.equal(from_chunks(PACKED, stored), kv)
    out = torch.empty_like(kv)
    native.copy_runs(stored_side(PACKED, stored), tensor_side(out), whole(3 * CHUNK))
    assert torch.equal(out, kv)
    again = torch.zeros_like(stored)
    native.copy_runs(tensor_side(kv), stored_side(PACKED, again), whole(3 * CHUNK))
    assert torch.equal(again, stored)


@pytest.mark.parametrize("kernel", native.kernels() if native else [])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", [PACKED, MLA], ids=["packed", "MLA"])
def test_an_edit_from_chunk_to_chunk_is_the_edit_of_the_tensor(
    layout: KVLayout, interleaved: bool, kernel: str
) -> None:
    assert native is not None
    rope = Rope(16, interleaved=interleaved)
    if layout is MLA:
        rope = Rope(96, rotary_dim=32, rotary_offset=64, interleaved=interleaved)
    edit: Edit = keep([*range(3), *range(7, 20), *range(23, 31)], rope=rope)
    kv, tokens = random_kv(layout, 4 * CHUNK), list(range(4 * CHUNK))
    expected, kept = edit(kv, tokens)
    assert len(kept) == 3 * CHUNK
    assert not torch.equal(expected[0], kv[0][:, kept])
    stored = to_chunks(layout, kv)
    target = torch.zeros_like(stored[:3])
    compiled = compile_plan(edit.plan(tokens), layout, CHUNK)
    before = native.kernel_name()
    native.set_kernel(kernel)
    try:
        runs, rotation = compiled.for_chunks(range(3), CHUNK)
        native.copy_runs(stored_side(layout, stored), stored_side(layout, target), runs, rotation)
    finally:
        native.set_kernel(before)
    assert torch.equal(from_chunks(layout, target), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"row_pieces": 0}, "row_pieces"),
        ({"row_pieces": 3, "piece_stride": 64}, "multiple of row_pieces"),
        ({"row_pieces": 4, "piece_stride": 8}, "piece_stride is 8"),
        ({"row_pieces": 4, "piece_stride": 64}, "token_stride is 128; expected at least a row"),
        ({"row_pieces": 4, "piece_stride": 1 << 62}, "too large"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(wrong: dict[str, int], message: str) -> None:
    assert native is not None
    memory = torch.zeros(4096, dtype=torch.uint8)
    sizes = {"tokens_per_chunk": 8, "planes": 1, "layers": 1, "row_bytes": 128}
    with pytest.raises(ValueError, match=message):
        native.ChunkedSide.from_addresses(
            np.array([memory.data_ptr()], np.uint64),
            memory,
            **sizes,
            plane_stride=1024,
            layer_stride=1024,
            **wrong,
        )


def test_a_rotation_that_would_cross_pieces_is_refused() -> None:
    assert native is not None
    kv = random_kv(PACKED, CHUNK)
    stored = to_chunks(PACKED, kv)
    table = np.ones((1, 16), np.float32)
    rotation = native.Rotation(
        table, table, [0], 0, num_heads=2, head_dim=32, rotary_dim=32, interleaved=False,
        dtype="bfloat16",
    )  # fmt: skip
    with pytest.raises(ValueError, match="2 heads; expected a multiple of a row's 4 pieces"):
        native.copy_runs(
            stored_side(PACKED, stored), tensor_side(kv.clone()), whole(CHUNK), rotation
        )
    with pytest.raises(ValueError, match="rotary_offset"):
        native.Rotation(
            table, table, [0], 0, num_heads=2, head_dim=64, rotary_dim=32, interleaved=False,
            dtype="bfloat16", rotary_offset=32,
        )  # fmt: skip
