"""The policies' scores in torch: their definition, on any device.

The native scorers give the same bits. So every sum has a defined order. Over a head's elements,
element ``i`` goes into partial sum ``i % 16``, in ascending order, products with one rounding
(fused); the upper half of the sixteen is then added to the lower until there is one. These and what
is computed of them is float32; sums over keys and over heads are float64. Nothing relies on a
library's order, its fused operations, its square root or its exponential function.

All functions return float64 ``[tokens]`` for one layer, whose heads are reduced to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

Reduce = Literal["mean", "max"]

_LANES = 16
_MOST = torch.finfo(torch.float32).max
_LOWEST = -86.0  # exp of less is 0
_TO_INTEGER = 12582912.0  # 1.5 * 2 ** 23, added to a smaller number, rounds it to an integer
_SERIES = [1.0 / math.factorial(n) for n in range(7, -1, -1)]


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
    return _reduce_heads(-_norms(keys.float()), 1, reduce)


def keydiff(keys: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Minus the cosine between the keys ``[T, heads, head_dim]`` and their mean direction."""
    keys = keys.float()
    if not keys.shape[0]:
        return keys.new_zeros(0, dtype=torch.float64)
    norms = _norms(keys)
    inverse = 1.0 / norms
    has_direction = (norms <= _MOST) & (inverse <= _MOST)
    directed = torch.where(has_direction.unsqueeze(2), keys, 0.0)
    inverse = torch.where(has_direction, inverse, 0.0)
    # Sixteen tokens become one float32, these a float64.
    rest = -keys.shape[0] % _LANES
    blocks = torch.nn.functional.pad(directed, (0, 0, 0, 0, 0, rest)).unflatten(0, (-1, _LANES))
    factors = torch.nn.functional.pad(inverse, (0, 0, 0, rest)).unflatten(0, (-1, _LANES))
    directions = torch.zeros_like(blocks[:, 0])
    for i in range(_LANES):
        directions = _fused(blocks[:, i], factors[:, i].unsqueeze(2), directions)
    total = keys.new_zeros(keys.shape[1:], dtype=torch.float64)
    for direction in directions:
        total += direction
    anchor = _divide(total, keys.shape[0])
    length = _sqrt(_sum(anchor * anchor)).float()
    least = keys.new_full((), 1e-8)
    both = torch.where(norms > least, norms, least) * torch.where(length > least, length, least)
    return _reduce_heads(-(_dot(keys, anchor.float()) / both), 1, reduce)


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
    combined = (spread[0] + spread[1]) * 0.5  # [partitions - 1, lag, heads]
    if not cross_scoring:
        order = torch.argsort(combined, dim=1, stable=True, descending=True)
        below = torch.arange(lag_size - 1, -1, -1, dtype=torch.float32, device=keys.device)
        shares = _divide(below, lag_size).reshape(1, -1, 1).expand_as(combined)
        combined = torch.empty_like(combined).scatter_(1, order, shares)
    reduced = _reduce_heads(combined, 2, reduce).flatten()
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
    reach = min(kernel_size // 2, scored)  # beyond it there is nothing

    scale = torch.tensor(1.0 / math.sqrt(head_dim)).item()

    def of_head(head: int) -> torch.Tensor:
        key = keys[:, head].float()
        total = torch.zeros(scored, device=keys.device)
        for query in queries[head * group : (head + 1) * group]:
            weights, factor = _softmax(_dot(query.unsqueeze(1), key), seen, scale)
            for weight, share in zip(weights, factor, strict=True):
                total = _fused(weight[:scored], share, total)
        padded = torch.nn.functional.pad(total, (reach, reach))
        pooled = padded[:scored].clone()
        for offset in range(1, 2 * reach + 1):
            pooled += padded[offset : offset + scored]
        return _divide(pooled, group * window * kernel_size)

    of_heads = torch.stack([of_head(head) for head in range(num_heads)])
    scores[:scored] = _reduce_heads(of_heads, 0, reduce)
    return scores


def _reduce_heads(scores: torch.Tensor, dim: int, reduce: Reduce) -> torch.Tensor:
    return reduce_in_order(scores.double().unbind(dim), reduce)


def _divide(values: torch.Tensor, divisor: int) -> torch.Tensor:
    # By a number CUDA multiplies with its inverse; by a tensor it divides.
    return values / values.new_full((), divisor)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    # In memory torch takes the vector library's, which is off by a bit now and then.
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` in float32, rounded once.

    The product is exact in float64; a sum that was rounded to an odd number there is rounded right
    a second time (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = a.double() * b.double()
    other = c.double()
    total = product + other
    of_other = total - product
    lost = (product - (total - of_other)) + (other - of_other)
    bits = total.view(torch.int64)
    inexact = ((lost < 0) | (lost > 0)) & (bits & 1 == 0)
    outward = (lost > 0) == (total > 0)
    bits = torch.where(inexact, torch.where(outward, bits + 1, bits - 1), bits)
    return bits.view(torch.float64).float()


def _pieces(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pieces of sixteen along the last dimension, the last one with zeros at its end."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % _LANES))
    return tuple(torch.split(padded, _LANES, -1))


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Add up along the last dimension."""
    sums = values.new_zeros(*values.shape[:-1], _LANES)
    for piece in _pieces(values):
        sums = sums + piece
    return _fold(sums)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add up products along the last dimension."""
    exact = _has_exact_products(a, b)
    sums = a.new_zeros(_LANES)
    for piece, other in zip(_pieces(a), _pieces(b), strict=True):
        sums = piece * other + sums if exact else _fused(piece, other, sums)
    return _fold(sums)


def _has_exact_products(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether float32 holds all products, so that fused or not is the same, only slower.

    It does for what was bfloat16 or float16, except at the ends of the range.
    """
    largest = smallest = 1.0
    for values in (a, b):
        if not values.numel() or (values.view(torch.int32) & 0xFFF).any():  # more than 12 bits
            return False
        sizes = values.abs()
        largest *= sizes.amax().item()
        smallest *= torch.where(sizes > 0, sizes, math.inf).amin().item()
    return smallest >= torch.finfo(torch.float32).smallest_normal and largest <= _MOST


def _fold(sums: torch.Tensor) -> torch.Tensor:
    while sums.shape[-1] > 1:
        lower, upper = sums.chunk(2, -1)
        sums = lower + upper
    return sums[..., 0]


def _norms(keys: torch.Tensor) -> torch.Tensor:
    return _sqrt(_dot(keys, keys))


def _lag_spread(rows: torch.Tensor) -> torch.Tensor:
    """Spread of the tokens of ``rows [partitions, lag, heads, head_dim]``, as softmax over lag."""
    rows = rows.float()
    ahead = rows[1:]
    low = torch.where(ahead.isnan(), math.inf, ahead).amin(1, keepdim=True)
    high = torch.where(ahead.isnan(), -math.inf, ahead).amax(1, keepdim=True)
    span = high - low
    inverse = 1.0 / span
    good = (span > 0) & (span <= _MOST) & (inverse <= _MOST)
    z = (rows[:-1] - torch.where(good, low, 0.0)) * torch.where(good, inverse, 0.0)
    count = rows.shape[3]
    total = _sum(z)
    variance = _divide(_dot(z, z) - _divide(total * total, count), max(count - 1, 1))
    deviation = _sqrt(torch.where(variance < 0, 0.0, variance)).transpose(1, 2)
    weights, factor = _softmax(deviation, torch.ones_like(deviation, dtype=torch.bool), 1.0)
    return (weights * factor.unsqueeze(-1)).transpose(1, 2)


def _softmax(
    values: torch.Tensor, valid: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of ``scale * values`` over the last dimension where ``valid``, and a factor it lacks.

    What is not a number counts as the lowest one, an infinity as the largest of its sign.
    """
    values = torch.nan_to_num(values, nan=-_MOST, posinf=_MOST, neginf=-_MOST)
    highest = torch.where(valid, values, -_MOST).amax(-1, keepdim=True)
    weights = torch.where(valid, _exponential((values - highest) * scale), 0.0)
    return weights, (1.0 / _sum(weights.double())).float()


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """Exp of float32 numbers up to 0: ``2 ** k * exp(r)``, of plain operations only."""

    def number(value: float) -> torch.Tensor:
        return x.new_full((), value)

    clamped = torch.where(x > _LOWEST, x, _LOWEST)
    shifted = _fused(clamped, number(1.44269504), number(_TO_INTEGER))
    k = shifted - _TO_INTEGER
    r = _fused(k, number(-1.42860677e-6), _fused(k, number(-0.693145752), clamped))
    result = number(_SERIES[0])
    for factor in _SERIES[1:]:
        result = _fused(result, r, number(factor))
    bits = result.view(torch.int32) + (shifted.view(torch.int32) << 23)
    return torch.where(x < _LOWEST, 0.0, bits.view(torch.float32))
