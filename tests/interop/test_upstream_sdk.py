"""Upstream's SDK and ours on one server: what one stores, the other finds bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_fast import KVClient
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.samples import digest, random_kv
from tests.interop.servers import CHUNK, Server, embedded_server, real_server
from tests.interop.status_proxy import status_proxy
from tests.interop.upstream_sdk import run_upstream

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SDK_VERSION = "0.5.6"
EDGES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 9]


@pytest.fixture(
    scope="module",
    params=["real-shm", "real-fallback", "embedded-shm", "embedded-fallback"],
)
def one_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind, transport = request.param.split("-")
    folder = tmp_path_factory.mktemp("server")
    shared = transport == "shm"
    if kind == "real":
        with real_server(peer.ensure(SDK_VERSION), folder, shared_memory=shared) as server:
            yield server
    else:
        with embedded_server(folder, shared) as server:
            yield server


def test_what_one_sdk_stores_the_other_retrieves(one_server: Server) -> None:
    with (
        status_proxy(one_server.http_url, {MODEL: LAYOUT}) as http_url,
        KVClient(one_server.url, http_url, MODEL) as ours,
    ):
        assert ours.layout == LAYOUT  # read from the registration
        steps = []
        for seed, count in enumerate(EDGES):
            tokens = list(range(count))
            kv = random_kv(LAYOUT.kv_shape(count), LAYOUT.dtype, seed)
            assert ours.store(kv, tokens, f"ours-{count}") is (count >= CHUNK)
            shared = {"tokens": tokens, "shape": LAYOUT.kv_shape(count), "seed": seed}
            steps.append({"action": "retrieve", "salt": f"ours-{count}", **shared})
            steps.append({"action": "store", "salt": f"theirs-{count}", **shared})
        answers = run_upstream(peer.ensure(SDK_VERSION), one_server.url, http_url, steps)

        for seed, count in enumerate(EDGES):
            whole = count // CHUNK * CHUNK
            kv = random_kv(LAYOUT.kv_shape(count), LAYOUT.dtype, seed)[:, :, :whole]
            theirs, stored = answers[2 * seed : 2 * seed + 2]
            found = ours.retrieve(list(range(count)), f"theirs-{count}")
            if whole == 0:
                assert theirs["shape"] is None
                assert found is None
            else:
                assert theirs == {"shape": list(kv.shape), "digest": digest(kv)}
                assert stored["stored"] is True
                assert found is not None
                assert digest(found) == digest(kv)
    one_server.wait_nothing_held()
