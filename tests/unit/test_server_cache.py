"""Locks, reservations and the order of eviction."""

from __future__ import annotations

from lmcache_fast.serve.server.cache import Cache, ObjectKey, ObjectSpec

SPEC = ObjectSpec((2, 1, 4, 8), "float32", 256)
READ_TTL, WRITE_TTL = 10.0, 20.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(chunks: int) -> tuple[Cache, Clock]:
    clock = Clock()
    return Cache(chunks * 256, 256, READ_TTL, WRITE_TTL, clock), clock


def prompt(name: str, chunks: int) -> list[ObjectKey]:
    return [(f"{name}{index}".encode(), 0) for index in range(chunks)]


def fill(cache: Cache, keys: list[ObjectKey]) -> None:
    assert cache.publish(cache.reserve(keys, SPEC).values())


def hit(cache: Cache, keys: list[ObjectKey], owner: str = "reader", count: int = 1) -> int:
    return cache.lock_prefix([[key] for key in keys], owner, count)


def test_only_published_chunks_are_found() -> None:
    cache, _ = make(4)
    keys = prompt("a", 3)
    reserved = cache.reserve(keys, SPEC)
    assert list(reserved) == [0, 1, 2]
    assert hit(cache, keys) == 0
    cache.publish(reserved.values())
    assert hit(cache, keys) == 3


def test_a_hit_ends_at_the_first_missing_chunk() -> None:
    cache, _ = make(4)
    keys = prompt("a", 4)
    fill(cache, [keys[0], keys[1], keys[3]])
    assert hit(cache, keys) == 2


def test_a_chunk_counts_only_when_every_rank_has_stored_it() -> None:
    cache, _ = make(4)
    fill(cache, [(b"x", 0)])
    assert cache.lock_prefix([[(b"x", 0), (b"x", 1)]], "reader", 1) == 0
    fill(cache, [(b"x", 1)])
    assert cache.lock_prefix([[(b"x", 0), (b"x", 1)]], "reader", 1) == 1


def test_what_is_there_is_not_reserved_again() -> None:
    cache, _ = make(4)
    keys = prompt("a", 3)
    fill(cache, keys[:1])
    assert list(cache.reserve(keys, SPEC)) == [1, 2]
    assert cache.reserve(keys, SPEC) == {}


def test_reading_needs_the_readers_own_lock() -> None:
    cache, _ = make(2)
    keys = prompt("a", 2)
    fill(cache, keys)
    assert cache.read(keys, "reader") is None
    hit(cache, keys)
    assert len(cache.read(keys, "reader") or []) == 2
    cache.unlock(keys, "somebody else")
    assert cache.read(keys, "reader") is not None
    cache.unlock(keys, "reader")
    assert cache.read(keys, "reader") is None


def test_a_chunk_with_two_readers_stays_locked_until_both_are_done() -> None:
    cache, _ = make(1)
    keys = prompt("a", 1)
    fill(cache, keys)
    hit(cache, keys, count=2)
    cache.unlock(keys, "reader")
    assert cache.report()["read_locked_objects"] == 1
    cache.unlock(keys, "reader")
    assert cache.report()["locked_objects"] == 0


def test_the_least_recently_used_prompt_gives_way() -> None:
    cache, _ = make(4)
    old, new, newest = prompt("a", 2), prompt("b", 2), prompt("c", 2)
    fill(cache, old)
    fill(cache, new)
    hit(cache, old)
    cache.unlock(old, "reader")
    fill(cache, newest)
    assert (hit(cache, old), hit(cache, new), hit(cache, newest)) == (2, 0, 2)
    assert cache.report()["evictions"] == 2


def test_the_end_of_a_prompt_gives_way_before_its_beginning() -> None:
    cache, _ = make(4)
    keys = prompt("a", 4)
    fill(cache, keys)
    fill(cache, prompt("b", 1))
    assert hit(cache, keys) == 3


def test_locked_chunks_never_give_way() -> None:
    cache, _ = make(3)
    read, written = prompt("a", 1), prompt("b", 1)
    fill(cache, read)
    hit(cache, read)
    reserved = cache.reserve(written, SPEC)
    assert list(cache.reserve(prompt("c", 3), SPEC)) == [0]
    assert cache.read(read, "reader") is not None
    assert cache.publish(reserved.values())


def test_a_store_never_evicts_its_own_prefix() -> None:
    cache, _ = make(2)
    keys = prompt("a", 3)
    fill(cache, keys[:2])
    assert cache.reserve(keys, SPEC) == {}
    assert hit(cache, keys) == 2


def test_an_object_larger_than_the_pool_evicts_nothing() -> None:
    cache, _ = make(2)
    fill(cache, prompt("a", 2))
    assert cache.reserve(prompt("b", 1), ObjectSpec((1,), "uint8", 3 * 256)) == {}
    assert cache.report()["objects"] == 2


def test_a_read_lock_ends_with_its_time() -> None:
    cache, clock = make(1)
    keys = prompt("a", 1)
    fill(cache, keys)
    hit(cache, keys)
    clock.now += READ_TTL
    assert cache.read(keys, "reader") is None
    assert list(cache.reserve(prompt("b", 1), SPEC)) == [0]


def test_a_reservation_ends_with_its_time_and_cannot_be_published_then() -> None:
    cache, clock = make(1)
    keys = prompt("a", 1)
    late = cache.reserve(keys, SPEC)
    clock.now += WRITE_TTL
    current = cache.reserve(keys, SPEC)
    assert list(current) == [0]
    assert not cache.publish(late.values())
    assert hit(cache, keys) == 0
    assert cache.publish(current.values())


def test_dropped_reservations_leave_nothing() -> None:
    cache, _ = make(2)
    reserved = cache.reserve(prompt("a", 2), SPEC)
    cache.drop(reserved.values())
    report = cache.report()
    assert (report["objects"], report["used_bytes"]) == (0, 0)


def test_dropping_does_not_touch_what_was_published() -> None:
    cache, _ = make(1)
    reserved = cache.reserve(prompt("a", 1), SPEC)
    cache.publish(reserved.values())
    cache.drop(reserved.values())
    assert cache.report()["objects"] == 1


def test_clear_spares_what_is_locked_unless_forced() -> None:
    cache, _ = make(2)
    locked, free = prompt("a", 1), prompt("b", 1)
    fill(cache, locked)
    fill(cache, free)
    hit(cache, locked)
    assert cache.clear() == 1
    assert hit(cache, free) == 0
    assert cache.clear(force=True) == 1
    assert cache.report()["used_bytes"] == 0
