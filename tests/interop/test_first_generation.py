"""A program for upstream's first-generation SDK runs on ours with only its imports changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL, Connect
from tests.interop.fake_engine import fake_engine
from tests.interop.servers import CHUNK, Server
from tests.interop.status_proxy import status_proxy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EXAMPLE = Path(__file__).with_name("first_generation_example.py")
PROMPT = 8 * CHUNK + 10
REQUESTS = 3


def run(python: object, script: Path, environment: dict[str, str], arguments: list[str]) -> Any:
    done = subprocess.run(
        [str(python), script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return json.loads(line.removeprefix("result "))


def test_the_example_runs_with_only_the_import_lines_changed(
    server: Server, connect: Connect, salt: str, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text()
    script = tmp_path / "example.py"
    script.write_text(text.replace("import lmcache.sdk.", "import lmcache_fast.sdk."))
    assert script.read_text().count("lmcache_fast") == text.count("import lmcache.sdk.") == 3
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    seen: list[dict[str, Any]] = []
    with (
        status_proxy(server.http_url, {MODEL: LAYOUT}) as http_url,
        fake_engine(connect(), seen) as engine_url,
    ):

        def arguments(salt: str) -> list[str]:
            addresses = [server.url, http_url, engine_url, MODEL, salt]
            return [*addresses, str(PROMPT), str(REQUESTS), str(CHUNK)]

        result = run(sys.executable, script, ours, arguments(salt))
        decodes = seen[REQUESTS:]
        assert [request["cached"] for request in seen[:REQUESTS]] == [0] * REQUESTS
        assert len(decodes) == REQUESTS
        for request in decodes:  # half of the chunks, then what lay behind the last whole one
            assert len(request["prompt"]) == 4 * CHUNK + 10 + 1
            assert request["cached"] == 4 * CHUNK
        assert result["counts"] == [REQUESTS * PROMPT, REQUESTS * 5]
        assert result["decoded"] == [6] * REQUESTS
        assert result["kv shape"] == list(LAYOUT.kv_shape(4 * CHUNK))
        assert result["stored again"] is False

        if server.version == "0.5.2":  # the release whose SDK the program was written for
            environment = peer.ensure("0.5.2")
            theirs = run(
                environment.python, EXAMPLE, environment.environment(), arguments(f"{salt}-2")
            )
            for name, sections in theirs.pop("metrics").items():
                results = result["metrics"][name]["results"]
                assert set(sections["results"]) <= set(results)
            result.pop("metrics")
            if not server.segment.exists():  # there upstream says True whatever it has stored
                assert theirs.pop("stored again") is True
                result.pop("stored again")
            assert result == theirs
