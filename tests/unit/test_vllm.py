"""The completions client against a real HTTP server that says what each test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_fast import vllm
from lmcache_fast.completion import TokenEvent
from lmcache_fast.errors import EngineError, InvalidInputError
from lmcache_fast.vllm import VLLMPostCompletion, make_post_completion

LONG = 60.0  # seconds; for waits that are not to run out
DONE = "[DONE]"


class Engine(ThreadingHTTPServer):
    """Answers every request with the next script: pieces of bytes, or a number to wait for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces: list[bytes] = []
        self.status = 200
        self.content_type = "text/event-stream"
        self.stalls = False  # after the pieces
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.connections = 0
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def says(self, *events: Any, status: int = 200) -> None:
        """Answer with these events: strings as they are, the rest as JSON."""
        self.status = status
        self.pieces = [sse(event) for event in events]

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where the client left: many tests make it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((body, {"path": self.path, **headers}))
        self.send_response(self.server.status)
        self.send_header("content-type", self.server.content_type)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in filter(None, self.server.pieces):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if self.server.stalls:
            self.server.go_on.wait(LONG)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


def sse(event: Any) -> bytes:
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"data: {data}\n\n".encode()


def ids(*token_ids: int, text: str = "", **more: Any) -> dict[str, Any]:
    """An event with token ids."""
    return {"choices": [{"index": 0, "text": text, "token_ids": list(token_ids), **more}]}


def piece(text: str, **more: Any) -> dict[str, Any]:
    """An event with text only."""
    return {"choices": [{"index": 0, "text": text, **more}]}


def usage(completion_tokens: int) -> dict[str, Any]:
    counts = {"completion_tokens": completion_tokens, "prompt_tokens": 3}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 2}}}


FINISH = {"finish_reason": "length"}


@pytest.fixture(scope="module")
def server() -> Iterator[Engine]:
    engine = Engine()
    thread = threading.Thread(target=engine.serve_forever, args=(0.05,))
    thread.start()
    yield engine
    engine.shutdown()
    thread.join(30)
    engine.server_close()


@pytest.fixture
def engine(server: Engine) -> Iterator[Engine]:
    server.stalls = False
    server.content_type = "text/event-stream"
    server.requests.clear()
    server.go_on.clear()
    yield server
    server.go_on.set()


@pytest.fixture
def connect(engine: Engine) -> Iterator[Callable[..., VLLMPostCompletion]]:
    made: list[VLLMPostCompletion] = []

    def connect(**more: Any) -> VLLMPostCompletion:
        made.append(make_post_completion(engine.url, "model", **more))
        return made[-1]

    yield connect
    for post in made:
        post.close()


Connect = Callable[..., VLLMPostCompletion]


def run(post: VLLMPostCompletion, salt: str = "", **params: Any) -> list[TokenEvent]:
    return list(post([1, 2, 3], params, salt))


def run_until_error(post: VLLMPostCompletion, **params: Any) -> tuple[list[int], str]:
    """Return the tokens that came before the error, and the error."""
    got: list[int] = []
    with pytest.raises(EngineError) as caught:
        for event in post([1, 2, 3], params, ""):
            got.append(event.token_id)
    return got, str(caught.value)


