"""The field's token-dropping policies, under the names that kvpress gives them.

There each head of each layer keeps tokens of its own. A cached prefix has one list of tokens for
all, so here the scores of all layers and heads become one, by ``reduce``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast._extension import native
from lmcache_fast.edits import scores as reference
from lmcache_fast.edits.policy import Policy, Scores
from lmcache_fast.edits.scores import Reduce
from lmcache_fast.edits.view import KVView
from lmcache_fast.errors import InvalidInputError, SharedMemoryError

if TYPE_CHECKING:
    from lmcache_fast._native import ChunkedSide

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first ``n_sink`` tokens and the most recent ones; see :class:`Policy`."""

    name: ClassVar[str] = "StreamingLLM"
    needs_kv: ClassVar[bool] = False

    def scores(self, view: KVView) -> Scores:
        """See :meth:`Policy.scores`."""
        return np.arange(view.num_tokens)


@dataclass(frozen=True)
class Random(Policy):
    """Keeps tokens at random, the yardstick of every policy; see :class:`Policy`.

    Args:
        seed: the same seed keeps the same tokens of sequences of one length.
    """

    name: ClassVar[str] = "Random"
    needs_kv: ClassVar[bool] = False
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        self._check_count("seed", self.seed, 0)

    def scores(self, view: KVView) -> Scores:
        """See :meth:`Policy.scores`."""
        return np.random.default_rng(self.seed).random(view.num_tokens)


