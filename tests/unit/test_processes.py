"""Child processes end with their parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_fast.serve.processes import ChildError, ChildGroup, run_until_signal

# Stands in for the package's command line: what the children run.
FAKE_CLI = """
import sys, time, signal
from lmcache_fast.serve.processes import end_with_parent
def main():
    end_with_parent()
    what = sys.argv[1]
    if what == "fail":
        print("the reason"); return 3
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", what, flush=True)
    time.sleep(600)
"""

PARENT = """
import os, sys, time
import lmcache_fast.serve.processes as processes
processes._same_package = lambda: {child!r}
def work(children):
    for name in ("one", "two"):
        child = children.start(name, [name])
        child.wait_for_line("ready", 60)
        print(child.pid, flush=True)
    print("started", flush=True)
    if {fail!r}:
        raise RuntimeError("the work failed")
    time.sleep({seconds})
    return 5
sys.exit(processes.run_until_signal(work))
"""


def child_code() -> str:
    root = str(Path(__file__).parents[2])
    return f"import sys; sys.path.insert(0, {root!r})\n" + FAKE_CLI + "\nsys.exit(main())"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("lmcache_fast.serve.processes._same_package", child_code)
    group = ChildGroup()
    yield group
    group.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def start_parent(
    fail: bool = False, seconds: float = 600
) -> tuple[subprocess.Popen[str], list[int]]:
    code = textwrap.dedent(PARENT).format(child=child_code(), fail=fail, seconds=seconds)
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip() for _ in range(3)]
    assert lines[2] == "started"
    return parent, [int(line) for line in lines[:2]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_children_end_when_a_signal_ends_the_parent(number: signal.Signals) -> None:
    parent, pids = start_parent()
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode == -number
    if number == signal.SIGKILL:
        wait_until(lambda: all(map(has_ended, pids)))
    else:  # the parent waited for them
        assert all(map(has_ended, pids))


@pytest.mark.parametrize("fail", [False, True])
def test_children_end_when_the_work_ends_or_fails(fail: bool) -> None:
    parent, pids = start_parent(fail, seconds=0)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == (1 if fail else 5)
    assert ("the work failed" in err) == fail
    assert all(map(has_ended, pids))


def test_a_child_that_ends_early_is_an_error_with_its_output(children: ChildGroup) -> None:
    child = children.start("faulty thing", ["fail"])
    with pytest.raises(ChildError, match=r"faulty thing ended with status 3 (?s:.*)the reason"):
        child.wait_for_line("ready", 60)


def test_a_child_that_is_not_ready_in_time_is_an_error(children: ChildGroup) -> None:
    child = children.start("slow thing", ["one"])
    with pytest.raises(ChildError, match=r"slow thing took more than 0\.2 s for: printing 'never'"):
        child.wait_for_line("never", 0.2)


def test_a_child_that_ignores_sigterm_is_killed(children: ChildGroup) -> None:
    child = children.start("stubborn thing", ["stubborn"])
    child.wait_for_line("ready stubborn", 60)
    assert child.stop(grace=0.2) == -signal.SIGKILL


def test_nothing_starts_in_a_closed_group(children: ChildGroup) -> None:
    children.close()
    with pytest.raises(ChildError, match="being ended"):
        children.start("late thing", ["one"])


def test_a_child_leads_its_own_process_group(children: ChildGroup) -> None:
    assert os.getpgid(children.start("thing", ["one"]).pid) != os.getpgid(0)


def test_handlers_are_as_before_when_the_work_is_done() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_until_signal(lambda children: 4) == 4
    assert signal.getsignal(signal.SIGTERM) is before
