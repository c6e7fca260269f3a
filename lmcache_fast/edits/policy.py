"""What all policies have in common: from scores to the tokens that stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast.arguments import TokenIds
from lmcache_fast.edits.edit import DEFAULT_CHUNK_SIZE, Edit, query_view
from lmcache_fast.edits.rope import Rope
from lmcache_fast.edits.scores import Reduce, reduce_in_order
from lmcache_fast.edits.selection import Positions
from lmcache_fast.edits.view import KVView, TensorView
from lmcache_fast.errors import InvalidInputError

Scores = torch.Tensor | npt.NDArray[Any]


@dataclass(frozen=True)
class Policy(Edit):
    """Keeps the tokens with the highest scores.

    The first ``n_sink`` tokens and a partial chunk at the end stay in any case; they count among
    those that are kept. Of equal scores the lower position stays; a score that is not a number is
    the lowest.

    Args:
        compression_ratio: the fraction of the tokens to remove, from 0 to below 1.
        n_sink: tokens at the beginning that stay.
        reduce: how the scores of all layers and heads become one a token: their mean or maximum.
        chunk_size: tokens a chunk; by default the server's, which the SDK tells, and 256 where the
            policy is called as a plain function.
        rope: moves the kept keys to their new positions; without it they keep the old ones.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    #: Whether the scores depend on the cache, not only on its length.
    needs_kv: ClassVar[bool] = True
    compression_ratio: float = 0.0
    n_sink: int = field(default=4, kw_only=True)
    reduce: Reduce = field(default="mean", kw_only=True)
    chunk_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        ratio = self.compression_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
            raise InvalidInputError(
                f"edits.{self.name}: compression_ratio is {ratio!r}; expected 0 to below 1"
            )
        self._check_count("n_sink", self.n_sink, 0)
        if self.chunk_size is not None:
            self._check_count("chunk_size", self.chunk_size, 1)
        if self.reduce not in get_args(Reduce):
            raise InvalidInputError(
                f"edits.{self.name}: reduce is {self.reduce!r}; expected 'mean' or 'max'"
            )

    @abstractmethod
    def scores(self, view: KVView) -> Scores:
        """Return a score for each token; higher ones are kept.

        Returns:
            ``[tokens]``, or ``[layers, tokens]`` or ``[layers, heads, tokens]``, which ``reduce``
            makes one a token.
        """

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """See :meth:`Edit.select`; for policies that go by the position alone."""
        if self.needs_kv:
            raise InvalidInputError(
                f"edits.{self.name}: looks at the cache to decide; expected a view of it"
            )
        return self.select_from(TensorView(torch.empty(1, 0, len(tokens), 0)), tokens, chunk_size)

    def select_from(self, view: KVView, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """See :meth:`Edit.select_from`."""
        num_tokens = len(tokens)
        num_kept = max(1, int(num_tokens * (1 - self.compression_ratio) + 1e-9))
        if num_kept >= num_tokens:
            return np.arange(num_tokens)
        size = self.chunk_size or chunk_size or DEFAULT_CHUNK_SIZE
        kept = np.zeros(num_tokens, np.bool_)
        kept[: self.n_sink] = True
        kept[num_tokens // size * size :] = True
        free = np.flatnonzero(~kept)
        num_free = max(0, num_kept - np.count_nonzero(kept))
        best_first = np.argsort(-self._one_each(self.scores(view), num_tokens)[free], kind="stable")
        kept[free[best_first[:num_free]]] = True
        return kept

    def _one_each(self, scores: Scores, num_tokens: int) -> npt.NDArray[np.float64]:
        tensor = torch.as_tensor(scores).detach()
        if tensor.dim() == 0 or tensor.shape[-1] != num_tokens or tensor.is_complex():
            raise InvalidInputError(
                f"edits.{self.name}: scores have shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}; expected [{num_tokens}], or more dimensions before it"
            )
        tensor = tensor.cpu().double()
        if tensor.dim() > 1:
            tensor = reduce_in_order(tensor.reshape(-1, num_tokens), self.reduce)
        return np.where(tensor.isnan().numpy(), -np.inf, tensor.numpy())

    def _check_count(self, name: str, value: Any, lowest: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise InvalidInputError(
                f"edits.{self.name}: {name} is {value!r}; expected an integer of at least {lowest}"
            )


@dataclass(frozen=True, eq=False)
class _FromScores(Policy):
    name: ClassVar[str] = "from_scores"
    function: Callable[[KVView], Scores] = field(kw_only=True)

    def scores(self, view: KVView) -> Scores:
        return self.function(view)


def from_scores(
    function: Callable[[KVView], Scores],
    compression_ratio: float = 0.0,
    *,
    n_sink: int = 4,
    reduce: Reduce = "mean",
    chunk_size: int | None = None,
    rope: Rope | None = None,
) -> Edit:
    """Return the policy that keeps the tokens to which ``function`` gives the highest scores.

    Args:
        function: takes a :class:`KVView` and returns scores ``[tokens]``, ``[layers, tokens]`` or
            ``[layers, heads, tokens]``, a tensor or an array. What it reads of the view must not be
            kept: the cache may lie in memory that is the server's.
        compression_ratio: the fraction of the tokens to remove, from 0 to below 1.
        n_sink: tokens at the beginning that stay.
        reduce: how several scores of a token become one: ``mean`` or ``max``.
        chunk_size: tokens a chunk, where the policy is called as a plain function.
        rope: moves the kept keys to their new positions; without it they keep the old ones.

    Raises:
        InvalidInputError: an argument is out of its range; when it runs, also scores of another
            shape.
    """
    return _FromScores(
        compression_ratio,
        n_sink=n_sink,
        reduce=reduce,
        chunk_size=chunk_size,
        rope=rope,
        function=function,
    )


@dataclass(frozen=True, eq=False)
class WithQueries(Edit):
    """See :func:`with_queries`."""

    name: ClassVar[str] = "with_queries"
    edit: Edit
    queries: torch.Tensor | KVView

    def select(self, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """See :meth:`Edit.select`."""
        return self.edit.select(tokens, chunk_size)

    def select_from(self, view: KVView, tokens: TokenIds, chunk_size: int | None) -> Positions:
        """See :meth:`Edit.select_from`."""
        view = copy(view)
        view.queries = query_view(self.queries)
        return self.edit.select_from(view, tokens, chunk_size)


def with_queries(edit: Edit, queries: torch.Tensor | KVView) -> Edit:
    """Return ``edit`` with the queries that it is to look at, for one sequence.

    Args:
        edit: a policy that looks at queries, or a chain with one in it.
        queries: of the same tokens, from the first on (more are ignored):
            ``[1, L, T, query heads * head_dim]``, or a view of a lease of them.

    Raises:
        InvalidInputError: ``queries`` are neither.
    """
    query_view(queries)
    return WithQueries(edit, queries, rope=edit.rope)
