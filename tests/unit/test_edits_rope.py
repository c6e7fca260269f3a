"""Rotating kept keys: right for every scheme, dtype and pairing, or a clear error."""

from __future__ import annotations

import builtins
import json
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast.edits import Rope, keep
from lmcache_fast.errors import InvalidInputError

HEADS, HEAD_DIM, LAYERS = 2, 32, 2
HALF = HEAD_DIM // 2

# Lengths around 96 and 128 tokens cross the limits of the length-dependent schemes.
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 96},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(HALF)],
        "long_factor": [1.5 + 0.3 * i for i in range(HALF)],
        "original_max_position_embeddings": 96,
        "factor": 4.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def model_frequencies(scaling: dict[str, Any] | None, dim: int, length: int) -> np.ndarray:
    """What transformers' own rotary embedding uses for a sequence of ``length``."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    extra = dict(scaling or {})
    longest = extra.pop("max_position_embeddings", 4096)
    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **extra},
    )
    embedding = LlamaRotaryEmbedding(config)
    embedding(torch.zeros(1), torch.arange(length)[None])
    frequencies: np.ndarray = embedding.inv_freq.double().numpy()
    return frequencies


def rotate_exactly(keys: np.ndarray, angles: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """Rotate float64 ``keys [T, heads, head_dim]`` by ``angles [T, rotary_dim / 2]``."""
    half = angles.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out: np.ndarray = keys.copy()
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., first] = keys[..., first] * c - keys[..., second] * s
    out[..., second] = keys[..., second] * c + keys[..., first] * s
    return out


def pair_ulp(exact: np.ndarray, half: int, interleaved: bool, dtype: torch.dtype) -> np.ndarray:
    """One unit in the last place at the length of each element's pair, which rotating keeps."""
    rotated = exact[..., : 2 * half]
    if interleaved:
        length = np.repeat(np.hypot(rotated[..., 0::2], rotated[..., 1::2]), 2, axis=-1)
    else:
        length = np.tile(np.hypot(rotated[..., :half], rotated[..., half:]), 2)
    ulp: np.ndarray = 2.0 ** (np.floor(np.log2(length)) + 1 - MANTISSA_BITS[dtype])
    return ulp


