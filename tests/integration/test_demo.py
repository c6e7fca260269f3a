"""The demo as a user runs it: reports, gain, files, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_fast import cli

SMALL = "--model tiny --requests 3 --prompt-tokens 130 --chunk-size 16 --output-tokens 20"
SEGMENTS = Path("/dev/shm")


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "lmcache_fast",
            "demo",
            "--png",
            str(folder / "gain.png"),
            *arguments,
        ],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def segments_of(pid: int) -> list[Path]:
    return list(SEGMENTS.glob(f"*demo_{pid}_*"))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    demo = start_demo(folder, *SMALL.split(), "--json", str(folder / "gain.json"))
    output, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, output
    assert not segments_of(demo.pid)
    return folder, output, json.loads((folder / "gain.json").read_text())


def test_both_reports_and_the_gain_are_printed(finished: tuple[Path, str, dict[str, Any]]) -> None:
    _, output, result = finished
    assert output.count("Batch prefill") == output.count("Batch decode") == 2
    assert output.count("Batch modify") == 1
    assert f"decode gain: {result['decode_gain']:.2f}x" in output


def test_the_engine_used_half_of_the_chunks(finished: tuple[Path, str, dict[str, Any]]) -> None:
    _, _, result = finished
    chunks = 3 * (130 // 16)
    assert result["baseline"]["cached_tokens"] == chunks * 16
    assert result["dropped"]["cached_tokens"] == chunks * 16 // 2
    for name in ("baseline", "dropped"):
        decode = result[name]["reports"]["decode"]["metrics"]["results"]
        assert decode["output_tokens"] == 3 * 20
    # One token was generated while prefilling.
    assert result["baseline"]["prompt_tokens"] == 3 * 131


def test_the_gain_is_the_ratio_of_the_two_reports(
    finished: tuple[Path, str, dict[str, Any]],
) -> None:
    _, _, result = finished
    before, after = (
        result[name]["reports"]["decode"]["metrics"]["results"]["output_tput"]
        for name in ("baseline", "dropped")
    )
    assert result["decode_gain"] == pytest.approx(after / before)


def test_the_chart_is_a_png(finished: tuple[Path, str, dict[str, Any]]) -> None:
    assert (finished[0] / "gain.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    # Far more work than is waited for: the signal always comes in the middle.
    demo = start_demo(tmp_path, *SMALL.split(), "--output-tokens", "20000")
    try:
        assert demo.stdout is not None
        while not (line := demo.stdout.readline()).startswith("baseline"):
            assert line, "the demo ended by itself"
        children = children_of(demo.pid)
        assert len(children) == 2
        os.kill(demo.pid, number)
        demo.communicate(timeout=120)
        assert demo.returncode == -number
    finally:
        demo.kill()
        demo.wait()
    wait_until(lambda: not any(map(is_running, children)), "the server and the engine end")
    wait_until(lambda: not segments_of(demo.pid), "the segment is unlinked")
    assert not (tmp_path / "gain.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "requests is 0"),
        (["--prompt-tokens", "63", "--chunk-size", "16"], "at least 4 chunks of 16"),
        (["--json", "/nowhere/at/all.json"], "there is no folder '/nowhere/at'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["demo", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "starting" not in captured.err and not captured.out
