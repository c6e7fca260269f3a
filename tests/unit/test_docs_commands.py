"""The commands on the pages exist, with the options that are given there."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import shlex

import pytest

from lmcache_fast.cli import COMMANDS
from tests.pages import PAGES, ROOT, commands, inline_code, without_settings


def make_targets() -> set[str]:
    rules = "".join((ROOT / name).read_text() for name in ("Makefile", "native.mk"))
    targets = re.findall(r"^([\w -]+):(?!=)", rules, re.M)
    return {target for line in targets for target in line.split()}


def complaint(words: list[str]) -> str:
    """Say what is wrong with a command; nothing if it is right, or not ours."""
    name, *rest = words
    if name == "lmcache-fast":
        return _parse(rest)
    if name == "make":
        wanted = {word for word in rest if "=" not in word and not word.startswith("-")}
        return "".join(f"no target {word!r}" for word in sorted(wanted - make_targets()))
    if name.startswith("python") and rest[:1] == ["-m"]:
        if rest[1] == "lmcache_fast":
            return _parse(rest[2:])
        return "" if importlib.util.find_spec(rest[1]) else f"no module {rest[1]!r}"
    if name == "pip":
        extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
        asked = {extra for word in rest for extra in _extras(word)}
        return "".join(f"no extra {extra!r}" for extra in sorted(asked - extras))
    if name == "pytest" or name.startswith("python"):
        paths = [word for word in rest if word.startswith(("tests/", "bench/", "examples/"))]
        return "".join(f"no file {path!r}" for path in paths if not (ROOT / path).exists())
    return ""


def _extras(requirement: str) -> list[str]:
    found = re.fullmatch(r"(?:lmcache_fast|\.)\[(.+)\]", requirement)
    return found.group(1).split(",") if found else []


def _parse(words: list[str]) -> str:
    if words[:1] in (["--version"], ["--help"]):
        return ""
    if not words or words[0] not in COMMANDS:
        return f"no subcommand {words[:1]}"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        _parser(words[0]).parse_args(words[1:])
    return errors.getvalue()


def _parser(subcommand: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"lmcache-fast {subcommand}", allow_abbrev=False)
    importlib.import_module(COMMANDS[subcommand].module).add_arguments(parser)
    return parser


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_right(page: str) -> None:
    wrong = {" ".join(words): complaint(words) for words in commands(page)}
    assert {command: why for command, why in wrong.items() if why} == {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_name_subcommands_and_options_that_exist(page: str) -> None:
    for span in inline_code(page):
        if span.startswith(("make ", "python -m lmcache_fast", "pip install ")):
            assert complaint(shlex.split(span)) == "", span
        elif span.startswith("lmcache-fast "):
            subcommand, *words = shlex.split(span)[1:]
            assert subcommand in COMMANDS or subcommand.startswith("-"), span
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= set(_parser(subcommand)._option_string_actions), span


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("lmcache-fast sing", "no subcommand"),
        ("lmcache-fast doctor --colour red", "unrecognized arguments: --colour red"),
        ("lmcache-fast server --port http", "invalid int value: 'http'"),
        ("lmcache-fast server --chunk 7", "unrecognized arguments"),
        ("make tea MINUTES=3", "no target 'tea'"),
        ("python -m lmcache_fast.nothing", "no module"),
        ("python -m lmcache_fast sing", "no subcommand"),
        ("pip install 'lmcache_fast[everything]'", "no extra 'everything'"),
        ("pytest tests/nothing", "no file 'tests/nothing'"),
    ],
)
def test_a_wrong_command_would_be_found(command: str, why: str) -> None:
    assert why in complaint(without_settings(shlex.split(command)))
