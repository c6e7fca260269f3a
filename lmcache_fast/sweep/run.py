"""The sweep: prompts decoded and scored from the unedited cache, then from each edited one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lmcache_fast.sdk.batch as lmc_batch
import lmcache_fast.sdk.request as lmc_request
from lmcache_fast import edits
from lmcache_fast.errors import BatchError, EditError, InvalidInputError
from lmcache_fast.sdk.context import LMCacheSDKContext
from lmcache_fast.sweep.divergence import NextToken, divergence
from lmcache_fast.sweep.scoring import Scorer
from lmcache_fast.vllm import VLLMPostCompletion

#: What can be swept, by name: from a compression ratio and a rope to an edit.
POLICIES: dict[str, Callable[[float, edits.Rope | None], edits.Edit]] = {
    "StreamingLLM": lambda ratio, rope: edits.StreamingLLM(ratio, rope=rope),
    "Random": lambda ratio, rope: edits.Random(ratio, rope=rope),
    "Knorm": lambda ratio, rope: edits.Knorm(ratio, rope=rope),
    "KeyDiff": lambda ratio, rope: edits.KeyDiff(ratio, rope=rope),
    "LagKV": lambda ratio, rope: edits.LagKV(ratio, rope=rope),
    "SnapKV": lambda ratio, rope: edits.SnapKV(ratio, rope=rope),
    "TOVA": lambda ratio, rope: edits.TOVA(ratio, rope=rope),
    "drop_middle_chunks": lambda ratio, rope: edits.drop_middle_chunks(ratio, rope=rope),
}
_GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        policies: names of :data:`POLICIES`.
        ratios: the fractions of the tokens to remove.
        max_tokens: tokens that are decoded and compared of each prompt.
        num_logprobs: how many of the likeliest tokens are compared one by one; -1 for all.
        rounds: times that each edited cache is decoded from, next to the unedited one.
        rope: moves the kept keys; None leaves them as they are.
        timeout: seconds to wait for the chunks of a prompt.
    """

    policies: tuple[str, ...]
    ratios: tuple[float, ...]
    max_tokens: int = 32
    num_logprobs: int = 20
    rounds: int = 1
    rope: edits.Rope | None = None
    timeout: float = 120.0


@dataclass(frozen=True)
class Row:
    """One policy at one ratio, against the unedited cache.

    Args:
        policy: its name.
        ratio: the fraction of the tokens that it was to remove.
        kept: the fraction of the cached tokens that it kept.
        decode_tput: decoded tokens a second, all prompts together: the median of the rounds.
        gain: that, over the unedited cache's just before: the median, too.
        edit_seconds: how long editing all prompts took.
        bytes_read: bytes of cache that the edit had before it, of keys, values and queries.
        bytes_written: bytes of cache that it wrote.
        kl: mean divergence of the next token from the unedited cache's, in nats.
        agreement: the fraction of the positions where both take the same token greedily.
        covered: mean probability of the tokens that were compared one by one.
    """

    policy: str
    ratio: float
    kept: float
    decode_tput: float
    gain: float
    edit_seconds: float
    bytes_read: int
    bytes_written: int
    kl: float
    agreement: float
    covered: float


@dataclass(frozen=True)
class LeftOut:
    """One policy at one ratio that could not be run, and why."""

    policy: str
    ratio: float
    reason: str


