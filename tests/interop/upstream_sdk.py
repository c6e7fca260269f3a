"""Upstream's SDK in a process of its own, doing what a test tells it to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.peer import Peer


def run_upstream(peer: Peer, url: str, http_url: str, steps: list[dict[str, Any]]) -> list[Any]:
    """Let upstream's SDK of one release do ``steps``; return its answers. Fails if it does."""
    job = {
        "url": url,
        "http_url": http_url,
        "model": MODEL,
        "dtype": LAYOUT.dtype_name,
        "steps": steps,
    }
    done = subprocess.run(
        [peer.python, Path(__file__).with_name("upstream_side.py")],
        input=json.dumps(job),
        env=peer.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    answers = [json.loads(line.removeprefix("answer ")) for line in lines]
    assert len(answers) == len(steps)
    return answers
