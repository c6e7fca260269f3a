"""Options of the interop tests, and the check that a test run leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

# Programs that the tests start inherit this, even those that leave our process tree.
_MARK = "LMCACHE_FAST_TEST_RUN"
_RUN = uuid.uuid4().hex
_SETTLE_SECONDS = 15.0
_SHM = Path("/dev/shm")
_segments_before: set[str] = set()
_left: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests/interop."""
    group = parser.getgroup("interop", "tests against real servers")
    group.addoption(
        "--server-version",
        action="append",
        help="a release of lmcache to test against; repeat for more (default: three)",
    )


def pytest_sessionstart() -> None:
    """Remember what was there before the tests; take signals as a program on a terminal does."""
    os.environ[_MARK] = _RUN
    # A run in the background inherits that they are ignored, and so would what it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _segments_before.update(_segments())


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process or a shared memory segment outlives its tests."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        leaks = _processes() + [f"segment /dev/shm/{name}" for name in sorted(_orphan_segments())]
        if not leaks or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    _left.extend(leaks)
    if leaks:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left behind."""
    if _left:
        terminalreporter.section("left behind by the tests", red=True)
        for leak in _left:
            terminalreporter.line(leak)


def _processes() -> list[str]:
    """Name the living processes that the tests started: our descendants and all with our mark."""
    parents: dict[int, int] = {}
    for folder in _process_folders():
        try:
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    found = []
    for pid in parents:
        try:
            marked = f"{_MARK}={_RUN}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        ancestor = parents[pid]
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        # multiprocessing's tracker is meant to live as long as the interpreter.
        if (marked or ancestor == os.getpid()) and "resource_tracker" not in command:
            found.append(f"process {pid}: {command[:200]}")
    return found


def _segments() -> set[str]:
    # Semaphores (sem.*) are no segments; Python's own tracker removes them.
    names = {path.name for path in _SHM.iterdir()} if _SHM.is_dir() else set()
    return {name for name in names if not name.startswith("sem.")}


def _orphan_segments() -> set[str]:
    """Return new segments that no other living process maps: what others use is theirs."""
    new = _segments() - _segments_before
    if not new:
        return new
    for folder in _process_folders():
        try:
            maps = (folder / "maps").read_text() if folder.name != str(os.getpid()) else ""
        except OSError:
            continue
        new -= {name for name in new if f"/dev/shm/{name}" in maps}
    return new


def _process_folders() -> list[Path]:
    proc = Path("/proc")
    return [path for path in proc.iterdir() if path.name.isdigit()] if proc.is_dir() else []
