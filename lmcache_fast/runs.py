"""Runs: which token rows go where.

A run is ``(source_token, target_token, count)``: ``count`` rows in a row on both sides. Plans are
arrays ``int64 [n, 3]`` of runs in ascending order of their target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Runs = npt.NDArray[np.int64]


def whole(num_tokens: int) -> Runs:
    """One run that copies ``num_tokens`` rows from the beginning to the beginning."""
    return np.array([[0, 0, num_tokens]] if num_tokens else [], np.int64).reshape(-1, 3)


def from_positions(positions: npt.NDArray[np.int64]) -> Runs:
    """Run-length code the plan that puts row ``positions[i]`` at row ``i``."""
    if positions.size == 0:
        return whole(0)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    targets = np.concatenate(([0], breaks)).astype(np.int64)
    counts = np.diff(np.append(targets, positions.size))
    return np.stack((positions[targets], targets, counts), axis=1).astype(np.int64)


def for_chunks(
    runs: Runs, chunk_indices: Sequence[int], chunk_size: int
) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Cut ``runs`` down to some target chunks, which then stand one behind the other.

    Args:
        runs: a plan over the whole target.
        chunk_indices: the target chunks that are written, ascending.
        chunk_size: tokens a chunk.

    Returns:
        The plan for a target that has these chunks only, and for each of its runs ``(n, 2)``: the
        run of ``runs`` it was cut from and how many rows into that run it begins.
    """
    pieces: list[npt.NDArray[np.int64]] = []
    origins: list[npt.NDArray[np.int64]] = []
    starts, counts = runs[:, 1], runs[:, 2]
    ends = starts + counts
    for place, chunk in enumerate(chunk_indices):
        low, high = chunk * chunk_size, (chunk + 1) * chunk_size
        first = int(np.searchsorted(ends, low, side="right"))
        last = int(np.searchsorted(starts, high, side="left"))
        if first >= last:
            continue
        begin = np.maximum(starts[first:last], low)
        end = np.minimum(ends[first:last], high)
        skipped = begin - starts[first:last]
        source = runs[first:last, 0] + skipped
        pieces.append(np.stack((source, begin - low + place * chunk_size, end - begin), axis=1))
        origins.append(np.stack((np.arange(first, last, dtype=np.int64), skipped), axis=1))
    if not pieces:
        return whole(0), np.zeros((0, 2), np.int64)
    return np.concatenate(pieces), np.concatenate(origins)
