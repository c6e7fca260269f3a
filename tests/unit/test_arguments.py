"""What users pass in is checked before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import InvalidInputError, KVLayout
from lmcache_fast.arguments import (
    check_kv,
    check_min_tokens,
    check_model_name,
    check_salt,
    check_timeout,
    check_tokens,
)

LAYOUT = KVLayout(2, 2, 3, torch.float32)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 2**32 - 1],
        (1, 2, 2**32 - 1),
        np.array([1, 2, 2**32 - 1], np.int64),
        torch.tensor([1, 2, 2**32 - 1]),
    ],
)
def test_tokens_become_uint32(tokens: Any) -> None:
    array = check_tokens("f", tokens)
    assert array.dtype == np.uint32
    assert array.tolist() == [1, 2, 2**32 - 1]


def test_no_tokens_are_an_empty_array() -> None:
    assert check_tokens("f", []).shape == (0,)


@pytest.mark.parametrize("value", [-1, 2**32, 2**70, -(2**70)])
def test_a_token_out_of_range_is_named_with_its_place(value: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"f: tokens\[1\] is {value}"):
        check_tokens("f", [0, value])


@pytest.mark.parametrize("tokens", [[[1]], [1.5], ["a"], "abc", None, [True], [1, [2]], 7])
def test_tokens_that_are_no_flat_list_of_integers_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidInputError, match="f: tokens"):
        check_tokens("f", tokens)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, 3, None])
def test_a_salt_the_server_would_drop_is_refused(salt: Any) -> None:
    with pytest.raises(InvalidInputError, match="cache_salt"):
        check_salt("f", salt)


def test_salts_up_to_128_characters_pass() -> None:
    assert check_salt("f", "x" * 128) == "x" * 128
    assert check_salt("f", "") == ""


@pytest.mark.parametrize("name", ["", "a@b", None])
def test_a_bad_model_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInputError, match="model_name"):
        check_model_name("f", name)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "1", None, True])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidInputError, match="timeout"):
        check_timeout("f", timeout)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_a_bad_least_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"f: min_tokens is .*; expected 0 or more"):
        check_min_tokens("f", value)


def test_a_non_contiguous_kv_is_copied() -> None:
    kv = torch.randn(2, 2, 6, 5).transpose(2, 3)
    checked = check_kv("f", kv, LAYOUT, 5)
    assert checked.is_contiguous()
    assert torch.equal(checked, kv)


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((2, 2, 5), "4 dimensions"),
        ((1, 2, 5, 6), "planes"),
        ((2, 3, 5, 6), "layers"),
        ((2, 2, 4, 6), "tokens"),
        ((2, 2, 5, 7), "width"),
    ],
)
def test_a_wrong_shape_is_named(shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        check_kv("f", torch.zeros(shape), LAYOUT, 5)


def test_a_wrong_dtype_or_type_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"float16.*expected torch.float32"):
        check_kv("f", torch.zeros(2, 2, 5, 6, dtype=torch.float16), LAYOUT, 5)
    with pytest.raises(InvalidInputError, match="ndarray"):
        check_kv("f", np.zeros((2, 2, 5, 6)), LAYOUT, 5)  # type: ignore[arg-type]
