"""Talk to vLLM, or another engine with an OpenAI-compatible ``/v1/completions``.

Token ids come from the engine: from ``token_ids`` (asked for with ``return_token_ids``), or else
from ``token_id:N`` strings (vLLM's ``--return-tokens-as-token-ids``), or else, with a tokenizer,
from the text of each token.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import httpx
import msgspec

from lmcache_fast.arguments import check_timeout
from lmcache_fast.completion import TokenEvent
from lmcache_fast.errors import EngineError, InvalidInputError
from lmcache_fast.sse import SSEParser

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_ONLY_TOKEN_IDS = re.compile(r"(?:token_id:\d+)+")
_EXCERPT = 500  # characters of an engine's own words in our errors

#: Seconds that a connection is kept for the next call. vLLM closes those that were idle for 5 s,
#: and a request that meets the closing is lost.
KEEPALIVE = 2.0


class Tokenizer(Protocol):
    """What is needed of a tokenizer, e.g. one of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``."""
        ...


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct):
    """One event of the engine: a piece of a completion, its usage, or an error."""

    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def make_post_completion(
    base_url: str,
    model: str,
    timeout: float = 60,
    tokenizer: Tokenizer | None = None,
    api_key: str | None = None,
) -> VLLMPostCompletion:
    """Return what streams call to generate: ``post_completion(tokens, params, cache_salt)``.

    Args:
        base_url: the engine's address, ``http://host:port``, with or without ``/v1``.
        model: the model's name on the engine.
        timeout: seconds to wait for the first token, and from one token to the next.
        tokenizer: for an engine that returns text only: the model's tokenizer.
        api_key: sent as a bearer token.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    return VLLMPostCompletion(base_url, model, timeout, tokenizer, api_key)


