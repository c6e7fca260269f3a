"""``lmcache-fast demo``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lmcache_fast.errors import InvalidInputError
from lmcache_fast.serve.demo.chart import draw
from lmcache_fast.serve.demo.experiment import Result, Settings, run_experiment
from lmcache_fast.serve.engine.model import PRESETS
from lmcache_fast.serve.processes import ChildGroup, run_until_signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    default = Settings()
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        default=Path("lmcache-fast-demo.png"),
        help="draw the chart there",
    )
    parser.add_argument(
        "--model", choices=sorted(PRESETS), default=default.model, help="made-up model"
    )
    parser.add_argument("--requests", type=int, default=default.requests, help="number of prompts")
    parser.add_argument(
        "--prompt-tokens", type=int, default=default.prompt_tokens, help="length of each prompt"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=default.output_tokens, help="tokens to decode of each"
    )
    parser.add_argument("--chunk-size", type=int, default=default.chunk_size, help="tokens a chunk")
    parser.add_argument(
        "--kv-budget-tokens",
        type=int,
        default=0,
        help="tokens of KV that the engine has room for; "
        "0: as many as all requests need after half was dropped",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the prompts")
    parser.add_argument(
        "--require-gain",
        type=float,
        default=0.0,
        metavar="FACTOR",
        help="end with status 1 if decoding gains less",
    )


def run(args: argparse.Namespace) -> int:
    """Run the experiment, print the reports and the gain, write the files."""
    for name in ("requests", "prompt_tokens", "output_tokens", "chunk_size"):
        if getattr(args, name) < 1:
            raise InvalidInputError(f"{name} is {getattr(args, name)}; expected at least 1")
    if args.prompt_tokens < 4 * args.chunk_size:
        raise InvalidInputError(
            f"prompt_tokens is {args.prompt_tokens}; expected at least 4 chunks of "
            f"{args.chunk_size}, so that half of them lie in the middle"
        )
    for path in (args.json, args.png):  # now, and not after a minute's work
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInputError(f"there is no folder {str(path.absolute().parent)!r}")
    settings = Settings(
        model=args.model,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        chunk_size=args.chunk_size,
        kv_budget_tokens=args.kv_budget_tokens,
        seed=args.seed,
    )

    def work(children: ChildGroup) -> int:
        result = run_experiment(children, settings)
        _report(result)
        if args.json is not None:
            args.json.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
        draw(result, args.png)
        print(f"chart: {args.png}")
        if result.decode_gain < args.require_gain:
            print(f"the gain is below {args.require_gain}", file=sys.stderr)
            return 1
        return 0

    return run_until_signal(work)


def _report(result: Result) -> None:
    for name, one in (("baseline", result.baseline), ("dropped", result.dropped)):
        print(
            f"{name}: {one.reports['decode'].output_tput:,.1f} decoded tokens/s; "
            f"{one.cached_tokens} of {one.prompt_tokens} prompt tokens came from the cache"
        )
    print(
        f"decode gain: {result.decode_gain:.2f}x "
        f"({result.decode_gain_with_modify:.2f}x with the time of the edit counted in)",
        flush=True,
    )
