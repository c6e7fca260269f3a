"""What streams and batches measured, and how it is reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TextIO

from lmcache_fast.errors import InvalidInputError

Number = int | float

FORMATS = ("terminal", "json")

_LABELS = {
    "num_request_streams": "Streams",
    "duration": "Duration (s)",
    "input_tokens": "Input tokens",
    "input_tput": "Input tokens a second",
    "output_tokens": "Output tokens",
    "output_tput": "Output tokens a second",
    "num_nodes": "Nodes",
    "num_moved": "Streams moved",
    "driver_seconds": "Driver's CPU time (s)",
    "bytes_sent": "Bytes sent",
    "bytes_received": "Bytes received",
}


def check_format(where: str, fmt: str, width: int) -> None:
    """Check a report's format before the work that it reports on is done.

    Raises:
        InvalidInputError: ``fmt`` is none of :data:`FORMATS`, or ``width`` is not positive.
    """
    if fmt not in FORMATS:
        raise InvalidInputError(f"{where}: fmt is {fmt!r}; expected one of {', '.join(FORMATS)}")
    if not isinstance(width, int) or width < 1:
        raise InvalidInputError(f"{where}: width is {width!r}; expected a positive integer")


@dataclass(frozen=True)
class StreamPerfMetrics:
    """What one ``generate`` call measured.

    Attributes:
        duration: seconds from the call to the last token.
        input_tokens: tokens of the prompt that was sent.
        output_tokens: tokens that came back.
        input_tput: input tokens a second.
        output_tput: output tokens a second.
        tpot: seconds between one token and the next, for each but the first.
        ttft: seconds to the first token; 0.0 if none came.
    """

    duration: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    input_tput: float = 0.0
    output_tput: float = 0.0
    tpot: list[float] = field(default_factory=list)
    ttft: float = 0.0

    @classmethod
    def of(
        cls, input_tokens: int, begin: float, token_times: Sequence[float], end: float
    ) -> StreamPerfMetrics:
        """Work them out from the time that the call began, each token came, and it ended."""
        duration = end - begin
        return cls(
            duration=duration,
            input_tokens=input_tokens,
            output_tokens=len(token_times),
            input_tput=input_tokens / duration if duration > 0 else 0.0,
            output_tput=len(token_times) / duration if duration > 0 else 0.0,
            tpot=[later - earlier for earlier, later in pairwise(token_times)],
            ttft=token_times[0] - begin if token_times else 0.0,
        )


class Metrics:
    """One report: what was run (``config``) and what came out (``results``).

    Every value is an attribute too: ``metrics.duration``, ``metrics.output_tput``. Times are in
    seconds, throughputs in tokens a second.

    Args:
        title: headline.
        config: what was run.
        results: what was measured.
        fmt: how :meth:`emit` prints it: ``"terminal"`` (a table) or ``"json"``.
        width: columns of the table.

    Raises:
        InvalidInputError: unknown format or no positive width.
    """

    def __init__(
        self,
        title: str,
        config: Mapping[str, Number],
        results: Mapping[str, Number],
        fmt: str = "terminal",
        width: int = 80,
    ) -> None:
        check_format("Metrics", fmt, width)
        self.title = title
        self.config = dict(config)
        self.results = dict(results)
        self.fmt = fmt
        self.width = width

    def __getattr__(self, name: str) -> Any:
        """Return the result, or else the config value, called ``name``."""
        if not name.startswith("_") and name not in ("config", "results"):
            for section in (self.results, self.config):
                if name in section:
                    return section[name]
        raise AttributeError(f"Metrics has no {name!r}")

    def __repr__(self) -> str:
        """Show the title and every value."""
        return f"Metrics({self.to_dict()!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"title": ..., "metrics": {"config": {...}, "results": {...}}}``."""
        sections = {"config": dict(self.config), "results": dict(self.results)}
        return {"title": self.title, "metrics": sections}

    def emit(self, file: TextIO | None = None) -> None:
        """Print the report to ``file``, by default standard output."""
        text = json.dumps(self.to_dict(), indent=2) if self.fmt == "json" else self._table()
        print(text, file=file or sys.stdout, flush=True)

    def _table(self) -> str:
        lines = [f" {self.title} ".center(self.width, "=")]
        for section in (self.config, self.results):
            for key, value in section.items():
                label = _LABELS.get(key, key)
                shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
                lines.append(f"{label}: {shown.rjust(self.width - len(label) - 2)}")
            lines.append("-" * self.width)
        lines[-1] = "=" * self.width
        return "\n".join(lines)
