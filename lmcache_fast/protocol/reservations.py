"""Reservations: what stores have reserved on the server and not committed."""

from __future__ import annotations

import threading

from lmcache_fast import clock
from lmcache_fast.protocol.messages import Key, StoreReservation

#: What two stores have in common for one to go on with what the other has reserved.
_Range = tuple[str, int | None, int, int, bytes]
_Place = tuple[str, int | None, int, int]


class Reservations:
    """The reservations of one server's opening; thread-safe.

    The protocol has no way to give a reservation back, and committing it would publish chunks that
    nobody has written. So one whose store failed is kept for the next store of the same range. If
    nobody takes it the server frees it when its time is over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: set[_Place] = set()
        self._kept: dict[_Range, StoreReservation] = {}

    def __bool__(self) -> bool:
        """Whether anything may be reserved, also by an answer that is still to come."""
        return bool(self._begun)

    def begin(self, key: Key) -> None:
        """Note that chunks are going to be reserved."""
        with self._lock:
            self._begun.add(_place(key))

    def end(self, key: Key) -> None:
        """Note that none are, or not any more."""
        with self._lock:
            self._begun.discard(_place(key))

    def keep(self, reservation: StoreReservation) -> None:
        """Keep what will not be committed."""
        if reservation.key is not None and reservation.chunk_indices:
            with self._lock:
                self._kept[_range(reservation.key)] = reservation

    def take(self, key: Key) -> StoreReservation | None:
        """Return what was kept of the key's range, if its time is not over."""
        if not self._kept:
            return None
        with self._lock:
            self._kept = {k: r for k, r in self._kept.items() if r.deadline > clock.now()}
            return self._kept.pop(_range(key), None)


def _place(key: Key) -> _Place:
    return (key.request_id, key.worker_id, key.start, key.end)


def _range(key: Key) -> _Range:
    tokens = key.tokens.array[: key.end].tobytes()
    return (key.cache_salt, key.worker_id, key.start, key.end, tokens)
