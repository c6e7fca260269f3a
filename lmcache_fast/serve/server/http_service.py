"""HttpService: the server's HTTP side, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lmcache_fast.errors import ConnectError, ServerTimeoutError
from lmcache_fast.serve.server.messages import Registration
from lmcache_fast.serve.server.transfers import CacheService

_START_TIMEOUT = 30.0


class HttpService:
    """``/version /healthcheck /config /status`` and ``POST /cache/clear``.

    Raises:
        ConnectError: the address cannot be bound.
        ServerTimeoutError: it did not start.
    """

    def __init__(self, service: CacheService, zmq_url: str) -> None:
        config = service.config
        try:
            family = socket.AF_INET6 if ":" in config.http_host else socket.AF_INET
            listener = socket.create_server((config.http_host, config.http_port), family=family)
        except OSError as error:
            raise ConnectError(
                f"HttpService: cannot listen on {config.http_host}:{config.http_port}: {error}"
            ) from error
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        #: Where a client on this machine connects to.
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        zmq_port = int(zmq_url.rpartition(":")[2]) if zmq_url.startswith("tcp:") else 0
        app = _application(service, config.to_json(zmq_port, port))
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._listener = listener
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="lmcache-fast-http", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.close()
                raise ServerTimeoutError(f"HttpService: {self.url} did not start")
            time.sleep(0.005)

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def status(service: CacheService) -> dict[str, Any]:
    """Return what ``/status`` answers.

    Real servers list engine-driven instances only under ``non_cuda_context_meta``. They are under
    ``cache_context_meta`` here too, where SDKs look for a model's layout: those that say how many
    heads there are, or where none of a model does, all.
    """
    config = service.config
    registrations, counters = service.report()
    told = {r.model_name for r in registrations.values() if r.num_kv_heads}
    return {
        "is_healthy": True,
        "engine_type": "lmcache_fast",
        "chunk_size": config.chunk_size,
        "hash_algorithm": "blake3",
        "active_sessions": counters["sessions"],
        "storage_manager": {
            "is_healthy": True,
            "l1_manager": {
                "total_object_count": counters["objects"],
                "write_locked_count": counters["write_locked_objects"],
                "read_locked_count": counters["read_locked_objects"],
                "memory_used_bytes": counters["used_bytes"],
                "memory_total_bytes": counters["pool_bytes"],
                "write_ttl_seconds": config.write_ttl,
                "read_ttl_seconds": config.read_ttl,
            },
        },
        "registered_gpu_ids": [],
        "registered_non_cuda_instance_ids": list(registrations),
        "cache_context_meta": {
            str(i): _context_meta(r)
            for i, r in sorted(registrations.items(), key=lambda item: not item[1].num_kv_heads)
            if r.num_kv_heads or r.model_name not in told
        },
        "non_cuda_context_meta": {
            str(i): {
                "model_name": r.model_name,
                "world_size": r.world_size,
                "block_size": r.block_size,
                "use_mla": r.use_mla,
            }
            for i, r in registrations.items()
        },
        "fast": counters,
    }


def _context_meta(registration: Registration) -> dict[str, Any]:
    r = registration
    heads = r.num_kv_heads or 1
    if r.use_mla:
        kv_format, shape = "NL_X_NB_BS_HS", [1, r.block_size, r.hidden_dim_size]
    else:
        kv_format = "NL_X_NB_TWO_BS_NH_HS"
        shape = [1, 2, r.block_size, heads, r.hidden_dim_size // heads]
    group = {
        "kernel_group_idx": 0,
        "engine_group_idx": 0,
        "object_group_idx": 0,
        "num_layers": r.num_layers,
        "layer_indices": list(range(r.num_layers)),
        "tokens_per_block": r.block_size,
        "slots_per_block": r.block_size,
        "dtype": f"torch.{r.dtype_str.removeprefix('torch.')}",
        "engine_kv_format": kv_format,
        "engine_kv_concrete_shape": f"{r.num_layers} x {shape}",
        "is_mla": r.use_mla,
    }
    return {
        "model_name": r.model_name,
        "world_size": r.world_size,
        "num_kv_readers": 1,
        "kv_cache_layout": {
            "num_layers": r.num_layers,
            "num_blocks": 1,
            "kernel_groups": [group],
        },
    }


def _application(service: CacheService, config_json: dict[str, Any]) -> Starlette:
    async def root(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "service": "lmcache_fast server"})

    async def version(_: Request) -> JSONResponse:
        return JSONResponse(service.config.version)

    async def healthcheck(_: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def config(_: Request) -> JSONResponse:
        return JSONResponse(config_json)

    def get_status(_: Request) -> JSONResponse:
        return JSONResponse(status(service))

    async def clear(request: Request) -> JSONResponse:
        body = await request.body()
        options = await request.json() if body else {}
        if not isinstance(options, dict) or options.get("tier", "l1") != "l1":
            return JSONResponse({"detail": "only the tier 'l1' is there"}, status_code=400)
        service.clear(bool(options.get("force", False)))
        return JSONResponse({"status": "ok", "cleared": {"tier": "l1"}})

    return Starlette(
        routes=[
            Route("/", root),
            Route("/version", version),
            Route("/healthcheck", healthcheck),
            Route("/config", config),
            Route("/status", get_status),
            Route("/cache/clear", clear, methods=["POST"]),
        ]
    )
