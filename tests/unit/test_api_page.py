"""docs/api.md names what there is: every public name, with the arguments that it takes."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import pytest

from tests.pages import ROOT, text_of

PAGE = text_of("docs/api.md")
#: The page's sections below a module's name, and a class's name: ``{(module, class or ""): text}``.
SECTIONS: dict[tuple[str, str], str] = {}
for _part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
    _module, _, _rest = _part.partition("\n")
    _own, *_classes = re.split(r"^### ", _rest, flags=re.M)
    SECTIONS[_module, ""] = _own
    for _class in _classes:
        _name, _, _text = _class.partition("\n")
        SECTIONS[_module, _name] = _text
MODULES = [module for module, name in SECTIONS if not name]
CLASSES = [section for section in SECTIONS if section[1]]


def listed(text: str) -> dict[str, str | None]:
    """Return the names in the first column, with what is in their brackets, if any are there."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    found: dict[str, str | None] = {}
    for cell in cells:
        for name, arguments in re.findall(r"`(\w+)(\([^`]*\))?`", cell):
            assert name not in found, name
            found[name] = arguments[1:-1] if arguments else None
    return found


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def wrong_arguments(owner: Any, names: dict[str, str | None]) -> dict[str, str]:
    """Return what has other parameters than the page says, with those that it has."""
    wrong = {}
    for name, arguments in names.items():
        value = getattr(owner, name)
        if arguments is None or isinstance(value, property):
            continue
        written = [part for part in arguments.split(", ") if part]
        real = parameters(value)
        if written[-1:] == ["..."]:
            written.pop()
            real = real[: len(written)]
        if written != real:
            wrong[name] = ", ".join(real)
    return wrong


def members(cls: type) -> set[str]:
    """Return the public attributes of a class that it and our bases of it define."""
    found = set()
    for base in cls.__mro__:
        if base.__module__.startswith("lmcache_fast"):
            found |= {name for name in vars(base) if not name.startswith("_")}
    return found


@pytest.fixture(autouse=True)
def no_finder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the drop-in changes what imports find: only until the test's end."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def test_every_module_that_says_what_is_public_is_on_the_page() -> None:
    exporting = set()
    for path in (ROOT / "lmcache_fast").rglob("*.py"):
        if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.M):
            exporting.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    exporting = {name.removesuffix(".__init__") for name in exporting}
    assert len(exporting) > 5
    assert exporting <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_names_are_those_that_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    names = listed(SECTIONS[name, ""])
    assert names
    if hasattr(module, "__all__"):
        assert set(names) == set(module.__all__)
    assert wrong_arguments(module, names) == {}


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_classes_names_are_all_that_it_has(module: str, name: str) -> None:
    cls = getattr(importlib.import_module(module), name)
    names = listed(SECTIONS[module, name])
    elsewhere: set[str] = set()
    for base in re.findall(r"^(?:All of|As) \[`(\w+)`\]", SECTIONS[module, name], re.M):
        (key,) = [key for key in CLASSES if key[1] == base]
        elsewhere |= set(listed(SECTIONS[key]))
    attributes = set(getattr(cls, "__dataclass_fields__", {}))
    assert members(cls) - attributes <= set(names) | elsewhere
    assert set(names) <= members(cls)
    assert wrong_arguments(cls, names) == {}
