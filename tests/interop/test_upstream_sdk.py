"""Upstream's SDK and ours on our own server: what one stores, the other finds bit for bit.

On real servers it is one of the checks of every release.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop import checks, peer
from tests.interop.servers import Server, embedded_server

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", params=["shm", "fallback"])
def own_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with embedded_server(tmp_path_factory.mktemp("server"), request.param == "shm") as server:
        yield server


def test_what_one_sdk_stores_the_other_retrieves(own_server: Server) -> None:
    checks.upstream(own_server, peer.BASE_VERSION)
    own_server.wait_nothing_held()
