"""Both generations' programs run unchanged under the drop-in, LMCache installed or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_fast import KVClient
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.fake_engine import fake_engine
from tests.interop.servers import CHUNK, Server, embedded_server
from tests.interop.test_second_generation import QUERY_LAYOUT, QUERY_MODEL

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FOLDER = Path(__file__).parent
PROMPT = 4 * CHUNK + 3
REQUESTS = 2


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Without a pool: the peer's environment has no native extension of ours to map one with.
    with embedded_server(tmp_path_factory.mktemp("server"), shared_memory=False) as server:
        yield server


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not-installed"])
@pytest.mark.parametrize("generation", ["first", "second"])
def test_the_unchanged_program_runs_on_ours(
    own_server: Server, generation: str, installed: bool, salt: str
) -> None:
    root = str(FOLDER.parents[1])
    if installed:
        upstream = peer.ensure()
        python, environment = upstream.python, {**upstream.environment(), "PYTHONPATH": root}
    else:
        python = Path(sys.executable)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    seen: list[dict[str, Any]] = []
    with (
        KVClient(own_server.url, own_server.http_url, MODEL, layout=LAYOUT) as kv,
        KVClient(own_server.url, own_server.http_url, QUERY_MODEL, layout=QUERY_LAYOUT) as queries,
        fake_engine(kv, seen, queries) as engine_url,
    ):
        script = FOLDER / f"{generation}_generation_example.py"
        addresses = [own_server.url, own_server.http_url, engine_url, MODEL, salt]
        numbers = [str(PROMPT), str(REQUESTS), str(CHUNK)]
        done = subprocess.run(
            [python, "-m", "lmcache_fast.dropin", script, *addresses, *numbers],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    result = json.loads(line.removeprefix("result "))
    assert "Batch decode" in done.stdout  # our report, not upstream's
    assert result["kv shape"] == list(LAYOUT.kv_shape(2 * CHUNK))
    assert result["counts"] == [REQUESTS * PROMPT, REQUESTS * 5]
    for request in seen[REQUESTS:]:
        assert request["cached"] == 2 * CHUNK
    own_server.wait_nothing_held()
