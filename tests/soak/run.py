"""``python -m tests.soak.run --minutes 10``: workers against a real server that dies now and then.

Every retrieved byte is checked. Ends with an error if one was wrong, a call hung, or a lock, a
segment, a thread or a descriptor was left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.interop.peer import ensure
from tests.interop.servers import Server, real_server

ROOT = Path(__file__).parents[2]


class Worker:
    """One process of the soak."""

    def __init__(self, server: Server, seed: int, threads: int) -> None:
        arguments = (server.url, server.http_url, str(seed), str(threads))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != '"ready"':
            raise RuntimeError("a worker of the soak did not start")

    def report(self) -> dict[str, Any]:
        """Have the worker stop, and return what it did."""
        output, _ = self._process.communicate("", timeout=300)
        lines = output.strip().splitlines()
        if self._process.returncode or not lines:
            return {"counts": {}, "failures": [f"worker ended with {self._process.returncode}"]}
        report: dict[str, Any] = json.loads(lines[-1])
        return report

    def kill(self) -> None:
        """End the worker in the middle of whatever it does."""
        self._process.kill()
        self._process.wait()


def disturb(server: Server, rng: random.Random) -> str:
    """Do something to the server that servers suffer."""
    what = rng.choice(("kill", "stop", "clear"))
    if what == "kill":
        server.kill()
        time.sleep(rng.uniform(0, 2))
        server.start()
    elif what == "stop":
        server.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 4))
        server.signal(signal.SIGCONT)
    else:
        server.clear()
    return what


def soak(server: Server, minutes: float, processes: int, threads: int, seed: int) -> list[str]:
    """Run the soak; print figures and return what went wrong."""
    rng = random.Random(seed)
    workers = [Worker(server, number, threads) for number in range(processes)]
    done: Counter[str] = Counter()
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        time.sleep(min(rng.uniform(4, 12), max(0.0, deadline - time.monotonic())))
        if rng.random() < 0.2:  # our own process dies, too; its locks run out with their TTL
            workers.pop(rng.randrange(len(workers))).kill()
            workers.append(Worker(server, rng.randrange(10_000), threads))
            done["worker killed"] += 1
        done[f"server: {disturb(server, rng)}"] += 1
    # What a killed worker had locked is freed by time only: end on a server without such locks.
    server.kill()
    server.start()
    time.sleep(5)
    reports = [worker.report() for worker in workers]
    problems = []
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report["counts"])
        problems += report["failures"]
        if report.get("hung"):
            problems.append(f"{report['hung']} threads hung")
        before, after = report.get("before", {}), report.get("after", {})
        for what in before:
            if after[what] > before[what] + (1 if what == "files" else 0):
                problems.append(f"{what}: {before[what]} before, {after[what]} after")
    print(json.dumps({"disturbances": done, "outcomes": total}, indent=2))
    try:
        server.wait_nothing_held()
    except (AssertionError, TimeoutError) as error:
        problems.append(f"left on the server: {error}")
    return problems


def main() -> None:
    """Run the soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--server-version", default="0.5.6")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    flags = ("--l1-size-gb", "0.03")
    with (
        tempfile.TemporaryDirectory() as folder,
        real_server(ensure(arguments.server_version), Path(folder), flags=flags) as server,
    ):
        problems = soak(
            server, arguments.minutes, arguments.processes, arguments.threads, arguments.seed
        )
    if server.segment.exists():
        problems.append(f"left behind: {server.segment}")
    print("\n".join(problems) or "soak passed: 0 problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
