"""The server's HTTP side: keys that stay secret, answers that never end or never fit."""

from __future__ import annotations

import http.server
import json
import logging
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_fast.errors import (
    ConnectError,
    InvalidInputError,
    LMCacheFastError,
    ProtocolError,
    ServerTimeoutError,
)
from lmcache_fast.protocol import server_info
from lmcache_fast.protocol.server_info import API_KEY_VARIABLE, read_models, read_server_info

KEY = "sk-very-secret-0815"
PAGES = {
    "/version": "0.5.7",
    "/config": {"mp": {"chunk_size": 4, "supported_transfer_mode": "auto"}},
    "/status": {},
}


class Handler(http.server.BaseHTTPRequestHandler):
    key = ""
    trickle = threading.Event()
    flood = False

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        body = json.dumps(PAGES[self.path]).encode()
        self.send_response(200)
        self.end_headers()
        try:
            while self.flood:
                self.wfile.write(b" " * 65536)
            while self.trickle.is_set():
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.02)
            self.wfile.write(body)
        except OSError:
            pass  # the client had enough


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "key", "")
    monkeypatch.setattr(Handler, "flood", False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Handler.trickle.clear()
    server.shutdown()
    server.server_close()


def test_the_key_is_sent_and_said_nowhere(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(Handler, "key", KEY)
    monkeypatch.setenv(API_KEY_VARIABLE, f" {KEY}\n")
    assert read_server_info(url, 30).chunk_size == 4
    assert read_models(url, 30) == {}
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("given", "text"), [("", "asks for one in"), ("wrong-key-77", "refuses the API key in")]
)
def test_a_server_that_wants_another_key_is_an_error_that_names_the_variable(
    url: str, monkeypatch: pytest.MonkeyPatch, given: str, text: str
) -> None:
    monkeypatch.setattr(Handler, "key", KEY)
    monkeypatch.setenv(API_KEY_VARIABLE, given)
    with pytest.raises(ConnectError, match=f"401: the server {text} {API_KEY_VARIABLE}") as caught:
        read_server_info(url, 30)
    error: BaseException | None = caught.value
    while error is not None:
        assert not given or given not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("key", ["gre\u00dfe", "two\nlines", "nul\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_said(
    url: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with pytest.raises(InvalidInputError, match=API_KEY_VARIABLE) as caught:
        read_server_info(url, 30)
    assert key not in str(caught.value)


def test_an_answer_that_trickles_in_for_ever_times_out(url: str) -> None:
    Handler.trickle.set()
    with pytest.raises(ServerTimeoutError, match=r"/version: no answer within 0\.5 s"):
        read_server_info(url, 0.5)


def test_an_answer_that_never_ends_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "flood", True)
    monkeypatch.setattr(server_info, "_MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(ProtocolError, match="/version: the answer has more than 1 MiB"):
        read_server_info(url, 60)


@pytest.mark.parametrize("page", ["/version", "/config", "/status"])
@pytest.mark.parametrize("answer", [None, 7, [], "0.5.1", {"mp": 7}, "[" * 100])
def test_answers_of_another_form_are_errors_of_ours(
    url: str, monkeypatch: pytest.MonkeyPatch, page: str, answer: object
) -> None:
    monkeypatch.setitem(PAGES, page, answer)
    try:
        read_server_info(url, 30)
        read_models(url, 30)
    except LMCacheFastError:
        return
    assert isinstance(answer, dict) and page == "/status"


def test_certificates_are_checked_over_https_and_not_read_otherwise() -> None:
    server_info._certificates.cache_clear()
    with server_info._client("http://127.0.0.1:1", 1):
        assert server_info._certificates.cache_info().currsize == 0
    with server_info._client("HTTPS://127.0.0.1:1", 1) as client:
        context = client._transport._pool._ssl_context  # type: ignore[attr-defined]
        assert context is server_info._certificates()
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