@dataclass(frozen=True)
class KeyPolicy(Policy):
    """A policy that reads the keys, natively where they are in memory and else in torch.

    Args:
        head_dim: elements a head. It need not be given where ``rope`` is, or where the SDK, which
            knows the model's, runs the policy.
    """

    head_dim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.head_dim is not None:
            self._check_count("head_dim", self.head_dim, 1)

    @abstractmethod
    def _native_scores(self, view: KVView, side: ChunkedSide, how: dict[str, Any]) -> Scores:
        """Scores ``[layers, tokens]``."""

    @abstractmethod
    def _layer_scores(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        """Scores ``[tokens]``."""

    def scores(self, view: KVView) -> Scores:
        """See :meth:`Policy.scores`."""
        self._check_cache(view)
        head_dim = self._head_dim_of(view)
        if view.dtype not in _DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise InvalidInputError(
                f"edits.{self.name}: the cache has dtype {str(view.dtype).removeprefix('torch.')}; "
                f"expected one of {names}"
            )
        side = view.side
        if side is not None:
            dtype = str(view.dtype).removeprefix("torch.")
            how = {"head_dim": head_dim, "dtype": dtype, "reduce": self.reduce}
            try:
                return self._native_scores(view, side, how)
            except OSError as error:
                raise SharedMemoryError(f"edits.{self.name}: {error}") from error
        layers = [self._layer_scores(view, layer, head_dim) for layer in range(view.num_layers)]
        return torch.stack(layers)

    def _check_cache(self, view: KVView) -> None:
        if not view.num_layers or not view.width:
            raise InvalidInputError(
                f"edits.{self.name}: the cache has {view.num_layers} layers and rows of "
                f"{view.width}; expected at least one layer and one element"
            )

    def _head_dim_of(self, view: KVView) -> int:
        known = [self.head_dim, view.head_dim]
        if view.planes == 1:  # one row for all heads (MLA)
            known += [view.width]
        elif self.rope is not None:
            known.insert(1, self.rope.head_dim)
        head_dim = next((each for each in known if each is not None), None)
        if head_dim is None:
            raise InvalidInputError(
                f"edits.{self.name}: the cache's rows have {view.width} elements, of unknown "
                "heads; expected head_dim or rope"
            )
        if view.width % head_dim:
            raise InvalidInputError(
                f"edits.{self.name}: head_dim is {head_dim}; the cache's rows have {view.width} "
                "elements, which is no multiple of it"
            )
        return head_dim


@dataclass(frozen=True)
class Knorm(KeyPolicy):
    """Keeps the tokens with the shortest keys (arXiv:2406.11430); see :class:`KeyPolicy`."""

    name: ClassVar[str] = "Knorm"

    def _native_scores(self, view: KVView, side: ChunkedSide, how: dict[str, Any]) -> Scores:
        return _native().knorm_scores(side, **how)  # type: ignore[no-any-return]

    def _layer_scores(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        return reference.knorm(view.keys(layer).unflatten(1, (-1, head_dim)), self.reduce)


@dataclass(frozen=True)
class KeyDiff(KeyPolicy):
    """Keeps the tokens whose keys are least like the mean key (arXiv:2504.15364).

    See :class:`KeyPolicy`. Keys whose length is 0 or, in float32, not finite are left out of the
    mean.
    """

    name: ClassVar[str] = "KeyDiff"

    def _native_scores(self, view: KVView, side: ChunkedSide, how: dict[str, Any]) -> Scores:
        return _native().keydiff_scores(side, **how)  # type: ignore[no-any-return]

    def _layer_scores(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        return reference.keydiff(view.keys(layer).unflatten(1, (-1, head_dim)), self.reduce)


@dataclass(frozen=True)
class LagKV(KeyPolicy):
    """Keeps the tokens that vary most against those behind them (arXiv:2504.04704).

    Behind ``n_sink`` tokens come partitions of ``lag_size``. A token's keys and values are scaled
    to the range of the next partition; how much they spread then over the head's elements ranks it
    among its own partition. Tokens without a whole partition behind them come first, the latest
    before the others. See :class:`KeyPolicy`.

    Args:
        lag_size: tokens a partition.
        cross_scoring: compare the spread over partitions, not the rank within each.
    """

    name: ClassVar[str] = "LagKV"
    lag_size: int = field(default=128, kw_only=True)
    cross_scoring: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        self._check_count("lag_size", self.lag_size, 1)

    def scores(self, view: KVView) -> Scores:
        """See :meth:`Policy.scores`."""
        if view.planes != 2:
            raise InvalidInputError(
                f"edits.LagKV: the cache has {view.planes} plane; expected keys and values apart"
            )
        num_partitions = max(view.num_tokens - self.n_sink, 0) // self.lag_size
        scored = self.n_sink + (num_partitions - 1) * self.lag_size if num_partitions > 1 else 0
        return _recent_first(self, super().scores(view) if scored else None, view, scored)

    def _native_scores(self, view: KVView, side: ChunkedSide, how: dict[str, Any]) -> Scores:
        return _native().lagkv_scores(  # type: ignore[no-any-return]
            side,
            num_sink=self.n_sink,
            lag_size=self.lag_size,
            cross_scoring=self.cross_scoring,
            **how,
        )

    def _layer_scores(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        keys, values = (
            rows.unflatten(1, (-1, head_dim)) for rows in (view.keys(layer), view.values(layer))
        )
        return reference.lagkv(
            keys, values, self.n_sink, self.lag_size, self.cross_scoring, self.reduce
        )


@dataclass(frozen=True)
class SnapKV(KeyPolicy):
    """Keeps the tokens that the last ones attend to most (arXiv:2404.14469).

    Needs the queries of the sequence, as the model's attention takes them: after the rotary
    embedding. They come with the call, ``edit(kv, tokens, queries=...)``, in the second
    generation's ``{kind: tensor}``, or by :func:`with_queries`. See :class:`KeyPolicy`.

    Args:
        window_size: the last tokens, whose attention counts. They come first, the latest before
            the others.
        kernel_size: the attention is averaged over so many neighbours, an odd number.
    """

    name: ClassVar[str] = "SnapKV"
    window_size: int = field(default=64, kw_only=True)
    kernel_size: int = field(default=5, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        self._check_count("window_size", self.window_size, 1)
        self._check_count("kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 != 1 or self.kernel_size >= 2**31:
            raise InvalidInputError(
                f"edits.{self.name}: kernel_size is {self.kernel_size!r}; expected an odd number "
                "below 2**31"
            )

    def scores(self, view: KVView) -> Scores:
        """See :meth:`Policy.scores`."""
        self._check_queries(view)
        scored = max(view.num_tokens - self.window_size, 0)
        return _recent_first(self, super().scores(view) if scored else None, view, scored)

    def _native_scores(self, view: KVView, side: ChunkedSide, how: dict[str, Any]) -> Scores:
        queries = [self._window(view, i, how["head_dim"]) for i in range(view.num_layers)]
        how["reduce"] = self._reduce_heads
        return _native().attention_scores(  # type: ignore[no-any-return]
            side, torch.stack(queries).cpu().numpy(), kernel_size=self.kernel_size, **how
        )

    def _layer_scores(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        keys = view.keys(layer).unflatten(1, (-1, head_dim))
        queries = self._window(view, layer, head_dim).to(keys.device)
        return reference.attention(keys, queries, self.kernel_size, self._reduce_heads)

    @property
    def needs_queries(self) -> bool:
        """See :attr:`Edit.needs_queries`."""
        return True

    @property
    def _reduce_heads(self) -> Reduce:
        return self.reduce

    def _window(self, view: KVView, layer: int, head_dim: int) -> torch.Tensor:
        """The window's queries, float32 ``[query heads, window, head_dim]``."""
        assert view.queries is not None
        rows = view.queries.rows(0, layer, view.num_tokens - self.window_size, view.num_tokens)
        heads = rows.float().reshape(self.window_size, -1, head_dim)
        return heads.transpose(0, 1).contiguous()

    def _check_queries(self, view: KVView) -> None:
        self._check_cache(view)
        if view.planes != 2:
            raise InvalidInputError(
                f"edits.{self.name}: the cache has {view.planes} plane; expected keys and values "
                "apart"
            )
        queries = view.queries
        if queries is None:
            raise InvalidInputError(
                f"edits.{self.name}: there are no queries; expected edit(kv, tokens, queries=...), "
                "a query cache beside kv, or edits.with_queries(edit, queries)"
            )
        if (
            queries.num_layers != view.num_layers
            or queries.num_tokens < view.num_tokens
            or not queries.width
            or queries.width % view.width
        ):
            raise InvalidInputError(
                f"edits.{self.name}: queries have {queries.num_layers} layers, "
                f"{queries.num_tokens} tokens and rows of {queries.width}; expected "
                f"{view.num_layers} layers, at least {view.num_tokens} tokens and rows of a "
                f"multiple of {view.width}"
            )
        if not queries.dtype.is_floating_point:
            raise InvalidInputError(
                f"edits.{self.name}: queries have dtype "
                f"{str(queries.dtype).removeprefix('torch.')}; expected floating-point numbers"
            )


@dataclass(frozen=True)
class TOVA(SnapKV):
    """Keeps the tokens that the last one attends to most (arXiv:2401.06104).

    Needs queries, as :class:`SnapKV` does. All heads of a layer are averaged, so ``reduce`` says
    how its layers become one.
    """

    name: ClassVar[str] = "TOVA"
    window_size: int = field(default=1, init=False, repr=False)
    kernel_size: int = field(default=1, init=False, repr=False)

    @property
    def _reduce_heads(self) -> Reduce:
        return "mean"


def _recent_first(
    policy: Policy, scores: Scores | None, view: KVView, scored: int
) -> npt.NDArray[np.float64]:
    """One score a token: those given, up to 1, for the first ``scored``; more for each later."""
    result = np.zeros(view.num_tokens)
    if scores is not None:
        result = policy._one_each(scores, view.num_tokens)
    result[scored:] = 2 + np.arange(view.num_tokens - scored)
    return result


def _native() -> Any:
    assert native is not None  # else no view has a side
    return native
