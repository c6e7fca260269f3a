"""What is read off a server's HTTP side, and which servers are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_fast.errors import ConnectError, ProtocolError, UnsupportedServerError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.server_info import read_layouts, read_models, read_server_info
from tests.unit.protocol_fake import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def entry(shape: str, kv_format: str = "NL_X_NB_TWO_BS_NH_HS", **more: Any) -> dict[str, Any]:
    group = {
        "dtype": "torch.bfloat16",
        "tokens_per_block": 16,
        "engine_kv_format": kv_format,
        "engine_kv_concrete_shape": shape,
        "is_mla": False,
    }
    layout = {"num_layers": 36, "kernel_groups": [group]}
    return {"model_name": "m", "world_size": 1, "kv_cache_layout": layout, **more}


def test_settings_are_read(server: FakeServer) -> None:
    info = read_server_info(server.http_url, 30)
    assert (info.version, info.dialect.release, info.chunk_size) == ("0.5.6", "0.5.6", 4)
    assert (info.shm_name, info.transfer_mode, info.transport) == ("fake", "auto", "zmq")
    assert (info.read_ttl, info.write_ttl, info.cpu_workers) == (30.0, 60.0, 1)


@pytest.mark.parametrize("mode", ["lmcache_driven", None])
def test_a_server_without_engine_driven_transfers_is_refused_with_the_flag(
    server: FakeServer, mode: str | None
) -> None:
    server.config["mp"]["supported_transfer_mode"] = mode
    with pytest.raises(UnsupportedServerError, match="--supported-transfer-mode auto"):
        read_server_info(server.http_url, 30)


def test_a_grpc_server_is_refused_with_the_flag(server: FakeServer) -> None:
    server.config["mp"]["transport"] = "grpc"
    with pytest.raises(UnsupportedServerError, match="--transport zmq"):
        read_server_info(server.http_url, 30)


def test_what_is_no_lmcache_server_is_told_apart(server: FakeServer) -> None:
    with pytest.raises(ConnectError, match="/version"):
        read_server_info(server.http_url + "/elsewhere", 30)
    with pytest.raises(ConnectError, match=r"no HTTP address|/version"):
        read_server_info("localhost", 30)
    server.config["mp"]["chunk_size"] = "many"
    with pytest.raises(ProtocolError, match="chunk_size"):
        read_server_info(server.http_url, 30)
    server.close()
    with pytest.raises(ConnectError, match="/version"):
        read_server_info(server.http_url, 30)


@pytest.mark.parametrize(
    ("shape", "kv_format", "expected"),
    [
        ("36 x [1024, 2, 16, 8, 128]", "NL_X_NB_TWO_BS_NH_HS", (8, 128, 2)),
        ("36 x [2, 1024, 16, 8, 128]", "NL_X_TWO_NB_BS_NH_HS", (8, 128, 2)),
        ("36 x [2, 1024, 8, 16, 128]", "NL_X_TWO_NB_NH_BS_HS", (8, 128, 2)),
        ("36 x [1024, 8, 16, 256]", "NL_X_NB_NH_BS_CS", (8, 256, 1)),
        ("36 x [1024, 16, 8, 256]", "NL_X_NB_BS_NH_CS", (8, 256, 1)),
        ("36 x [1024, 16, 576]", "NL_X_NB_BS_HS", (1, 576, 1)),
    ],
)
def test_a_registration_tells_the_layout(
    server: FakeServer, shape: str, kv_format: str, expected: tuple[int, int, int]
) -> None:
    server.status["cache_context_meta"] = {"1": entry(shape, kv_format, num_kv_readers=2)}
    heads, head_dim, planes = expected
    layout = KVLayout(36, heads, head_dim, "bfloat16", 16, planes)  # type: ignore[arg-type]
    assert read_layouts(server.http_url, 30) == {"m": layout}
    assert read_models(server.http_url, 30)["m"].num_kv_readers == 2


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (entry("Unknown (new format)"), "says no sizes"),
        (entry("36 x [1024, 2, 16, 8, 128]", world_size=4), "4 ranks"),
        (entry("36 x [1, 2, 3]", "NEW"), "unknown here"),
        ({"model_name": "m"}, "kv_cache_layout"),
    ],
)
def test_a_layout_that_cannot_be_told_gives_its_reason(
    server: FakeServer, status: dict[str, Any], why: str
) -> None:
    server.status["cache_context_meta"] = {"1": status}
    reason = read_layouts(server.http_url, 30)["m"]
    assert isinstance(reason, str) and why in reason and "layout=" in reason


def test_an_engine_driven_registration_is_named_without_a_layout(server: FakeServer) -> None:
    server.status["non_cuda_context_meta"] = {"7": {"model_name": "x", "world_size": 1}}
    assert "engine-driven" in str(read_layouts(server.http_url, 30)["x"])
