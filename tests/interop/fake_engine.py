"""An engine's HTTP endpoint without a model: it stores made-up KV and makes up tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from lmcache_fast import KVClient
from tests.interop.samples import made_up_kv
from tests.interop.status_proxy import serving


def next_tokens(prompt: list[int], count: int) -> list[int]:
    """Return what the engine answers a prompt with."""
    return [(sum(prompt) + 7 * n) % 1000 for n in range(count)]


@contextmanager
def fake_engine(
    client: KVClient, seen: list[dict[str, Any]], queries: KVClient | None = None
) -> Iterator[str]:
    """Serve ``POST /v1/completions`` and yield its URL.

    Each request is noted in ``seen``: its prompt, its salt and how much of it was cached. The KV of
    a prompt, and with a client for ``queries`` those too, are stored before its first token.
    """

    class Engine(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, salt = request["prompt"], request.get("cache_salt") or ""
            cached = client.lookup(prompt, salt)
            seen.append({"prompt": prompt, "salt": salt, "cached": cached})
            for store in filter(None, (client, queries)):
                store.store(made_up_kv(store.layout, prompt), prompt, salt)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for token in next_tokens(prompt, request["max_tokens"]):
                choice = {"index": 0, "text": f"token_id:{token}", "token_ids": [token]}
                self._send(json.dumps({"object": "text_completion", "choices": [choice]}))
            self._send("[DONE]")

        def _send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

    with serving(Engine) as url:
        yield url
