"""The sweep as a user runs it, and its divergence against the model's own, computed apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import cli, edits
from lmcache_fast.serve.demo.parts import Parts, start_parts
from lmcache_fast.serve.engine.model import PRESETS, Model, random_weights
from lmcache_fast.serve.processes import ChildGroup
from lmcache_fast.sweep import command
from lmcache_fast.sweep.run import POLICIES
from tests.teacher import logprobs_of

CONFIG = PRESETS["tiny"]
CHUNK = 16
SEED = 5
PROMPT_TOKENS = 16 * CHUNK + 4
MAX_TOKENS = 6
MADE_UP = (
    f"--model tiny --requests 2 --prompt-tokens {PROMPT_TOKENS} --chunk-size {CHUNK} "
    f"--max-tokens {MAX_TOKENS} --ratios 0,0.5 --seed {SEED}"
).split()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sweep")
    files = ["--json", str(folder / "sweep.json"), "--picture", str(folder / "sweep.png")]
    with pytest.MonkeyPatch.context() as patch:
        # A pool in which later rows' caches take the place of earlier ones'.
        patch.setattr(command, "_POOL_BYTES", 0)
        assert cli.main(["sweep", *MADE_UP, *files]) == 0
    return folder, json.loads((folder / "sweep.json").read_text())


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    """A server and an engine that stores no queries."""
    children = ChildGroup()
    try:
        yield start_parts(
            children,
            model="tiny",
            chunk_size=CHUNK,
            pool_bytes=64 << 20,
            kv_budget_tokens=4000,
            seed=SEED,
        )
    finally:
        children.close()


def at(result: dict[str, Any], ratio: float) -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in result["rows"][1:] if row["ratio"] == ratio}


def test_every_policy_runs_at_every_ratio(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    assert result["left_out"] == []
    assert [row["policy"] for row in result["rows"]] == [
        "unedited",
        *(policy for policy in POLICIES for _ in range(2)),
    ]
    assert all(row["decode_tput"] > 0 for row in result["rows"])
    assert all(row["covered"] == pytest.approx(1, abs=1e-4) for row in result["rows"])


def test_removing_nothing_changes_nothing(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    for row in (result["rows"][0], *at(result, 0.0).values()):
        assert row["kl"] < 1e-6, row
        assert (row["agreement"], row["kept"]) == (1, 1)


def test_removing_half_moves_half_and_changes_the_output(
    swept: tuple[Path, dict[str, Any]],
) -> None:
    _, result = swept
    whole = 2 * (PROMPT_TOKENS - 4) * CONFIG.layout(torch.float32).token_bytes
    queries = 2 * (PROMPT_TOKENS - 4) * CONFIG.query_layout(torch.float32).token_bytes
    for policy, row in at(result, 0.5).items():
        assert row["kept"] == 0.5
        assert row["bytes_written"] == whole // 2
        assert row["bytes_read"] == whole + (queries if policy in ("SnapKV", "TOVA") else 0)
        assert row["kl"] > 1e-3 and row["agreement"] < 1
    assert all(row["bytes_written"] == whole for row in at(result, 0.0).values())


def test_the_picture_is_a_png(swept: tuple[Path, dict[str, Any]]) -> None:
    assert (swept[0] / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("policy", ["StreamingLLM", "Random", "KeyDiff", "drop_middle_chunks"])
def test_the_divergence_is_the_models_own(swept: tuple[Path, dict[str, Any]], policy: str) -> None:
    row = at(swept[1], 0.5)[policy]
    model = Model(CONFIG, random_weights(CONFIG, SEED))
    rope = edits.Rope(CONFIG.head_dim, CONFIG.rope_theta)
    edit = POLICIES[policy](0.5, rope)
    if isinstance(edit, edits.Policy):
        edit = type(edit)(0.5, rope=rope, chunk_size=CHUNK)
    else:
        edit = edits.drop_middle_chunks(0.5, rope=rope, chunk_size=CHUNK)
    prompts = np.random.default_rng(SEED).integers(1, CONFIG.vocab_size, (2, PROMPT_TOKENS))
    kls, agreements = [], []
    for index, prompt in enumerate(prompts.tolist()):
        whole, behind = prompt[:-4], prompt[-4:]
        kv = torch.empty(CONFIG.layout(torch.float32).kv_shape(len(whole)))
        model.prefill(torch.tensor(whole), kv, 0)
        continuation: list[int] = []
        for _ in range(MAX_TOKENS):
            last = logprobs_of(model, kv, behind, [*continuation, 0])[-1]
            continuation.append(int(last.argmax()))
        assert continuation == swept[1]["continuations"][index]
        p = logprobs_of(model, kv, behind, continuation)
        q = logprobs_of(model, edit(kv, whole)[0], behind, continuation)
        kls.append((p.exp() * (p - q)).sum(-1))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    assert row["kl"] == pytest.approx(float(torch.stack(kls).mean()), rel=1e-3)
    assert row["agreement"] == pytest.approx(float(torch.stack(agreements).float().mean()))


def prompts_file(folder: Path) -> Path:
    words = " ".join(f"t{token}" for token in range(1, 5 * CHUNK))
    path = folder / "prompts.jsonl"
    path.write_text(f"{json.dumps(words)}\n\n{list(range(100, 100 + 5 * CHUNK))}\n")
    return path


def sweep_over(parts: Parts, folder: Path, *arguments: str) -> dict[str, Any]:
    engine = ["--engine-url", parts.engine_url, "--url", parts.url, "--http-url", parts.http_url]
    prompts = ["--prompts", str(prompts_file(folder)), "--max-tokens", "3"]
    path = folder / "sweep.json"
    given = [*engine, "--model", parts.model_name, *prompts, "--json", str(path), *arguments]
    assert cli.main(["sweep", *given]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_an_engine_of_ones_own_without_queries(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["--policies", "SnapKV,Knorm", "--ratios", "0.25,0.5"]
    result = sweep_over(parts, tmp_path, *policies, "--logprobs", "5", "--rounds", "2")
    assert (result["rounds"], result["num_logprobs"], result["max_tokens"]) == (2, 5, 3)
    assert result["prompt_tokens"] == [5 * CHUNK - 1, 5 * CHUNK]
    assert [row["policy"] for row in result["rows"]] == ["unedited", "Knorm", "Knorm"]
    assert all(row["covered"] < 1 for row in result["rows"])
    assert [one["ratio"] for one in result["left_out"]] == [0.25, 0.5]
    told = "left out: SnapKV 0.25, 0.5: it needs queries, and the engine stores none: nothing is "
    assert f"{told}registered as {parts.model_name}##query" in capsys.readouterr().out


def test_without_a_rope_the_output_changes_otherwise(parts: Parts, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "hidden_size": CONFIG.hidden_size,
                "num_attention_heads": CONFIG.num_attention_heads,
                "head_dim": CONFIG.head_dim,
                "rope_theta": CONFIG.rope_theta,
            }
        )
    )
    arguments = ["--policies", "StreamingLLM", "--ratios", "0.5"]
    without = sweep_over(parts, tmp_path, *arguments)
    with_rope = sweep_over(parts, tmp_path, *arguments, "--hf-config", str(config))
    assert (without["keys_moved"], with_rope["keys_moved"]) == (False, True)
    assert without["rows"][1]["kl"] != with_rope["rows"][1]["kl"]


def test_a_prompt_below_one_chunk_is_refused(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("[1, 2, 3]\n")
    engine = ["--engine-url", parts.engine_url, "--url", parts.url, "--http-url", parts.http_url]
    arguments = [*engine, "--model", parts.model_name, "--prompts", str(short)]
    assert cli.main(["sweep", *arguments]) == 1
    assert "prompt 0 has 3 tokens; expected at least one chunk of 16" in capsys.readouterr().err