def cached_keys(keys: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A cache ``[2, L, T, D]`` with ``keys [T, heads, head_dim]`` in every layer."""
    kv = torch.zeros(2, LAYERS, len(keys), HEADS * HEAD_DIM, dtype=dtype)
    kv[0] = torch.from_numpy(keys).reshape(len(keys), -1).to(dtype)
    return kv


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", list(MANTISSA_BITS), ids=str)
@pytest.mark.parametrize("scheme", list(SCALINGS))
def test_moved_keys_agree_with_keys_rotated_at_the_new_positions_from_the_start(
    scheme: str, dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    scaling = dict(SCALINGS[scheme] or {})
    half = rotary_dim // 2
    for name in ("short_factor", "long_factor"):
        if name in scaling:
            scaling[name] = scaling[name][:half]
    rope = Rope(HEAD_DIM, 10000.0, rotary_dim, interleaved, scaling or None)
    num_tokens = 160
    positions = np.r_[0:40, 61, 64:100:3, 130:160]  # 83 stay, below both limits
    keys = np.random.default_rng(7).standard_normal((num_tokens, HEADS, HEAD_DIM))

    before = model_frequencies(scaling, rotary_dim, num_tokens)
    after = model_frequencies(scaling, rotary_dim, len(positions))
    old = rotate_exactly(keys, np.multiply.outer(np.arange(num_tokens), before), interleaved)
    new = rotate_exactly(
        keys[positions], np.multiply.outer(np.arange(len(positions)), after), interleaved
    )

    edited, tokens = keep(positions, rope=rope)(cached_keys(old, dtype), list(range(num_tokens)))
    wanted = cached_keys(new, dtype)

    assert tokens == positions.tolist()
    got = edited[0].view(LAYERS, -1, HEADS, HEAD_DIM).double().numpy()
    want = wanted[0].view(LAYERS, -1, HEADS, HEAD_DIM).double().numpy()
    off = np.abs(got - want)[..., :rotary_dim] / pair_ulp(new, half, interleaved, dtype)
    # 16-bit caches: one unit. In a float32 cache the arithmetic's own rounding shows as well.
    assert off.max() <= (3.0 if dtype == torch.float32 else 1.0)
    assert np.array_equal(got[..., rotary_dim:], want[..., rotary_dim:])


@pytest.mark.parametrize("scheme", list(SCALINGS))
@pytest.mark.parametrize("length", [1, 96, 97, 200])
def test_frequencies_are_the_models_own(scheme: str, length: int) -> None:
    rope = Rope(HEAD_DIM, scaling=SCALINGS[scheme])
    assert np.array_equal(
        rope.frequencies(length), model_frequencies(SCALINGS[scheme], HEAD_DIM, length)
    )


@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_a_rope_at_a_length_keeps_its_frequencies(scheme: str) -> None:
    rope = Rope(HEAD_DIM, scaling=SCALINGS[scheme])
    fixed = rope.at_length(200)
    assert fixed != rope
    assert np.array_equal(fixed.frequencies(5), rope.frequencies(200))
    assert not np.array_equal(rope.frequencies(5), rope.frequencies(200))


def test_angles_stay_exact_far_out() -> None:
    rope = Rope(HEAD_DIM, 1e6)
    shift = -1_000_003
    runs = np.array([[1_000_003, 0, 3]], np.int64)
    tables = rope.tables(runs, 1_000_006, 3)
    angles = shift * rope.frequencies(1)
    row = tables.run_rows[0]
    assert tables.row_step == 0
    np.testing.assert_allclose(tables.cos[row], np.cos(angles), atol=2**-25)
    np.testing.assert_allclose(tables.sin[row], np.sin(angles), atol=2**-25)


def test_tables_of_dense_and_of_scattered_shifts_hold_each_shifts_angle() -> None:
    rope = Rope(HEAD_DIM)
    for sources in (np.arange(0, 600, 2), np.cumsum(np.arange(1, 80) * 97)):
        runs = np.stack((sources, np.arange(len(sources)), np.ones_like(sources)), axis=1)
        tables = rope.tables(runs, int(sources[-1]) + 1, len(sources))
        shifts = runs[:, 1] - runs[:, 0]
        assert np.array_equal(tables.run_rows < 0, shifts == 0)
        moved = shifts != 0
        angles = np.multiply.outer(shifts[moved], rope.frequencies(1))
        np.testing.assert_allclose(tables.cos[tables.run_rows[moved]], np.cos(angles), atol=2**-25)
        np.testing.assert_allclose(tables.sin[tables.run_rows[moved]], np.sin(angles), atol=2**-25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 31}, "head_dim is 31"),
        ({"head_dim": 32, "rotary_dim": 64}, "rotary_dim is 64; expected at most head_dim = 32"),
        ({"head_dim": 32, "theta": 0}, "theta is 0"),
        ({"head_dim": 32, "scaling": 3}, "scaling is int"),
        ({"head_dim": 32, "scaling": {"rope_type": "3d"}}, "'3d' is not known.*default, linear"),
        ({"head_dim": 32, "scaling": {"type": "linear"}}, "'linear' lacks 'factor'"),
        ({"head_dim": 32, "scaling": {"type": "linear", "factor": -1}}, "factor.* is -1"),
        (
            {"head_dim": 32, "scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "lacks 'max_position_embeddings'",
        ),
        (
            {"head_dim": 64, "scaling": SCALINGS["longrope"]},
            "short_factor.* is 16 numbers; expected .* = 32",
        ),
        ({"head_dim": 32, "scaling": {"mrope_section": [4, 6, 6]}}, "mrope_section"),
        (
            {
                "head_dim": 32,
                "scaling": {**(SCALINGS["longrope"] or {}), "short_mscale": 1, "long_mscale": 2},
            },
            "cannot rescale",
        ),
    ],
)
def test_a_wrong_rope_is_refused_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Rope(**arguments)


def test_only_schemes_beyond_linear_need_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("transformers"):
            raise ImportError("not installed")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    Rope(HEAD_DIM)
    Rope(HEAD_DIM, scaling=SCALINGS["linear"])
    with pytest.raises(InvalidInputError, match=r"pip install 'lmcache_fast\["):
        Rope(HEAD_DIM, scaling=SCALINGS["yarn"])


@pytest.mark.parametrize(
    ("dtype", "planes", "width", "message"),
    [
        (torch.float64, 2, 64, "dtype float64"),
        (torch.int8, 2, 64, "dtype int8"),
        (torch.float8_e4m3fn, 2, 64, "dtype float8_e4m3fn"),
        (torch.bfloat16, 1, 64, "1 plane"),
        (torch.bfloat16, 2, 40, "40 elements; expected a multiple .* 32"),
    ],
)
def test_caches_whose_keys_cannot_be_rotated_are_refused_with_a_rope_only(
    dtype: torch.dtype, planes: int, width: int, message: str
) -> None:
    kv = torch.arange(planes * 2 * 6 * width).view(planes, 2, 6, width).to(dtype)
    with pytest.raises(InvalidInputError, match=message):
        keep([0, 4], rope=Rope(HEAD_DIM))(kv, list(range(6)))
    edited, tokens = keep([0, 4])(kv, list(range(6)))
    assert tokens == [0, 4]
    assert edited.dtype == dtype
    assert torch.equal(edited.view(torch.uint8), kv[:, :, [0, 4]].view(torch.uint8))


def test_from_hf_config_reads_old_and_new_configs(tmp_path: Any) -> None:
    common = {"hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 131072}
    llama3 = dict(SCALINGS["llama3"] or {})
    old = {**common, "rope_theta": 5e5, "rope_scaling": llama3}
    new = {**common, "rope_parameters": {**llama3, "rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(new))
    expected = Rope(32, 5e5, scaling=llama3)
    assert Rope.from_hf_config(old) == expected
    assert Rope.from_hf_config(tmp_path) == expected
    assert Rope.from_hf_config(common) == Rope(32)
    assert Rope.from_hf_config({**common, "head_dim": 64, "partial_rotary_factor": 0.5}) == Rope(
        64, rotary_dim=32
    )
    assert Rope.from_hf_config({**common, "model_type": "cohere"}).interleaved
    phi3 = {
        **common,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    }
    rope = Rope.from_hf_config(phi3)
    assert np.array_equal(rope.frequencies(4096), 2 * rope.frequencies(4097))


def test_from_hf_config_takes_transformers_own_configs() -> None:
    transformers = pytest.importorskip("transformers")
    qwen = transformers.Qwen3Config(head_dim=128)
    assert Rope.from_hf_config(qwen) == Rope(128, qwen.to_dict()["rope_parameters"]["rope_theta"])
    with pytest.raises(InvalidInputError, match="differ by layer type"):
        Rope.from_hf_config(transformers.Gemma3TextConfig())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "neither head_dim nor hidden_size"),
        ({"head_dim": 64, "rope_local_base_freq": 1e4}, "another base"),
        ({"head_dim": 64, "no_rope_layers": [1, 1, 0]}, "without rotation"),
        ({"head_dim": 64, "model_type": "gpt2"}, "'gpt2' leaves layers without rotation"),
        ({"head_dim": 64, "kv_lora_rank": 512}, "MLA"),
    ],
)
def test_from_hf_config_refuses_models_that_one_rotation_cannot_move(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Rope.from_hf_config(fields)


def test_the_rope_of_mla_turns_the_end_of_its_rows_in_neighbouring_pairs() -> None:
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_theta": 1e4, "head_dim": 192}
    rope = Rope.from_hf_config(config)
    assert (rope.head_dim, rope.rotary_offset, rope.rotary_dim) == (576, 512, 64)
    assert rope.interleaved
    assert not Rope.from_hf_config({**config, "rope_interleave": False}).interleaved
    kv = torch.randn(1, 2, 6, 576)
    edited, _ = keep([0, 2, 4], rope=rope)(kv, list(range(6)))
    source = kv[:, :, [0, 2, 4]]
    assert torch.equal(edited[..., :512], source[..., :512])
    pairs = torch.view_as_complex(source[0, :, :, 512:].unflatten(-1, (32, 2)).contiguous())
    angles = torch.outer(torch.tensor([0.0, -1.0, -2.0]), 1e4 ** (-torch.arange(32) / 32))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(3, 32), angles)).flatten(-2)
    assert torch.allclose(edited[0, :, :, 512:], turned, atol=1e-5)


def test_the_rope_of_mla_and_other_caches_do_not_go_together() -> None:
    with pytest.raises(InvalidInputError, match="1 plane of 64 elements"):
        keep([1], rope=Rope(64))(torch.zeros(1, 1, 2, 64), [1, 2])
    with pytest.raises(InvalidInputError, match="2 planes"):
        keep([1], rope=Rope(64, rotary_offset=32))(torch.zeros(2, 1, 2, 64), [1, 2])
    with pytest.raises(InvalidInputError, match="rotary_offset is 64"):
        Rope(64, rotary_offset=64)
    with pytest.raises(InvalidInputError, match="less rotary_offset = 32"):
        Rope(64, rotary_dim=34, rotary_offset=32)
