"""Incremental parser of server-sent events."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SSEParser:
    """Turns the bytes of an event stream, split anywhere, into the data of its events.

    Comments and the fields ``event``, ``id`` and ``retry`` are skipped; several ``data`` lines of
    one event are joined with newlines; lines may end in LF, CR LF or CR.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[str] = []
        self._after_cr = False
        self._first_line = True

    def feed(self, data: bytes) -> list[str]:
        """Return the data of every event that ends within ``data``, in order."""
        if not data:
            return []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # the second half of a CR LF whose first half ended the line
        self._after_cr = data.endswith(b"\r")
        events: list[str] = []
        for piece in data.splitlines(keepends=True):
            self._line.append(piece)
            if piece.endswith((b"\r", b"\n")):
                self._end_line(events)
        return events

    def close(self) -> str | None:
        """Return the data of an event that was not ended before the stream was, if any."""
        events: list[str] = []
        if self._line:
            self._end_line(events)
        if self._data:
            events.append("\n".join(self._data))
            self._data.clear()
        return events[0] if events else None

    def _end_line(self, events: list[str]) -> None:
        line = b"".join(self._line).rstrip(b"\r\n")
        self._line.clear()
        if self._first_line:
            line = line.removeprefix(_BOM)
            self._first_line = False
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data.clear()
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
