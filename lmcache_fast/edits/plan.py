"""Plans: what an edit does to one sequence, and that as the copy engine's runs and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_fast import runs as run_plans
from lmcache_fast.edits.rope import Rope, RotationTables
from lmcache_fast.errors import EditError, InvalidInputError
from lmcache_fast.layout import KVLayout
from lmcache_fast.runs import Runs

_ROTATED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class EditPlan:
    """What an edit does to one sequence.

    Attributes:
        positions: int64, source position of each token that is kept, ascending.
        rope: how the kept keys move to their new positions; None leaves them as they are.
        num_source_tokens: tokens of the sequence that the plan is for.
    """

    positions: npt.NDArray[np.int64]
    rope: Rope | None
    num_source_tokens: int

    def runs(self) -> Runs:
        """Return the plan as runs."""
        return run_plans.from_positions(self.positions)

    def tables(self, runs: Runs) -> RotationTables | None:
        """Return the rotation of ``runs``, or None if no key is rotated."""
        if self.rope is None:
            return None
        tables = self.rope.tables(runs, self.num_source_tokens, self.positions.size)
        return tables if (tables.run_rows >= 0).any() else None


def check_rotatable(where: str, rope: Rope, planes: int, width: int, dtype: torch.dtype) -> None:
    """Check that keys of such a cache can be rotated.

    Raises:
        InvalidInputError: one plane that is not MLA's, or MLA's rope for two; a dtype that is not
            rotated, or a width of no whole heads.
    """
    if planes != 2 and not (rope.rotary_offset and width == rope.head_dim):
        raise InvalidInputError(
            f"{where}: the cache has {planes} plane of {width} elements; expected keys and values "
            "apart (2 planes) where rope is given, or MLA rows and the rope of their model"
        )
    if planes == 2 and rope.rotary_offset:
        raise InvalidInputError(
            f"{where}: the rope has rotary_offset {rope.rotary_offset}, for MLA's one plane; the "
            "cache has 2 planes"
        )
    if dtype not in _ROTATED_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _ROTATED_DTYPES)
        raise InvalidInputError(
            f"{where}: the cache has dtype {str(dtype).removeprefix('torch.')}; expected one of "
            f"{names} where rope is given"
        )
    if width % rope.head_dim:
        raise InvalidInputError(
            f"{where}: the cache's rows have {width} elements; expected a multiple of the rope's "
            f"head_dim {rope.head_dim}"
        )


@dataclass(frozen=True, eq=False)
class CompiledEdit:
    """An edit of one sequence, ready for the copy engine.

    Attributes:
        new_positions: int64, source position of each new token.
        runs: int64 ``[n, 3]`` of (source_token, target_token, count).
        cos: float32 ``[rows, rotary_dim / 2]``; no rows where nothing is rotated.
        sin: the same shape.
        run_rows: int64 ``[n]``, each run's first table row, negative where it is not rotated.
        row_step: table rows from one token of a run to the next, 0 or 1.
        num_unchanged_chunks: leading whole chunks that come out as they went in: same tokens, same
            prefix, no rotation. The server has them already.
        rope: the rotation that the tables are for.
        layout: the cache that the edit was compiled for.
    """

    new_positions: npt.NDArray[np.int64]
    runs: Runs
    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]
    run_rows: npt.NDArray[np.int64]
    row_step: int
    num_unchanged_chunks: int
    rope: Rope | None
    layout: KVLayout

    def cut(
        self, chunk_indices: Sequence[int], chunk_size: int
    ) -> tuple[Runs, npt.NDArray[np.int32]]:
        """Return the runs for some target chunks, one behind the other, and their table rows."""
        runs, origins = run_plans.for_chunks(self.runs, chunk_indices, chunk_size)
        first = self.run_rows[origins[:, 0]]
        rows = np.where(first < 0, -1, first + origins[:, 1] * self.row_step)
        return runs, rows.astype(np.int32)

    def for_chunks(self, chunk_indices: Sequence[int], chunk_size: int) -> tuple[Runs, Any | None]:
        """Return what ``_native.copy_runs`` needs to write some target chunks.

        Args:
            chunk_indices: target chunks to write, ascending; in the target they stand one behind
                the other.
            chunk_size: tokens a chunk.

        Returns:
            The runs, and a ``_native.Rotation`` or None if none of these tokens is rotated.
        """
        runs, rows = self.cut(chunk_indices, chunk_size)
        if self.rope is None or not (rows >= 0).any():
            return runs, None
        from lmcache_fast._extension import native

        if native is None:
            raise RuntimeError("CompiledEdit.for_chunks: the native extension is not there")
        rotation = native.Rotation(
            self.cos,
            self.sin,
            rows,
            self.row_step,
            num_heads=self.layout.width // self.rope.head_dim,
            head_dim=self.rope.head_dim,
            rotary_dim=self.rope.rotary_dim,
            interleaved=self.rope.interleaved,
            dtype=self.layout.dtype_name,
            rotary_offset=self.rope.rotary_offset,
        )
        return runs, rotation


def compile_plan(plan: EditPlan, layout: KVLayout, chunk_size: int) -> CompiledEdit:
    """Turn a plan into runs and rotation tables.

    Args:
        plan: from :meth:`Edit.plan`.
        layout: the cache's layout.
        chunk_size: tokens a chunk.

    Raises:
        InvalidInputError: the plan rotates keys and the layout's cannot be.
        EditError: the layout is opaque and the plan takes chunks apart.
    """
    where = "compile_plan"
    if layout.rows == "opaque":
        _check_whole_chunks(plan, chunk_size)
    if plan.rope is not None:
        check_rotatable(where, plan.rope, layout.planes, layout.width, layout.dtype)
        if layout.num_kv_heads > 1 and layout.head_dim != plan.rope.head_dim:
            raise InvalidInputError(
                f"{where}: the rope's head_dim is {plan.rope.head_dim}; expected the layout's "
                f"{layout.head_dim}"
            )
    runs = plan.runs()
    tables = plan.tables(runs)
    if tables is None:
        none = np.zeros((0, 1), np.float32)
        tables = RotationTables(none, none, np.full(len(runs), -1, np.int64), 0)
    unchanged = 0
    if len(runs) and runs[0, 0] == 0 and tables.run_rows[0] < 0:
        unchanged = int(runs[0, 2]) // chunk_size
    return CompiledEdit(
        new_positions=plan.positions,
        runs=runs,
        cos=tables.cos,
        sin=tables.sin,
        run_rows=tables.run_rows,
        row_step=tables.row_step,
        num_unchanged_chunks=unchanged,
        rope=plan.rope,
        layout=layout,
    )


def check_chunks_kept(
    where: str, source: Sequence[int], kept: Sequence[int], chunk_size: int
) -> None:
    """Check that each whole chunk of ``kept`` is a chunk of ``source``, by its tokens.

    For what a plain function made of a cache with opaque rows: which rows it took cannot be told,
    but tokens that it put together anew can.

    Raises:
        EditError: a chunk is none of the source's.
    """
    known = {tuple(source[at : at + chunk_size]) for at in range(0, len(source), chunk_size)}
    for at in range(0, len(kept) // chunk_size * chunk_size, chunk_size):
        if tuple(kept[at : at + chunk_size]) not in known:
            raise EditError(
                f"{where}: tokens {at} to {at + chunk_size - 1} are no chunk of the source; the "
                "layout is opaque: its rows are no tokens, so only whole chunks of "
                f"{chunk_size} can be kept or dropped"
            )


def _check_whole_chunks(plan: EditPlan, chunk_size: int) -> None:
    """Check that every new chunk is a chunk of the source; a rest behind them is not stored."""
    if plan.rope is not None:
        raise EditError(
            "edit: the layout is opaque: nobody knows where in its rows the keys are, so that they "
            "cannot be rotated; expected an edit without rope"
        )
    num_chunks = plan.positions.size // chunk_size
    chunks = plan.positions[: num_chunks * chunk_size].reshape(num_chunks, chunk_size)
    first, last = chunks[:, 0], chunks[:, -1]
    wrong = np.flatnonzero((first % chunk_size != 0) | (last - first != chunk_size - 1))
    if wrong.size:
        index = int(wrong[0])
        raise EditError(
            f"edit: new chunk {index} would be put together from source tokens {first[index]} to "
            f"{last[index]}; the layout is opaque: its rows are no tokens, so only whole chunks of "
            f"{chunk_size} can be kept or dropped"
        )
