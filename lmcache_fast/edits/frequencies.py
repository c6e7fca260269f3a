"""The angle a token that rotary embeddings turn each pair of key elements by, for every scheme."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.errors import InvalidInputError

#: Known schemes and the fields of the scaling dictionary that each cannot do without.
SCHEMES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {"yarn": ("beta_fast", "beta_slow", "truncate")}
_OLD_NAMES = {"su": "longrope"}


def check_scaling(scaling: Mapping[str, Any] | None, rotary_dim: int) -> dict[str, Any]:
    """Return the ``rope_type`` and the fields of ``scaling`` that the frequencies depend on.

    Raises:
        InvalidInputError: the scheme is unknown, lacks a field, or cannot be undone by a rotation.
    """
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        raise InvalidInputError(
            f"Rope: scaling is {type(scaling).__name__}; expected Hugging Face's rope_scaling or "
            "rope_parameters dictionary, or None"
        )
    fields = dict(scaling)
    name = fields.pop("type", None)
    name = fields.get("rope_type") or name or "default"
    name = _OLD_NAMES.get(name, name)
    if name not in SCHEMES:
        raise InvalidInputError(
            f"Rope: scaling scheme {name!r} is not known; expected one of {', '.join(SCHEMES)}"
        )
    if fields.get("mrope_section"):
        raise InvalidInputError(
            "Rope: scaling has mrope_section, where an image token's position is not its index; "
            "expected one position a token (for prompts of text alone leave mrope_section out)"
        )
    if name == "dynamic" and fields.get("max_position_embeddings") is None:
        fields["max_position_embeddings"] = fields.get("original_max_position_embeddings")
    for field in SCHEMES[name]:
        if fields.get(field) is None:
            raise InvalidInputError(f"Rope: scaling of scheme {name!r} lacks {field!r}")
        if field.endswith("_factor") and isinstance(fields[field], (list, tuple)):
            continue
        if not isinstance(fields[field], (int, float)) or not 0 < fields[field] < float("inf"):
            raise InvalidInputError(
                f"Rope: scaling[{field!r}] is {fields[field]!r}; expected a positive number"
            )
    if name == "longrope":
        _check_longrope(fields, rotary_dim)
    wanted = SCHEMES[name] + _OPTIONAL.get(name, ())
    return {"rope_type": name, **{key: fields[key] for key in wanted if key in fields}}


def _check_longrope(fields: Mapping[str, Any], rotary_dim: int) -> None:
    for field in ("short_factor", "long_factor"):
        factors = fields[field]
        if not isinstance(factors, (list, tuple)) or len(factors) != rotary_dim // 2:
            what = f"{len(factors)} numbers" if isinstance(factors, (list, tuple)) else factors
            raise InvalidInputError(
                f"Rope: scaling[{field!r}] is {what}; expected a list of rotary_dim / 2 = "
                f"{rotary_dim // 2} numbers"
            )
    if fields.get("short_mscale") != fields.get("long_mscale"):
        raise InvalidInputError(
            f"Rope: scaling has short_mscale {fields.get('short_mscale')!r} and long_mscale "
            f"{fields.get('long_mscale')!r}; expected the same, as a rotation cannot rescale keys"
        )


def effective_length(scaling: Mapping[str, Any], num_tokens: int) -> int:
    """Return the one length that stands for all with the same frequencies as ``num_tokens``."""
    if scaling["rope_type"] == "dynamic":
        return max(num_tokens, int(scaling["max_position_embeddings"]))
    if scaling["rope_type"] == "longrope":
        limit = int(scaling["original_max_position_embeddings"])
        return limit + 1 if num_tokens > limit else limit
    return 0


def inverse_frequencies(
    theta: float, rotary_dim: int, scaling: Mapping[str, Any], num_tokens: int
) -> npt.NDArray[np.float64]:
    """Return radians a token for each pair, ``[rotary_dim / 2]``.

    The values are the models' own float32 values, held as float64: whoever multiplies them by a
    position then gets the angle that the model means, without the model's rounding.

    Args:
        theta: base of the geometric series.
        rotary_dim: rotated elements a head.
        scaling: a dictionary from :func:`check_scaling`.
        num_tokens: length of the sequence, for the schemes that depend on it.

    Raises:
        InvalidInputError: the scheme needs transformers and it is not installed, or refuses.
    """
    if scaling["rope_type"] in ("default", "linear"):
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        frequencies = 1.0 / (theta**exponents)
        if scaling["rope_type"] == "linear":
            frequencies /= scaling["factor"]
    else:
        frequencies = _from_transformers(theta, rotary_dim, scaling, num_tokens)
    result = frequencies.numpy().astype(np.float64)
    if not np.isfinite(result).all():
        raise InvalidInputError(f"Rope: scaling {dict(scaling)!r} gives frequencies {result}")
    result.flags.writeable = False
    return result


def _from_transformers(
    theta: float, rotary_dim: int, scaling: Mapping[str, Any], num_tokens: int
) -> torch.Tensor:
    name = scaling["rope_type"]
    try:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError as error:
        raise InvalidInputError(
            f"Rope: scaling scheme {name!r} takes its frequencies from transformers, which cannot "
            f"be imported ({error}); pip install 'lmcache_fast[demo]'"
        ) from error
    original = scaling.get("original_max_position_embeddings")
    longest = scaling.get("max_position_embeddings") or int(original * scaling.get("factor", 1))
    parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": 1.0}
    # Only what the functions read, so that any release of transformers takes it: release 4 looks
    # for rope_scaling and rope_theta, release 5 for rope_parameters.
    config = SimpleNamespace(
        head_dim=rotary_dim,
        hidden_size=rotary_dim,
        num_attention_heads=1,
        partial_rotary_factor=1.0,
        max_position_embeddings=longest,
        rope_theta=theta,
        rope_scaling=parameters,
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )
    if original is not None:
        config.original_max_position_embeddings = original
    length: Any = num_tokens
    if name == "dynamic" and num_tokens > longest:
        length = torch.tensor(num_tokens)  # as the models pass it; the last bit depends on it
    try:
        frequencies, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInputError(
            f"Rope: transformers has no frequencies for scaling {dict(scaling)!r}: {error!r}"
        ) from error
    return torch.as_tensor(frequencies, dtype=torch.float32)
