"""KVLayout: counts, dtypes, and configs from Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmcache_fast import InvalidInputError, KVLayout
from lmcache_fast.layout import CACHE_DTYPES

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_sizes_of_qwen3_8b() -> None:
    layout = KVLayout.from_hf_config(QWEN3_8B)
    assert layout == KVLayout(36, 8, 128, torch.bfloat16)
    assert layout.width == 1024
    assert layout.row_bytes == 2048
    assert layout.token_bytes * 256 * 16 == 603_979_776
    assert layout.kv_shape(256) == layout.object_shape(256) == (2, 36, 256, 1024)


def test_one_plane_objects_have_three_dimensions() -> None:
    layout = KVLayout(4, 1, 512, "bfloat16", planes=1)
    assert layout.kv_shape(256) == (1, 4, 256, 512)
    assert layout.object_shape(256) == (4, 256, 512)


@pytest.mark.parametrize(
    ("planes", "shape", "fits"),
    [
        (1, (4, 256, 512), True),
        (1, (1, 4, 256, 512), True),  # copied by the server itself
        (1, (2, 4, 256, 512), False),
        (1, (1, 1, 4, 256, 512), False),
        (1, (256, 512), False),
        (2, (2, 4, 256, 512), True),
        (2, (4, 256, 512), False),
        (2, (1, 4, 256, 512), False),
        (2, (1, 2, 4, 256, 512), False),
    ],
)
def test_which_shapes_a_stored_chunk_may_have(
    planes: int, shape: tuple[int, ...], fits: bool
) -> None:
    layout = KVLayout(4, 1, 512, torch.bfloat16, planes=planes)
    assert layout.is_object_shape(shape, 256) is fits
    assert layout.is_object_shape(list(shape), 256) is fits


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_every_dtype_is_known_by_name(name: str) -> None:
    assert KVLayout(1, 1, 1, name).dtype is CACHE_DTYPES[name]
    assert KVLayout(1, 1, 1, f"torch.{name}").dtype_name == name


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_bad_count_is_named(name: str, value: object) -> None:
    arguments = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": torch.float16}
    with pytest.raises(InvalidInputError, match=name):
        KVLayout(**{**arguments, name: value})  # type: ignore[arg-type]


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(InvalidInputError, match="bfloat16"):
        KVLayout(1, 1, 1, "int4")


def test_a_config_is_read_from_its_folder_and_heads_default_to_attention_heads(
    tmp_path: Path,
) -> None:
    fields = {k: v for k, v in QWEN3_8B.items() if k not in ("num_key_value_heads", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields}))
    layout = KVLayout.from_hf_config(tmp_path)
    assert (layout.num_kv_heads, layout.head_dim) == (32, 128)


def test_a_latent_attention_config_has_one_plane() -> None:
    config = {**QWEN3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    layout = KVLayout.from_hf_config(config)
    assert (layout.planes, layout.width) == (1, 576)


def test_a_config_without_a_field_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="num_hidden_layers"):
        KVLayout.from_hf_config({k: v for k, v in QWEN3_8B.items() if k != "num_hidden_layers"})
    with pytest.raises(InvalidInputError, match="dtype"):
        KVLayout.from_hf_config({k: v for k, v in QWEN3_8B.items() if k != "torch_dtype"})
    with pytest.raises(InvalidInputError, match="cannot read"):
        KVLayout.from_hf_config(tmp_path / "nowhere")


def test_packed_objects_have_a_head_s_key_and_value_behind_one_another() -> None:
    layout = KVLayout.packed(2, 3, 4, "float16")
    assert layout.kv_shape(5) == (2, 2, 5, 12)
    assert layout.object_shape(5) == (2, 5, 24)
    assert (layout.object_planes, layout.object_width) == (1, 24)
    stored = torch.arange(2 * 5 * 24).view(2, 5, 24)
    kv = layout.from_object(stored)
    assert kv[1, 0, 3, 4:8].tolist() == stored[0, 3, 12:16].tolist()
    assert torch.equal(layout.to_object(kv), stored)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8", "int8"])
def test_bytes_survive_packing(dtype: str) -> None:
    layout = KVLayout.packed(2, 3, 4, dtype)
    stored = torch.arange(2 * 5 * 24, dtype=torch.uint8).view(2, 5, 24)
    again = layout.to_object(layout.from_object(stored.view(layout.dtype)))
    assert torch.equal(again.view(torch.uint8), stored)


def test_rows_and_planes_must_go_together() -> None:
    with pytest.raises(InvalidInputError, match="rows is 'odd'; expected one of plain"):
        KVLayout(1, 1, 1, "uint8", rows="odd")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="planes is 1 and rows 'packed'"):
        KVLayout(1, 1, 1, torch.uint8, planes=1, rows="packed")
    with pytest.raises(InvalidInputError, match="planes is 2 and rows 'opaque'"):
        KVLayout(1, 1, 1, torch.uint8, rows="opaque")


def test_a_packed_layout_may_turn_out_opaque() -> None:
    packed = KVLayout.packed(2, 3, 4, "bfloat16", 32)
    opaque = packed.as_opaque()
    assert opaque == KVLayout.opaque(2, 24, "bfloat16", 32) == opaque.as_opaque()
    assert opaque.object_shape(64) == packed.object_shape(64)
    with pytest.raises(InvalidInputError, match="rows is 'plain'"):
        KVLayout(2, 3, 4, torch.bfloat16).as_opaque()


@pytest.mark.parametrize(
    ("whole", "rank"),
    [
        (KVLayout(2, 8, 4, torch.uint8), KVLayout(2, 2, 4, torch.uint8)),
        (KVLayout.packed(2, 8, 4, "uint8"), KVLayout.packed(2, 2, 4, "uint8")),
        (KVLayout.opaque(2, 64, "uint8"), KVLayout.opaque(2, 16, "uint8")),
        (KVLayout(2, 1, 64, torch.uint8, planes=1), KVLayout(2, 1, 64, torch.uint8, planes=1)),
    ],
    ids=["split", "packed", "opaque", "MLA"],
)
def test_ranks_share_heads_and_repeat_what_has_none(whole: KVLayout, rank: KVLayout) -> None:
    assert whole.for_rank(4) == rank
    assert rank.for_all_ranks(4) == whole
    assert whole.for_rank(1) is whole


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="num_kv_heads is 8; expected a multiple of the 3"):
        KVLayout(2, 8, 4, torch.uint8).for_rank(3)
