"""Edit: a function over a KV cache whose effect is also known as a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.arguments import TokenIds
from lmcache_fast.edits.plan import EditPlan, check_rotatable
from lmcache_fast.edits.rope import Rope
from lmcache_fast.edits.selection import Positions, check_positions, select_tokens
from lmcache_fast.errors import InvalidInputError

#: Chunk size that edits assume when nobody says which.
DEFAULT_CHUNK_SIZE = 256


@dataclass(frozen=True)
class Edit(ABC):
    """Keeps some tokens of a sequence and moves their keys to the new positions.

    An edit is an ordinary edit function, ``edit(kv, tokens) -> (kv, tokens)``, in torch alone and
    on any device. An SDK that knows edits asks for the :meth:`plan` instead and moves the bytes
    itself; both ways give the same bytes.

    Subclasses say in :meth:`select` what is kept.

    Args:
        rope: how kept keys move to their new positions; None leaves them as they are.
    """

    #: What errors call the edit.
    name: ClassVar[str] = "edit"
    rope: Rope | None = field(default=None, kw_only=True)

    @abstractmethod
    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """Return the positions to keep, or a boolean mask over ``tokens``.

        Args:
            tokens: token ids of the sequence.
            chunk_size: tokens a chunk, None where nobody knows.
        """

    def plan(self, tokens: TokenIds, chunk_size: int | None = None) -> EditPlan:
        """Return what the edit does to one sequence.

        Args:
            tokens: token ids of the sequence.
            chunk_size: the server's tokens a chunk, where known.

        Raises:
            InvalidInputError: the selection does not fit the sequence.
        """
        num_tokens = len(tokens)
        positions = check_positions(
            f"edits.{self.name}", self.select(tokens, chunk_size), num_tokens
        )
        return EditPlan(positions, self.rope, num_tokens)

    def __call__(
        self, kv: torch.Tensor | Mapping[Any, torch.Tensor], tokens: TokenIds
    ) -> tuple[torch.Tensor, Any]:
        """Return the edited cache and its tokens.

        Args:
            kv: ``[planes, L, T, D]``; or tensors by cache kind, of which the one called KV counts.
            tokens: the ``T`` token ids.

        Returns:
            A new tensor ``[planes, L, T', D]`` (``kv`` itself if everything is kept), and the kept
            tokens: an array or tensor if they came in one, else a list.

        Raises:
            InvalidInputError: kv and tokens do not fit each other, the selection does not fit them,
                or the cache's keys cannot be rotated.
        """
        kv = _kv_of(kv)
        if kv.dim() != 4 or kv.shape[2] != len(tokens):
            raise InvalidInputError(
                f"edit: kv has shape {list(kv.shape)}; expected [planes, layers, {len(tokens)}, "
                f"width] for {len(tokens)} tokens"
            )
        plan = self.plan(tokens)
        return apply_plan(plan, kv), select_tokens(tokens, plan.positions)


def _kv_of(kv: torch.Tensor | Mapping[Any, torch.Tensor]) -> torch.Tensor:
    if isinstance(kv, Mapping):
        for kind, tensor in kv.items():
            if str(getattr(kind, "value", kind)).lower() == "kv":
                return _kv_of(tensor)
        raise InvalidInputError(f"edit: got the kinds {list(kv)}; expected one called KV")
    if not isinstance(kv, torch.Tensor):
        raise InvalidInputError(f"edit: kv is {type(kv).__name__}; expected a torch.Tensor")
    return kv


def apply_plan(plan: EditPlan, kv: torch.Tensor) -> torch.Tensor:
    """Run ``plan`` on ``kv [planes, L, T, D]`` in torch; return ``[planes, L, T', D]``.

    Raises:
        InvalidInputError: the plan rotates keys and this cache's cannot be.
    """
    kv = kv.detach()
    if plan.rope is not None:
        check_rotatable("edit", plan.rope, kv.shape[0], kv.shape[3], kv.dtype)
    if plan.positions.size == kv.shape[2]:
        return kv
    index = torch.from_numpy(plan.positions).to(kv.device)
    if kv.dtype.itemsize == 1:  # torch cannot index 8-bit floats everywhere
        return kv.view(torch.uint8).index_select(2, index).view(kv.dtype)
    result = kv.index_select(2, index)
    runs = plan.runs()
    tables = plan.tables(runs)
    if tables is not None:
        assert plan.rope is not None
        rows = np.repeat(tables.run_rows, runs[:, 2])
        if tables.row_step:
            rows += np.arange(rows.size) - np.repeat(runs[:, 1], runs[:, 2])
        _rotate(result[0], plan.rope, rows, tables.cos, tables.sin)
    return result


def _rotate(
    keys: torch.Tensor,
    rope: Rope,
    rows: npt.NDArray[np.int64],
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
) -> None:
    """Rotate ``keys [L, T, D]`` in place, token ``i`` by table row ``rows[i]`` if not negative.

    In float32, without fused multiply-add, rounded once: the native kernel's operations in the
    native kernel's order, so that both give the same bytes. One layer at a time, to be frugal.
    """
    moved = np.flatnonzero(rows >= 0)
    c = torch.from_numpy(cos[rows[moved]]).to(keys.device).unsqueeze(1)
    s = torch.from_numpy(sin[rows[moved]]).to(keys.device).unsqueeze(1)
    where: Any = slice(int(moved[0]), int(moved[-1]) + 1)
    if moved.size != where.stop - where.start:
        where = torch.from_numpy(moved).to(keys.device)
    rotary_dim = rope.rotary_dim
    assert rotary_dim is not None
    start, end = rope.rotary_offset, rope.rotary_offset + rotary_dim
    first, second = slice(start, start + rotary_dim // 2), slice(start + rotary_dim // 2, end)
    if rope.interleaved:
        first, second = slice(start, end, 2), slice(start + 1, end, 2)
    for layer in keys:
        block = layer[where].view(moved.size, -1, rope.head_dim)
        x1, x2 = block[..., first].float(), block[..., second].float()
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        block[..., first], block[..., second] = y1.to(keys.dtype), y2.to(keys.dtype)
        if not isinstance(where, slice):  # then the block is a copy
            layer[where] = block.view(moved.size, -1)
