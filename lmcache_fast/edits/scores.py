"""The policies' scores in torch: their definition, on any device.

The native scorers give the same bits. So every sum has a defined order: element ``i`` goes into
partial sum ``i % 8``, in ascending order, and the eight are then added in pairs. Partial sums over
a head's elements and over keys are float32, all others float64. Nothing relies on a library's
order, its fused operations, its square root or its exponential function.

All functions return float64 ``[tokens]`` for one layer, whose heads are reduced to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

Reduce = Literal["mean", "max"]

_MOST = torch.finfo(torch.float64).max
_LOWEST = -708.0  # exp of less is 0
_FACTORIALS = [1.0 / math.factorial(n) for n in range(11, -1, -1)]


def reduce_in_order(scores: Iterable[torch.Tensor], reduce: Reduce) -> torch.Tensor:
    """Return the mean or the maximum of tensors of one shape, taken in their order.

    A score that is not a number makes the result not a number.
    """
    result, count = None, 0
    for score in scores:
        count += 1
        if result is None:
            result = score.clone()
        else:
            result = result + score if reduce == "mean" else torch.maximum(result, score)
    assert result is not None
    return _divide(result, count) if reduce == "mean" else result


def knorm(keys: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Minus the length of the keys ``[T, heads, head_dim]``."""
    return reduce_in_order((-_norms(keys)).unbind(1), reduce)


