"""``lmcache-fast sweep``."""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from lmcache_fast.edits import Rope
from lmcache_fast.errors import InvalidInputError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.server_info import read_models
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_fast.sdk.context import LMCacheSDKContext
from lmcache_fast.serve.processes import ChildGroup, run_until_signal
from lmcache_fast.sweep.run import POLICIES, Plan, Result, Row, Sweep
from lmcache_fast.sweep.scoring import Scorer
from lmcache_fast.vllm import make_post_completion

_URL = "tcp://localhost:6555"
_HTTP_URL = "http://localhost:8080"
_BUDGET = 32768
_POOL_BYTES = 1 << 30
_COLUMNS = (
    f"{'':20}{'ratio':>7}{'kept':>7}{'tokens/s':>10}{'gain':>7}{'edit ms':>9}"
    f"{'read MB':>9}{'wrote MB':>10}{'KL':>10}{'agree':>7}{'covered':>9}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    default = Plan((), ())
    parser.add_argument(
        "--engine-url",
        metavar="URL",
        help="the engine's HTTP address; without one a server and an engine with a made-up model "
        "are started",
    )
    parser.add_argument("--url", help=f"that engine's cache server, if not {_URL}")
    parser.add_argument("--http-url", help=f"that server's HTTP address, if not {_HTTP_URL}")
    parser.add_argument(
        "--model", help="the model's name on the engine; or the made-up one: tiny, small"
    )
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="which to run, separated by commas"
    )
    parser.add_argument(
        "--ratios", default="0.25,0.5,0.75", help="fractions of the tokens to remove"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line, as JSON: a text, or a list of token ids; made up by default",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=default.max_tokens, help="tokens to decode and compare"
    )
    parser.add_argument(
        "--rounds", type=int, default=default.rounds, help="times to decode from each edited cache"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        help="how many of the likeliest tokens to compare one by one; -1: all "
        f"(all of a made-up model; {default.num_logprobs} of another)",
    )
    parser.add_argument(
        "--hf-config",
        metavar="PATH",
        help="the model's config.json, or its folder: kept keys are moved to their new positions",
    )
    parser.add_argument(
        "--opaque",
        action="store_true",
        help="rows of the engine's cache are no tokens (vLLM on a CPU): no keys are moved; the "
        "sizes are those of --hf-config if that is given, else those on /status",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds that one answer may take"
    )
    made_up = parser.add_argument_group("made-up engine and prompts")
    made_up.add_argument("--requests", type=int, default=4, help="number of prompts")
    made_up.add_argument("--prompt-tokens", type=int, default=1032, help="length of each prompt")
    made_up.add_argument("--chunk-size", type=int, default=64, help="tokens a chunk")
    made_up.add_argument(
        "--kv-budget-tokens",
        type=int,
        default=0,
        help="tokens of KV that the engine has room for; "
        f"0: for half of the made-up prompts, or {_BUDGET}",
    )
    made_up.add_argument("--seed", type=int, default=0, help="of the weights and the prompts")


def run(args: argparse.Namespace) -> int:
    """Run the sweep, print the table, write the files.

    Raises:
        InvalidInputError: an argument is wrong; nothing was started.
        LMCacheFastError: a part could not be used.
    """
    _check(args)
    if args.picture is not None:
        importlib.import_module("lmcache_fast.sweep.picture")  # now, and not after all the work
    if args.engine_url is None:
        return run_until_signal(lambda children: _run_embedded(args, children))
    url, http_url = args.url or _URL, args.http_url or _HTTP_URL
    layout: KVLayout | Literal["opaque"] | None = None
    rope = None
    if args.opaque:
        layout = _opaque(args.hf_config) if args.hf_config else "opaque"
    elif args.hf_config:
        rope = Rope.from_hf_config(args.hf_config)
    return _run(args, url, http_url, args.engine_url, args.model, rope, layout)


def _opaque(hf_config: str) -> KVLayout:
    """The cache of vLLM on a CPU: a head's keys and values in one row."""
    layout = KVLayout.from_hf_config(hf_config)
    return KVLayout.opaque(layout.num_layers, layout.planes * layout.width, layout.dtype)


