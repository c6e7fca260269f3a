"""What a ``with`` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Closing = TypeVar("_Closing", bound="Closing")


class Closing(ABC):
    """Closes itself at the end of a ``with`` statement, whether it failed or not."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; once more does nothing."""

    def __enter__(self: _Closing) -> _Closing:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
