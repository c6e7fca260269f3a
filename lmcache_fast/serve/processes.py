"""Child processes that cannot outlive their parent.

Each child gets the read end of a pipe whose write end only the parent has. When the parent ends in
whatever way, SIGKILL included, the kernel closes the write end, the child reads the end of the file
and ends itself. A clean end is asked for with SIGTERM first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from lmcache_fast.errors import LMCacheFastError

#: Names, for a child, the file descriptor that ends with its parent.
PARENT_PIPE_VARIABLE = "LMCACHE_FAST_PARENT_PIPE"
#: Seconds a child has to end cleanly before it is killed.
GRACE = 10.0
_POLL = 0.05
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildError(LMCacheFastError):
    """A child process ended early, or did not become ready in time."""


def end_with_parent() -> None:
    """In a child of :class:`ChildGroup`: end this process when its parent has ended.

    Does nothing in a process that no :class:`ChildGroup` started.
    """
    value = os.environ.pop(PARENT_PIPE_VARIABLE, None)
    if value is None:
        return
    descriptor = int(value)
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        os.read(descriptor, 1)  # nobody ever writes: this returns when the parent is gone
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _same_package() -> str:
    """A program that runs the command line from where this process has it.

    ``-m`` would put the current folder first, where another copy of the package may be.
    """
    return (
        f"import sys; sys.path[:] = {sys.path!r}; from lmcache_fast.cli import main; "
        "sys.exit(main())"
    )


class Child:
    """One running child process with its output kept in an unnamed file."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._read_end, self._write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _same_package(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[self._read_end],
                env={
                    **os.environ,
                    PARENT_PIPE_VARIABLE: str(self._read_end),
                    "PYTHONUNBUFFERED": "1",
                },
                start_new_session=True,  # Ctrl-C goes to the parent, which ends children in order
            )
        except BaseException:
            os.close(self._write_end)
            self._log.close()
            raise
        finally:
            os.close(self._read_end)

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group's."""
        return self._process.pid

    def output(self, limit: int = 1 << 20) -> str:
        """The last ``limit`` bytes of what the child has printed."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - limit)
        # pread leaves the file's position alone, which the child shares.
        return os.pread(self._log.fileno(), limit, start).decode("utf-8", "replace")

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        """Wait until ``ready()`` is true.

        Raises:
            ChildError: the child ended, or ``timeout`` seconds passed; with its last output.
        """
        deadline = time.monotonic() + timeout
        while not ready():
            status = self._process.poll()
            if status is not None:
                raise self._failure(f"ended with status {status} before {what}")
            if time.monotonic() > deadline:
                raise self._failure(f"took more than {timeout:g} s for: {what}")
            time.sleep(_POLL)

    def wait_for_line(self, beginning: str, timeout: float) -> str:
        """Wait until the child has printed a line that begins so, and return that line.

        Raises:
            ChildError: the child ended, or ``timeout`` seconds passed; with its last output.
        """
        found: list[str] = []

        def printed() -> bool:
            complete = self.output().rpartition("\n")[0].splitlines()
            found.extend(line for line in complete if line.startswith(beginning))
            return bool(found)

        self.wait_until(printed, f"printing {beginning!r}", timeout)
        return found[0]

    def is_running(self) -> bool:
        """Whether the child has not ended yet."""
        return self._process.poll() is None

    def stop(self, grace: float = GRACE) -> int:
        """End the child, by force after ``grace`` seconds, and return its exit status."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait(grace)
        if not self._log.closed:
            os.close(self._write_end)
            self._log.close()
        return status

    def _failure(self, what: str) -> ChildError:
        tail = "\n".join(self.output().splitlines()[-20:])
        return ChildError(f"the {self.name} {what}; its last output:\n{tail}")


class ChildGroup:
    """Child processes that are ended together, the last started first. Thread-safe.

    Starting and bookkeeping happen under one lock, so that :meth:`close` either sees a child or
    keeps it from being started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: list[Child] = []
        self._closed = False

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Start ``lmcache-fast ARGUMENTS``.

        Raises:
            ChildError: the group was closed.
        """
        with self._lock:
            if self._closed:
                raise ChildError(f"the {name} was not started: everything is being ended")
            child = Child(name, arguments)
            self._children.append(child)
            return child

    def child(self, name: str) -> Child:
        """Return the child that was started under that name."""
        with self._lock:
            return next(child for child in self._children if child.name == name)

    def close(self) -> None:
        """End all children. Any number of times, from any thread."""
        with self._lock:
            self._closed = True
            while self._children:
                self._children[-1].stop()
                self._children.pop()


@contextlib.contextmanager
def _recorded_signals(event: threading.Event) -> Iterator[list[int]]:
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)
        event.set()

    previous = {}
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            previous[number] = signal.signal(number, record)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_until_signal(work: Callable[[ChildGroup], int]) -> int:
    """Run ``work(children)`` in a thread; end all children when it or this process ends.

    The main thread only waits, and its signal handlers only take a note: no exception can strike
    between starting a child and remembering it. On SIGINT, SIGTERM or SIGHUP the children are ended
    and then this process by the same signal.

    Returns:
        What ``work`` returned. What it raised is raised.
    """
    wake = threading.Event()
    results: list[int] = []
    errors: list[BaseException] = []
    children = ChildGroup()

    def body() -> None:
        try:
            results.append(work(children))
        except BaseException as error:  # handed to the main thread
            errors.append(error)
        finally:
            wake.set()

    with _recorded_signals(wake) as received:
        worker = threading.Thread(target=body, name="work", daemon=True)
        worker.start()
        while not wake.wait(1.0):  # short waits: a signal is handled between them at the latest
            pass
        children.close()
        if received:
            sys.stdout.flush()
            sys.stderr.flush()
            # Without unwinding: the work is still under way and its thread may hold anything.
            signal.signal(received[0], signal.SIG_DFL)
            os.kill(os.getpid(), received[0])
    if errors:
        raise errors[0]
    return results[0]
