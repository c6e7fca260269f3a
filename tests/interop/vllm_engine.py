"""A real vLLM on the CPU, with LMCache's connector."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save_file

from lmcache_fast import KVLayout
from lmcache_fast.serve.engine.model import ModelConfig, random_weights
from tests.interop import peer
from tests.interop.processes import Program, free_ports
from tests.interop.servers import Server

#: vLLM's CPU kernels pack keys and values in a way of their own: a token's row is opaque, and only
#: whole chunks can be moved. The tiny model: 4 layers, 4 heads of 64, keys and values.
LAYOUT = KVLayout.opaque(4, 2 * 4 * 64, "bfloat16")
MODEL = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
SEED = 11
#: Tokens a chunk: a multiple of the engine's block.
CHUNK = 256


@dataclass(frozen=True)
class Engine:
    """A running engine: its address, and the name that it registers its model under."""

    url: str
    model: str

    def cached_tokens(self, prompt: list[int]) -> int:
        """Return how many tokens of ``prompt`` the engine takes from the cache."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=240.0)
        usage = answer.raise_for_status().json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def write_model(source: Path, folder: Path) -> Path:
    """Make the tiny model with weights, which :class:`Model` has too for the same seed.

    vLLM's own dummy weights are so small that no token depends on those before it.
    """
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    weights = {name: one.bfloat16() for name, one in random_weights(MODEL, SEED).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def vllm_engine(server: Server, folder: Path) -> Iterator[Engine]:
    """Run vLLM against ``server`` for the length of a ``with`` block."""
    environment, tiny = peer.ensure_vllm()
    model = write_model(tiny, folder / "model")
    (port,) = free_ports(1)
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": server.port,
        "lmcache.mp.mp_transfer_mode": "engine_driven",
    }
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    program = Program(
        [
            *(environment.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--host", "127.0.0.1", "--port", port),
            *("--max-model-len", 8192, "--enforce-eager", "--no-enable-prefix-caching"),
            *("--return-tokens-as-token-ids", "--enable-prompt-tokens-details"),
            *("--max-logprobs", MODEL.vocab_size),
            *("--kv-transfer-config", json.dumps(connector)),
        ],
        {
            **environment.environment(),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        folder / "vllm.log",
    )
    try:
        program.wait_ready(f"http://127.0.0.1:{port}/health", 900)
        yield Engine(f"http://127.0.0.1:{port}", str(model))
    finally:
        program.stop()
