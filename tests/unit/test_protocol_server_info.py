"""What is read off a server's HTTP side, and which servers are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmcache_fast.errors import (
    ConnectError,
    InvalidInputError,
    ProtocolError,
    UnknownModelError,
    UnsupportedServerError,
)
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.registrations import RegisteredModel, models_of, resolve
from lmcache_fast.protocol.server_info import read_layouts, read_models, read_server_info
from tests.unit.protocol_fake import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


SPLIT = KVLayout(36, 8, 128, torch.bfloat16)
PACKED = KVLayout.packed(36, 8, 128, "bfloat16")
MLA = KVLayout(36, 1, 576, torch.bfloat16, planes=1)


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
    for address in ("localhost", "localhost:8080", "tcp://localhost:8080"):
        with pytest.raises(ConnectError, match="is no HTTP address: expected http://HOST:PORT"):
            read_server_info(address, 30)
    with pytest.raises(ConnectError, match=r"/version: .*; is the server running\?"):
        read_server_info("http://127.0.0.1:1", 30)
    server.config["mp"]["chunk_size"] = "many"
    with pytest.raises(ProtocolError, match="chunk_size"):
        read_server_info(server.http_url, 30)
    server.close()
    with pytest.raises(ConnectError, match="/version"):
        read_server_info(server.http_url, 30)


@pytest.mark.parametrize(
    ("shape", "kv_format", "layout"),
    [
        ("36 x [1024, 2, 16, 8, 128]", "NL_X_NB_TWO_BS_NH_HS", SPLIT),
        ("36 x [1024, 2, 8, 16, 128]", "EngineKVFormat.NL_X_NB_TWO_NH_BS_HS", SPLIT),
        ("36 x [2, 1024, 16, 8, 128]", "NL_X_TWO_NB_BS_NH_HS", SPLIT),
        ("36 x [2, 1024, 8, 16, 128]", "NL_X_TWO_NB_NH_BS_HS", SPLIT),
        ("36 x [2, 1024, 8, 1, 16, 128]", "NL_X_TWO_NB_NH_ONE_BS_HS", SPLIT),
        ("36 x 2 x [1024, 16, 8, 128]", "NL_X_TWO_X_NB_BS_NH_HS", SPLIT),
        ("2 x 36 x [16384, 8, 128]", "TWO_X_NL_X_NBBS_NH_HS", SPLIT),
        ("[1024, 36, 2, 16, 8, 128]", "NB_NL_TWO_BS_NH_HS", SPLIT),
        ("36 x [1024, 8, 16, 256]", "NL_X_NB_NH_BS_CS", PACKED),
        ("36 x [1024, 16, 8, 256]", "NL_X_NB_BS_NH_CS", PACKED),
        ("36 x [1024, 8, 16, 2, 128]", "NL_X_NB_NH_BS_TWO_HS", PACKED),
        ("36 x [1024, 16, 576]", "NL_X_NB_BS_HS", MLA),
        ("36 x [16384, 1, 576]", "NL_X_NBBS_ONE_HS", MLA),
    ],
)
def test_a_registration_tells_the_layout(
    server: FakeServer, shape: str, kv_format: str, layout: KVLayout
) -> None:
    server.status["cache_context_meta"] = {"1": entry(shape, kv_format, num_kv_readers=2)}
    assert read_layouts(server.http_url, 30) == {"m": layout}
    assert read_models(server.http_url, 30)["m"].num_kv_readers == 2


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (entry("Unknown (new format)"), "says no sizes"),
        (entry("36 x [1, 2, 3]", "NEW"), "unknown here"),
        (entry("36 x [1024, 16, 132]", "NL_X_NB_BSV_BSS"), "unknown here"),
        (entry("72 x [1024, 16, 8, 128]", "NL_X_NB_BS_NH_HS"), "unknown here"),
        (entry("36 x NP x [1024, 16, 1, 512]", "NL_X_NP_X_NB_BS_ONE_HS"), "unknown here"),
        (entry("36 x [1024, 16, 128]", "NL_X_NB_TWO_BS_NH_HS"), "expected ['NB', 'TWO'"),
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


def contexts(*entries: dict[str, Any]) -> RegisteredModel:
    named = {str(100 + n): entry for n, entry in enumerate(entries)}
    return models_of({"cache_context_meta": named})["m"]


def test_packed_rows_of_a_cpu_are_opaque() -> None:
    status = entry("36 x [1024, 8, 16, 256]", "NL_X_NB_NH_BS_CS")
    assert contexts(status).layout == PACKED
    status["kv_cache_layout"]["kernel_groups"][0]["attention_backend"] = "vLLM CPU, fused K/V"
    assert contexts(status).layout == KVLayout.opaque(36, 2048, "bfloat16")


def test_several_engines_of_one_name_agree_or_are_named() -> None:
    one, other = entry("36 x [1024, 2, 16, 8, 128]"), entry("36 x [512, 2, 16, 4, 128]")
    assert contexts(one, entry("36 x [77, 2, 16, 8, 128]")).layout == SPLIT
    model = contexts(one, other)
    assert model.layout is None
    assert "instances 100 and 101" in model.problem and "4 heads" in model.problem
    assert contexts(one, entry("Unknown (new)")).layout == SPLIT
    assert "2 ranks" in contexts(one, {**other, "world_size": 2}).problem
    with pytest.raises(UnknownModelError, match="pass world_size="):
        resolve("m", {"m": contexts(one, {**one, "world_size": 2})}, SPLIT, None)


def test_each_rank_registers_its_share_of_the_heads() -> None:
    rank = entry("36 x [1024, 2, 16, 2, 128]", world_size=4)
    assert contexts(rank, rank, rank, rank) == RegisteredModel(SPLIT, "", 4)
    assert resolve("m", {"m": contexts(rank)}, None, None) == (SPLIT, 4)
    assert resolve("m", {"m": contexts(rank)}, None, 4) == (SPLIT, 4)
    assert resolve("m", {"m": contexts(rank)}, SPLIT, None) == (SPLIT, 4)
    assert resolve("m", {"m": contexts(rank)}, SPLIT, 1) == (SPLIT, 1)
    with pytest.raises(InvalidInputError, match="world_size is 2, but the engine"):
        resolve("m", {"m": contexts(rank)}, None, 2)
    mla = entry("36 x [1024, 16, 576]", "NL_X_NB_BS_HS", world_size=4)
    assert contexts(mla).layout == MLA


def test_hybrid_models_are_refused_with_their_groups_whatever_layout_is_given() -> None:
    status = entry("36 x [1024, 2, 16, 8, 128]")
    groups = status["kv_cache_layout"]["kernel_groups"]
    groups.append({**groups[0], "num_layers": 12, "engine_kv_concrete_shape": "12 x [9, 16, 576]"})
    for layout in (None, SPLIT):
        with pytest.raises(UnknownModelError, match=r"2 groups.*group 1: 12 layers of NL_X"):
            resolve("m", {"m": contexts(status)}, layout, None)


def test_what_an_engine_driven_registration_lacks_can_be_given() -> None:
    driven = {"model_name": "m", "world_size": 4, "block_size": 16, "use_mla": True}
    models = models_of({"non_cuda_context_meta": {"7": driven, "8": driven}})
    with pytest.raises(UnknownModelError, match=r"layout=KVLayout.packed.*KVLayout.opaque"):
        resolve("m", models, None, None)
    assert resolve("m", models, PACKED, None) == (PACKED, 4)
    models = models_of({"non_cuda_context_meta": {"7": driven, "8": {**driven, "world_size": 1}}})
    with pytest.raises(UnknownModelError, match="different world sizes"):
        resolve("m", models, PACKED, None)
    assert resolve("m", models, PACKED, 2) == (PACKED, 2)


def test_opaque_takes_the_sizes_from_the_registration() -> None:
    models = {"m": RegisteredModel(PACKED), "split": RegisteredModel(SPLIT)}
    assert resolve("m", models, "opaque", None)[0] == PACKED.as_opaque()
    with pytest.raises(InvalidInputError, match="expected packed"):
        resolve("split", models, "opaque", None)
    with pytest.raises(InvalidInputError, match="expected a KVLayout"):
        resolve("m", models, "odd", None)  # type: ignore[arg-type]
    for world_size in (0, 256, True, 1.5):
        with pytest.raises(InvalidInputError, match="world_size is"):
            resolve("m", models, None, world_size)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="multiple of the 3 ranks"):
        resolve("x", models, SPLIT, 3)
