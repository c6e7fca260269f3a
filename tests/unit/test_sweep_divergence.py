"""The sweep's divergence: what it is of whole distributions, and a bound of what it is not told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.sweep.divergence import REST_FLOOR, NextToken, divergence

SIZE = 12


def next_token(logits: list[float], count: int = SIZE) -> NextToken:
    """The ``count`` likeliest tokens of a softmax, in single precision as engines give them."""
    total = math.log(math.fsum(map(math.exp, logits)))
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    return NextToken(best[0], {token: logits[token] - total for token in best[:count]})


def exact(logits: list[float], others: list[float]) -> float:
    p, q = next_token(logits).logprobs, next_token(others).logprobs
    return math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in p)


logits = st.lists(st.floats(-12, 12), min_size=SIZE, max_size=SIZE)
counts = st.integers(0, SIZE)


@given(logits, counts)
def test_a_distribution_does_not_diverge_from_itself(values: list[float], count: int) -> None:
    one = next_token(values, count)
    found = divergence(one, one)
    assert found.kl == 0
    assert found.covered == pytest.approx(sum(map(math.exp, one.logprobs.values())), abs=1e-9)


@given(logits, logits)
def test_all_tokens_give_the_divergence_itself(first: list[float], second: list[float]) -> None:
    found = divergence(next_token(first), next_token(second))
    assert found.kl == pytest.approx(exact(first, second), abs=1e-4)
    assert found.covered == pytest.approx(1)


@given(logits, logits, counts, counts)
def test_some_tokens_give_a_lower_bound_of_it(
    first: list[float], second: list[float], count: int, other_count: int
) -> None:
    found = divergence(next_token(first, count), next_token(second, other_count))
    assert 0 <= found.kl <= exact(first, second) + 1e-4
    assert 0 <= found.covered <= 1


@given(logits, logits, st.integers(1, SIZE))
def test_more_tokens_never_tell_less(first: list[float], second: list[float], count: int) -> None:
    # Named by both: else a token more could leave the ones compared as they are.
    p, q = next_token(first).logprobs, next_token(second).logprobs
    fewer, more = (
        divergence(
            NextToken(0, {token: p[token] for token in range(n)}),
            NextToken(0, {token: q[token] for token in range(n)}),
        )
        for n in (count - 1, count)
    )
    # Of a rest that is less likely than the floor, only what the floor would say is told.
    rest, other = (
        math.fsum(math.exp(one[token]) for token in range(count, SIZE)) for one in (p, q)
    )
    untold = rest * math.log(REST_FLOOR / other) if 0 < other < REST_FLOOR else 0.0
    assert more.kl >= fewer.kl - untold - 1e-4
    assert more.covered >= fewer.covered


def test_a_token_that_only_one_names_is_among_the_others() -> None:
    half = math.log(0.5)
    first = NextToken(1, {1: half, 2: math.log(0.25)})
    second = NextToken(1, {1: half, 3: math.log(0.25)})
    assert divergence(first, second).kl == 0
    assert divergence(first, second).covered == pytest.approx(0.5)


def test_by_hand() -> None:
    first = NextToken(0, {0: math.log(0.5), 1: math.log(0.3)})
    second = NextToken(1, {0: math.log(0.2), 1: math.log(0.4)})
    expected = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.4)
    assert divergence(first, second).kl == pytest.approx(expected)


def test_nothing_in_common_tells_nothing() -> None:
    found = divergence(NextToken(0, {0: -0.1}), NextToken(1, {1: -0.1}))
    assert (found.kl, found.covered) == (0, 0)


def test_what_is_all_but_impossible_stays_finite() -> None:
    # -9999 is how vLLM writes minus infinity.
    found = divergence(NextToken(0, {0: 0.0, 1: -9999.0}), NextToken(1, {0: -9999.0, 1: 0.0}))
    assert found.kl == pytest.approx(9999, rel=1e-3)
    assert math.exp(-9999.0) == 0 and REST_FLOOR > 0
