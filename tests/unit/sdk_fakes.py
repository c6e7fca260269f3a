"""Stand-ins for the server and the engine, so that streams and batches can be tested alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from lmcache_fast.arguments import TokenIds, check_kv, check_tokens
from lmcache_fast.client import EditResult, KVClient
from lmcache_fast.completion import TokenEvent
from lmcache_fast.edits import Edit
from lmcache_fast.layout import KVLayout
from lmcache_fast.sdk.cache_kind import LMCacheSDKCacheKind

CHUNK = 4
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, dtype=torch.float32)

_Prefix = tuple[str, tuple[int, ...]]


class FakeClient:
    """A KVClient whose server is a dictionary of chunks by salt and prefix.

    Args:
        kind: the kind of cache; queries have one plane.
    """

    chunk_size = CHUNK

    def __init__(self, kind: LMCacheSDKCacheKind = LMCacheSDKCacheKind.KV) -> None:
        self.kind = kind
        self.layout = replace(LAYOUT, planes=2 if kind is LMCacheSDKCacheKind.KV else 1)
        self.chunks: dict[_Prefix, torch.Tensor] = {}
        self.calls: list[str] = []
        self.target_salts: list[str] = []
        self.before_lookup: Callable[[], None] = lambda: None
        self.before_store: Callable[[], None] = lambda: None

    def _prefixes(self, tokens: TokenIds, salt: str) -> Iterator[_Prefix]:
        ids = check_tokens("fake", tokens).tolist()
        for end in range(CHUNK, len(ids) + 1, CHUNK):
            yield salt, tuple(ids[:end])

    def _hit(self, tokens: TokenIds, salt: str) -> list[torch.Tensor]:
        chunks: list[torch.Tensor] = []
        for prefix in self._prefixes(tokens, salt):
            if prefix not in self.chunks:
                break
            chunks.append(self.chunks[prefix])
        return chunks

    def lookup(self, tokens: TokenIds, cache_salt: str = "") -> int:
        self.before_lookup()
        return len(self._hit(tokens, cache_salt)) * CHUNK

    def retrieve(
        self, tokens: TokenIds, cache_salt: str = "", *, min_tokens: int = 1
    ) -> torch.Tensor | None:
        hit = self._hit(tokens, cache_salt)
        if len(hit) * CHUNK < max(1, min_tokens):
            return None
        self.calls.append("retrieve")
        return torch.cat(hit, dim=2)

    def store(self, kv: torch.Tensor, tokens: TokenIds, cache_salt: str = "") -> bool:
        self.calls.append("store")
        kv = check_kv("store", kv, self.layout, len(tokens))
        self.before_store()
        new = False
        for index, prefix in enumerate(self._prefixes(tokens, cache_salt)):
            if prefix not in self.chunks:
                self.chunks[prefix] = kv[:, :, index * CHUNK : (index + 1) * CHUNK].clone()
                new = True
        return new

    def edit(
        self,
        tokens: TokenIds,
        edit: Edit,
        cache_salt: str = "",
        *,
        target_salt: str | None = None,
        min_tokens: int = 0,
    ) -> EditResult:
        hit = self._hit(tokens, cache_salt)
        if len(hit) * CHUNK < min_tokens:
            return EditResult([], 0, len(hit) * CHUNK)
        self.calls.append("edit")
        self.target_salts.append(cache_salt if target_salt is None else target_salt)
        source = check_tokens("fake", tokens)[: len(hit) * CHUNK].tolist()
        kept = [source[position] for position in edit.plan(source, CHUNK).positions]
        return EditResult(kept, len(kept) // CHUNK * CHUNK, len(source))


def as_client(fake: FakeClient) -> KVClient:
    return cast(KVClient, fake)


def kv_for(tokens: Sequence[int], layout: KVLayout = LAYOUT) -> torch.Tensor:
    """Return a KV in which every element of a token's rows is that token's id."""
    row = torch.tensor(tokens, dtype=torch.float32).reshape(1, 1, -1, 1)
    return row.expand(layout.kv_shape(len(tokens))).contiguous()


class FakeEngine:
    """An engine that stores its prompts' chunks and generates 100, 101, ... from a script.

    Args:
        client: where it stores.
        stops_after: tokens after which it ends by itself.
        breaks_after: tokens after which it fails.
    """

    def __init__(
        self, client: FakeClient, stops_after: int = 10**9, breaks_after: int | None = None
    ) -> None:
        self.client = client
        self.stops_after = stops_after
        self.breaks_after = breaks_after
        self.prompts: list[list[int]] = []
        self.salts: list[str] = []
        self.closed = 0

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        self.prompts.append(prompt_token_ids)
        self.salts.append(cache_salt)
        if self.breaks_after == 0:
            raise ConnectionResetError("the line went dead")
        self.client.store(kv_for(prompt_token_ids), prompt_token_ids, cache_salt)
        try:
            for number in range(min(sampling_params.get("max_tokens", 16), self.stops_after)):
                if number == self.breaks_after:
                    raise ConnectionResetError("the line went dead")
                yield TokenEvent(100 + number, f"<{number}>")
        finally:
            self.closed += 1
