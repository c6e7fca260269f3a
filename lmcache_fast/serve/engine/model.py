"""A decoder of Qwen3's shape over torch: the KV cache is the caller's, one tensor a sequence.

The names of the weights are those of Hugging Face's ``Qwen3ForCausalLM``, whose results this model
gives. What it adds is a decoding step over sequences of unequal length without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lmcache_fast.layout import KVLayout

#: ``attend(layer, queries [n, heads, d], keys [n, kv_heads, d], values)`` -> ``[n, heads * d]``.
_Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model; the names are those of a Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    eos_token_id: int = 0

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The layout of this model's KV cache with elements of ``dtype``."""
        return KVLayout(
            self.num_hidden_layers, self.num_key_value_heads, self.head_dim, dtype, block_size=16
        )

    def query_layout(self, dtype: torch.dtype) -> KVLayout:
        """The layout of this model's query cache with elements of ``dtype``: one plane."""
        return KVLayout(
            self.num_hidden_layers, self.num_attention_heads, self.head_dim, dtype, 16, planes=1
        )


#: The models that the engine can make up.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "small": ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    ),
}


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Make up weights, the same for the same seed.

    Their scale keeps the spread of activations over the layers, so that every token of the context
    has a say in the next one.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    weights = {
        "model.embed_tokens.weight": torch.randn(
            config.vocab_size, config.hidden_size, generator=generator
        ),
        "model.norm.weight": torch.ones(config.hidden_size),
        "lm_head.weight": matrix(config.vocab_size, config.hidden_size),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(config.hidden_size),
            prefix + "post_attention_layernorm.weight": torch.ones(config.hidden_size),
            prefix + "self_attn.q_norm.weight": torch.full((config.head_dim,), 1.5),
            prefix + "self_attn.k_norm.weight": torch.full((config.head_dim,), 1.5),
            prefix + "self_attn.q_proj.weight": matrix(heads, config.hidden_size),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads, config.hidden_size),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads, config.hidden_size),
            prefix + "self_attn.o_proj.weight": matrix(config.hidden_size, heads),
            prefix + "mlp.gate_proj.weight": matrix(config.intermediate_size, config.hidden_size),
            prefix + "mlp.up_proj.weight": matrix(config.intermediate_size, config.hidden_size),
            prefix + "mlp.down_proj.weight": matrix(config.hidden_size, config.intermediate_size),
        }
    return weights


class Model:
    """The forward pass. All arithmetic is in float32, whatever the KV cache's dtype.

    Args:
        config: the sizes.
        weights: float32 tensors under Hugging Face's names.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"]
        self._final_norm = weights["model.norm.weight"]
        self._head = weights["lm_head.weight"]
        self._layers = [
            _Layer(weights, f"model.layers.{layer}.") for layer in range(config.num_hidden_layers)
        ]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = config.rope_theta**-exponents
        self._kv_heads_shape = (config.num_key_value_heads, config.head_dim)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        kv: torch.Tensor,
        start: int,
        queries: torch.Tensor | None = None,
    ) -> None:
        """Compute the KV of ``tokens`` ``[n]`` at positions ``start`` to ``start + n``.

        Args:
            tokens: token ids.
            kv: ``[2, L, capacity, D]``, filled up to ``start``; rows ``start`` to ``start + n`` are
                written.
            start: how many tokens precede.
            queries: ``[1, L, capacity, heads * head_dim]``, where the same rows are to be written
                with the rotated queries; None to keep none.
        """
        end = start + len(tokens)
        positions = torch.arange(start, end)
        visible = torch.arange(end) <= positions[:, None]

        def attend(
            layer: int, rotated: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            self._write(kv, layer, slice(start, end), keys, values)
            if queries is not None:
                queries[0, layer, start:end] = rotated.flatten(1)
            return self._attention(rotated, kv, layer, end, visible)

        self._forward(tokens, positions, attend, kv_only=True)

    @torch.inference_mode()
    def decode(
        self,
        tokens: Sequence[int],
        kvs: Sequence[torch.Tensor],
        lengths: Sequence[int],
        queries: Sequence[torch.Tensor | None] = (),
    ) -> torch.Tensor:
        """Compute one more token of each sequence.

        Args:
            tokens: the token that each sequence goes on with.
            kvs: each sequence's ``[2, L, capacity, D]``; the row at its length is written.
            lengths: how many tokens of each sequence's KV are there.
            queries: as in :meth:`prefill`, for each sequence, or for none.

        Returns:
            The logits ``[sequences, vocabulary]`` of the tokens after these.
        """

        def attend(
            layer: int, rotated: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            rows = []
            for index, (kv, length) in enumerate(zip(kvs, lengths, strict=True)):
                one = slice(index, index + 1)
                self._write(kv, layer, slice(length, length + 1), keys[one], values[one])
                rows.append(self._attention(rotated[one], kv, layer, length + 1, None))
            for row, (target, length) in enumerate(zip(queries, lengths, strict=False)):
                if target is not None:
                    target[0, layer, length] = rotated[row].flatten()
            return torch.cat(rows)

        hidden = self._forward(torch.tensor(tokens), torch.tensor(lengths), attend)
        return F.linear(self._norm(hidden, self._final_norm), self._head)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: _Attend,
        kv_only: bool = False,
    ) -> torch.Tensor:
        config = self.config
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        hidden = F.embedding(tokens, self._embedding)
        heads = [config.num_attention_heads] + 2 * [config.num_key_value_heads]
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm)
            projected = F.linear(normed, layer.qkv).view(len(tokens), -1, config.head_dim)
            queries, keys, values = torch.split(projected, heads, dim=1)
            queries = _rotate(self._norm(queries, layer.q_norm), cos, sin)
            keys = _rotate(self._norm(keys, layer.k_norm), cos, sin)
            attended = attend(index, queries, keys, values)
            if kv_only and index == len(self._layers) - 1:
                break  # nothing reads what the last layer puts out
            hidden = hidden + F.linear(attended, layer.output)
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, weight.shape, weight, self.config.rms_norm_eps)

    def _write(
        self,
        kv: torch.Tensor,
        layer: int,
        rows: slice,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        kv[0, layer, rows] = keys.flatten(1)
        kv[1, layer, rows] = values.flatten(1)

    def _attention(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        length: int,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of ``queries`` ``[n, heads, d]`` over the first ``length`` rows of a layer."""
        keys = kv[0, layer, :length].view(length, *self._kv_heads_shape).transpose(0, 1)
        values = kv[1, layer, :length].view(length, *self._kv_heads_shape).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None].float(),
            values[None].float(),
            attn_mask=visible,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).flatten(1)


class _Layer:
    """One layer's weights, with those put together that read the same input."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        def joined(*names: str) -> torch.Tensor:
            return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

        self.input_norm = weights[prefix + "input_layernorm.weight"]
        self.mlp_norm = weights[prefix + "post_attention_layernorm.weight"]
        self.q_norm = weights[prefix + "self_attn.q_norm.weight"]
        self.k_norm = weights[prefix + "self_attn.k_norm.weight"]
        self.qkv = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = weights[prefix + "self_attn.o_proj.weight"]
        self.gate_up = joined("mlp.gate_proj", "mlp.up_proj")
        self.down = weights[prefix + "mlp.down_proj.weight"]


def _rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[n, heads, d]``: element ``j`` pairs with element ``j + d / 2``."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
