"""CompletePrompts: a cluster's nodes as one step of a Ray Data pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lmcache_fast.cluster.batch import ClusterBatchedStream
from lmcache_fast.cluster.fleet import Fleet
from lmcache_fast.cluster.node import Node
from lmcache_fast.edits import Edit
from lmcache_fast.errors import BatchError, InvalidInputError
from lmcache_fast.sdk.stream import EditFunction


class CompletePrompts:
    """Prompts in, completions and metrics out; for ``Dataset.map_batches``.

    ::

        done = dataset.map_batches(
            CompletePrompts,
            fn_constructor_kwargs={"nodes": nodes, "edit": drop_middle_chunks(0.5),
                                   "decode": {"max_tokens": 256}},
            compute=ray.data.ActorPoolStrategy(size=1), num_cpus=0, batch_size=1024,
        )

    One such actor drives all nodes: each batch of rows is a :class:`ClusterBatchedStream` over one
    :class:`Fleet`, whose actors are pinned to their nodes, wherever Ray Data puts this one. Calls
    are asynchronous, so that a batch begins while the last streams of the one before are running;
    Ray Data runs those of synchronous classes one after the other, whatever ``max_concurrency``.

    Args:
        nodes: the machines.
        edit: the edit between prefill and decode; None for neither prefill nor edit.
        prefill: the engine's parameters of the prefill.
        decode: the engine's parameters of the decode, e.g. ``max_tokens``.
        prompt_column: column with each row's token ids.
        salt_column: column with each row's cache salt, where there is one.
        max_imbalance: as for :class:`ClusterBatchedStream`.
        ask_nodes: as for :class:`ClusterBatchedStream`.
        options: what :class:`Fleet` takes.

    Raises:
        ConnectError: no node can be used.
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        edit: EditFunction | Edit | None = None,
        *,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt_token_ids",
        salt_column: str | None = None,
        max_imbalance: float = 1.25,
        ask_nodes: bool = True,
        **options: Any,
    ) -> None:
        self._edit = edit
        self._prefill = dict(prefill or {})
        self._decode = dict(decode or {})
        self._prompt_column = prompt_column
        self._salt_column = salt_column
        self._max_imbalance = max_imbalance
        self._ask_nodes = ask_nodes
        self._fleet = Fleet(nodes, **options)

    async def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the rows with further columns.

        They are ``completion_token_ids``, ``completion``, ``node``, ``num_moves`` and, of the
        decode, ``seconds`` and ``ttft``; and ``error``, "" where all went well: a row that fails
        keeps the others.

        Raises:
            InvalidInputError: a column is missing, or a prompt is none.
        """
        return await asyncio.to_thread(self._complete, rows)

    def _complete(self, rows: dict[str, Any]) -> dict[str, Any]:
        for column in filter(None, (self._prompt_column, self._salt_column)):
            if column not in rows:
                raise InvalidInputError(
                    f"CompletePrompts: no column {column!r}; there are {', '.join(rows)}"
                )
        prompts = rows[self._prompt_column]
        salts = rows[self._salt_column] if self._salt_column else [""] * len(prompts)
        with ClusterBatchedStream(
            self._fleet, max_imbalance=self._max_imbalance, ask_nodes=self._ask_nodes
        ) as batch:
            streams = [
                batch.add(prompt, str(salt)) for prompt, salt in zip(prompts, salts, strict=True)
            ]
            errors = self._run(batch)
            perf = [batch.perf_metrics.get(stream.stream_id) for stream in streams]
            return {
                **rows,
                "completion_token_ids": _column([stream.output_tokens for stream in streams]),
                "completion": _column([stream.output_text for stream in streams]),
                "node": _column([stream.node for stream in streams]),
                "num_moves": np.array([stream.moves for stream in streams]),
                "seconds": np.array([one.duration if one else 0.0 for one in perf]),
                "ttft": np.array([one.ttft if one else 0.0 for one in perf]),
                "error": _column([errors.get(stream.stream_id, "") for stream in streams]),
            }

    def _run(self, batch: ClusterBatchedStream) -> dict[str, str]:
        """Run all phases; return what went wrong, by stream."""
        edit, errors = self._edit, dict[str, str]()
        phases: list[Callable[[list[str]], object]] = []
        if edit is not None:
            phases.append(lambda left: batch.prefill(self._prefill, stream_ids=left))
            phases.append(lambda left: batch.modify(edit, stream_ids=left))
        phases.append(lambda left: batch.decode(self._decode, stream_ids=left))
        for phase in phases:
            try:
                phase([stream_id for stream_id in batch.streams if stream_id not in errors])
            except BatchError as error:
                for stream_id, failure in error.failures.items():
                    errors[stream_id] = f"{type(failure).__name__}: {failure}"
        return errors


def _column(values: list[Any]) -> Any:
    """Return an array of objects: rows may differ in length."""
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column
