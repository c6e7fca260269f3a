"""The engine's model: the same numbers as Hugging Face's, however the work is cut up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lmcache_fast.serve.engine.model import PRESETS, Model, random_weights

CONFIG = PRESETS["tiny"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, random_weights(CONFIG, seed=1))


def empty_kv(capacity: int) -> torch.Tensor:
    return torch.zeros(CONFIG.layout(torch.float32).kv_shape(capacity))


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, CONFIG.vocab_size, (count,), generator=torch.manual_seed(seed))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    first = random_weights(CONFIG, seed=1)[name]
    assert torch.equal(first, random_weights(CONFIG, seed=1)[name])
    assert not torch.equal(first, random_weights(CONFIG, seed=2)[name])


def test_logits_are_those_of_transformers_qwen3(model: Model) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**dataclasses.asdict(CONFIG), tie_word_embeddings=False)
    config._attn_implementation = "eager"
    reference = transformers.Qwen3ForCausalLM(config).eval()
    reference.load_state_dict(random_weights(CONFIG, seed=1))
    tokens = tokens_of(50)
    kv = empty_kv(50)
    model.prefill(tokens[:-1], kv, 0)
    ours = model.decode([int(tokens[-1])], [kv], [49])
    with torch.inference_mode():
        theirs = reference(tokens[None]).logits[0, -1]
    torch.testing.assert_close(ours[0], theirs, rtol=1e-4, atol=1e-4)


def test_queries_and_keys_give_the_attention_of_transformers_qwen3(model: Model) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**dataclasses.asdict(CONFIG), tie_word_embeddings=False)
    config._attn_implementation = "eager"
    reference = transformers.Qwen3ForCausalLM(config).eval()
    reference.load_state_dict(random_weights(CONFIG, seed=1))
    tokens = tokens_of(30)
    kv = empty_kv(30)
    queries = torch.zeros(CONFIG.query_layout(torch.float32).kv_shape(30))
    model.prefill(tokens[:16], kv, 0, queries)
    model.prefill(tokens[16:-1], kv, 16, queries)
    model.decode([int(tokens[-1])], [kv], [29], [queries])
    with torch.inference_mode():
        theirs = reference(tokens[None], output_attentions=True).attentions
    groups = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    for layer in range(CONFIG.num_hidden_layers):
        rotated = queries[0, layer].view(30, -1, CONFIG.head_dim).transpose(0, 1)
        keys = kv[0, layer].view(30, -1, CONFIG.head_dim).transpose(0, 1)
        products = rotated @ keys.repeat_interleave(groups, 0).transpose(1, 2)
        products += torch.full((30, 30), -torch.inf).triu(1)
        ours = (products / CONFIG.head_dim**0.5).softmax(-1)
        torch.testing.assert_close(ours, theirs[layer][0], rtol=1e-4, atol=1e-4)


def test_a_loaded_prefix_gives_the_same_bits_as_a_computed_one(model: Model) -> None:
    tokens = tokens_of(70)
    whole, resumed = empty_kv(80), empty_kv(80)
    for start in (0, 32):
        model.prefill(tokens[start : start + 32], whole, start)
    resumed[:, :, :64] = whole[:, :, :64]
    for kv in (whole, resumed):
        model.prefill(tokens[64:69], kv, 64)
    assert torch.equal(whole, resumed)
    last = [int(tokens[69])]
    assert torch.equal(model.decode(last, [whole], [69]), model.decode(last, [resumed], [69]))


def test_sequences_of_unequal_length_decode_together_as_alone(model: Model) -> None:
    lengths = [1, 31, 64]
    kvs = []
    for length in lengths:
        kv = empty_kv(length + 1)
        model.prefill(tokens_of(length, seed=length), kv, 0)
        kvs.append(kv)
    together = model.decode([5, 6, 7], kvs, lengths)
    for index, (kv, length) in enumerate(zip(kvs, lengths, strict=True)):
        alone = model.decode([5 + index], [kv], [length])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-4)


def test_a_token_depends_on_the_whole_context(model: Model) -> None:
    tokens = tokens_of(40)
    results = []
    for first in (3, 4):
        tokens[0] = first
        kv = empty_kv(41)
        model.prefill(tokens, kv, 0)
        results.append(model.decode([9], [kv], [40]))
    assert not torch.allclose(results[0], results[1], atol=1e-3)
