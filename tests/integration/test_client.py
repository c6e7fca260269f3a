"""KVClient over every transport, against the embedded server."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_fast import (
    ClosedError,
    InvalidInputError,
    KVClient,
    KVLayout,
    LeaseExpiredError,
    StoreIncompleteError,
    edits,
)
from lmcache_fast.layout import CACHE_DTYPES
from lmcache_fast.serve.server import EmbeddedServer
from tests.integration.conftest import CHUNK, LAYOUT, Connect, locked, start_server


def random_kv(num_tokens: int, layout: KVLayout = LAYOUT, seed: int = 0) -> torch.Tensor:
    """Random bytes that are finite numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = layout.kv_shape(num_tokens)
    raw = torch.randint(0, 96, (*shape[:3], layout.row_bytes), generator=generator)
    return raw.to(torch.uint8).view(layout.dtype).view(shape)


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    return (
        a is not None
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize(
    "num_tokens", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1]
)
def test_what_is_stored_is_retrieved_up_to_the_last_whole_chunk(
    client: KVClient, num_tokens: int
) -> None:
    kv, tokens = random_kv(num_tokens), list(range(num_tokens))
    whole = num_tokens // CHUNK * CHUNK

    assert client.store(kv, tokens) is (whole > 0)

    assert client.lookup(tokens) == whole
    found = client.retrieve(tokens)
    assert found is None if whole == 0 else same(found, kv[:, :, :whole])
    assert client.store(kv, tokens) is False


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize(
    "geometry", [(1, 1, 1, 2), (1, 3, 5, 2), (2, 1, 80, 1)], ids=["one", "odd", "one-plane"]
)
def test_every_dtype_and_odd_shapes_come_back_bit_for_bit(
    connect: Connect, dtype: str, geometry: tuple[int, int, int, int]
) -> None:
    layers, heads, head_dim, planes = geometry
    layout = KVLayout(layers, heads, head_dim, dtype, planes=planes)
    client = connect(f"{dtype}-{layers}", layout)
    kv = random_kv(2 * CHUNK, layout)
    assert client.store(kv, range(2 * CHUNK))
    assert same(client.retrieve(range(2 * CHUNK)), kv)


def test_the_longest_cached_prefix_is_retrieved(client: KVClient) -> None:
    kv = random_kv(2 * CHUNK)
    tokens = list(range(2 * CHUNK))
    client.store(kv, tokens)
    other = tokens[:CHUNK] + [7] * CHUNK
    assert same(client.retrieve(other), kv[:, :, :CHUNK])
    assert client.retrieve([9] * CHUNK) is None


def test_only_what_is_missing_is_stored(client: KVClient) -> None:
    kv, tokens = random_kv(3 * CHUNK), list(range(3 * CHUNK))
    client.store(kv[:, :, :CHUNK], tokens[:CHUNK])
    changed = kv.clone()
    changed[:, :, :CHUNK] = 0
    assert client.store(changed, tokens) is True
    assert same(client.retrieve(tokens), kv)


def test_salts_and_models_are_kept_apart(client: KVClient, connect: Connect) -> None:
    kv, tokens = random_kv(CHUNK), list(range(CHUNK))
    client.store(kv, tokens, cache_salt="alice")
    assert client.lookup(tokens) == 0
    assert client.lookup(tokens, cache_salt="bob") == 0
    assert client.lookup(tokens, cache_salt="alice") == CHUNK
    assert connect("other model").lookup(tokens, cache_salt="alice") == 0


def test_a_non_contiguous_tensor_is_stored_as_it_reads(client: KVClient) -> None:
    kv = random_kv(2 * CHUNK).transpose(1, 2).contiguous().transpose(1, 2)
    assert not kv.is_contiguous()
    client.store(kv, range(2 * CHUNK))
    assert same(client.retrieve(range(2 * CHUNK)), kv)


def test_out_takes_the_hit_and_its_rest_is_left_alone(client: KVClient) -> None:
    kv = random_kv(2 * CHUNK)
    client.store(kv, range(2 * CHUNK))
    out = torch.full(LAYOUT.kv_shape(3 * CHUNK), 7, dtype=LAYOUT.dtype)
    found = client.retrieve(range(2 * CHUNK), out=out)
    assert found is not None and found.data_ptr() == out.data_ptr()
    assert same(out[:, :, : 2 * CHUNK], kv)
    assert (out[:, :, 2 * CHUNK :] == 7).all()


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(LAYOUT.kv_shape(CHUNK), dtype=LAYOUT.dtype),
        torch.zeros(LAYOUT.kv_shape(2 * CHUNK), dtype=torch.float16),
        torch.zeros((1, *LAYOUT.kv_shape(2 * CHUNK)[1:]), dtype=LAYOUT.dtype),
        torch.zeros(LAYOUT.kv_shape(4 * CHUNK), dtype=LAYOUT.dtype)[:, :, ::2],
        "no tensor",
    ],
    ids=["too small", "dtype", "planes", "not contiguous", "type"],
)
def test_an_out_that_does_not_fit_is_refused(client: KVClient, out: Any) -> None:
    client.store(random_kv(2 * CHUNK), range(2 * CHUNK))
    with pytest.raises(InvalidInputError, match="retrieve: out"):
        client.retrieve(range(2 * CHUNK), out=out)


