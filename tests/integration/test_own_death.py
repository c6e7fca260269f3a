"""Our process is killed at any step: its locks run out, and nobody else is harmed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.integration.conftest import CHUNK, locked, start_server
from tests.integration.dying_client import STEPS
from tests.integration.faults import pattern, quiet_client

ROOT = Path(__file__).parents[2]


def test_a_killed_client_leaves_nothing_that_time_does_not_free() -> None:
    times = {"read_ttl": 3.0, "write_ttl": 3.0, "session_ttl": 3.0}
    with start_server("shm", **times) as server, quiet_client(server) as bystander:
        kept = list(range(50_000, 50_000 + 4 * CHUNK))
        bystander.store(pattern(kept), kept)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.integration.dying_client"),
                *(server.url, server.http_url, "100000", *STEPS),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        ends = done.stdout.splitlines()
        assert ends == [f"{step}: -9" for step in STEPS], done.stderr
        assert os.path.exists(f"/dev/shm/{server.shm_name}")
        # The other client of the same model goes on at once, over its own registration.
        found = bystander.retrieve(kept)
        assert found is not None and torch.equal(found, pattern(kept))
        deadline = time.monotonic() + 60
        while locked(server) and time.monotonic() < deadline:
            pass
        assert locked(server) == 0
        # Nothing half-written is ever found, and what was being stored can be stored again.
        for number, step in enumerate(STEPS):
            first = 100_000 + 1000 * number
            tokens = list(range(first, first + 4 * CHUNK))
            stored = bystander.retrieve(tokens)
            if step.startswith("store") and "after commit" not in step:
                assert stored is None
            if stored is not None:
                assert torch.equal(stored, pattern(tokens)[:, :, : stored.shape[2]])
            bystander.store(pattern(tokens), tokens)
            assert bystander.lookup(tokens) == len(tokens)
            edited = bystander.retrieve(tokens[::2])
            assert edited is None or torch.equal(edited, pattern(tokens[::2]))
        assert locked(server) == 0
