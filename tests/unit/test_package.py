"""The package's front door: what it exports, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import lmcache_fast
from lmcache_fast import errors


def test_all_is_sorted_and_every_name_is_there() -> None:
    assert lmcache_fast.__all__ == sorted(lmcache_fast.__all__)
    for name in lmcache_fast.__all__:
        assert getattr(lmcache_fast, name) is not None
    assert set(lmcache_fast.__all__) <= set(dir(lmcache_fast))


def test_every_error_is_exported_and_has_one_root() -> None:
    tree = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    root = lmcache_fast.LMCacheFastError
    ours = {name for name, error in tree.items() if issubclass(error, root)}
    assert ours <= set(lmcache_fast.__all__)
    # The rest are upstream's names, under which old code catches all of ours.
    assert all(issubclass(root, tree[name]) for name in set(tree) - ours)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(lmcache_fast, "Nothing")  # noqa: B009 - a plain attribute would fail mypy


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import lmcache_fast, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_the_version_is_the_extensions_version() -> None:
    native = pytest.importorskip("lmcache_fast._native")
    assert re.fullmatch(r"\d+\.\d+\.\d+", lmcache_fast.__version__)
    assert native.__version__ == lmcache_fast.__version__
