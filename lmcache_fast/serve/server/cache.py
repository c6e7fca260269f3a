"""Cache: the stored chunks, who may read or write them, and which go first."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmcache_fast.serve.server.allocator import Allocator

#: A chunk's hash and the rank whose share of the heads it holds.
ObjectKey = tuple[bytes, int]


@dataclass(frozen=True)
class ObjectSpec:
    """What one model's chunks look like: shape, dtype name and length in bytes."""

    shape: tuple[int, ...]
    dtype: str
    length: int


@dataclass
class ReadLock:
    """How many reads one request may still do, and until when."""

    count: int
    deadline: float


@dataclass(eq=False)
class StoredObject:
    """One chunk in the pool."""

    key: ObjectKey
    spec: ObjectSpec
    offset: int
    #: When the reservation runs out; None once the chunk is published.
    write_deadline: float | None
    #: Read locks by the request that took them, so that none can give back another's.
    readers: dict[str, ReadLock] = field(default_factory=dict)


class Cache:
    """Chunks in order of use. Not thread-safe: its user holds a lock.

    The least recently used unlocked chunk goes first. Within one prompt later chunks count as older
    than earlier ones, since a prefix without its beginning is worth nothing.

    Args:
        pool_bytes: room for the chunks.
        alignment: bytes; every chunk starts at a multiple.
        read_ttl: seconds after which a read lock no longer counts.
        write_ttl: seconds after which a reservation is dropped.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        pool_bytes: int,
        alignment: int = 4096,
        read_ttl: float = 300.0,
        write_ttl: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = Allocator(pool_bytes, alignment)
        self._read_ttl = read_ttl
        self._write_ttl = write_ttl
        self._clock = clock
        self._objects: OrderedDict[ObjectKey, StoredObject] = OrderedDict()  # oldest first
        self.counters: Counter[str] = Counter()

    # -- reading ------------------------------------------------------------------------------

    def lock_prefix(self, chunks: Sequence[Sequence[ObjectKey]], owner: str, count: int) -> int:
        """Lock the longest published prefix for ``count`` reads each; return its chunks.

        A chunk counts when the objects of all its ranks are there.
        """
        hit = 0
        for keys in chunks:
            if not all(self._published(key) for key in keys):
                break
            hit += 1
        deadline = self._clock() + self._read_ttl
        for keys in chunks[:hit]:
            for key in keys:
                readers = self._objects[key].readers
                held = readers.get(owner)
                live = held.count if held is not None and held.deadline > self._clock() else 0
                readers[owner] = ReadLock(live + count, deadline)
        self.touch([key for keys in chunks[:hit] for key in keys])
        self.counters["lookups"] += 1
        self.counters["hits"] += hit
        self.counters["misses"] += len(chunks) - hit
        return hit

    def read(self, keys: Sequence[ObjectKey], owner: str) -> list[StoredObject] | None:
        """Return the objects, or None where one is gone or is not locked by ``owner``."""
        found = []
        for key in keys:
            stored = self._objects.get(key)
            lock = stored.readers.get(owner) if stored is not None else None
            if stored is None or lock is None or lock.deadline <= self._clock():
                return None
            found.append(stored)
        return found

    def unlock(self, keys: Iterable[ObjectKey], owner: str, count: int = 1) -> None:
        """Give back ``count`` reads of each object that ``owner`` holds."""
        for key in keys:
            stored = self._objects.get(key)
            if stored is None or owner not in stored.readers:
                continue
            lock = stored.readers[owner]
            lock.count -= count
            if lock.count <= 0:
                del stored.readers[owner]

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Mark the objects as just used, the first as the newest."""
        for key in reversed(keys):
            if key in self._objects:
                self._objects.move_to_end(key)

    # -- writing ------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[ObjectKey], spec: ObjectSpec) -> dict[int, StoredObject]:
        """Reserve room for the objects that are missing; return them by index in ``keys``.

        Unlocked objects outside ``keys`` give way. It stops at the first object that finds no
        room: what follows a gap could never be found.
        """
        self.expire()
        wanted = set(keys)
        reserved: dict[int, StoredObject] = {}
        for index, key in enumerate(keys):
            if key in self._objects:
                continue
            offset = self._make_room(spec.length, wanted)
            if offset is None:
                self.counters["refused"] += len(keys) - index
                break
            stored = StoredObject(key, spec, offset, self._clock() + self._write_ttl)
            self._objects[key] = reserved[index] = stored
        self.touch(keys)
        return reserved

    def publish(self, reserved: Iterable[StoredObject]) -> bool:
        """Make reserved objects readable; False where a reservation had run out."""
        self.expire()
        complete = True
        for stored in reserved:
            if self._objects.get(stored.key) is stored:
                stored.write_deadline = None
                self.counters["stored"] += 1
            else:
                complete = False
        return complete

    def drop(self, reserved: Iterable[StoredObject]) -> None:
        """Give up reservations: the objects were never readable and now are gone."""
        for stored in reserved:
            if self.is_reserved(stored):
                self._remove(stored)

    def clear(self, force: bool = False) -> int:
        """Remove all objects but the locked ones, with ``force`` those too; return how many."""
        self.expire()
        doomed = [stored for stored in self._objects.values() if force or not self._locked(stored)]
        for stored in doomed:
            self._remove(stored)
        return len(doomed)

    def is_reserved(self, stored: StoredObject) -> bool:
        """Whether a reservation still stands and is not published yet."""
        return stored.write_deadline is not None and self._objects.get(stored.key) is stored

    def is_locked_by(self, key: ObjectKey, owner: str) -> bool:
        """Whether ``owner`` holds a read lock on the object."""
        stored = self._objects.get(key)
        return stored is not None and owner in stored.readers

    # -- upkeep -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Drop the reservations and read locks whose time is over."""
        now = self._clock()
        for stored in list(self._objects.values()):
            if stored.write_deadline is not None and stored.write_deadline <= now:
                self.counters["expired_writes"] += 1
                self._remove(stored)
            for owner in [o for o, lock in stored.readers.items() if lock.deadline <= now]:
                self.counters["expired_reads"] += 1
                del stored.readers[owner]

    def report(self) -> dict[str, int]:
        """Return the counters and how things are now."""
        self.expire()
        objects = self._objects.values()
        reading = sum(bool(stored.readers) for stored in objects)
        writing = sum(stored.write_deadline is not None for stored in objects)
        names = ("lookups", "hits", "misses", "stored", "evictions", "refused")
        return {name: 0 for name in (*names, "expired_reads", "expired_writes")} | {
            **self.counters,
            "objects": len(objects),
            "read_locked_objects": reading,
            "write_locked_objects": writing,
            "locked_objects": sum(self._locked(stored) for stored in objects),
            "used_bytes": self._allocator.used_bytes,
        }

    def _published(self, key: ObjectKey) -> bool:
        stored = self._objects.get(key)
        return stored is not None and stored.write_deadline is None

    def _locked(self, stored: StoredObject) -> bool:
        if stored.write_deadline is not None:
            return True
        return any(lock.deadline > self._clock() for lock in stored.readers.values())

    def _make_room(self, length: int, wanted: set[ObjectKey]) -> int | None:
        if length > self._allocator.size:
            return None
        offset = self._allocator.allocate(length)
        while offset is None:
            victim = next(
                (o for o in self._objects.values() if o.key not in wanted and not self._locked(o)),
                None,
            )
            if victim is None:
                return None
            self.counters["evictions"] += 1
            self._remove(victim)
            offset = self._allocator.allocate(length)
        return offset

    def _remove(self, stored: StoredObject) -> None:
        del self._objects[stored.key]
        self._allocator.free(stored.offset)
