"""Values that can be read as they are and called as well.

What a stream tells was a method in the first generation, ``stream.output_text()``, and is a
property in the second, ``stream.output_text``. These values serve both: called, they return the
plain value.
"""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


class CallableStr(str):
    """A string that returns itself when called."""

    __slots__ = ()

    def __call__(self) -> str:
        """Return the plain string."""
        return str(self)


class CallableInt(int):
    """An integer that returns itself when called."""

    __slots__ = ()

    def __call__(self) -> int:
        """Return the plain integer."""
        return int(self)


class CallableBool(int):
    """A truth value that returns itself when called.

    Python lets nobody derive from ``bool``, so this is the integer 0 or 1, as ``bool`` itself is:
    it is equal to False or True and is shown as such, but it is not the same object. Ask
    ``if stream.is_done`` or ``stream.is_done()``, not ``stream.is_done is True``.
    """

    __slots__ = ()

    def __new__(cls, value: object) -> CallableBool:
        """Return the truth of ``value``."""
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        """Return the plain truth value."""
        return bool(self)

    def __repr__(self) -> str:
        """Show as False or True."""
        return repr(bool(self))

    __str__ = __repr__


class CallableList(list[_T]):
    """A list that returns itself when called."""

    __slots__ = ()

    def __call__(self) -> list[_T]:
        """Return a plain list."""
        return list(self)
