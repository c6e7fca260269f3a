"""What has to work on every server, whatever its release, its memory and its transport."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable

import torch

from lmcache_fast import KVClient, edits
from tests.interop import peer
from tests.interop.conftest import LAYOUT, MODEL
from tests.interop.samples import digest, random_kv, same_bits
from tests.interop.servers import CHUNK, Server
from tests.interop.status_proxy import status_proxy
from tests.interop.upstream_sdk import run_upstream

Check = Callable[[Server], None]
#: How many tokens the two SDKs exchange.
EDGES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 9]


def connect(server: Server, http_url: str | None = None) -> KVClient:
    """Return a client; that there is no shared memory is what the table says anyway."""
    layout = None if http_url else LAYOUT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return KVClient(server.url, http_url or server.http_url, MODEL, layout=layout)


def store(server: Server) -> None:
    """Whole chunks are stored once, and a longer request adds its new ones."""
    salt, tokens = uuid.uuid4().hex, list(range(4 * CHUNK + 3))
    kv = random_kv(LAYOUT.kv_shape(len(tokens)), LAYOUT.dtype, 1)
    with connect(server) as client:
        assert client.store(kv[:, :, : CHUNK + 1], tokens[: CHUNK + 1], salt)
        assert client.store(kv, tokens, salt)
        assert not client.store(kv, tokens, salt)
        assert client.lookup(tokens, salt) == 4 * CHUNK


def retrieve(server: Server) -> None:
    """Another client finds the same bytes, and nothing of what was never stored."""
    salt, tokens = uuid.uuid4().hex, list(range(4 * CHUNK + 3))
    kv = random_kv(LAYOUT.kv_shape(len(tokens)), LAYOUT.dtype, 2)
    with connect(server) as writer, connect(server) as reader:
        writer.store(kv, tokens, salt)
        found = reader.retrieve(tokens, salt)
        assert found is not None
        assert same_bits(found, kv[:, :, : 4 * CHUNK])
        assert reader.retrieve(tokens, salt + "x") is None


def edit(server: Server) -> None:
    """An edit with rotation stores what it returns as a plain function."""
    salt, tokens = uuid.uuid4().hex, list(range(6 * CHUNK))
    shape = LAYOUT.kv_shape(len(tokens))
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(LAYOUT.dtype)
    change = edits.keep(lambda count, _: range(0, count, 2), edits.Rope(head_dim=LAYOUT.head_dim))
    expected, kept = change(kv, tokens)
    with connect(server) as client:
        client.store(kv, tokens, salt)
        result = client.edit(tokens, change, salt)
        assert (result.tokens, result.num_cached) == (kept, 3 * CHUNK)
        found = client.retrieve(kept, salt)
        assert found is not None
        assert same_bits(found, expected)


def upstream(server: Server, sdk_version: str | None = None) -> None:
    """What upstream's SDK of the server's release stores, we retrieve; and the other way round."""
    salt = uuid.uuid4().hex
    steps, stored = [], []
    with (
        status_proxy(server.http_url, {MODEL: LAYOUT}) as http_url,
        connect(server, http_url) as client,
    ):
        assert client.layout == LAYOUT  # read from the registration
        for seed, count in enumerate(EDGES):
            kv = random_kv(LAYOUT.kv_shape(count), LAYOUT.dtype, seed)
            assert client.store(kv, range(count), f"{salt}-ours-{count}") is (count >= CHUNK)
            stored.append(kv[:, :, : count // CHUNK * CHUNK])
            shared = {"tokens": list(range(count)), "shape": kv.shape, "seed": seed}
            steps.append({"action": "retrieve", "salt": f"{salt}-ours-{count}", **shared})
            steps.append({"action": "store", "salt": f"{salt}-theirs-{count}", **shared})
        sdk = peer.ensure(sdk_version or server.version)
        answers = run_upstream(sdk, server.url, http_url, steps)
        for index, (count, kv) in enumerate(zip(EDGES, stored, strict=True)):
            found, did = answers[2 * index : 2 * index + 2]
            theirs = client.retrieve(range(count), f"{salt}-theirs-{count}")
            if count < CHUNK:
                assert found["shape"] is None
                assert theirs is None
            else:
                assert found == {"shape": list(kv.shape), "digest": digest(kv)}
                assert did["stored"] is True
                assert theirs is not None
                assert same_bits(theirs, kv)


CHECKS: dict[str, Check] = {
    "store": store,
    "retrieve": retrieve,
    "edit": edit,
    "upstream's SDK": upstream,
}
