"""Checks of what users pass in, before anything is sent or locked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.errors import InvalidInputError
from lmcache_fast.layout import KVLayout

MAX_TOKEN_ID = 2**32 - 1
MAX_SALT_CHARS = 128
_FORBIDDEN_IN_SALT = "@/\\\0"

TokenIds = Sequence[int] | npt.NDArray[Any] | torch.Tensor


def check_tokens(where: str, tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """Return ``tokens`` as a contiguous one-dimensional uint32 array.

    Raises:
        InvalidInputError: not one-dimensional, not integers, negative or 2³² and above.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, (str, bytes)):
        raise InvalidInputError(f"{where}: tokens is {type(tokens).__name__}; expected token ids")
    try:
        array = np.asarray(tokens)
        if array.dtype == object:  # integers beyond 64 bits, or no integers at all
            for index, value in enumerate(tokens):
                if isinstance(value, (int, np.integer)) and not 0 <= value <= MAX_TOKEN_ID:
                    raise InvalidInputError(
                        f"{where}: tokens[{index}] is {value}; expected 0 to {MAX_TOKEN_ID}"
                    )
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{where}: tokens are no flat list of integers") from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"{where}: tokens have shape {array.shape} and dtype {array.dtype}; "
            "expected a flat list of integers"
        )
    if array.dtype != np.uint32:
        wrong = np.flatnonzero((array < 0) | (array > MAX_TOKEN_ID))
        if wrong.size:
            index = int(wrong[0])
            raise InvalidInputError(
                f"{where}: tokens[{index}] is {int(array[index])}; expected 0 to {MAX_TOKEN_ID}"
            )
    return np.ascontiguousarray(array, np.uint32)


def check_salt(where: str, cache_salt: str) -> str:
    """Return ``cache_salt`` if the server would take it.

    Raises:
        InvalidInputError: no string, over 128 characters, or with one of ``@ / \\ NUL``.
    """
    if not isinstance(cache_salt, str):
        raise InvalidInputError(
            f"{where}: cache_salt is {cache_salt!r}; expected a string ('' for none)"
        )
    if len(cache_salt) > MAX_SALT_CHARS:
        raise InvalidInputError(
            f"{where}: cache_salt has {len(cache_salt)} characters; expected at most "
            f"{MAX_SALT_CHARS}"
        )
    for character in _FORBIDDEN_IN_SALT:
        if character in cache_salt:
            raise InvalidInputError(
                f"{where}: cache_salt {cache_salt!r} has {character!r}; expected none of @ / \\ NUL"
            )
    return cache_salt


def check_configs(where: str, request_configs: Mapping[str, Any] | None) -> None:
    """Make sure that ``request_configs`` can be sent.

    Raises:
        InvalidInputError: no mapping from strings to what msgpack can hold.
    """
    if request_configs is None:
        return
    try:
        if isinstance(request_configs, Mapping) and all(
            isinstance(k, str) for k in request_configs
        ):
            msgspec.msgpack.encode(dict(request_configs))
            return
    except (TypeError, OverflowError, RecursionError):
        pass
    raise InvalidInputError(
        f"{where}: request_configs is {request_configs!r}; expected a dictionary of names "
        "and plain values, or None"
    )


def check_model_name(where: str, model_name: str) -> str:
    """Return ``model_name`` if it can be part of a key.

    Raises:
        InvalidInputError: empty, no string, or with ``@``, which the server's keys split at.
    """
    if not isinstance(model_name, str) or not model_name or "@" in model_name:
        raise InvalidInputError(
            f"{where}: model_name is {model_name!r}; expected a non-empty string without '@'"
        )
    return model_name


def check_min_tokens(where: str, min_tokens: int) -> None:
    """Make sure of a least number of tokens, 0 or more.

    Raises:
        InvalidInputError: it is something else.
    """
    if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or min_tokens < 0:
        raise InvalidInputError(f"{where}: min_tokens is {min_tokens!r}; expected 0 or more")


def check_timeout(where: str, timeout: float) -> float:
    """Return ``timeout`` in seconds if it is a positive finite number.

    Raises:
        InvalidInputError: it is not.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidInputError(f"{where}: timeout is {timeout!r}; expected seconds")
    if not 0 < timeout < float("inf"):
        raise InvalidInputError(f"{where}: timeout is {timeout}; expected more than 0 seconds")
    return float(timeout)


def check_kv(where: str, kv: torch.Tensor, layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """Return ``kv`` as a contiguous CPU tensor ``[planes, L, T, D]``.

    A CUDA or non-contiguous tensor is copied.

    Raises:
        InvalidInputError: no tensor; wrong rank, planes, layers, width, dtype or token count.
    """
    if not isinstance(kv, torch.Tensor):
        raise InvalidInputError(f"{where}: kv is {type(kv).__name__}; expected a torch.Tensor")
    expected = layout.kv_shape(num_tokens)
    if kv.dim() != 4:
        raise InvalidInputError(
            f"{where}: kv has shape {list(kv.shape)}; expected 4 dimensions {list(expected)}"
        )
    for axis, what in enumerate(("planes", "layers", "tokens", "width")):
        if kv.shape[axis] != expected[axis]:
            raise InvalidInputError(
                f"{where}: kv has {kv.shape[axis]} {what} (shape {list(kv.shape)}); expected "
                f"{expected[axis]} (shape {list(expected)})"
            )
    if kv.dtype != layout.dtype:
        raise InvalidInputError(f"{where}: kv has dtype {kv.dtype}; expected {layout.dtype}")
    return kv.detach().cpu().contiguous()
