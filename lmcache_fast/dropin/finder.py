"""Finders that answer imports of ``lmcache.sdk``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "lmcache"
_THEIRS = "lmcache.sdk"
_OURS = "lmcache_fast.sdk"
#: The modules that are ours; others below lmcache.sdk belong to upstream's insides.
_MODULES = ("batch", "cache_kind", "context", "kvcache", "qcache", "request", "stream")


class _Package(Loader):
    """Makes an empty package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Stands in for lmcache, which is not installed; only lmcache.sdk is there."


class _SDKPackage(_Package):
    """Makes a package that has what our SDK has."""

    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(_OURS)
        module.__doc__ = ours.__doc__
        vars(module).update(
            {"__all__": ours.__all__, **{n: getattr(ours, n) for n in ours.__all__}}
        )


class _SDKModule(_Package):
    """Puts one of our modules in the place of the one that is being imported."""

    def exec_module(self, module: ModuleType) -> None:
        # What sys.modules has at its end is what an import gives. Our module keeps its own name, so
        # that there is one of each class, whichever way it was imported.
        name = module.__name__
        sys.modules[name] = importlib.import_module(_OURS + name.removeprefix(_THEIRS))


class _SDKFinder(MetaPathFinder):
    """Comes before all others: finds lmcache.sdk in lmcache_fast."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _THEIRS:
            spec = ModuleSpec(fullname, _SDKPackage(), is_package=True)
            # Where upstream's insides find what is not ours.
            spec.submodule_search_locations = [os.path.join(f, "sdk") for f in path or ()]
            return spec
        parent, _, name = fullname.rpartition(".")
        if parent == _THEIRS and name in _MODULES:
            return ModuleSpec(fullname, _SDKModule())
        return None


class _PackageFinder(MetaPathFinder):
    """Comes after all others: finds an empty lmcache where there is none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Package(), is_package=True) if fullname == _PACKAGE else None


_first, _last = _SDKFinder(), _PackageFinder()


def install() -> None:
    """Let imports of ``lmcache.sdk`` give ``lmcache_fast.sdk`` from now on; again: nothing.

    Raises:
        ImportError: ``lmcache.sdk`` was imported before: the program would use half of each.
    """
    if _first in sys.meta_path:
        return
    early = sorted(name for name in sys.modules if f"{name}.".startswith(f"{_THEIRS}."))
    if early:
        raise ImportError(
            f"lmcache_fast.dropin: {', '.join(early)} had been imported before; import "
            "lmcache_fast.dropin first"
        )
    sys.meta_path.insert(0, _first)
    sys.meta_path.append(_last)
