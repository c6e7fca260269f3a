"""The engine's HTTP side: ``/v1/completions``, ``/v1/models``, ``/tokenize`` and ``/health``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lmcache_fast.errors import EngineError, InvalidInputError
from lmcache_fast.serve.engine.completions import (
    CompletionRequest,
    CompletionWriter,
    parse_request,
    parse_text,
)
from lmcache_fast.serve.engine.scheduler import Generated, GenerationRequest, Scheduler


def make_app(
    scheduler: Scheduler, model_name: str, vocab_size: int, tokens_as_token_ids: bool = False
) -> Starlette:
    """Make the ASGI application.

    Args:
        scheduler: what generates.
        model_name: the one name that requests may ask for.
        vocab_size: token ids are below it.
        tokens_as_token_ids: write tokens in logprobs as ``token_id:N``.
    """

    async def completions(request: Request) -> Response:
        try:
            parsed = parse_request(json.loads(await request.body()), vocab_size)
        except InvalidInputError as error:
            return _error(400, str(error))
        except ValueError as error:
            return _error(400, f"the body is no JSON: {error}")
        if parsed.model not in (None, model_name):
            return _error(404, f"model is {parsed.model!r}; this engine has {model_name!r}")
        writer = CompletionWriter(parsed, model_name, tokens_as_token_ids)
        tokens = _Tokens(scheduler)
        try:
            tokens.start(parsed.generation)
        except InvalidInputError as error:
            return _error(400, str(error))
        except EngineError as error:
            return _error(503, str(error))
        if parsed.stream:
            return StreamingResponse(
                _event_stream(tokens, parsed, writer), media_type="text/event-stream"
            )
        return await _whole(request, tokens, writer)

    async def models(request: Request) -> Response:
        entry = {
            "id": model_name,
            "object": "model",
            "owned_by": "lmcache_fast",
            "max_model_len": scheduler.kv_budget_tokens,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def tokenize(request: Request) -> Response:
        try:
            tokens = parse_text(json.loads(await request.body()), vocab_size)
        except ValueError as error:
            return _error(400, str(error))
        budget = scheduler.kv_budget_tokens
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": budget})

    async def health(request: Request) -> Response:
        return Response(status_code=200 if scheduler.is_healthy else 503)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/health", health),
        ]
    )


class _Tokens:
    """One sequence's tokens, carried over from the scheduler's thread to the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: asyncio.Queue[Generated | EngineError] = asyncio.Queue()

    def start(self, request: GenerationRequest) -> None:
        """Queue the request; it runs from now on, also while nobody reads."""
        loop = asyncio.get_running_loop()

        def listener(event: Generated | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self._sequence = self._scheduler.submit(request, listener)

    async def read(self) -> AsyncIterator[Generated]:
        """Give each token; a reader that goes away cancels the sequence.

        Raises:
            EngineError: the engine failed.
        """
        try:
            while True:
                event = await self._queue.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if event.finish_reason:
                    return
        finally:
            self._scheduler.cancel(self._sequence)


async def _event_stream(
    tokens: _Tokens, request: CompletionRequest, writer: CompletionWriter
) -> AsyncIterator[str]:
    generated = []
    try:
        async with aclosing(tokens.read()) as events:  # type: ignore[type-var]
            async for token in events:
                generated.append(token)
                yield _event(writer.chunk(token))
        if request.include_usage:
            yield _event(writer.usage_chunk(generated))
    except EngineError as error:
        yield _event(_error_body(500, str(error)))
    yield "data: [DONE]\n\n"


async def _whole(request: Request, tokens: _Tokens, writer: CompletionWriter) -> Response:
    async def collect() -> list[Generated]:
        return [token async for token in tokens.read()]

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.create_task(collect()), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(writer.completion(work.result()))
    except EngineError as error:
        return _error(500, str(error))
    finally:
        work.cancel()
        gone.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "code": status}}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_error_body(status, message), status_code=status)
