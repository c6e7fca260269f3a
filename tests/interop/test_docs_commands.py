"""The pages' commands for LMCache's own server start it, with a pool that a client can map."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from lmcache_fast import KVClient
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.processes import Program, free_ports
from tests.pages import PAGES, commands

_LMCACHE = "from lmcache.cli.main import main; main()"
COMMANDS = {
    f"{page}-{number}": command[2:]
    for page in PAGES
    for number, command in enumerate(commands(page))
    if command[:2] == ["lmcache", "server"] and "--shm-name" in command
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run README's command on every release, and those of other pages on the last."""
    if "version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--server-version") or peer.CI_VERSIONS
        cases = [
            pytest.param(command, version, id=f"{version}-{name}")
            for name, command in COMMANDS.items()
            for version in (versions if name.startswith("README.md") else versions[-1:])
        ]
        metafunc.parametrize(("command", "version"), cases)


def test_readme_has_such_a_command() -> None:
    assert any(name.startswith("README.md") for name in COMMANDS)


def test_a_documented_command_starts_a_server_with_shared_memory(
    command: list[str], version: str, tmp_path: Path
) -> None:
    release = peer.ensure(version)
    words = list(command)
    if version[:5] <= "0.5.3":  # as the pages say
        at = words.index("--supported-transfer-mode")
        del words[at : at + 2]
    port, http_port = free_ports(2)
    # Of options that are given twice the last one holds.
    ours = ["--port", port, "--http-port", http_port, "--l1-size-gb", "0.25"]
    name = f"lmcache_fast_{uuid.uuid4().hex[:8]}"
    program = Program(
        [release.python, "-c", _LMCACHE, "server", *words, *ours, "--shm-name", name],
        release.environment(),
        tmp_path / "server.log",
    )
    url, http_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
    try:
        program.wait_ready(f"{http_url}/healthcheck", 120)
        with KVClient(url, http_url, MODEL, layout=LAYOUT) as client:
            assert client.transport_name == "shm"
    finally:
        program.stop()
