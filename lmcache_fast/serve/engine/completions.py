"""The JSON of ``/v1/completions``: requests in, completions and stream chunks out."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import uuid4

from lmcache_fast.arguments import check_salt
from lmcache_fast.errors import InvalidInputError
from lmcache_fast.serve.engine.scheduler import Generated, GenerationRequest

_TOKEN_WORD = re.compile(r"t(\d+)")


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request: what to generate, and how to send it."""

    generation: GenerationRequest
    model: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    tokens_as_token_ids: bool


def text_of(token: int) -> str:
    """The made-up text of a token: there is no real vocabulary."""
    return f"t{token} "


def tokens_of(text: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a text: ``t123`` is token 123, any other word one by its checksum."""
    tokens = []
    for word in text.split():
        match = _TOKEN_WORD.fullmatch(word)
        tokens.append(int(match[1]) if match else zlib.crc32(word.encode()) % vocab_size)
    return tuple(tokens)


def parse_request(body: Any, vocab_size: int) -> CompletionRequest:
    """Read the body of a completion request.

    Parameters that change nothing here (``stop``, ``user`` and the like) are ignored, as other
    engines do with those they don't know.

    Raises:
        InvalidInputError: a field is wrong; the message names it.
    """
    if not isinstance(body, Mapping):
        raise InvalidInputError(f"the body is {type(body).__name__}; expected a JSON object")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise InvalidInputError(f"{name} is {body[name]!r}; this engine gives 1 choice only")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidInputError(f"stream_options is {options!r}; expected an object")
    temperature = _number(body, "temperature", 1.0)
    if not 0 <= temperature < float("inf"):
        raise InvalidInputError(f"temperature is {temperature}; expected 0 or more")
    seed = body.get("seed")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidInputError(f"model is {model!r}; expected a string")
    logprobs = None if body.get("logprobs") is None else _integer(body, "logprobs", 0)
    return CompletionRequest(
        generation=GenerationRequest(
            prompt=_prompt(body.get("prompt"), vocab_size),
            max_tokens=_integer(body, "max_tokens", 16),
            cache_salt=check_salt("completions", body.get("cache_salt") or ""),
            ignore_eos=_flag(body, "ignore_eos"),
            temperature=temperature,
            seed=None if seed is None else _integer(body, "seed", 0) % 2**63,
            num_logprobs=logprobs or 0,
        ),
        model=model,
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        return_token_ids=_flag(body, "return_token_ids"),
        logprobs=logprobs is not None,
        tokens_as_token_ids=_flag(body, "return_tokens_as_token_ids"),
    )


def parse_text(body: Any, vocab_size: int) -> tuple[int, ...]:
    """Read the body of a request for the tokens of a text.

    Raises:
        InvalidInputError: there is no text in it.
    """
    prompt = body.get("prompt") if isinstance(body, Mapping) else None
    if not isinstance(prompt, str):
        raise InvalidInputError(f"prompt is {type(prompt).__name__}; expected a string")
    return tokens_of(prompt, vocab_size)


def _prompt(prompt: Any, vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return tokens_of(prompt, vocab_size)
    if not isinstance(prompt, list):
        raise InvalidInputError(
            f"prompt is {type(prompt).__name__}; expected a string or a list of token ids"
        )
    for index, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidInputError(
                f"prompt[{index}] is {token!r}; expected a token id (one prompt a request)"
            )
    return tuple(prompt)


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{name} is {value!r}; expected an integer")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidInputError(f"{name} is {value!r}; expected a number")
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidInputError(f"{name} is {value!r}; expected true or false")
    return bool(value)


class CompletionWriter:
    """Makes the objects of one response.

    Args:
        request: what was asked for.
        model_name: the name to answer under.
        tokens_as_token_ids: write ``token_id:N`` for tokens in logprobs, whatever the request says.
    """

    def __init__(
        self, request: CompletionRequest, model_name: str, tokens_as_token_ids: bool
    ) -> None:
        self._request = request
        as_ids = tokens_as_token_ids or request.tokens_as_token_ids
        self._name_of: Callable[[int], str] = "token_id:{}".format if as_ids else text_of
        self._text_length = 0
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }

    def chunk(self, token: Generated) -> dict[str, Any]:
        """The stream chunk of one token."""
        return {**self._head, "choices": [self._choice([token])]}

    def usage_chunk(self, tokens: Sequence[Generated]) -> dict[str, Any]:
        """The stream's last chunk, which has the usage and no choices."""
        return {**self._head, "choices": [], "usage": self._usage(tokens)}

    def completion(self, tokens: Sequence[Generated]) -> dict[str, Any]:
        """The whole response to a request that does not stream."""
        return {**self._head, "choices": [self._choice(tokens)], "usage": self._usage(tokens)}

    def _choice(self, tokens: Sequence[Generated]) -> dict[str, Any]:
        texts = [text_of(token.token_id) for token in tokens]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(texts),
            "logprobs": None,
            "finish_reason": tokens[-1].finish_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        if self._request.logprobs:
            ends = list(accumulate(map(len, texts), initial=self._text_length))
            self._text_length = ends.pop()
            choice["logprobs"] = {
                "tokens": [self._name_of(token.token_id) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [self._top_logprobs(token) for token in tokens],
                "text_offset": ends,
            }
        return choice

    def _top_logprobs(self, token: Generated) -> dict[str, float]:
        """The token itself, and the likeliest ones: one more than asked for if it is not among."""
        logprobs = {token.token_id: token.logprob, **dict(token.likeliest)}
        return {self._name_of(token_id): logprob for token_id, logprob in logprobs.items()}

    def _usage(self, tokens: Sequence[Generated]) -> dict[str, Any]:
        prompt = len(self._request.generation.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": len(tokens),
            "total_tokens": prompt + len(tokens),
            "prompt_tokens_details": {"cached_tokens": tokens[-1].cached_tokens},
        }
