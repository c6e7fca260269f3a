"""Rope: how a model's keys carry their position, and the rotation that changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_fast.edits.frequencies import check_scaling, effective_length, inverse_frequencies
from lmcache_fast.errors import InvalidInputError
from lmcache_fast.layout import hf_config_fields
from lmcache_fast.runs import Runs

_Floats = npt.NDArray[np.float32]
_Complex = npt.NDArray[np.complex128]
_Integers = npt.NDArray[np.int64]

_FINE = 64  # a shift is a multiple of this plus a rest: two small tables give every angle
_SLICE = 4096  # tokens whose angles are held in double precision at a time

#: Model types whose keys pair neighbours, (0, 1), (2, 3), ..., not the halves of a head.
_INTERLEAVED = {"codegen", "cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium"}
#: Model types that leave some layers unrotated, or all.
_NOT_EVERY_LAYER = {"bloom", "cohere2", "exaone4", "gpt2", "llama4_text", "mpt", "opt"}


@dataclass(frozen=True)
class RotationTables:
    """Cosines and sines for the runs of a plan.

    Token ``i`` of run ``r`` uses row ``run_rows[r] + i * row_step``; a negative run row says that
    the run is not rotated.

    Attributes:
        cos: float32 ``[rows, rotary_dim / 2]``.
        sin: the same shape.
        run_rows: int64, one a run.
        row_step: 0 where a run has one angle, 1 where every token has its own.
    """

    cos: _Floats
    sin: _Floats
    run_rows: _Integers
    row_step: int


@dataclass(frozen=True)
class Rope:
    """A model's rotary position embedding.

    A cached key is ``s * R(p * f) * k``: the model's key ``k``, turned by position ``p`` times the
    frequencies ``f`` and scaled by the scheme's attention factor ``s``. Rotations add up, so
    turning by ``p' * f' - p * f`` gives ``s * R(p' * f') * k``, the key at position ``p'``. The
    factor ``s`` is one number for the model, stands on both sides, and so never has to be known.

    Args:
        head_dim: elements a head.
        theta: base of the frequencies.
        rotary_dim: rotated elements, the first of each head; all by default.
        interleaved: neighbours make a pair, ``(0, 1), (2, 3), ...`` (GPT-J, Cohere, GLM), not the
            two halves (Llama, Qwen).
        scaling: Hugging Face's ``rope_scaling`` or ``rope_parameters`` dictionary. ``dynamic`` also
            needs ``max_position_embeddings`` in it. Schemes other than ``default`` and ``linear``
            need transformers to be installed.
        fixed_length: see :meth:`at_length`.
        rotary_offset: elements of a head before the rotated ones. An MLA row is one head, whose
            rotated part is its end.

    Raises:
        InvalidInputError: a size is wrong, the scheme is unknown or incomplete, or transformers is
            needed and missing.
    """

    head_dim: int
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    fixed_length: int | None = None
    rotary_offset: int = 0
    _known: dict[int, npt.NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Check everything now, so that a wrong scheme does not wait for the first edit."""
        _check_even("head_dim", self.head_dim)
        offset = self.rotary_offset
        if not isinstance(offset, int) or not 0 <= offset < self.head_dim:
            raise InvalidInputError(
                f"Rope: rotary_offset is {offset!r}; expected 0 to head_dim = {self.head_dim}"
            )
        rotary_dim = self.head_dim - offset if self.rotary_dim is None else self.rotary_dim
        _check_even("rotary_dim", rotary_dim)
        if offset + rotary_dim > self.head_dim:
            most = f"head_dim = {self.head_dim}" + (
                f", less rotary_offset = {offset}" * bool(offset)
            )
            raise InvalidInputError(f"Rope: rotary_dim is {rotary_dim}; expected at most {most}")
        if not isinstance(self.theta, (int, float)) or not 0 < self.theta < float("inf"):
            raise InvalidInputError(f"Rope: theta is {self.theta!r}; expected a positive number")
        object.__setattr__(self, "rotary_dim", rotary_dim)
        object.__setattr__(self, "theta", float(self.theta))
        object.__setattr__(self, "scaling", check_scaling(self.scaling, rotary_dim))
        self.frequencies(1)

    def at_length(self, num_tokens: int) -> Rope:
        """Return a Rope with the frequencies of sequences of ``num_tokens``, whatever their length.

        For engines that choose the frequencies of ``dynamic`` and ``longrope`` once, not for each
        sequence. vLLM does: with longrope at its ``max_model_len``, with dynamic at
        ``factor * max_position_embeddings``.
        """
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise InvalidInputError(
                f"Rope.at_length: num_tokens is {num_tokens!r}; expected a positive integer"
            )
        return replace(self, fixed_length=num_tokens)

    def frequencies(self, num_tokens: int) -> npt.NDArray[np.float64]:
        """Return radians a position, ``[rotary_dim / 2]``, in a sequence of ``num_tokens``."""
        assert self.scaling is not None and self.rotary_dim is not None
        length = effective_length(self.scaling, self.fixed_length or num_tokens)
        known = self._known.get(length)
        if known is None:
            known = inverse_frequencies(self.theta, self.rotary_dim, self.scaling, length)
            if len(self._known) >= 16:  # dynamic has one set a length
                self._known.clear()
            self._known[length] = known
        return known

    def tables(self, runs: Runs, source_length: int, target_length: int) -> RotationTables:
        """Return the rotation that moves keys from their source to their target positions.

        Args:
            runs: ``[n, 3]``, which token rows go where.
            source_length: tokens of the sequence that the keys were computed in.
            target_length: tokens of the sequence that they move to.
        """
        before, after = self.frequencies(source_length), self.frequencies(target_length)
        shifts = runs[:, 1] - runs[:, 0]
        if not np.array_equal(before, after):
            cos, sin = _tables_per_token(before, after, runs)
            return RotationTables(cos, sin, runs[:, 1].copy(), 1)
        if not shifts.any():
            nothing = np.zeros((0, before.size), np.float32)
            return RotationTables(nothing, nothing, np.full(shifts.size, -1, np.int64), 0)
        cos, sin, rows = _tables_per_shift(before.tobytes(), shifts.tobytes())
        return RotationTables(cos, sin, rows, 0)

    @classmethod
    def from_hf_config(cls, config: str | Path | Mapping[str, Any] | Any) -> Rope:
        """Build the Rope of a Hugging Face model; for MLA that of its compressed rows.

        Args:
            config: a ``PretrainedConfig``, its dictionary, a ``config.json`` or the folder with it.

        Raises:
            InvalidInputError: the config cannot be read, names no head size, or its layers do not
                all rotate alike.
        """
        fields = hf_config_fields(config)
        scaling = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
        _check_all_layers_alike(fields, scaling)
        head_dim = fields.get("head_dim")
        if head_dim is None:
            hidden = fields.get("hidden_size", fields.get("n_embd"))
            heads = fields.get("num_attention_heads", fields.get("n_head"))
            if not isinstance(hidden, int) or not isinstance(heads, int):
                raise InvalidInputError(
                    "Rope.from_hf_config: the config has neither head_dim nor hidden_size and "
                    "num_attention_heads"
                )
            head_dim = hidden // heads
        rotary_dim, offset = None, 0
        if fields.get("kv_lora_rank"):
            offset, rotary_dim = (
                int(fields["kv_lora_rank"]),
                int(fields.get("qk_rope_head_dim") or 0),
            )
            head_dim = offset + rotary_dim
        theta = _first(scaling.get("rope_theta"), fields.get("rope_theta"))
        theta = _first(theta, fields.get("rotary_emb_base"), 10000.0)
        part = _first(scaling.get("partial_rotary_factor"), fields.get("partial_rotary_factor"))
        part = _first(part, fields.get("rotary_pct"), 1.0)
        rotary_dim = _first(rotary_dim, fields.get("rotary_dim"), int(head_dim * part))
        for name in ("max_position_embeddings", "original_max_position_embeddings"):
            # Phi-3 keeps the original length outside, and there it counts.
            if fields.get(name) is not None:
                scaling[name] = fields[name]
        if scaling.get("original_max_position_embeddings") is None:
            scaling["original_max_position_embeddings"] = fields.get("max_position_embeddings")
        interleaved = fields.get("rope_interleave")
        if interleaved is None:  # engines keep MLA's rotated part as its neighbours pair up
            interleaved = offset > 0 or fields.get("model_type") in _INTERLEAVED
        return cls(head_dim, theta, rotary_dim, bool(interleaved), scaling, rotary_offset=offset)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _check_even(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2 or value % 2:
        raise InvalidInputError(f"Rope: {name} is {value!r}; expected a positive even integer")


def _check_all_layers_alike(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    why = None
    if any(isinstance(value, Mapping) for value in scaling.values()):
        why = "rope_parameters differ by layer type"
    elif fields.get("rope_local_base_freq") is not None:
        why = "rope_local_base_freq gives some layers another base"
    elif not all(fields.get("no_rope_layers") or [True]):
        why = "no_rope_layers leaves some layers without rotation"
    elif fields.get("model_type") in _NOT_EVERY_LAYER:
        why = f"model_type {fields['model_type']!r} leaves layers without rotation"
    elif fields.get("kv_lora_rank") and not fields.get("qk_rope_head_dim"):
        why = "kv_lora_rank says MLA, and qk_rope_head_dim, the rotated end of its rows, is missing"
    if why:
        raise InvalidInputError(
            f"Rope.from_hf_config: {why}; expected keys that every layer rotates alike"
        )


def _turn(frequencies: npt.NDArray[np.float64], positions: _Integers) -> _Complex:
    """Unit complex numbers at the angles ``positions x frequencies``."""
    angles = np.multiply.outer(positions.astype(np.float64), frequencies)
    result = np.empty(angles.shape, np.complex128)
    np.cos(angles, out=result.real)
    np.sin(angles, out=result.imag)
    return result


@lru_cache(maxsize=32)
def _fine(frequencies: bytes) -> _Complex:
    return _turn(np.frombuffer(frequencies, np.float64), np.arange(_FINE))


def _turn_rows(
    frequencies: npt.NDArray[np.float64], positions: _Integers
) -> tuple[_Complex, _Integers]:
    """Angles of ``positions`` by addition: a table, and the row of each position in it.

    Cosines are slow and complex products fast, so an angle is put together from that of the next
    lower multiple of 64 and that of the rest. In double precision nothing is lost.
    """
    fine = _fine(frequencies.tobytes())
    high, low = np.divmod(positions, _FINE)
    blocks, block_of = np.unique(high, return_inverse=True)
    coarse = _turn(frequencies, blocks * _FINE)
    if 4 * positions.size < blocks.size * _FINE:  # few positions of each block are asked for
        return coarse[block_of] * fine[low], np.arange(positions.size)
    table = coarse[:, None] * fine[None]
    return table.reshape(-1, frequencies.size), block_of * _FINE + low


def _read_only(table: npt.NDArray[np.float64]) -> _Floats:
    result = table.astype(np.float32)
    result.flags.writeable = False
    return result


@lru_cache(maxsize=8)  # a batch gives every stream of one length the same plan
def _tables_per_shift(frequencies: bytes, shifts: bytes) -> tuple[_Floats, _Floats, _Integers]:
    moves = np.frombuffer(shifts, np.int64)
    moved = moves != 0
    rows = np.full(moves.size, -1, np.int64)
    table, rows[moved] = _turn_rows(np.frombuffer(frequencies, np.float64), moves[moved])
    rows.flags.writeable = False
    return _read_only(table.real), _read_only(table.imag), rows


def _tables_per_token(
    before: npt.NDArray[np.float64], after: npt.NDArray[np.float64], runs: Runs
) -> tuple[_Floats, _Floats]:
    counts = runs[:, 2]
    targets = np.arange(int(counts.sum()), dtype=np.int64)
    sources = targets + np.repeat(runs[:, 0] - runs[:, 1], counts)
    cos = np.empty((targets.size, before.size), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, targets.size, _SLICE):
        part = slice(start, start + _SLICE)
        new, new_rows = _turn_rows(after, targets[part])
        old, old_rows = _turn_rows(before, sources[part])
        turned = new[new_rows] * old[old_rows].conj()
        cos[part], sin[part] = turned.real, turned.imag
    return cos, sin