class VLLMPostCompletion:
    """A pool of connections to one engine; callable from many threads.

    Attributes:
        usage: the engine's count of the call that ended last, e.g.
            ``usage["prompt_tokens_details"]["cached_tokens"]``; None before, or if it gave none.
            The iterable of each call has its own ``usage``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        timeout: float = 60,
        tokenizer: Tokenizer | None = None,
        api_key: str | None = None,
    ) -> None:
        where = "make_post_completion"
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise InvalidInputError(f"{where}: base_url is {base_url!r}; expected http://host:port")
        if not isinstance(model, str) or not model:
            raise InvalidInputError(f"{where}: model is {model!r}; expected a name")
        if isinstance(tokenizer, str) or not (tokenizer is None or hasattr(tokenizer, "encode")):
            raise InvalidInputError(
                f"{where}: tokenizer is {type(tokenizer).__name__}; expected one with encode()"
            )
        self.url = base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self.model = model
        self.timeout = check_timeout(where, timeout)
        self.tokenizer = tokenizer
        self.usage: Mapping[str, Any] | None = None
        self.http = httpx.Client(
            timeout=self.timeout,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=KEEPALIVE,
            ),
        )

    def __call__(
        self,
        prompt_token_ids: list[int],
        sampling_params: Mapping[str, Any],
        cache_salt: str = "",
    ) -> Completion:
        """Return the tokens that the engine generates; it is asked when they are first read.

        Raises:
            InvalidInputError: parameters that make more than one completion, or echo the prompt.
        """
        for name, allowed in (("n", (None, 1)), ("best_of", (None, 1)), ("echo", (None, False))):
            if sampling_params.get(name) not in allowed:
                raise InvalidInputError(
                    f"post_completion: {name} is {sampling_params[name]!r}; a stream takes one "
                    f"completion without its prompt: expected {allowed[1]!r}"
                )
        body = {
            "return_token_ids": True,
            **sampling_params,
            "model": self.model,
            "prompt": list(prompt_token_ids),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if cache_salt:
            body["cache_salt"] = cache_salt
        return Completion(self, body)

    def close(self) -> None:
        """Close the pooled connections."""
        self.http.close()


class Completion:
    """The tokens of one call, as they arrive; to be read once.

    Attributes:
        usage: the engine's own count, once it has come.
        finish_reason: why the engine ended, e.g. ``length`` or ``stop``; None before.
    """

    def __init__(self, owner: VLLMPostCompletion, body: Mapping[str, Any]) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.finish_reason: str | None = None
        self._owner = owner
        self._body = body
        self._num_tokens = 0
        self._carried = ""  # text that came without a token, shown with the next one
        self._ids_from_text = False
        self._stop_reason: int | str | None = None
        self._done = False
        self._response: httpx.Response | None = None
        self._events = self._request()

    def __iter__(self) -> Iterator[TokenEvent]:
        """Return the one iterator over the events."""
        return self._events

    def close(self) -> None:
        """End the request; the engine stops generating."""
        self._events.close()

    def cancel(self) -> None:
        """Break the connection under a thread that is reading; its wait ends with an error."""
        if self._response is not None:
            stream = self._response.extensions.get("network_stream")
            connection = stream.get_extra_info("socket") if stream is not None else None
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _request(self) -> Generator[TokenEvent, None, None]:
        url = self._owner.url
        try:
            with self._owner.http.stream("POST", url, json=self._body) as response:
                self._response = response
                media_type = response.headers.get("content-type", "")
                if response.status_code != 200 or media_type.startswith("application/json"):
                    response.read()
                    raise EngineError(
                        f"{url} answered {response.status_code}, not an event stream: "
                        f"{_reason(response.content)}"
                    )
                yield from self._read(response)
            yield from self._end()
        except httpx.ConnectTimeout as error:
            raise EngineError(f"no connection to {url} within {self._owner.timeout:g} s") from error
        except httpx.ConnectError as error:
            raise EngineError(f"cannot connect to {url}: {error}") from error
        except httpx.ReadTimeout as error:
            raise self._timed_out() from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"the connection to {url} broke after {self._num_tokens} tokens: "
                f"{error or type(error).__name__}"
            ) from error
        finally:
            self._response = None
            self._owner.usage = self.usage

    def _read(self, response: httpx.Response) -> Generator[TokenEvent, None, None]:
        parser = SSEParser()
        last_token = time.monotonic()
        try:
            for piece in response.iter_bytes():
                for data in parser.feed(piece):
                    for event in self._parse(data):
                        yield event
                        last_token = time.monotonic()
                # Comments that keep the connection alive must not keep us waiting for ever.
                idle = time.monotonic() - last_token
                if idle > self._owner.timeout and not (self._done or self.finish_reason):
                    raise self._timed_out()
        except httpx.HTTPError:
            if not self._done:
                raise
        rest = parser.close()
        if rest is not None:
            yield from self._parse(rest)

    def _parse(self, data: str) -> Iterator[TokenEvent]:
        """Yield the tokens of one event."""
        if self._done or not data.strip():
            return
        if data.strip() == "[DONE]":
            self._done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"after {self._num_tokens} tokens the engine sent an event that is no piece of a "
                f"completion ({error}): {data[:_EXCERPT]!r}"
            ) from error
        if chunk.error is not None or chunk.object == "error":
            raise EngineError(
                f"the engine failed after {self._num_tokens} tokens: {_reason(data.encode())}"
            )
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.index != 0:
                raise EngineError(f"the engine sent completion {choice.index}; one was asked for")
            ids, text = self._tokens_of(choice)
            text = self._carried + text
            self._carried = "" if ids else text
            self._num_tokens += len(ids)
            self.finish_reason = choice.finish_reason or self.finish_reason
            self._stop_reason = choice.stop_reason
            for place, token_id in enumerate(ids, 1):
                yield TokenEvent(token_id, text if place == len(ids) else "")
            if choice.finish_reason in ("abort", "error"):
                raise EngineError(
                    f"the engine gave up after {self._num_tokens} tokens: finish_reason "
                    f"{choice.finish_reason!r}"
                )

    def _tokens_of(self, choice: _Choice) -> tuple[list[int], str]:
        """Return the token ids and the text that one event brings."""
        text = choice.text or ""
        if choice.token_ids is not None:
            return choice.token_ids, text
        pieces = choice.logprobs.tokens if choice.logprobs is not None else None
        if pieces and all(_TOKEN_ID.fullmatch(piece) for piece in pieces):
            return [int(piece.removeprefix("token_id:")) for piece in pieces], text
        if _ONLY_TOKEN_IDS.fullmatch(text):
            return [int(number) for number in _TOKEN_ID.findall(text)], ""
        if not text and not pieces:
            return [], ""
        if self._owner.tokenizer is None:
            raise EngineError(
                f"the engine sent text without token ids: {text[:_EXCERPT]!r}; use one that knows "
                "return_token_ids, start it with --return-tokens-as-token-ids and ask for "
                "logprobs=0, or give make_post_completion a tokenizer"
            )
        self._ids_from_text = True
        encode = self._owner.tokenizer.encode
        ids = [encode(piece, add_special_tokens=False) for piece in pieces or [text]]
        return [token_id for part in ids for token_id in part], text

    def _end(self) -> Generator[TokenEvent, None, None]:
        """Check that nothing is missing."""
        finished = self._done or self.finish_reason is not None
        if not finished and self._num_tokens != self._body.get("max_tokens"):
            raise EngineError(
                f"{self._owner.url} closed the stream after {self._num_tokens} tokens without "
                "saying that it had finished"
            )
        counted = (self.usage or {}).get("completion_tokens")
        if not isinstance(counted, int) or counted == self._num_tokens:
            return
        eos = getattr(self._owner.tokenizer, "eos_token_id", None)
        if (
            self._ids_from_text
            and counted == self._num_tokens + 1
            and self.finish_reason == "stop"
            and self._stop_reason is None
            and isinstance(eos, int)
        ):
            self._num_tokens += 1
            yield TokenEvent(eos)  # the token that ends a text has none itself
            return
        raise EngineError(
            f"the engine counts {counted} generated tokens, but {self._num_tokens} arrived"
            + ("; its text does not tell where each begins" if self._ids_from_text else "")
        )

    def _timed_out(self) -> EngineError:
        url, seconds = self._owner.url, f"{self._owner.timeout:g} s"
        if self._num_tokens:
            return EngineError(
                f"no further token from {url} within {seconds}, after {self._num_tokens} tokens"
            )
        prompt = len(self._body["prompt"])
        return EngineError(
            f"no first token from {url} within {seconds}, for a prompt of {prompt} tokens"
        )


def _reason(content: bytes) -> str:
    """Return what an engine's error body says, in its own words."""
    try:
        reply = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content[:_EXCERPT].decode("utf-8", "replace")
    for name in ("error", "message"):
        if isinstance(reply, dict) and reply.get(name):
            reply = reply[name]
    return str(reply)[:_EXCERPT]
