"""A segment that loses its pages under a copy is an error, never the end of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_fast._extension import native

pytestmark = pytest.mark.skipif(native is None, reason="needs the native extension")

PAGE = 4096
CHUNKS = 512


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/lmcache_fast_test_{uuid.uuid4().hex}")
    path.write_bytes(b"\x01" * PAGE * CHUNKS)
    yield path
    path.unlink(missing_ok=True)


def sides(segment: Path) -> tuple[Any, Any, Any]:
    """The region, the segment as a side, and a buffer of its size."""
    assert native is not None
    region = native.SharedRegion(segment.name, PAGE * CHUNKS)
    offsets = np.arange(CHUNKS, dtype=np.uint64) * PAGE
    shape = {"tokens_per_chunk": 64, "planes": 1, "layers": 1, "row_bytes": 64}
    return (
        region,
        native.ChunkedSide.from_region(region, offsets, **shape),
        np.zeros(PAGE * CHUNKS, np.uint8),
    )


def buffer_side(buffer: Any) -> Any:
    assert native is not None
    return native.ChunkedSide.from_addresses(
        [buffer.ctypes.data],
        buffer,
        tokens_per_chunk=64 * CHUNKS,
        planes=1,
        layers=1,
        row_bytes=64,
        plane_stride=0,
        layer_stride=0,
    )


WHOLE = [[0, 0, 64 * CHUNKS]]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("writing", [False, True])
def test_a_segment_cut_short_while_it_is_mapped_is_an_error(
    segment: Path, threads: int, writing: bool
) -> None:
    assert native is not None
    _region, slots, buffer = sides(segment)
    source, target = buffer_side(buffer), slots
    if not writing:
        source, target = target, source
    os.truncate(segment, PAGE * 7)
    with pytest.raises(OSError, match="went away under the copy"):
        native.copy_runs(source, target, WHOLE, None, threads)
    os.truncate(segment, PAGE * CHUNKS)
    native.copy_runs(source, target, WHOLE, None, threads)  # the next one is as good as ever


def test_a_region_knows_whether_it_is_whole(segment: Path) -> None:
    region, _, _ = sides(segment)
    assert region.is_intact
    os.truncate(segment, PAGE * CHUNKS - 1)
    assert not region.is_intact
    segment.unlink()  # unlinked by its server: still whole for whoever maps it
    os.truncate(descriptors(segment)[0], PAGE * CHUNKS)
    assert region.is_intact


def descriptors(segment: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if str(segment) in os.readlink(f"/proc/self/fd/{number}"):
                found.append(f"/proc/self/fd/{number}")
    return found


def test_a_region_gives_its_descriptor_back(segment: Path) -> None:
    region, slots, _ = sides(segment)
    region.close()
    del region, slots
    assert not descriptors(segment)


@pytest.mark.parametrize("handler", ["default", "faulthandler", "faulthandler later"])
def test_a_bus_error_that_is_not_ours_still_ends_the_process(segment: Path, handler: str) -> None:
    script = f"""
import faulthandler, mmap, os
if {handler!r} == "faulthandler":
    faulthandler.enable()
from lmcache_fast import _native as native
from tests.unit.test_vanishing_memory import *
from pathlib import Path
region, slots, buffer = sides(Path({str(segment)!r}))
native.copy_runs(slots, buffer_side(buffer), WHOLE)
if {handler!r} == "faulthandler later":
    faulthandler.enable()
    native.copy_runs(slots, buffer_side(buffer), WHOLE)
mapped = mmap.mmap(os.open({str(segment)!r}, os.O_RDWR), PAGE * CHUNKS)
os.truncate({str(segment)!r}, 0)
mapped[PAGE]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGBUS, done.stderr
    if handler != "default":
        assert "Bus error" in done.stderr


def test_a_full_dev_shm_is_an_error() -> None:
    """A server that does not take its pages beforehand leaves us to find that there are none."""
    script = """
from tests.unit.test_vanishing_memory import *
path = Path("/dev/shm/full")
with path.open("wb") as file:
    file.truncate(PAGE * CHUNKS)
_region, slots, buffer = sides(path)
try:
    native.copy_runs(buffer_side(buffer), slots, WHOLE)
except OSError as error:
    print(error)
"""
    mount = f"mount -t tmpfs -o size={PAGE * 16} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("may not mount a file system of its own")
    run = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert "went away under the copy" in done.stdout, done.stderr
