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
from lmcache_fast.edits.view import KVView, TensorView
from lmcache_fast.errors import InvalidInputError

#: Chunk size that edits assume when nobody says which.
DEFAULT_CHUNK_SIZE = 256


@dataclass(frozen=True)
class Edit(ABC):
    """Keeps some tokens of a sequence and moves their keys to the new positions.

    An edit is an ordinary edit function, ``edit(kv, tokens) -> (kv, tokens)``, in torch alone and
    on any device. An SDK that knows edits asks for the :meth:`plan` instead and moves the bytes
    itself; both ways give the same bytes.

    Subclasses say in :meth:`select` what is kept; those that look at the cache to decide, in
    :meth:`select_from`.

    Args:
        rope: how kept keys move to their new positions; None leaves them as they are.
    """

    #: What errors call the edit.
    name: ClassVar[str] = "edit"
    rope: Rope | None = field(default=None, kw_only=True)

    @property
    def needs_queries(self) -> bool:
        """Whether the edit looks at the view's queries."""
        return False

    @abstractmethod
    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """Return the positions to keep, or a boolean mask over ``tokens``.

        Args:
            tokens: token ids of the sequence.
            chunk_size: tokens a chunk, None where nobody knows.
        """

    def select_from(self, view: KVView, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """Return what :meth:`select` does, of a cache that can be looked at.

        Args:
            view: the cache of ``tokens``, as it is before the edit.
            tokens: token ids of the sequence.
            chunk_size: tokens a chunk, None where nobody knows.
        """
        return self.select(tokens, chunk_size)

    def plan(
        self, tokens: TokenIds, chunk_size: int | None = None, view: KVView | None = None
    ) -> EditPlan:
        """Return what the edit does to one sequence.

        Args:
            tokens: token ids of the sequence.
            chunk_size: the server's tokens a chunk, where known.
            view: the cache of ``tokens``, for edits that look at it.

        Raises:
            InvalidInputError: the selection does not fit the sequence, or the edit needs a view and
                there is none.
        """
        num_tokens = len(tokens)
        where = f"edits.{self.name}"
        if view is None:
            selection = self.select(tokens, chunk_size)
        elif view.num_tokens != num_tokens:
            raise InvalidInputError(
                f"{where}: the cache has {view.num_tokens} tokens; expected {num_tokens}"
            )
        else:
            selection = self.select_from(view, tokens, chunk_size)
            view.check()
        return EditPlan(check_positions(where, selection, num_tokens), self.rope, num_tokens)

    def __call__(
        self,
        kv: torch.Tensor | Mapping[Any, torch.Tensor],
        tokens: TokenIds,
        queries: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the edited cache and its tokens.

        Args:
            kv: ``[planes, L, T, D]``; or tensors by cache kind, of which those called KV and query
                count.
            tokens: the ``T`` token ids.
            queries: ``[1, L, T or more, query heads * head_dim]``, for edits that look at them.

        Returns:
            A new tensor ``[planes, L, T', D]`` (``kv`` itself if everything is kept), and the kept
            tokens: an array or tensor if they came in one, else a list.

        Raises:
            InvalidInputError: kv and tokens do not fit each other, the selection does not fit them,
                or the cache's keys cannot be rotated.
        """
        if isinstance(kv, Mapping):
            queries = _of_kind(kv, "query") if queries is None else queries
            kv = _of_kind(kv, "kv")
        if not isinstance(kv, torch.Tensor):
            raise InvalidInputError(f"edit: kv is {type(kv).__name__}; expected a torch.Tensor")
        if kv.dim() != 4 or kv.shape[2] != len(tokens):
            raise InvalidInputError(
                f"edit: kv has shape {list(kv.shape)}; expected [planes, layers, {len(tokens)}, "
                f"width] for {len(tokens)} tokens"
            )
        view = TensorView(kv.detach())
        view.queries = None if queries is None else query_view(queries)
        plan = self.plan(tokens, view=view)
        return apply_plan(plan, kv), select_tokens(tokens, plan.positions)


def _of_kind(tensors: Mapping[Any, torch.Tensor], name: str) -> Any:
    for kind, tensor in tensors.items():
        if str(getattr(kind, "value", kind)).lower() == name:
            return tensor
    if name == "query":
        return None
    raise InvalidInputError(f"edit: got the kinds {list(tensors)}; expected one called KV")


def query_view(queries: torch.Tensor | KVView) -> KVView:
    """Return queries as a view.

    Raises:
        InvalidInputError: neither a view of one plane nor a tensor ``[1, L, T, D]``.
    """
    if isinstance(queries, torch.Tensor) and queries.dim() == 4:
        queries = TensorView(queries.detach())
    if not isinstance(queries, KVView) or queries.planes != 1:
        what = list(queries.shape) if isinstance(queries, torch.Tensor) else type(queries).__name__
        raise InvalidInputError(
            f"edit: queries are {what}; expected a tensor [1, layers, tokens, width]"
        )
    return queries


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
