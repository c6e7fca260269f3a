"""A server that asks for a key, soon forgets who is silent, and listens on a Unix socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_fast import ConnectError, KVClient
from lmcache_fast.protocol import connection as connection_module
from lmcache_fast.protocol.server_info import API_KEY_VARIABLE, is_registered
from tests.interop import peer
from tests.interop.checks import CHECKS
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.processes import wait_until
from tests.interop.samples import random_kv, same_bits
from tests.interop.servers import CHUNK, Server, real_server

KEY = "a-key-of-the-tests"
VERSION = "0.5.7rc2"
GRACE = 2.0
#: Takes off the half minute that its flags have to give everybody at least.
NO_MINIMUM = """
from lmcache.v1.multiprocess.config import MPServerConfig
MPServerConfig.__post_init__ = lambda self: None
"""


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    key_file = folder / "key"
    key_file.write_text(KEY)
    flags = (
        *("--api-key-file", str(key_file)),
        *("--worker-reap-timeout-seconds", "1", "--worker-registration-grace-seconds", f"{GRACE}"),
    )
    options = {"flags": flags, "transport": "grpc+unix", "prelude": NO_MINIMUM}
    with real_server(peer.ensure(VERSION), folder, **options) as server:
        yield server


@pytest.fixture
def server(strict_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    return strict_server


@pytest.mark.parametrize("check", ["store", "retrieve", "edit"])
def test_it_works_over_a_unix_socket_and_with_a_key(server: Server, check: str) -> None:
    assert server.url.startswith("grpc+unix:///") and Path(server.url[12:]).is_socket()
    CHECKS[check](server)


def test_without_its_key_the_error_names_the_variable(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, what in (("", "asks for one in"), ("another", "refuses the API key in")):
        monkeypatch.setenv(API_KEY_VARIABLE, key)
        with pytest.raises(ConnectError, match=f"401: the server {what} {API_KEY_VARIABLE}"):
            KVClient(server.url, server.http_url, MODEL, layout=LAYOUT)


def test_an_idle_client_outlives_the_servers_reaping(
    server: Server, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(2 * CHUNK))
    kv = random_kv(LAYOUT.kv_shape(len(tokens)), LAYOUT.dtype, 8)

    def is_known(client: KVClient) -> bool:
        return bool(is_registered(server.http_url, client.instance_id, 30.0))

    monkeypatch.setattr(connection_module, "HEARTBEAT", 1e6)
    with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT) as asleep:
        asleep.store(kv, tokens, salt)
        monkeypatch.setattr(connection_module, "HEARTBEAT", GRACE / 4)
        with KVClient(server.url, server.http_url, MODEL, layout=LAYOUT) as idle:
            wait_until(lambda: not is_known(asleep), 60, "the server to forget who is silent")
            assert is_known(idle), "a heartbeat is a sign of life"
        # Awake again, with nobody left whom the server knows: it would call everything a miss.
        found = asleep.retrieve(tokens, salt)
        assert found is not None and same_bits(found, kv)
        assert is_known(asleep)
