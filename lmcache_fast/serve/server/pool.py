"""Pool: the memory that holds the chunks, shared with clients or private."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

from lmcache_fast.errors import SharedMemoryError

SEGMENT_FOLDER = Path("/dev/shm")
SEGMENT_PREFIX = "lmcache_l1_pool_"
# Only named by Python 3.11 and later.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Pool:
    """One mapping of ``size`` bytes.

    A named pool is the file ``/dev/shm/lmcache_l1_pool_<name>``, mode 0600. Its owner holds a lock
    on the file (flock) for as long as it lives, so a leftover of a killed server can be told from
    the segment of a running one: the first is replaced, the second is an error.

    Args:
        size: bytes.
        name: the segment's name without the prefix; empty for private memory.
        populate: give a named segment its pages now.

    Raises:
        SharedMemoryError: another server owns the segment, or ``/dev/shm`` refuses or has no room.
    """

    def __init__(self, size: int, name: str = "", populate: bool = True) -> None:
        self.size = size
        self.name = SEGMENT_PREFIX + name if name else ""
        self._descriptor = -1
        if not name:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self.memory = mmap.mmap(-1, size, flags=flags)
            return
        path = SEGMENT_FOLDER / self.name
        self._descriptor = _create_owned(path)
        try:
            if populate:
                os.posix_fallocate(self._descriptor, 0, size)
            else:
                os.ftruncate(self._descriptor, size)
            self.memory = mmap.mmap(self._descriptor, size)
        except OSError as error:
            self._remove()
            raise SharedMemoryError(
                f"Pool: cannot get {size} bytes for {path}: {error.strerror}; "
                "a smaller --l1-size-gb or a larger /dev/shm helps"
            ) from error

    def close(self) -> None:
        """Unlink the segment and give up the lock. Clients keep what they have mapped."""
        self._remove()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with the last
            self.memory.close()

    def _remove(self) -> None:
        if self._descriptor < 0:
            return
        # Unlink before the lock goes: nobody may take this file for a leftover in between.
        (SEGMENT_FOLDER / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def _create_owned(path: Path) -> int:
    """Return a descriptor of a new, empty, locked file at ``path``."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SharedMemoryError(f"Pool: cannot create {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise SharedMemoryError(
                    f"Pool: {path} belongs to a running server; "
                    "stop it or choose another --shm-name"
                ) from error
            raise
        if os.fstat(descriptor).st_nlink == 0:  # unlinked by its last owner meanwhile
            os.close(descriptor)
        elif os.fstat(descriptor).st_size == 0:
            return descriptor
        else:  # a leftover: clients may still map it, so it is replaced, never resized
            path.unlink(missing_ok=True)
            os.close(descriptor)
