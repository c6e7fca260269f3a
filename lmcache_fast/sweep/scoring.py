"""Asks an engine for its distribution of the next token, position by position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec

from lmcache_fast.errors import EngineError
from lmcache_fast.sweep.divergence import NextToken
from lmcache_fast.vllm import VLLMPostCompletion

_EXCERPT = 500
_TOKEN_ID = re.compile(r"token_id:(\d+)")
#: Requests under way at once: enough to let an engine batch them.
_PARALLEL = 8


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Reply).decode


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Scorer:
    """An engine's next-token distributions in given contexts.

    One request a context, of one greedy token: the only way that goes through the cache. vLLM
    computes a whole prompt anew when it is asked for ``prompt_logprobs`` and leaves every cache
    alone, so those would not be the edited cache's.

    Args:
        engine: where to ask.
        num_logprobs: how many of the likeliest tokens to ask for, -1 for all. vLLM gives no more
            than its ``--max-logprobs``, 20.
    """

    def __init__(self, engine: VLLMPostCompletion, num_logprobs: int) -> None:
        self._engine = engine
        self._num_logprobs = num_logprobs

    def score(
        self, context: Sequence[int], continuation: Sequence[int], cache_salt: str, cached: int
    ) -> list[NextToken]:
        """Return the distribution of each token of ``continuation``, given those before it.

        Args:
            context: token ids before the continuation.
            continuation: token ids, whatever this cache would go on with.
            cache_salt: the salt that the context's cache is stored under.
            cached: how many leading tokens of the context are cached.

        Raises:
            EngineError: the engine failed, does not name tokens by id, or took less from the cache
                than is there.
        """
        tokens = [*context, *continuation]
        prompts = [tokens[: len(context) + place] for place in range(len(continuation))]
        with ThreadPoolExecutor(_PARALLEL, "lmcache_fast-score") as executor:
            try:
                futures = [
                    executor.submit(self._next_token, prompt, cache_salt, cached)
                    for prompt in prompts
                ]
                return [future.result() for future in futures]
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise

    def tokenize(self, text: str) -> list[int]:
        """Return the engine's tokens of ``text``, from ``/tokenize``, which vLLM has.

        Raises:
            EngineError: the engine cannot tell.
        """
        url = self._engine.url.removesuffix("/v1/completions") + "/tokenize"
        content = self._post(url, {"model": self._engine.model, "prompt": text})
        try:
            return msgspec.json.decode(content, type=_Tokens).tokens
        except msgspec.DecodeError as error:
            raise _unexpected(url, content, error) from error

    def _next_token(self, prompt: Sequence[int], cache_salt: str, cached: int) -> NextToken:
        body = {
            "model": self._engine.model,
            "prompt": prompt,
            "cache_salt": cache_salt,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": self._num_logprobs,
            "return_tokens_as_token_ids": True,
        }
        url = self._engine.url
        content = self._post(url, body)
        try:
            reply = _decode(content)
            (logprobs,) = (choice.logprobs for choice in reply.choices)
        except (msgspec.DecodeError, ValueError) as error:
            raise _unexpected(url, content, error) from error
        if logprobs is None or len(logprobs.tokens) != 1 or not logprobs.top_logprobs:
            raise EngineError(
                f"{url} gave no top_logprobs: {content[:_EXCERPT].decode('utf-8', 'replace')}"
            )
        details = None if reply.usage is None else reply.usage.prompt_tokens_details
        told = None if details is None else details.cached_tokens
        # A prompt that is cached whole has a last chunk of which the engine computes a token anew.
        if told is not None and told < cached < len(prompt):
            raise EngineError(
                f"{url} took {told} of {cached} cached tokens from the cache: what it computed "
                "itself is not the edited cache's; is its server's pool too small for the sweep?"
            )
        top = {
            _token_id(url, name): value for name, value in (logprobs.top_logprobs[0] or {}).items()
        }
        return NextToken(_token_id(url, logprobs.tokens[0]), top)

    def _post(self, url: str, body: object) -> bytes:
        try:
            reply = self._engine.http.post(url, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{url} failed: {error or type(error).__name__}") from error
        if reply.status_code != 200:
            raise EngineError(f"{url} answered {reply.status_code}: {reply.text[:_EXCERPT]}")
        return reply.content


def _token_id(url: str, name: str) -> int:
    match = _TOKEN_ID.fullmatch(name)
    if match is None:
        raise EngineError(
            f"{url} calls a token {name!r}; expected token_id:N, which vLLM gives where asked for "
            "return_tokens_as_token_ids"
        )
    return int(match[1])


def _unexpected(url: str, content: bytes, error: Exception) -> EngineError:
    return EngineError(
        f"{url} sent no reply that can be read ({error}): "
        f"{content[:_EXCERPT].decode('utf-8', 'replace')}"
    )
