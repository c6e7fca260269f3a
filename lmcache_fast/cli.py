"""The command ``lmcache-fast``: one subcommand a part, each loaded only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_fast.errors import LMCacheFastError
from lmcache_fast.serve.processes import end_with_parent


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with ``add_arguments(parser)`` and ``run(args) -> int``."""

    module: str
    help: str
    extra: str | None = None


COMMANDS: dict[str, Command] = {
    "server": Command(
        "lmcache_fast.serve.server.command", "run the embedded cache server", "server"
    ),
    "engine": Command("lmcache_fast.serve.engine.command", "run the embedded CPU engine", "server"),
    "demo": Command(
        "lmcache_fast.serve.demo.command", "measure what dropping half of the KV gains", "demo"
    ),
    "sweep": Command(
        "lmcache_fast.sweep.command", "measure what policies gain and what they change", "demo"
    ),
    "doctor": Command("lmcache_fast.doctor", "check a server as a client would use it"),
    "bench": Command("lmcache_fast.bench", "measure store and retrieve against a server", "bench"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status.

    Args:
        argv: the arguments after the program's name; those of this process by default.
    """
    end_with_parent()
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    try:
        return _run(arguments, chosen)
    except ModuleNotFoundError as error:
        command = COMMANDS.get(chosen)
        missing = (error.name or "").split(".")[0]
        if command is None or command.extra is None or missing in ("", "lmcache_fast"):
            raise
        print(
            f"lmcache-fast {chosen}: the module {missing!r} is missing; "
            f"pip install 'lmcache_fast[{command.extra}]'",
            file=sys.stderr,
        )
        return 1
    except LMCacheFastError as error:
        print(f"lmcache-fast {chosen}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str], chosen: str) -> int:
    parser = argparse.ArgumentParser(
        prog="lmcache-fast", description="A fast client for LMCache, with embedded parts to try it."
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if name == chosen:  # the others stay unloaded: each pulls in much
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if args.version:
        from lmcache_fast import __version__

        print(f"lmcache-fast {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
