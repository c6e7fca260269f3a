"""Ctrl-C comes where it leaves nothing behind on the server.

``KeyboardInterrupt`` may come between any two bytecodes of the main thread: also just after a lock
was granted and before that was noted. So calls run :class:`shielded`. A Ctrl-C that comes inside is
held back until the call is over, which is a matter of milliseconds, or until it waits for something
that takes long (:class:`interruptible`): there it is let through, and treated like a time-out. A
second Ctrl-C comes at once, wherever it is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class _Handler:
    """Stands in for the program's own handler of SIGINT."""

    def __init__(self, program: Callable[[int, FrameType | None], Any]) -> None:
        self.program = program
        self.is_open = False
        self.held = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.held += 1
        if self.is_open or self.held > 1:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        # Whoever cleans up after it is shielded again.
        self.is_open, self.held = False, 0
        self.program(signal.SIGINT, frame)


#: The handler in place; the main thread's alone.
_handler: _Handler | None = None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class shielded:
    """A context manager that holds back the first Ctrl-C; within another one: nothing."""

    def __init__(self) -> None:
        self._mine: _Handler | None = None

    def __enter__(self) -> None:
        """Put our handler in place if the program has one of its own, in Python."""
        global _handler
        if not _in_main_thread() or _handler is not None:
            return
        program = signal.getsignal(signal.SIGINT)
        if isinstance(program, _Handler):  # left by a second Ctrl-C that broke through
            program = program.program
        if callable(program):
            mine = _Handler(program)
            signal.signal(signal.SIGINT, mine)
            # From here on the first one is held: no Ctrl-C can come between these.
            self._mine = _handler = mine

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the program its handler back, and what was held."""
        global _handler
        mine = self._mine
        self._mine = None
        if mine is not None:
            _handler = None
            in_place: object = signal.getsignal(signal.SIGINT)
            if in_place is mine:
                signal.signal(signal.SIGINT, mine.program)
            if mine.held:
                mine.deliver()


class interruptible:
    """A context manager inside :class:`shielded` in which Ctrl-C comes at once."""

    def __enter__(self) -> None:
        """Let through what comes, and what was held."""
        if _handler is not None and _in_main_thread():
            _handler.is_open = True
            if _handler.held:
                _handler.deliver()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hold back again."""
        if _handler is not None and _in_main_thread():
            _handler.is_open = False