def test_a_result_stays_as_it_is_when_others_follow(client: KVClient) -> None:
    first, second = random_kv(CHUNK, seed=1), random_kv(CHUNK, seed=2)
    client.store(first, [1] * CHUNK)
    client.store(second, [2] * CHUNK)
    found = client.retrieve([1] * CHUNK)
    for _ in range(3):
        client.retrieve([2] * CHUNK)
    assert same(found, first)


def test_a_lease_views_chunks_read_only_and_ends(client: KVClient) -> None:
    kv = random_kv(2 * CHUNK)
    client.store(kv, range(2 * CHUNK))
    with client.lease(range(2 * CHUNK + 1)) as lease:
        assert (len(lease), lease.num_tokens) == (2, 2 * CHUNK)
        assert 0 < lease.seconds_left <= 300
        for index, chunk in enumerate(lease):
            expected = kv[:, :, index * CHUNK : (index + 1) * CHUNK]
            assert same(chunk.tensor(), expected)
            array = chunk.numpy()
            assert array.shape == chunk.shape and array.dtype == np.uint16
            assert (array == expected.view(torch.int16).numpy().view(np.uint16)).all()
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        last = lease[-1]
        with pytest.raises(IndexError):
            lease[2]
    with pytest.raises(ClosedError, match="lease is over"):
        last.numpy()
    with pytest.raises(ClosedError, match="lease is over"):
        lease[0]


def test_a_lease_of_nothing_is_empty(client: KVClient) -> None:
    with client.lease(range(CHUNK)) as lease:
        assert len(lease) == 0
        assert list(lease) == []


