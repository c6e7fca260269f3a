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
