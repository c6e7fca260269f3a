"""Decoders take any bytes: every finding of the fuzzers, and a short run of mutations."""

from __future__ import annotations

import random

import pytest

from lmcache_fast.errors import InvalidInputError, LMCacheFastError
from tests.fuzz.run import CORPUS, mutate
from tests.fuzz.targets import TARGETS, replay, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_fuzzer_once_found_is_dealt_with(target: str) -> None:
    for path in sorted((CORPUS / target).glob("*")):
        replay(target, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_changed_input_is_refused_or_right(target: str) -> None:
    samples = seeds()[target]
    rng = random.Random(target)
    for data in samples:
        replay(target, data)
    for _ in range(300):
        replay(target, mutate(rng, samples))


def test_an_error_is_never_as_long_as_what_caused_it() -> None:
    error = InvalidInputError("x" * 100_000)
    assert isinstance(error, LMCacheFastError)
    assert len(str(error)) < 3000 and "98000 more characters" in str(error)
