"""Write a tiny Qwen3 model's config and tokenizer (no weights). Runs in the peer's environment."""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 1024

folder = sys.argv[1]
config = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=0,
    dtype="bfloat16",
)
config.architectures = ["Qwen3ForCausalLM"]
words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="t1", eos_token="t0", pad_token="t0"
)
tokenizer.save_pretrained(folder)
config.save_pretrained(folder)  # last: its config.json tells that the folder is complete
