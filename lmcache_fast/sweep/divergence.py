"""How far two distributions of the next token are apart, as far as their likeliest tokens tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: The least that the lumped rest of a distribution is taken to have. Engines give logarithms in
#: single precision: a sum of probabilities is off by about this much, and may be above 1.
REST_FLOOR = 1e-6


@dataclass(frozen=True)
class NextToken:
    """What an engine says about one next token.

    Args:
        token_id: the token that it takes, greedily.
        logprobs: natural logarithms of the likeliest tokens' probabilities, by token id.
    """

    token_id: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True)
class Divergence:
    """How far apart two distributions are.

    Args:
        kl: Kullback-Leibler divergence of the second from the first, in nats.
        covered: probability, by the first, of the tokens that are compared one by one.
    """

    kl: float
    covered: float


def divergence(reference: NextToken, edited: NextToken) -> Divergence:
    """Compare the tokens that both name one by one, and all others as one.

    Merging outcomes never makes the divergence larger (the log-sum inequality; Cover and Thomas,
    *Elements of Information Theory*, theorem 2.7.1), so the result is a lower bound of
    ``KL(reference ‖ edited)``, and that itself where both name every token. A token that only one
    of them names is among the others: what the other gives it is not known.

    Returns:
        A divergence of at least 0; 0 of a distribution from itself.
    """
    shared = sorted(reference.logprobs.keys() & edited.logprobs.keys())
    p, covered = _merged(reference.logprobs, shared)
    q, _ = _merged(edited.logprobs, shared)
    kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    return Divergence(max(kl, 0.0), covered)


def _merged(logprobs: Mapping[int, float], tokens: list[int]) -> tuple[list[float], float]:
    """Logarithms of the tokens' probabilities and of the rest's, normalized; and the tokens' sum.

    They stay logarithms: a probability may be too small for a float.
    """
    covered = math.fsum(math.exp(logprobs[token]) for token in tokens)
    rest = max(1 - covered, REST_FLOOR)
    total = math.log(covered + rest)
    logs = [logprobs[token] - total for token in tokens]
    return [*logs, math.log(rest) - total], min(covered, 1.0)