def _check(args: argparse.Namespace) -> None:
    args.policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    for name in args.policies:
        if name not in POLICIES:
            raise InvalidInputError(f"--policies: {name!r}; expected some of {', '.join(POLICIES)}")
    try:
        args.ratios = [float(ratio) for ratio in args.ratios.split(",")]
    except ValueError as error:
        raise InvalidInputError(f"--ratios: {error}") from error
    for name in args.policies:  # in the edits' own words
        for ratio in args.ratios:
            POLICIES[name](ratio, None)
    if not args.policies:
        raise InvalidInputError("--policies names none")
    for name in ("max_tokens", "rounds", "requests", "prompt_tokens", "chunk_size"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise InvalidInputError(f"--{flag} is {getattr(args, name)}; expected at least 1")
    for path in (args.json, args.picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInputError(f"there is no folder {str(path.absolute().parent)!r}")
    if args.engine_url is None:
        for name in ("url", "http_url", "hf_config", "opaque"):
            if getattr(args, name):
                flag = name.replace("_", "-")
                raise InvalidInputError(f"--{flag} belongs to an engine: expected --engine-url too")
    elif args.model is None or args.prompts is None:
        raise InvalidInputError("--engine-url: expected --model and --prompts too")


def _run_embedded(args: argparse.Namespace, children: ChildGroup) -> int:
    """Start a server and an engine, and sweep over them."""
    from lmcache_fast.serve.demo.parts import start_parts
    from lmcache_fast.serve.engine.model import PRESETS

    model = args.model or "small"
    if model not in PRESETS:
        raise InvalidInputError(
            f"--model is {model!r}; without --engine-url expected one of {', '.join(PRESETS)}"
        )
    config = PRESETS[model]
    whole = args.prompt_tokens + args.max_tokens
    budget = args.kv_budget_tokens or (
        max(1, args.requests // 2) * whole if args.prompts is None else _BUDGET
    )
    token_bytes = config.layout(torch.float32).token_bytes
    token_bytes += config.query_layout(torch.float32).token_bytes
    print("starting a cache server and an engine ...", file=sys.stderr, flush=True)
    parts = start_parts(
        children,
        model=model,
        chunk_size=args.chunk_size,
        # The prompts and the edits of some rows; older ones may be evicted.
        pool_bytes=max(_POOL_BYTES, 4 * args.requests * whole * token_bytes),
        kv_budget_tokens=budget,
        seed=args.seed,
        store_queries=True,
    )
    rope = Rope(config.head_dim, config.rope_theta)
    if args.logprobs is None:
        args.logprobs = -1
    made_up = np.random.default_rng(args.seed).integers(
        1, config.vocab_size, (args.requests, args.prompt_tokens)
    )
    name, prompts = parts.model_name, made_up.tolist()
    return _run(args, parts.url, parts.http_url, parts.engine_url, name, rope, None, prompts)


def _run(
    args: argparse.Namespace,
    url: str,
    http_url: str,
    engine_url: str,
    model: str,
    rope: Rope | None,
    layout: KVLayout | Literal["opaque"] | None,
    made_up: Sequence[Sequence[int]] = (),
) -> int:
    plan = Plan(
        policies=tuple(args.policies),
        ratios=tuple(args.ratios),
        max_tokens=args.max_tokens,
        num_logprobs=Plan.num_logprobs if args.logprobs is None else args.logprobs,
        rounds=args.rounds,
        rope=rope,
        timeout=args.timeout,
    )
    engine = make_post_completion(engine_url, model, timeout=args.timeout)
    kind = LMCacheSDKCacheKind.QUERY
    try:
        prompts = made_up
        if args.prompts is not None:
            prompts = _read_prompts(args.prompts, Scorer(engine, 0))
        with LMCacheSDKContext(url, http_url, model, timeout=args.timeout, layout=layout) as ctx:
            queries = None
            if kind.server_model_name(model) in read_models(http_url, args.timeout):
                queries = LMCacheSDKContext(url, http_url, model, kind, args.timeout)
            try:
                print(
                    f"{len(prompts)} prompts; server {ctx.server_version}, transport "
                    f"{ctx.transport_name}, chunks of {ctx.chunk_size} tokens"
                )
                print(_COLUMNS, flush=True)
                salt = f"sweep-{secrets.token_hex(8)}"
                result = Sweep(ctx, queries, engine, prompts, salt, plan, _print_row).run()
            finally:
                if queries is not None:
                    queries.close()
    finally:
        engine.close()
    _write(args, result)
    return 0


def _read_prompts(path: Path, scorer: Scorer) -> list[list[int]]:
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--prompts: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=str | list[int])
        except msgspec.DecodeError as error:
            raise InvalidInputError(
                f"--prompts: line {number} of {str(path)!r} is neither a JSON string nor a list of "
                f"token ids: {error}"
            ) from error
        prompts.append(scorer.tokenize(prompt) if isinstance(prompt, str) else prompt)
    if not prompts:
        raise InvalidInputError(f"--prompts: {str(path)!r} has none")
    return prompts


def _print_row(row: Row) -> None:
    print(
        f"{row.policy:20}{row.ratio:7.2f}{row.kept:7.0%}{row.decode_tput:10,.1f}{row.gain:6.2f}x"
        f"{1e3 * row.edit_seconds:9.1f}{row.bytes_read / 1e6:9.1f}{row.bytes_written / 1e6:10.1f}"
        f"{row.kl:10.2g}{row.agreement:7.0%}{row.covered:9.0%}",
        flush=True,
    )


def _write(args: argparse.Namespace, result: Result) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in result.left_out:
        reasons.setdefault((one.policy, one.reason), []).append(f"{one.ratio:g}")
    for (policy, reason), ratios in reasons.items():
        print(f"left out: {policy} {', '.join(ratios)}: {reason}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if args.picture is not None:
        from lmcache_fast.sweep.picture import draw

        draw(result, args.picture)
        print(f"picture: {args.picture}")