def keydiff(keys: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Minus the cosine between the keys ``[T, heads, head_dim]`` and their mean direction."""
    norms = _norms(keys)
    narrow = keys.float()
    has_direction = (norms > 0) & (norms < math.inf)
    inverse = (1.0 / norms).float()
    directions = torch.where(
        has_direction.unsqueeze(2), narrow * inverse.unsqueeze(2), torch.zeros_like(narrow)
    )
    anchor = _divide(_sum(directions, 0), keys.shape[0])
    length = _sqrt(_sum(anchor * anchor, 1))
    length = torch.where(length > 1e-8, length, 1e-8)
    norms = torch.where(norms > 1e-8, norms, 1e-8)
    cosines = _sum(narrow * anchor.float(), 2) / (norms * length)
    return reduce_in_order((-cosines).unbind(1), reduce)


def lagkv(
    keys: torch.Tensor,
    values: torch.Tensor,
    num_sink: int,
    lag_size: int,
    cross_scoring: bool,
    reduce: Reduce,
) -> torch.Tensor:
    """Rank of each token among its partition, 0 for tokens that no partition follows.

    Args:
        keys: ``[T, heads, head_dim]``.
        values: the same shape.
        num_sink: tokens before the first partition.
        lag_size: tokens a partition.
        cross_scoring: the spread itself instead of its rank.
        reduce: how heads become one.
    """
    num_tokens = keys.shape[0]
    scores = torch.zeros(num_tokens, dtype=torch.float64, device=keys.device)
    num_partitions = (num_tokens - num_sink) // lag_size
    if num_partitions < 2:
        return scores
    end = num_sink + num_partitions * lag_size
    spread = [
        _lag_spread(rows[num_sink:end].unflatten(0, (num_partitions, lag_size)))
        for rows in (keys, values)
    ]
    combined = (spread[0] + spread[1]) / 2  # [partitions - 1, lag, heads]
    if not cross_scoring:
        order = torch.argsort(combined, dim=1, stable=True, descending=True)
        below = torch.arange(lag_size - 1, -1, -1, dtype=torch.float64, device=keys.device)
        shares = _divide(below, lag_size).reshape(1, -1, 1).expand_as(combined)
        combined = torch.empty_like(combined).scatter_(1, order, shares)
    reduced = reduce_in_order(combined.unbind(2), reduce).flatten()
    scores[num_sink : num_sink + reduced.numel()] = reduced
    return scores


def attention(
    keys: torch.Tensor, queries: torch.Tensor, kernel_size: int, reduce: Reduce
) -> torch.Tensor:
    """Attention of the last ``window`` tokens to those before them, 0 for these themselves.

    Args:
        keys: ``[T, heads, head_dim]``.
        queries: float32 ``[query heads, window, head_dim]``; a multiple of the keys' heads.
        kernel_size: over so many neighbours scores are averaged, an odd number.
        reduce: how the heads of keys become one; the query heads of each are averaged.
    """
    num_tokens, num_heads, head_dim = keys.shape
    num_query_heads, window, _ = queries.shape
    group = num_query_heads // num_heads
    scored = num_tokens - window
    scores = torch.zeros(num_tokens, dtype=torch.float64, device=keys.device)
    if scored <= 0:
        return scores
    seen = torch.arange(num_tokens, device=keys.device) <= scored + torch.arange(
        window, device=keys.device
    ).unsqueeze(1)
    reach = kernel_size // 2

    def of_head(head: int) -> torch.Tensor:
        key = keys[:, head].float()
        total = torch.zeros(scored, dtype=torch.float64, device=keys.device)
        for query in queries[head * group : (head + 1) * group]:
            products = _pairs(_partial_sums(query.unsqueeze(1) * key, 2))
            logits = products.double() * (1.0 / math.sqrt(head_dim))
            weights, factor = _softmax(logits, seen)
            for row in weights * factor:
                total += row[:scored]
        padded = torch.nn.functional.pad(total, (reach, reach))
        pooled = padded[:scored].clone()
        for offset in range(1, kernel_size):
            pooled += padded[offset : offset + scored]
        return _divide(pooled, group * window * kernel_size)

    scores[:scored] = reduce_in_order((of_head(head) for head in range(num_heads)), reduce)
    return scores


def _divide(values: torch.Tensor, divisor: int) -> torch.Tensor:
    # By a number CUDA multiplies with its inverse; by a tensor it divides.
    return values / values.new_full((), divisor)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    # In memory torch takes the vector library's, which is off by a bit now and then.
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


def _sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    return _pairs(_partial_sums(values, dim).double())


def _partial_sums(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Add up along ``dim`` into eight sums, which become the first dimension."""
    values = values.movedim(dim, 0)
    rest = -values.shape[0] % 8
    if rest:
        values = torch.cat((values, values.new_zeros(rest, *values.shape[1:])))
    sums = values.new_zeros(8, *values.shape[1:])
    for start in range(0, values.shape[0], 8):
        sums += values[start : start + 8]
    return sums


def _pairs(sums: torch.Tensor) -> torch.Tensor:
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def _norms(keys: torch.Tensor) -> torch.Tensor:
    narrow = keys.float()
    return _sqrt(_sum(narrow * narrow, 2))


def _lag_spread(rows: torch.Tensor) -> torch.Tensor:
    """Spread of the tokens of ``rows [partitions, lag, heads, head_dim]``, as softmax over lag."""
    narrow = rows.float()
    ahead = narrow[1:]
    low = torch.where(ahead.isnan(), math.inf, ahead).amin(1, keepdim=True)
    high = torch.where(ahead.isnan(), -math.inf, ahead).amax(1, keepdim=True)
    span = high - low
    inverse = 1.0 / span
    most = torch.finfo(torch.float32).max
    good = (span > 0) & (span <= most) & (inverse <= most)
    z = (narrow[:-1] - torch.where(good, low, 0.0)) * torch.where(good, inverse, 0.0)
    count = rows.shape[3]
    total = _sum(z, 3)
    squares = _sum(z * z, 3)
    variance = _divide(squares - _divide(total * total, count), max(count - 1, 1))
    deviation = _sqrt(torch.where(variance < 0, 0.0, variance)).transpose(1, 2)
    weights, factor = _softmax(deviation, torch.ones_like(deviation, dtype=torch.bool))
    return (weights * factor).transpose(1, 2)


def _softmax(values: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension where ``valid``, and the factor that it lacks.

    What is not a number counts as the lowest one, an infinity as the largest of its sign.
    """
    values = torch.nan_to_num(values, nan=-_MOST, posinf=_MOST, neginf=-_MOST)
    highest = torch.where(valid, values, -_MOST).amax(-1, keepdim=True)
    weights = torch.where(valid, _exponential(values - highest), 0.0)
    return weights, (1.0 / _sum(weights, weights.dim() - 1)).unsqueeze(-1)


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """Exp of float64 numbers up to 0: ``2 ** k * exp(r)``, of plain operations only."""
    clamped = torch.where(x < _LOWEST, _LOWEST, x).clamp(max=0.0)
    k = torch.round(clamped * 1.4426950408889634)
    r = (clamped - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    result = torch.zeros_like(r)
    for factor in _FACTORIALS:
        result = result * r + factor
    power = ((k.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < _LOWEST, 0.0, result * power)
