"""What a user may name the kept tokens by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.arguments import TokenIds
from lmcache_fast.errors import InvalidInputError

Positions = Sequence[int] | Sequence[bool] | npt.NDArray[Any] | torch.Tensor
Selection = Positions | Callable[[int, TokenIds], Positions]


def check_positions(where: str, selection: Positions, num_tokens: int) -> npt.NDArray[np.int64]:
    """Return the kept positions, ascending, from positions or a boolean mask.

    Args:
        where: the function to name in errors.
        selection: sorted unique positions, or a mask of ``num_tokens`` booleans.
        num_tokens: tokens to choose from.

    Raises:
        InvalidInputError: not flat, not integers, unsorted, doubled, out of range, or a mask of the
            wrong length.
    """
    if isinstance(selection, torch.Tensor):
        selection = selection.detach().cpu().numpy()
    try:
        array = np.asarray(selection)
    except ValueError as error:
        raise InvalidInputError(f"{where}: selection is no flat list: {error}") from error
    if array.ndim != 1 or (array.dtype.kind not in "biu" and array.size):
        raise InvalidInputError(
            f"{where}: selection has shape {array.shape} and dtype {array.dtype}; expected a flat "
            "list of positions or a boolean mask"
        )
    if array.dtype.kind == "b":
        if array.size != num_tokens:
            raise InvalidInputError(
                f"{where}: the mask has {array.size} values; expected {num_tokens}, one a token"
            )
        return np.flatnonzero(array).astype(np.int64)
    outside = np.flatnonzero((array < 0) | (array >= num_tokens))
    if outside.size:
        raise InvalidInputError(
            f"{where}: selection[{outside[0]}] is {array[outside[0]]}, out of range; expected 0 to "
            f"{num_tokens - 1} for {num_tokens} tokens"
        )
    positions = array.astype(np.int64)
    steps = np.diff(positions)
    for wrong, what in ((steps < 0, "unsorted"), (steps == 0, "doubled")):
        if wrong.any():
            index = int(np.argmax(wrong))
            raise InvalidInputError(
                f"{where}: selection is {what}: {positions[index + 1]} at index {index + 1} comes "
                f"after {positions[index]}; expected ascending positions without repeats"
            )
    return positions


def select_tokens(tokens: TokenIds, positions: npt.NDArray[np.int64]) -> Any:
    """Return ``tokens`` at ``positions``, of the kind they came in (any sequence gives a list)."""
    if isinstance(tokens, torch.Tensor):
        return tokens[torch.from_numpy(positions).to(tokens.device)]
    if isinstance(tokens, np.ndarray):
        return tokens[positions]
    return [tokens[position] for position in positions.tolist()]
