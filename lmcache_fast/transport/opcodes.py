"""A reader of pickles that runs nothing.

It knows the opcodes that plain data is made of, and builds numbers, strings, tuples, lists and
dictionaries. A name stays a :class:`Symbol`; what a call or a persistent id means is for the caller
to say. Bytes come as views of the input, so they cost no copy and their lengths no memory.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_fast.errors import PayloadError

#: Longest integer, in bytes; the largest that is needed is torch's magic number.
_MAX_INTEGER_BYTES = 16

_MARK = object()


@dataclass(frozen=True)
class Symbol:
    """A global's dotted name, not looked up."""

    name: str


Reduce = Callable[[Symbol, "tuple[Any, ...]", "dict[str, Any]"], Any]
Persistent = Callable[[Any], Any]


def _refuse(*_: Any) -> Any:
    raise PayloadError("pickle: a call or a persistent id where plain data is expected")


class PickleReader:
    """Reads the pickles in ``data`` one after the other.

    Args:
        data: the bytes; views of them are handed out.
        reduce: makes the value of a call, given its symbol and arguments.
        persistent: makes the value of a persistent id.
    """

    def __init__(
        self, data: memoryview, reduce: Reduce = _refuse, persistent: Persistent = _refuse
    ) -> None:
        self._data = data
        self._reduce = reduce
        self._persistent = persistent
        self.position = 0

    def read(self) -> Any:
        """Read the next pickle.

        Raises:
            PayloadError: it ends too early, is malformed, or asks for anything but data.
        """
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        try:
            while True:
                opcode = bytes(self.take(1))
                if opcode == pickle.STOP:
                    return self._stack.pop()
                handler = _HANDLERS.get(opcode)
                if handler is None:
                    raise PayloadError(f"pickle: opcode {opcode!r} is not allowed")
                handler(self)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PayloadError(f"pickle: malformed at byte {self.position}: {error}") from error

    def take(self, length: int) -> memoryview:
        """Return a view of the next ``length`` bytes and step over them.

        Raises:
            PayloadError: there are not so many.
        """
        if length > len(self._data) - self.position:
            raise PayloadError(
                f"pickle: {length} bytes wanted at byte {self.position} of {len(self._data)}"
            )
        self.position += length
        return self._data[self.position - length : self.position]

    def number(self, code: str) -> int:
        """Read a little-endian integer of :mod:`struct`'s type ``code``."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return int(value)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _text(self, length: int) -> None:
        self._push(str(self.take(length), "utf-8"))

    def _line(self) -> str:
        start = self.position
        while self.take(1)[0] != ord("\n"):
            if self.position - start > 256:
                raise PayloadError("pickle: a global's name is too long")
        return str(self._data[start : self.position - 1], "utf-8")

    def _long(self) -> None:
        length = self.number("B")
        if length > _MAX_INTEGER_BYTES:
            raise PayloadError(f"pickle: an integer of {length} bytes")
        self._push(int.from_bytes(self.take(length), "little", signed=True))

    def _pop_marked(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                items = self._stack[index + 1 :]
                del self._stack[index:]
                return items
        raise PayloadError("pickle: no mark")

    def _pop(self, kind: type) -> Any:
        value = self._stack.pop()
        if not isinstance(value, kind):
            raise PayloadError(f"pickle: {type(value).__name__} where {kind.__name__} is expected")
        return value

    def _tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise PayloadError("pickle: a tuple of more than there is")
        items = tuple(self._stack[-length:])
        del self._stack[-length:]
        self._push(items)

    def _append(self, items: list[Any]) -> None:
        target = self._pop(list)
        target.extend(items)
        self._push(target)

    def _set_items(self, items: list[Any]) -> None:
        target = self._pop(dict)
        if not all(isinstance(key, (str, int)) for key in items[::2]):
            raise PayloadError("pickle: a dictionary's key is no string")
        target.update(zip(items[::2], items[1::2], strict=True))
        self._push(target)

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._push(Symbol(f"{module}.{name}"))

    def _stack_global(self) -> None:
        name, module = self._pop(str), self._pop(str)
        self._push(Symbol(f"{module}.{name}"))

    def _call(self, with_keywords: bool) -> None:
        keywords = self._pop(dict) if with_keywords else {}
        arguments, function = self._pop(tuple), self._pop(Symbol)
        self._push(self._reduce(function, arguments, keywords))

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]


_HANDLERS: dict[bytes, Callable[[PickleReader], None]] = {
    pickle.PROTO: lambda r: None if r.number("B") <= 5 else _refuse(),
    pickle.FRAME: lambda r: (r.number("Q"), None)[1],
    pickle.NONE: lambda r: r._push(None),
    pickle.NEWTRUE: lambda r: r._push(True),
    pickle.NEWFALSE: lambda r: r._push(False),
    pickle.BININT: lambda r: r._push(r.number("i")),
    pickle.BININT1: lambda r: r._push(r.number("B")),
    pickle.BININT2: lambda r: r._push(r.number("H")),
    pickle.LONG1: PickleReader._long,
    pickle.SHORT_BINUNICODE: lambda r: r._text(r.number("B")),
    pickle.BINUNICODE: lambda r: r._text(r.number("I")),
    pickle.SHORT_BINBYTES: lambda r: r._push(r.take(r.number("B"))),
    pickle.BINBYTES: lambda r: r._push(r.take(r.number("I"))),
    pickle.BINBYTES8: lambda r: r._push(r.take(r.number("Q"))),
    pickle.BYTEARRAY8: lambda r: r._push(r.take(r.number("Q"))),
    pickle.EMPTY_LIST: lambda r: r._push([]),
    pickle.EMPTY_TUPLE: lambda r: r._push(()),
    pickle.EMPTY_DICT: lambda r: r._push({}),
    pickle.MARK: lambda r: r._push(_MARK),
    pickle.TUPLE: lambda r: r._push(tuple(r._pop_marked())),
    pickle.TUPLE1: lambda r: r._tuple(1),
    pickle.TUPLE2: lambda r: r._tuple(2),
    pickle.TUPLE3: lambda r: r._tuple(3),
    pickle.APPEND: lambda r: r._append([r._stack.pop()]),
    pickle.APPENDS: lambda r: r._append(r._pop_marked()),
    pickle.SETITEM: lambda r: r._set_items([r._stack.pop(-2), r._stack.pop()]),
    pickle.SETITEMS: lambda r: r._set_items(r._pop_marked()),
    pickle.GLOBAL: PickleReader._global,
    pickle.STACK_GLOBAL: PickleReader._stack_global,
    pickle.REDUCE: lambda r: r._call(with_keywords=False),
    pickle.NEWOBJ_EX: lambda r: r._call(with_keywords=True),
    pickle.BINPERSID: lambda r: r._push(r._persistent(r._stack.pop())),
    pickle.MEMOIZE: lambda r: r._put(len(r._memo)),
    pickle.BINPUT: lambda r: r._put(r.number("B")),
    pickle.LONG_BINPUT: lambda r: r._put(r.number("I")),
    pickle.BINGET: lambda r: r._push(r._memo[r.number("B")]),
    pickle.LONG_BINGET: lambda r: r._push(r._memo[r.number("I")]),
}
