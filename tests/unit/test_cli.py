"""The command line: subcommands are loaded lazily and fail with one clear line."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from lmcache_fast import __version__, cli
from lmcache_fast.errors import ConnectError


def use(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = types.ModuleType("lmcache_fast.fake_command")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command(module.__name__, "fake", "extras"))


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lmcache-fast {__version__}\n"


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in ("server", "engine", "demo", "sweep", "doctor", "bench"))


def test_help_loads_no_subcommand_and_no_torch() -> None:
    code = (
        "import sys; from lmcache_fast.cli import main; main([]); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'uvicorn', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_arguments_reach_the_subcommand_and_its_status_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, lambda args: args.number)
    assert cli.main(["fake", "--number", "7"]) == 7


def test_a_missing_extra_gives_one_line_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise ModuleNotFoundError("No module named 'plots.bars'", name="plots.bars")

    use(monkeypatch, run)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == (
        "lmcache-fast fake: the module 'plots' is missing; pip install 'lmcache_fast[extras]'\n"
    )


def test_our_own_errors_are_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise ConnectError("nobody is there")

    use(monkeypatch, run)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == "lmcache-fast fake: nobody is there\n"