def test_a_lease_refuses_to_go_on_past_the_servers_deadline(
    client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.store(random_kv(CHUNK), range(CHUNK))
    with client.lease(range(CHUNK)) as lease:
        monkeypatch.setattr(lease._request, "deadline", 0.0)
        with pytest.raises(LeaseExpiredError, match="read lock may have run out"):
            lease[0]


@pytest.mark.parametrize(
    "edit",
    [
        edits.keep(range(2 * CHUNK + 3)),
        edits.keep(list(range(0, 6 * CHUNK, 2)), rope=edits.Rope(8)),
        edits.drop_middle_chunks(0.5, rope=edits.Rope(8)),
        edits.chain(edits.keep(range(5, 6 * CHUNK)), edits.keep(range(4 * CHUNK))),
    ],
    ids=["prefix", "every second", "drop middle", "chain"],
)
def test_an_edit_on_the_server_stores_what_the_function_returns(
    client: KVClient, edit: edits.Edit
) -> None:
    tokens = list(range(100, 100 + 6 * CHUNK))
    kv = torch.randn(LAYOUT.kv_shape(6 * CHUNK)).to(LAYOUT.dtype)
    client.store(kv, tokens)
    positions = edit.plan(tokens, chunk_size=CHUNK).positions
    expected, kept = edits.keep(positions, rope=edit.rope)(kv, tokens)

    result = client.edit(tokens, edit)

    assert result.tokens == kept
    assert result.num_source == len(tokens)
    assert result.num_cached == len(kept) // CHUNK * CHUNK
    assert same(client.retrieve(kept), expected[:, :, : result.num_cached])
    assert same(client.retrieve(tokens), kv), "the source is left as it was"


def test_an_edit_that_keeps_less_than_a_chunk_stores_nothing(client: KVClient) -> None:
    client.store(random_kv(CHUNK), range(CHUNK))
    result = client.edit(range(CHUNK), edits.keep([3]))
    assert (result.tokens, result.num_cached) == ([3], 0)


@pytest.mark.parametrize("min_tokens", [0, 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_with_fewer_tokens_cached_than_asked_for_nothing_is_done_and_no_lock_stays(
    client: KVClient, server: EmbeddedServer, min_tokens: int
) -> None:
    tokens = list(range(3 * CHUNK))
    kv = random_kv(2 * CHUNK)
    client.store(kv, tokens[: 2 * CHUNK])
    half = edits.keep(lambda total, tokens: range(total // 2, total))
    result = client.edit(tokens, half, min_tokens=min_tokens)
    kept = tokens[CHUNK : 2 * CHUNK]
    assert result.num_source == 2 * CHUNK
    if min_tokens > 2 * CHUNK:
        assert (result.tokens, result.num_cached, client.lookup(kept)) == ([], 0, 0)
        assert client.retrieve(tokens, min_tokens=min_tokens) is None
    else:
        assert (result.tokens, result.num_cached, client.lookup(kept)) == (kept, CHUNK, CHUNK)
        assert same(client.retrieve(tokens, min_tokens=min_tokens), kv)
    assert locked(server) == 0


def test_an_edit_whose_selection_is_wrong_leaves_no_lock(
    client: KVClient, server: EmbeddedServer
) -> None:
    client.store(random_kv(CHUNK), range(CHUNK))
    with pytest.raises(InvalidInputError):
        client.edit(range(CHUNK), edits.keep([CHUNK]))
    assert locked(server) == 0


def test_a_pool_that_is_full_of_unused_chunks_makes_room(client: KVClient) -> None:
    for start in range(200):
        tokens = [start] * (4 * CHUNK)
        assert client.store(random_kv(4 * CHUNK), tokens)
        assert client.lookup(tokens) == 4 * CHUNK


@pytest.mark.parametrize("transport", ["shm", "pickle"], indirect=True)
def test_a_pool_that_is_full_of_chunks_in_use_is_an_error_that_says_how_much_is_stored(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_fast.client.EVICTION_PAUSE", 0.01)
    chunk_bytes = LAYOUT.token_bytes * CHUNK
    with (
        start_server(transport, pool_bytes=4 * max(chunk_bytes, 4096)) as server,
        pytest.warns(UserWarning) if transport == "pickle" else warnings_as_they_are(),
        KVClient(server.url, server.http_url, "model", layout=LAYOUT) as client,
    ):
        client.store(random_kv(2 * CHUNK), [1] * (2 * CHUNK))
        with client.lease([1] * (2 * CHUNK)):
            tokens = [2] * (4 * CHUNK)
            if transport == "pickle":  # there a lease is a copy: hold the locks by hand
                link, tokens_1 = client._links.current, np.full(2 * CHUNK, 1, np.uint32)
                request = client._request(link, tokens_1, "")
                assert request.lookup() == 2
            with pytest.raises(StoreIncompleteError, match="of 64 tokens") as caught:
                client.store(random_kv(4 * CHUNK), tokens)
            assert caught.value.stored_tokens == client.lookup(tokens) < 4 * CHUNK
            assert caught.value.total_tokens == 4 * CHUNK
            if transport == "pickle":
                request.close()
        assert locked(server) == 0


def warnings_as_they_are() -> Any:
    """A context manager that does nothing."""
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda c: c.store(random_kv(CHUNK), range(CHUNK + 1)), "tokens"),
        (lambda c: c.store(random_kv(CHUNK)[:1], range(CHUNK)), "planes"),
        (lambda c: c.store(random_kv(CHUNK).float(), range(CHUNK)), "dtype"),
        (lambda c: c.store(random_kv(CHUNK), [-1] * CHUNK), r"tokens\[0\] is -1"),
        (lambda c: c.retrieve([2**32] * CHUNK), "tokens"),
        (lambda c: c.lookup(range(CHUNK), cache_salt="a@b"), "cache_salt"),
        (lambda c: c.lease("text"), "tokens"),
    ],
)
def test_bad_input_is_refused_and_the_client_goes_on(
    client: KVClient, call: Any, what: str
) -> None:
    with pytest.raises(InvalidInputError, match=what):
        call(client)
    assert client.store(random_kv(CHUNK), range(CHUNK))


def test_a_closed_client_says_so(client: KVClient) -> None:
    client.close()
    client.close()
    with pytest.raises(ClosedError, match="lookup: the client was closed"):
        client.lookup(range(CHUNK))


def test_closing_one_client_leaves_another_of_the_same_model_alone(
    client: KVClient, connect: Connect
) -> None:
    other = connect()
    kv = random_kv(CHUNK)
    other.store(kv, range(CHUNK))
    client.close()
    assert same(other.retrieve(range(CHUNK)), kv)


def test_many_threads_share_one_client(client: KVClient) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(4):
                tokens = [number * 100 + step] * (2 * CHUNK)
                kv = random_kv(2 * CHUNK, seed=number)
                client.store(kv, tokens)
                assert same(client.retrieve(tokens), kv)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


def test_many_readers_and_writers_of_one_prefix_do_not_disturb_each_other(
    client: KVClient,
) -> None:
    kv, tokens = random_kv(4 * CHUNK), list(range(4 * CHUNK))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                client.store(kv, tokens)
                assert same(client.retrieve(tokens), kv)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_a_fork_gets_an_error_and_the_parent_goes_on(client: KVClient) -> None:
    kv = random_kv(CHUNK)
    client.store(kv, range(CHUNK))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            client.retrieve(range(CHUNK))
            answer = b"no error"
        except ClosedError:
            answer = b"ClosedError"
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write_end, answer)
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1000) == b"ClosedError"
    os.close(read_end)
    os.waitpid(pid, 0)
    assert same(client.retrieve(range(CHUNK)), kv)


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_the_segment_survives_its_clients(server: EmbeddedServer, connect: Connect) -> None:
    connect().close()
    assert os.path.exists(f"/dev/shm/{server.shm_name}")
