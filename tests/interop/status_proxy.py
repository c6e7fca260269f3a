"""A server's HTTP side with engine registrations added that no engine has made.

SDKs take the cache's shape from ``/status``, where only engines on a GPU appear with theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lmcache_fast import KVLayout
from tests.interop.processes import fetch


def registration(model: str, layout: KVLayout) -> dict[str, Any]:
    """Return the ``/status`` entry of an engine that keeps keys and values apart.

    A layout of one plane stands for queries, whose heads are not told apart.
    """
    blocks = 1024
    split = layout.planes == 2
    row = f"{layout.num_kv_heads}, {layout.head_dim}" if split else f"{layout.width}"
    row = f"{layout.block_size}, {row}"
    group = {
        "kernel_group_idx": 0,
        "engine_group_idx": 0,
        "object_group_idx": 0,
        "num_layers": layout.num_layers,
        "layer_indices": list(range(layout.num_layers)),
        "tokens_per_block": layout.block_size,
        "slots_per_block": layout.block_size,
        "dtype": str(layout.dtype),
        "is_mla": not split,
        "engine_kv_format": "NL_X_NB_TWO_BS_NH_HS" if split else "NL_X_NB_BS_HS",
        "engine_kv_shape": "NL x [NB, 2, BS, NH, HS]" if split else "NL x [NB, BS, HS]",
        "engine_kv_concrete_shape": (
            f"{layout.num_layers} x [{blocks}, {'2, ' if split else ''}{row}]"
        ),
        "attention_backend": "vLLM flash attention",
    }
    return {
        "model_name": model,
        "world_size": 1,
        "num_kv_readers": 1,
        "kv_cache_layout" if split else "q_ring_layout": {
            "num_layers": layout.num_layers,
            "num_blocks": blocks,
            "kernel_groups": [group],
        },
    }


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP in threads of this process for the length of a ``with`` block; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@contextmanager
def status_proxy(http_url: str, models: dict[str, KVLayout]) -> Iterator[str]:
    """Stand in for engines of these models; yield the URL to use instead of ``http_url``."""
    added: dict[str, dict[str, Any]] = {"cache_context_meta": {}, "q_context_meta": {}}
    for number, (model, layout) in enumerate(models.items()):
        section = "cache_context_meta" if layout.planes == 2 else "q_context_meta"
        added[section][f"stand-in-{number}"] = registration(model, layout)
    with serving_status(http_url, added) as url:
        yield url


@contextmanager
def serving_status(http_url: str, added: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Serve what ``http_url`` does, with entries added to the sections of ``/status``."""

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = fetch(http_url + self.path)
            if self.path == "/status":
                status = json.loads(body)
                for section, entries in added.items():
                    status[section] = {**status.get(section, {}), **entries}
                body = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Proxy) as url:
        yield url
