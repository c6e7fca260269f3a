"""The clock that deadlines of the server's locks are told by."""

from __future__ import annotations

import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Seconds before a deadline of the server at which we stop: clocks and copies take time.
MARGIN = 2.0


def now() -> float:
    """Seconds that also pass while the machine sleeps, unlike those of ``time.monotonic``."""
    return time.clock_gettime(_BOOT)


def deadline(ttl: float) -> float:
    """Until when something may be used that the server keeps for ``ttl`` seconds from now on.

    Call it before asking the server: its clock starts later, so we stop earlier.
    """
    return now() + ttl - min(MARGIN, ttl / 10)
