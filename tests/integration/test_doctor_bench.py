"""``lmcache-fast doctor`` and ``lmcache-fast bench`` against the embedded server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_fast import bench
from lmcache_fast._extension import available
from lmcache_fast.cli import main
from lmcache_fast.layout import KVLayout
from lmcache_fast.serve.server import EmbeddedServer

CHUNK = 8
SMALL = KVLayout(2, 1, 16, torch.bfloat16)


@pytest.fixture(params=["0.5.6", "0.5.7"])
def plain(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server without shared memory."""
    with EmbeddedServer(pool_bytes=1 << 24, chunk_size=CHUNK, protocol=request.param) as server:
        yield server


@pytest.fixture
def shared() -> Iterator[EmbeddedServer]:
    """A server with shared memory."""
    if not available():
        pytest.skip("no native extension")
    name = f"doctor_{uuid.uuid4().hex[:12]}"
    with EmbeddedServer(pool_bytes=1 << 24, chunk_size=CHUNK, shm_name=name) as server:
        yield server


def addresses(server: EmbeddedServer) -> list[str]:
    return ["--url", server.url, "--http-url", server.http_url, "--timeout", "60"]


def test_doctor_passes_a_server_with_shared_memory(
    shared: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *addresses(shared)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    assert any(line.startswith("ok    transport: shm") for line in lines)
    assert any(line.startswith("ok    round trip: one chunk") for line in lines)


def test_doctor_passes_a_server_without_and_says_which_flags_would_help(
    plain: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *addresses(plain)]) == 0
    out = capsys.readouterr().out
    assert f"spoken to as {plain.config.protocol}" in out
    assert "--shm-name" in out and "--no-l1-use-lazy" in out
    assert "ok    round trip" in out


def test_doctor_fails_for_a_model_that_is_not_registered(
    plain: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *addresses(plain), "--model", "absent"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  model: 'absent' is not registered" in out
    assert "ok    round trip" in out


def test_doctor_fails_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ["--url", "tcp://127.0.0.1:9", "--http-url", "http://127.0.0.1:9"]
    assert main(["doctor", *nobody]) == 1
    assert "FAIL  server: GET http://127.0.0.1:9/version" in capsys.readouterr().out


def test_bench_measures_every_operation_and_writes_json(
    plain: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "LAYOUT", SMALL)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setenv("LMCACHE_FAST_TRANSPORT", _spoken(plain))
    path = tmp_path / "figures.json"
    assert main(["bench", *addresses(plain), "--chunks", "4", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["chunk_bytes"] == SMALL.token_bytes * CHUNK
    assert figures["transport"] == _spoken(plain)
    for name in ("memcpy", "retrieve", "store", "edit, half dropped", "one chunk", "lease"):
        assert figures["results"][name]["rounds"] == 2
    assert figures["results"]["edit, half dropped"]["bytes"] * 2 == SMALL.token_bytes * 4 * CHUNK


def test_bench_wants_chunks_to_drop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--chunks", "1"]) == 1
    assert "--chunks is 1; expected at least 2" in capsys.readouterr().err


def _spoken(server: EmbeddedServer) -> str:
    return "inline" if server.config.protocol == "0.5.7" else "pickle"
