"""What a model says of tokens that are given to it one by one, computed by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_fast.serve.engine.model import Model


def logprobs_of(
    model: Model, kv: torch.Tensor, behind: Sequence[int], continuation: Sequence[int]
) -> torch.Tensor:
    """Return the distribution of each token of a continuation, given those before it.

    Args:
        model: the model.
        kv: ``[2, L, T, D]``, what precedes.
        behind: at least one token behind it.
        continuation: the tokens behind those.

    Returns:
        Logarithmic probabilities ``[continuation, vocabulary]``.
    """
    tokens = [*behind, *continuation[:-1]]
    planes, layers, length, width = kv.shape
    room = torch.empty(planes, layers, length + len(tokens), width)
    room[:, :, :length] = kv
    rows = [
        model.decode([token], [room], [length + place])[0] for place, token in enumerate(tokens)
    ]
    return torch.stack(rows[len(behind) - 1 :]).log_softmax(-1)
