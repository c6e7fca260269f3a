"""Waiting for the chunks that an engine stores in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lmcache_fast.arguments import TokenIds
from lmcache_fast.errors import InvalidInputError, LMCacheFastError, ModifyTimeoutError


def wait_cached(
    who: str,
    lookup: Callable[[TokenIds], int],
    tokens: Sequence[int],
    chunk_size: int,
    num_chunks: int,
    timeout: float,
    poll_interval: float,
    cancelled: threading.Event,
) -> Iterator[int]:
    """Yield how many of ``tokens`` may be cached, every time that it may be enough.

    First all of them, without a look-up: mostly they are there, and the caller finds out. The
    caller goes on to the next where not enough was cached, or was evicted before it had it.

    Args:
        who: beginning of every error: the call and its stream.
        lookup: tells how many leading tokens are cached.
        tokens: the stream's token ids.
        chunk_size: tokens a chunk.
        num_chunks: how many chunks are enough.
        timeout: seconds to wait.
        poll_interval: seconds between two look-ups.
        cancelled: ends the wait from another thread.

    Raises:
        ModifyTimeoutError: it was not enough in time.
        InvalidInputError: less than one chunk of tokens, or bad times.
        LMCacheFastError: cancelled, or the look-up failed.
    """
    for name, value in (("timeout", timeout), ("poll_interval", poll_interval)):
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise InvalidInputError(f"{who}: {name} is {value!r}; expected seconds, 0 or more")
    if len(tokens) < chunk_size:
        raise InvalidInputError(
            f"{who} has {len(tokens)} tokens; expected at least one chunk of {chunk_size}"
        )
    array = np.asarray(tokens, np.uint32)
    deadline = time.monotonic() + timeout
    yield len(array)
    while True:
        cached = lookup(array)
        if cached >= num_chunks * chunk_size:
            yield cached
        left = deadline - time.monotonic()
        if left <= 0:
            raise ModifyTimeoutError(
                f"{who}: {cached // chunk_size} of {num_chunks} chunks were cached after "
                f"{timeout:g} s of waiting for the engine to store them"
            )
        if cancelled.wait(min(poll_interval, left)):
            raise LMCacheFastError(f"{who} was cancelled")
