"""Which node a stream goes to.

To the one that already holds the longest prefix of it; ties and misses by the hash of the first
chunk, so that equal prefixes meet. A node that has more than its share takes no more: the next one
in that order does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


def prefix_key(tokens: Tokens, cache_salt: str, chunk_size: int) -> int:
    """Return a hash of the first chunk: the same for all that could share it."""
    digest = hashlib.blake2b(tokens[:chunk_size].tobytes(), digest_size=8)
    digest.update(cache_salt.encode())
    return int.from_bytes(digest.digest(), "little")


class Router:
    """Spreads streams over nodes and remembers how much each node has.

    Args:
        max_imbalance: a node that has this many times the mean of all nodes takes no more; 1 or
            more. What a node has is counted in tokens, so it ends at most one stream above that.
    """

    def __init__(self, max_imbalance: float) -> None:
        self._max_imbalance = max_imbalance
        #: Tokens by node.
        self.loads: dict[str, int] = {}

    def assign(
        self,
        names: Sequence[str],
        keys: Keys,
        weights: Sequence[int],
        hits: Counts | None = None,
    ) -> list[str]:
        """Return the node of each stream.

        Args:
            names: nodes to choose from, at least one.
            keys: ``[n]``, each stream's :func:`prefix_key`.
            weights: ``[n]``, each stream's tokens.
            hits: ``[n, nodes]``, how many tokens of each stream a node holds already.
        """
        if hits is None:
            hits = np.zeros((len(keys), len(names)), np.int64)
        loads = [self.loads.get(name, 0) for name in names]
        limit = self._max_imbalance * (sum(loads) + sum(weights)) / len(names)
        # Highest score first: a node that leaves moves its own streams and no others.
        seeds = np.array([prefix_key(np.zeros(0, np.uint32), name, 0) for name in names], np.uint64)
        scores = _mix(keys[:, None] ^ seeds[None, :])
        order = np.lexsort((~scores, -hits), axis=-1).tolist()
        chosen = [0] * len(keys)
        # Who has something cached somewhere chooses before those who have not.
        for stream in np.argsort(-hits.max(axis=1, initial=0), kind="stable").tolist():
            # Some node is below the mean as long as anything is left to place.
            place = next((j for j in order[stream] if loads[j] < limit), order[stream][0])
            chosen[stream] = place
            loads[place] += weights[stream]
        self.loads.update(zip(names, loads, strict=True))
        return [names[place] for place in chosen]


def _mix(values: Keys) -> Keys:
    """Scramble 64-bit numbers (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = values ^ (values >> np.uint64(31))
    return mixed
