"""The examples on the pages run as they stand, against the embedded server and engine.

A page's blocks are one program, which is run as a process of its own: each block may use what those
before it have made. What a page takes for granted, such as an open client, is in ``GIVEN``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_fast.serve.processes import ChildGroup
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import locked, start_server
from tests.pages import PAGES, ROOT, blocks, program

#: Names that a page's reader has already.
GIVEN = {
    "README.md": ["prompts"],
    "docs/drop-in.md": ["client", "ctx", "post_completion", "prompt_token_ids"],
    "docs/reliability.md": ["client"],
}
_CONNECT = 'connect("tcp://localhost:6555", "http://localhost:8080", "lmcache-fast-small")'
_MAKE = {
    "prompts": "prompts = [list(range(n, n + 1100)) for n in (1, 2)]",
    "prompt_token_ids": "prompt_token_ids = list(range(1, 1101))",
    "client": f"import lmcache_fast.sdk.kvcache; client = lmcache_fast.sdk.kvcache.{_CONNECT}",
    "ctx": "ctx = client",
    "post_completion": "from lmcache_fast.vllm import make_post_completion; post_completion = "
    'make_post_completion("http://localhost:8000", "lmcache-fast-small")',
}
WITH_EXAMPLES = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """Run a server and an engine; return what stands for them on the pages, and where they are."""
    children = ChildGroup()
    try:
        with start_server("shm", chunk_size=256, pool_bytes=1 << 29) as server:
            yield _start_engine(children, server)
            assert locked(server) == 0
    finally:
        children.close()


def _start_engine(children: ChildGroup, server: EmbeddedServer) -> dict[str, str]:
    addresses = ["--url", server.url, "--http-url", server.http_url]
    engine = children.start("engine", ["engine", "--port", "0", *addresses])
    url, _, name = engine.wait_for_line("lmcache-fast engine ready on ", 180).split()[-3:]
    return {
        "tcp://localhost:6555": server.url,
        "http://localhost:8080": server.http_url,
        "http://localhost:8000": url,
        "Qwen/Qwen3-8B": name,
    }


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_a_pages_examples_run(places: dict[str, str], page: str, tmp_path: Path) -> None:
    given = "; ".join(_MAKE[name] for name in GIVEN.get(page, []))
    source = given + program(page)  # the first line of a page is its title
    for written, real in places.items():
        source = source.replace(written, real)
    script = tmp_path / Path(page).with_suffix(".py").name
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


def test_no_example_is_overlooked() -> None:
    assert {"README.md", "docs/edits.md", "docs/policies.md"} <= set(WITH_EXAMPLES)
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("```python") == text.count("\n```python\n") == len(blocks(page, "python"))
    assert set(GIVEN) <= set(WITH_EXAMPLES)
