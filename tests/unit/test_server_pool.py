"""The pool's memory and who owns its segment."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_fast.errors import SharedMemoryError
from lmcache_fast.serve.server.pool import SEGMENT_PREFIX, Pool

SIZE = 1 << 16


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test_pool_{uuid.uuid4().hex}"
    yield name
    path(name).unlink(missing_ok=True)


def path(name: str) -> Path:
    return Path("/dev/shm") / (SEGMENT_PREFIX + name)


@pytest.mark.parametrize("populate", [True, False])
def test_a_named_pool_is_a_private_file_of_its_size_until_closed(name: str, populate: bool) -> None:
    pool = Pool(SIZE, name, populate)
    status = path(name).stat()
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (SIZE, 0o600)
    assert status.st_blocks * 512 == (SIZE if populate else 0)
    pool.close()
    pool.close()
    assert not path(name).exists()


def test_a_pool_without_a_name_is_private_memory() -> None:
    pool = Pool(SIZE)
    pool.memory[:2] = b"ok"
    assert pool.name == "" and pool.memory[:2] == b"ok"
    pool.close()


def test_a_running_servers_segment_is_left_alone(name: str) -> None:
    pool = Pool(SIZE, name)
    with pytest.raises(SharedMemoryError, match="running server"):
        Pool(SIZE, name)
    assert path(name).stat().st_size == SIZE
    pool.close()


def test_a_killed_servers_segment_is_replaced_not_resized(name: str) -> None:
    path(name).write_bytes(bytes(2 * SIZE))  # a killed owner's lock is gone
    with path(name).open("rb") as old:
        pool = Pool(SIZE, name)
        assert os.fstat(old.fileno()).st_size == 2 * SIZE
        assert path(name).stat().st_size == SIZE
        pool.close()


def test_a_segment_that_does_not_fit_is_an_error_and_leaves_nothing(name: str) -> None:
    with pytest.raises(SharedMemoryError, match="l1-size-gb"):
        Pool(1 << 50, name)
    assert not path(name).exists()