@dataclass(frozen=True)
class Result:
    """What came out.

    Args:
        plan: what was run.
        about: on what.
        continuations: the tokens of each prompt that every cache was asked about.
        rows: the first of them is the unedited cache, compared with itself.
        left_out: what could not be run.
    """

    plan: Plan
    about: Mapping[str, Any]
    continuations: list[list[int]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        return {
            **self.about,
            "max_tokens": self.plan.max_tokens,
            "num_logprobs": self.plan.num_logprobs,
            "rounds": self.plan.rounds,
            "keys_moved": self.plan.rope is not None,
            "continuations": self.continuations,
            "rows": [asdict(row) for row in self.rows],
            "left_out": [asdict(one) for one in self.left_out],
        }


@dataclass(frozen=True)
class _Start:
    """Where a decode begins: tokens, the salt of their cache, and how many are cached there."""

    tokens: Sequence[int]
    salt: str
    cached: int


@dataclass(frozen=True)
class _Reference:
    """What one prompt's unedited cache gave."""

    continuation: list[int]
    next_tokens: list[NextToken]


class Sweep:
    """One sweep over some prompts.

    The unedited cache decodes each prompt greedily. Then, and for each edited cache, every token
    of that one continuation is scored given those before it: all caches are asked about the same
    contexts, whatever they would have gone on with themselves.

    Args:
        context: where the engine's keys and values are.
        queries: where its queries are; None where it stores none.
        engine: the engine.
        prompts: token ids of each prompt, at least one chunk.
        salt: the unedited cache's; edited ones get random salts of their own.
        plan: what to run.
        finished: called with each row once it is there.

    Raises:
        InvalidInputError: a prompt is too short.
    """

    def __init__(
        self,
        context: LMCacheSDKContext,
        queries: LMCacheSDKContext | None,
        engine: VLLMPostCompletion,
        prompts: Sequence[Sequence[int]],
        salt: str,
        plan: Plan,
        finished: Callable[[Row], None] = lambda row: None,
    ) -> None:
        for index, prompt in enumerate(prompts):
            if len(prompt) < context.chunk_size:
                raise InvalidInputError(
                    f"prompt {index} has {len(prompt)} tokens; expected at least one chunk of "
                    f"{context.chunk_size}"
                )
        self._context = context
        self._queries = queries
        self._engine = engine
        self._prompts = prompts
        self._salt = self._first_salt = salt
        self._salts = 0
        self._plan = plan
        self._finished = finished
        self._scorer = Scorer(engine, plan.num_logprobs)

    def run(self) -> Result:
        """Run all of it.

        Raises:
            LMCacheFastError: the server or the engine failed.
        """
        size = self._context.chunk_size
        about = {
            "model": self._context.model_name,
            "server": self._context.server_version,
            "transport": self._context.transport_name,
            "chunk_size": size,
            "prompt_tokens": [len(prompt) for prompt in self._prompts],
        }
        result = Result(self._plan, about)
        self._prefill(False)
        references, unedited = self._reference()
        result.continuations.extend(one.continuation for one in references)
        self._add(result, unedited)
        for policy in self._plan.policies:
            for ratio in self._plan.ratios:
                row = self._row(policy, ratio, references)
                if isinstance(row, str):
                    result.left_out.append(LeftOut(policy, ratio, row))
                else:
                    self._add(result, row)
        return result

    def _add(self, result: Result, row: Row) -> None:
        result.rows.append(row)
        self._finished(row)

    def _batch(
        self, starts: Sequence[_Start], with_queries: bool = False
    ) -> lmc_batch.LMCacheBatchedStream:
        contexts = [self._context]
        if with_queries and self._queries is not None:
            contexts.append(self._queries)
        batch = lmc_batch.LMCacheBatchedStream()
        for start in starts:
            batch.add(
                lmc_request.create_request(
                    contexts, self._engine, start.tokens, start.salt, isolate_edits=True
                )
            )
        return batch

    def _unedited(self) -> list[_Start]:
        size = self._context.chunk_size
        return [_Start(prompt, self._salt, len(prompt) // size * size) for prompt in self._prompts]

    def _prefill(self, with_queries: bool) -> None:
        """Let the engine store what is not cached (any more)."""
        if with_queries and self._queries is not None and not self._is_cached(self._queries):
            # An engine makes queries of what it computes, and it computes what nobody has cached.
            self._salts += 1
            self._salt = f"{self._first_salt}-{self._salts}"
        if not self._is_cached(self._context):
            self._batch(self._unedited()).prefill(_GREEDY)

    def _is_cached(self, client: LMCacheSDKContext) -> bool:
        starts = self._unedited()
        return all(client.lookup(start.tokens, start.salt) >= start.cached for start in starts)

    def _decode(self, starts: Sequence[_Start]) -> tuple[float, list[list[int]]]:
        """Return decoded tokens a second, and what was decoded of each."""
        batch = self._batch(starts)
        report = batch.decode({**_GREEDY, "max_tokens": self._plan.max_tokens})
        return float(report.output_tput), [list(s.output_tokens) for s in batch.streams.values()]

    def _reference(self) -> tuple[list[_Reference], Row]:
        """Decode and score from the unedited cache; then score again: the measure's own noise."""
        starts = self._unedited()
        self._batch(starts).decode({**_GREEDY, "max_tokens": 2})  # warms the engine up
        tput, continuations = self._decode(starts)
        references = [
            _Reference(continuation, self._score(start, continuation))
            for start, continuation in zip(starts, continuations, strict=True)
        ]
        again = [
            self._score(start, continuation)
            for start, continuation in zip(starts, continuations, strict=True)
        ]
        return references, Row(
            "unedited", 0.0, 1.0, tput, 1.0, 0.0, 0, 0, *_compared(references, again)
        )

    def _score(self, start: _Start, continuation: Sequence[int]) -> list[NextToken]:
        return self._scorer.score(start.tokens, continuation, start.salt, start.cached)

    def _row(
        self,
        policy: str,
        ratio: float,
        references: Sequence[_Reference],
    ) -> Row | str:
        """Run one cell; a text where the cache cannot be edited so."""
        edit = POLICIES[policy](ratio, self._plan.rope)
        if edit.needs_queries and self._queries is None:
            return (
                "it needs queries, and the engine stores none: nothing is registered as "
                f"{self._context.model_name}##query"
            )
        self._prefill(edit.needs_queries)
        unedited = self._unedited()
        batch = self._batch(unedited, edit.needs_queries)
        before = self._bytes_moved()
        try:
            report = batch.modify(edit, timeout=self._plan.timeout)
        except BatchError as error:
            for failure in error.failures.values():
                if isinstance(failure, (EditError, InvalidInputError)):
                    return str(failure)
            raise
        read, written = (
            after - earlier for after, earlier in zip(self._bytes_moved(), before, strict=True)
        )
        size = self._context.chunk_size
        kept = sum(len(stream.tokens) for stream in batch.streams.values())
        starts = [
            _Start(
                [*stream.tokens, *stream.suffix_tokens],
                stream.cache_salt,
                len(stream.tokens) // size * size,
            )
            for stream in batch.streams.values()
        ]
        tputs, gains = [], []
        for _ in range(self._plan.rounds):
            # Next to each other, since a machine is not as fast at all times.
            before_tput, _ = self._decode(unedited)
            tput, _ = self._decode(starts)
            tputs.append(tput)
            gains.append(tput / before_tput)
        scored = [
            self._score(start, reference.continuation)
            for start, reference in zip(starts, references, strict=True)
        ]
        return Row(
            policy,
            ratio,
            kept / sum(start.cached for start in unedited),
            statistics.median(tputs),
            statistics.median(gains),
            report.duration,
            read,
            written,
            *_compared(references, scored),
        )

    def _bytes_moved(self) -> tuple[int, int]:
        clients = [self._context] if self._queries is None else [self._context, self._queries]
        stats = [client.stats() for client in clients]
        return sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats)


def _compared(
    references: Sequence[_Reference], scored: Sequence[Sequence[NextToken]]
) -> tuple[float, float, float]:
    """Return the mean divergence, the agreement and the mean probability that is covered."""
    pairs = [
        pair
        for reference, tokens in zip(references, scored, strict=True)
        for pair in zip(reference.next_tokens, tokens, strict=True)
    ]
    found = [divergence(reference, token) for reference, token in pairs]
    return (
        math.fsum(each.kl for each in found) / len(found),
        statistics.mean(reference.token_id == token.token_id for reference, token in pairs),
        math.fsum(each.covered for each in found) / len(found),
    )
