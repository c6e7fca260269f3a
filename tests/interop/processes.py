"""Start other programs and end them, with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll ``condition`` until it holds; after ``seconds`` fail and say ``what`` was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.2)


def fetch(url: str, method: str = "GET") -> bytes:
    """Return what ``url`` answers; OSError unless it is a success."""
    # Not httpx: each of its one-off calls loads the certificates, which adds up when polling.
    request = urllib.request.Request(url, method=method)
    with _direct.open(request, timeout=30.0) as answer:
        body: bytes = answer.read()
        return body


def answers(url: str) -> bool:
    """Whether a GET of ``url`` succeeds."""
    try:
        fetch(url)
    except OSError:
        return False
    return True


class Program:
    """A program in a session of its own, its output in a file.

    Args:
        command: what to run.
        environment: its whole environment.
        log: the file that takes its output.
    """

    def __init__(self, command: Sequence[object], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._what = " ".join(map(str, command))[:200]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=log.parent,
            )

    def wait_ready(self, url: str, seconds: float) -> None:
        """Wait until ``url`` answers; fail with the end of the log if the program ends first."""
        try:
            wait_until(lambda: self._ended() or answers(url), seconds, f"{url} of {self._what}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.tail()}") from None
        if self._ended():
            raise RuntimeError(
                f"{self._what} ended with {self._process.returncode}:\n{self.tail()}"
            )

    def tail(self, characters: int = 4000) -> str:
        """Return the end of what the program has printed."""
        return self.log.read_text(errors="replace")[-characters:]

    def kill(self) -> None:
        """End the program and its children at once, as a crash would."""
        self.signal(signal.SIGKILL)
        self._process.wait(30)
        wait_until(lambda: not self._group_alive(), 30, f"the children of {self._what} to end")

    def stop(self) -> None:
        """Ask the program and its children to end; after 20 s end them."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
            self._process.wait(20)
            wait_until(lambda: not self._group_alive(), 5, "its children")
        self.kill()

    def _ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _group_alive(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True
