"""Run a program whose ``lmcache.sdk`` is ours."""

from __future__ import annotations

import os
import runpy
import sys

import lmcache_fast.dropin  # noqa: F401  (importing it is what it is for)

USAGE = """usage: python -m lmcache_fast.dropin SCRIPT [ARGUMENT ...]
       python -m lmcache_fast.dropin -m MODULE [ARGUMENT ...]

Runs a Python program in which lmcache.sdk is lmcache_fast.sdk."""


def main() -> None:
    """Run the program that the command line names, as Python itself would."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
    elif arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        if not getattr(sys.flags, "safe_path", False):
            # Started with -m, Python has put the current folder where the script's belongs.
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        print(USAGE, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
