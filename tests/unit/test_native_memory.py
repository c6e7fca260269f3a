"""Shared regions are checked before they are touched; buffers come back to their pool."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

native = pytest.importorskip("lmcache_fast._native")

SIZE = 3 * 4096


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/lmcache_fast_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    yield path
    path.unlink(missing_ok=True)


def test_a_region_is_the_segment_and_outlives_nothing_of_it(segment: Path) -> None:
    region = native.SharedRegion("/" + segment.name, SIZE)
    assert (region.name, region.size) == (segment.name, SIZE)
    region.populate(np.array([0, 4096], np.uint64), 4096)
    view = region.view(256, 4)
    assert view.readonly and bytes(view) == b"\0\1\2\3"
    region.view(0, 1, writable=True)[0] = 9
    region.close()
    region.close()
    assert bytes(view) == b"\0\1\2\3", "a view keeps the memory"
    assert segment.read_bytes()[0] == 9, "closing unlinks nothing"
    with pytest.raises(ValueError, match="is closed"):
        region.view(0, 1)


def test_what_cannot_be_opened_says_why(segment: Path) -> None:
    with pytest.raises(FileNotFoundError, match="lmcache_fast_none"):
        native.SharedRegion("lmcache_fast_none", SIZE)
    with pytest.raises(ValueError, match=f"has {SIZE} bytes; expected at least {SIZE + 1}"):
        native.SharedRegion(segment.name, SIZE + 1)
    for name in ("", "a/b", ".."):
        with pytest.raises(ValueError, match="expected the name of a segment"):
            native.SharedRegion(name, SIZE)


def test_a_segment_that_is_not_ours_to_open_says_so(segment: Path) -> None:
    segment.chmod(0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:  # who may open everything
                os.seteuid(65534)
            answer = repr(native.SharedRegion(segment.name, SIZE))
        except BaseException as error:
            answer = repr(error)
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.waitpid(child, 0)
    assert answer.startswith("PermissionError") and segment.name in answer


def test_a_slot_outside_or_misaligned_names_its_numbers(segment: Path) -> None:
    region = native.SharedRegion(segment.name, SIZE)
    region.check_slot(0, SIZE, 4096)
    region.check_slot(SIZE, 0)
    for offset, length in ((1, SIZE), (SIZE + 1, 0), (2**64 - 1, 2)):
        with pytest.raises(ValueError, match=f"offset {offset} with length {length}"):
            region.check_slot(offset, length)
    with pytest.raises(ValueError, match="100 is no multiple of the alignment 64"):
        region.check_slot(100, 1, 64)
    with pytest.raises(ValueError, match="lies outside"):
        native.ChunkedSide.from_region(
            region, [0, 4097], tokens_per_chunk=4, planes=2, layers=4, row_bytes=256
        )


def test_the_segment_survives_the_processes_that_attached(segment: Path) -> None:
    code = (
        "import os, sys\n"
        "from lmcache_fast import _native\n"
        f"region = _native.SharedRegion({segment.name!r}, {SIZE})\n"
        "os.fork()\n"
        "assert bytes(region.view(1, 1)) == b'\\1'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert segment.exists()


def test_buffers_are_used_again_up_to_the_limit() -> None:
    huge = 2 << 20
    pool = native.BufferPool(4 * huge)
    buffer = pool.take(3 * huge)
    array = np.frombuffer(buffer, np.uint8)
    array[:] = 1
    assert (len(buffer), array.nbytes, array.ctypes.data % huge) == (3 * huge, 3 * huge, 0)
    address = array.ctypes.data
    del buffer
    assert pool.held_bytes == 0, "the array still uses it"
    del array
    assert pool.held_bytes == 3 * huge
    again = np.frombuffer(pool.take(2 * huge), np.uint8)
    assert again.ctypes.data == address and again.nbytes == 2 * huge
    others = [pool.take(2 * huge) for _ in range(3)]
    others.clear()
    assert pool.held_bytes == 4 * huge
    pool.clear()
    assert pool.held_bytes == 0
    with pytest.raises(ValueError, match="nbytes is -1"):
        pool.take(-1)


def test_without_the_extension_one_warning_says_why() -> None:
    code = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from lmcache_fast import _extension\n"
        "    from lmcache_fast._extension import available\n"
        "assert not available() and _extension.native is None\n"
        "(warning,) = caught\n"
        "assert 'LMCACHE_FAST_DISABLE_NATIVE is set' in str(warning.message)\n"
    )
    environment = {**os.environ, "LMCACHE_FAST_DISABLE_NATIVE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from lmcache_fast import _extension

        assert _extension.available()
