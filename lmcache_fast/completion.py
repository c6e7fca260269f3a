"""What passes between a stream and the engine that generates for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TokenEvent:
    """One generated token and the text that came with it."""

    token_id: int
    text: str = ""


class PostCompletion(Protocol):
    """What hands a prompt to the engine, e.g. :func:`lmcache_fast.vllm.make_post_completion`."""

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str, /
    ) -> Iterable[TokenEvent]:
        """Return one event a generated token; raise if the engine fails.

        The iterable may have ``close()``, called on every path, and ``usage``, the engine's own
        count, read at the end.
        """
        ...
