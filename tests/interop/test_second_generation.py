"""A program for upstream's second-generation SDK runs on ours with only its imports changed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL, Connect
from tests.interop.fake_engine import fake_engine
from tests.interop.servers import CHUNK, Server
from tests.interop.status_proxy import status_proxy
from tests.interop.test_first_generation import PROMPT, REQUESTS, run

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shared_memory_only]
EXAMPLE = Path(__file__).with_name("second_generation_example.py")
QUERY_MODEL = f"{MODEL}##query"
#: Twice as many heads as there are keys.
QUERY_LAYOUT = replace(LAYOUT, num_kv_heads=2 * LAYOUT.num_kv_heads, planes=1)


def test_the_example_runs_with_only_the_import_word_changed(
    server: Server, connect: Connect, salt: str, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text()
    script = tmp_path / "example.py"
    for word in ("import", "from"):
        text = text.replace(f"\n{word} lmcache.", f"\n{word} lmcache_fast.")
    script.write_text(text)
    assert text.count("lmcache_fast") == 5
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    seen: list[dict[str, Any]] = []
    with (
        status_proxy(server.http_url, {MODEL: LAYOUT, QUERY_MODEL: QUERY_LAYOUT}) as http_url,
        fake_engine(connect(), seen, connect(QUERY_MODEL, QUERY_LAYOUT)) as engine_url,
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
        assert result["config"] == {"num_request_streams": REQUESTS}
        assert result["decoded"] == [6] * REQUESTS
        assert result["kv shape"] == list(LAYOUT.kv_shape(4 * CHUNK))
        assert result["queries shape"] == list(QUERY_LAYOUT.object_shape(8 * CHUNK))
        assert result["stored again"] is False
        assert result["caught"] is True

        if server.version == "0.5.6":
            environment = peer.ensure("0.5.6")
            theirs = run(
                environment.python, EXAMPLE, environment.environment(), arguments(f"{salt}-2")
            )
            for name, sections in theirs.pop("metrics").items():
                results = result["metrics"][name]["results"]
                assert set(sections["results"]) <= set(results)
            result.pop("metrics")
            assert result == theirs
