"""``lmcache-fast server`` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PATIENCE = 120.0
READY = re.compile(r"lmcache-fast server: zmq (tcp://\S+) http (http://\S+) (.*) \((\d+) bytes\)")


def command(*flags: str) -> list[str]:
    program = "import sys; from lmcache_fast.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", program, "server", "--port", "0", "--http-port", "0", *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
    """Run a server; yield the process and its ready line."""
    with subprocess.Popen(
        command(*flags), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            match = READY.match(process.stdout.readline())
            assert match is not None
            yield process, match
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_removes_the_segment(number: signal.Signals) -> None:
    name = f"test_command_{uuid.uuid4().hex}"
    flags = ("--l1-size-gb", "0.01", "--chunk-size", "32", "--shm-name", name, "--no-l1-use-lazy",
             "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven",
             "--protocol", "0.5.7")  # fmt: skip
    segment = Path(f"/dev/shm/lmcache_l1_pool_{name}")
    with running(*flags) as (process, ready):
        assert ready[3] == f"shared memory {segment.name}"
        assert int(ready[4]) == segment.stat().st_size
        config = httpx.get(f"{ready[2]}/config", timeout=PATIENCE).json()["mp"]
        assert (config["chunk_size"], config["supported_transfer_mode"]) == (32, "engine_driven")
        assert httpx.get(f"{ready[2]}/version", timeout=PATIENCE).json() == "0.5.7-fast"
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    assert not segment.exists()


def test_a_lazy_pool_is_private_whatever_its_name() -> None:
    with running("--l1-size-gb", "0.01", "--shm-name", "unused") as (process, ready):
        assert ready[3] == "private memory"
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_taken_port_is_one_clear_line() -> None:
    with running("--l1-size-gb", "0.01") as (_, ready):
        port = ready[1].rpartition(":")[2]
        second = subprocess.run(
            [*command(), "--port", port],
            env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    assert second.returncode == 1
    assert "cannot listen" in second.stderr and "Traceback" not in second.stderr
