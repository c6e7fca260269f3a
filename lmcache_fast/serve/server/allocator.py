"""Allocator: which bytes of the pool are free."""

from __future__ import annotations

from bisect import bisect_left, insort

from lmcache_fast.errors import InvalidInputError


class Allocator:
    """First fit over a sorted list of free spans, which are merged when given back.

    Objects of one model are all of one size, so holes are reused exactly and the list stays short.

    Args:
        size: bytes to hand out.
        alignment: every span starts at, and takes up, a multiple of it.
    """

    def __init__(self, size: int, alignment: int = 4096) -> None:
        if size < 1 or alignment < 1:
            raise InvalidInputError(
                f"Allocator: size {size}, alignment {alignment}; expected positive numbers"
            )
        self.alignment = alignment
        self.size = size // alignment * alignment
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []
        self._taken: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, with what alignment adds."""
        return sum(self._taken.values())

    def allocate(self, length: int) -> int | None:
        """Return the offset of ``length`` bytes, or None where no free span is long enough."""
        if length < 1:
            raise InvalidInputError(
                f"Allocator.allocate: length is {length}; expected 1 byte or more"
            )
        length = -(-length // self.alignment) * self.alignment
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                self._taken[offset] = length
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give back what :meth:`allocate` returned.

        Raises:
            InvalidInputError: nothing is allocated at ``offset``.
        """
        if offset not in self._taken:
            raise InvalidInputError(f"Allocator.free: nothing is allocated at offset {offset}")
        length = self._taken.pop(offset)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and offset + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, before_length = self._free.pop(index - 1)
            offset, length = before, before_length + length
        insort(self._free, (offset, length))