def test_the_request_says_what_is_wanted(engine: Engine, connect: Connect) -> None:
    engine.says(ids(7, **FINISH), usage(1), DONE)
    run(connect(api_key="secret"), salt="me", max_tokens=1, temperature=0.5)
    (body, headers) = engine.requests[0]
    assert body == {
        "model": "model",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": 0.5,
        "cache_salt": "me",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert headers["path"] == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"


def test_no_salt_and_no_key_are_left_out(engine: Engine, connect: Connect) -> None:
    engine.says(ids(7, **FINISH), DONE)
    run(connect())
    (body, headers) = engine.requests[0]
    assert "cache_salt" not in body
    assert "authorization" not in headers


def test_usage_of_the_last_call_is_kept(engine: Engine, connect: Connect) -> None:
    post = connect()
    assert post.usage is None
    engine.says(ids(7, **FINISH), usage(1), DONE)
    run(post)
    assert post.usage is not None
    assert post.usage["prompt_tokens_details"]["cached_tokens"] == 2
    engine.says(ids(7, **FINISH), DONE)
    run(post)
    assert post.usage is None


def test_connections_are_used_again(engine: Engine, connect: Connect) -> None:
    engine.says(ids(7, **FINISH), usage(1), DONE)
    post, before = connect(), engine.connections
    for _ in range(3):
        run(post)
    assert engine.connections == before + 1


def test_connections_that_an_engine_may_be_about_to_close_are_not_used_again(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vllm.KEEPALIVE < 5  # vLLM's, and uvicorn's, time
    monkeypatch.setattr(vllm, "KEEPALIVE", 0.1)
    engine.says(ids(7, **FINISH), usage(1), DONE)
    post, before = connect(), engine.connections
    run(post)
    time.sleep(0.2)
    run(post)
    assert engine.connections == before + 2


ANSWER: list[Any] = [
    {"choices": []},
    ids(7, text="Grüße"),
    ids(8, 9, text=" 世\u2028界"),
    ids(text="", **FINISH),
    usage(3),
    DONE,
]
WHOLE = b"".join(map(sse, ANSWER))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
def test_any_split_of_the_bytes_gives_the_same_tokens(
    engine: Engine, connect: Connect, cuts: list[int]
) -> None:
    engine.pieces = [WHOLE[a:b] for a, b in zip([0, *cuts], [*cuts, len(WHOLE)], strict=True)]
    engine.status = 200
    events = run(connect())
    assert [event.token_id for event in events] == [7, 8, 9]
    assert "".join(event.text for event in events) == "Grüße 世\u2028界"


@pytest.mark.parametrize(
    "events",
    [
        [ids(7, text="a"), ids(8, text="b", **FINISH), usage(2), DONE],
        [ids(7, 8, text="ab", **FINISH), usage(2), DONE],
        [ids(text="a"), ids(7, 8, text="b", **FINISH), DONE],
        [ids(7, text="a"), ids(8, text="b", **FINISH)],  # closed without [DONE]
        [ids(7, text="a"), ids(8, text="b"), DONE],  # no finish_reason
        [piece("a", logprobs={"tokens": ["token_id:7"]}), ids(8, text="b", **FINISH), DONE],
        [piece("ab", logprobs={"tokens": ["token_id:7", "token_id:8"]}, **FINISH), usage(2), DONE],
    ],
)
def test_every_form_of_a_complete_answer(engine: Engine, connect: Connect, events: Any) -> None:
    engine.says(*events)
    got = run(connect())
    assert [event.token_id for event in got] == [7, 8]
    assert "".join(event.text for event in got) == "ab"


@pytest.mark.parametrize("each", range(1, 9))
def test_an_event_may_bring_any_number_of_ids(engine: Engine, connect: Connect, each: int) -> None:
    events = [ids(*range(start, start + each)) for start in (0, each, 2 * each)]
    engine.says(*events, ids(**FINISH), usage(3 * each), DONE)
    assert [event.token_id for event in run(connect())] == list(range(3 * each))


def test_text_made_of_token_ids_is_not_text(engine: Engine, connect: Connect) -> None:
    engine.says(piece("token_id:7token_id:8"), piece("token_id:9", **FINISH), usage(3), DONE)
    assert run(connect()) == [TokenEvent(7), TokenEvent(8), TokenEvent(9)]


def test_as_many_tokens_as_asked_for_are_complete_without_a_word(
    engine: Engine, connect: Connect
) -> None:
    engine.says(ids(7), ids(8))
    assert len(run(connect(), max_tokens=2)) == 2
    got, error = run_until_error(connect(), max_tokens=3)
    assert got == [7, 8]
    assert "closed the stream after 2 tokens" in error


class Letters:
    """A tokenizer with one token a letter."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_text_goes_through_the_tokenizer(engine: Engine, connect: Connect) -> None:
    engine.says(piece("a"), piece("bc", **FINISH), usage(3), DONE)
    assert [event.token_id for event in run(connect(tokenizer=Letters()))] == [97, 98, 99]
    engine.says(piece("ab", logprobs={"tokens": ["a", "b"]}, **FINISH), usage(2), DONE)
    assert [event.token_id for event in run(connect(tokenizer=Letters()))] == [97, 98]


def test_the_end_token_that_has_no_text_is_not_lost(engine: Engine, connect: Connect) -> None:
    engine.says(piece("a"), piece("", finish_reason="stop"), usage(2), DONE)
    assert [event.token_id for event in run(connect(tokenizer=Letters()))] == [97, 0]
    engine.says(piece("a"), piece("", finish_reason="stop", stop_reason="b"), usage(2), DONE)
    got, error = run_until_error(connect(tokenizer=Letters()))
    assert got == [97]
    assert "counts 2 generated tokens, but 1 arrived" in error


@pytest.mark.parametrize(
    ("events", "tokens", "message"),
    [
        ([piece("a")], [], "without token ids"),
        ([ids(7), usage(2), DONE], [7], "counts 2 generated tokens, but 1 arrived"),
        ([ids(7, 7), usage(1), DONE], [7, 7], "counts 1 generated tokens, but 2 arrived"),
        ([ids(7)], [7], "closed the stream after 1 tokens"),
        ([], [], "closed the stream after 0 tokens"),
        ([ids(7), {"error": {"message": "out of memory"}}], [7], "after 1 tokens: out of memory"),
        ([ids(7), {"object": "error", "message": "out of memory"}], [7], "out of memory"),
        ([ids(7), {"error": "boom"}, DONE], [7], "boom"),
        ([ids(7), '{"choices": [{"te'], [7], "no piece of a completion"),
        ([ids(7), {"choices": [{"token_ids": ["x"]}]}], [7], "no piece of a completion"),
        ([ids(7), ids(8, finish_reason="abort")], [7, 8], "gave up after 2 tokens"),
        ([{"choices": [{"index": 1, "token_ids": [7]}]}], [], "completion 1"),
    ],
)
def test_what_is_not_right_is_an_error_after_the_tokens_that_came(
    engine: Engine, connect: Connect, events: Any, tokens: list[int], message: str
) -> None:
    engine.says(*events)
    got, error = run_until_error(connect())
    assert got == tokens
    assert message in error


def test_an_event_cut_off_by_the_close_is_an_error_but_a_whole_one_counts(
    engine: Engine, connect: Connect
) -> None:
    last = sse(ids(8, **FINISH))
    engine.status, engine.pieces = 200, [sse(ids(7)), last.rstrip(b"\n")]
    assert [event.token_id for event in run(connect())] == [7, 8]
    engine.pieces = [sse(ids(7)), last[:-9]]
    got, error = run_until_error(connect())
    assert got == [7]
    assert "after 1 tokens" in error


def test_an_http_error_says_what_the_engine_said(engine: Engine, connect: Connect) -> None:
    engine.content_type = "application/json"
    engine.status, engine.pieces = 404, [b'{"error": {"message": "no such model"}}']
    assert "404, not an event stream: no such model" in run_until_error(connect())[1]
    engine.status, engine.pieces = 200, [b'{"choices": []}']
    assert "200, not an event stream" in run_until_error(connect())[1]


def test_time_outs_say_what_was_waited_for(engine: Engine, connect: Connect) -> None:
    engine.stalls = True
    engine.says()
    got, error = run_until_error(connect(timeout=0.2))
    assert got == []
    assert "no first token" in error
    assert "0.2 s, for a prompt of 3 tokens" in error
    engine.says(ids(7))
    for timeout in (1, 4, 16):  # a busy machine may take long over the first token
        got, error = run_until_error(connect(timeout=timeout))
        if got:
            break
    assert got == [7]
    assert "no further token" in error
    assert "after 1 tokens" in error


def test_nobody_there_is_a_clear_error() -> None:
    post = make_post_completion("http://127.0.0.1:9", "model", timeout=5)
    assert "http://127.0.0.1:9/v1/completions" in run_until_error(post)[1]


def test_a_call_can_be_broken_from_another_thread(engine: Engine, connect: Connect) -> None:
    engine.stalls = True
    engine.says(ids(7))
    completion = connect(timeout=LONG)([1], {}, "")
    with pytest.raises(EngineError, match="after 1 tokens"):
        for _ in completion:
            threading.Thread(target=completion.cancel).start()


@pytest.mark.parametrize("params", [{"n": 2}, {"best_of": 3}, {"echo": True}])
def test_parameters_that_do_not_give_one_stream_are_refused(
    connect: Connect, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError):
        run(connect(), **params)


@pytest.mark.parametrize(
    "arguments",
    [("localhost:8000", "m"), ("http://h", ""), ("http://h", "m", 0), ("http://h", "m", 1, "tok")],
)
def test_wrong_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(InvalidInputError):
        make_post_completion(*arguments)


@pytest.mark.parametrize(
    "base_url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"]
)
def test_the_address_may_end_in_v1(base_url: str) -> None:
    assert make_post_completion(base_url, "m").url == "http://h:1/v1/completions"
