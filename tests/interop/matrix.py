"""Every release, with and without shared memory, over each of its transports; as a table.

``python -m tests.interop.matrix --write docs/compatibility.md`` runs it and writes the page; with
``--only 0.5.6`` it runs one release and prints its rows. Takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.interop import peer
from tests.interop.checks import CHECKS, connect
from tests.interop.servers import Server, real_server

_PAGE = """\
# Compatibility

Which LMCache servers this package works with: found by trying, on a machine without a GPU. This
page is written by `python -m tests.interop.matrix --write docs/compatibility.md`, which starts
each server and runs the checks of `tests/interop/checks.py` on it.

{table}

- **transport**: what requests travel over. `zmq` is the server's default; `grpc` is `--transport
  grpc`, which servers have from 0.5.6 on, and takes `pip install lmcache_fast[grpc]` and an
  address such as `grpc://localhost:6555`.
- **KV through**: how the KV itself travels. `shm` is the server's shared memory, on its own
  machine; `pickle` and `inline` are inside the messages (see [transports](transports.md)), for
  servers without a shared pool.
- **store**: whole chunks, once; a longer request adds its new ones.
- **retrieve**: another client gets the same bytes.
- **edit**: half the tokens dropped, keys rotated, equal to the edit as a plain function on a
  tensor.
- **upstream's SDK**: what it stores, of the server's release, we retrieve bit for bit; and the
  other way round.

After each check the server must hold no lock and no session. Servers from 0.5.4 on need
`--supported-transfer-mode auto`; one started without it is refused with a message that says so.
Releases before 0.5.2 are refused. One newer than 0.5.7 is spoken to like 0.5.7, with a warning.
"""


@dataclass(frozen=True)
class Cell:
    """One way to run a server.

    Args:
        version: its release.
        shared_memory: whether it keeps its cache in a shared segment.
        transport: ``"zmq"`` or ``"grpc"``.
    """

    version: str
    shared_memory: bool
    transport: str


CELLS = [
    Cell(version, shared_memory, transport)
    for version in peer.KNOWN_VERSIONS
    for transport in peer.transports(version)
    for shared_memory in (True, False)
]


def run_cell(cell: Cell, folder: Path) -> list[str]:
    """Run all checks on a server of its own; return the row of the table."""
    options = {"shared_memory": cell.shared_memory, "transport": cell.transport}
    with real_server(peer.ensure(cell.version), folder, **options) as server:
        with connect(server) as client:
            path = client.transport_name
        results = [_result(name, server) for name in CHECKS]
    return [cell.version, cell.transport, path, *results]


def _result(name: str, server: Server) -> str:
    try:
        CHECKS[name](server)
        server.wait_nothing_held()
    except Exception:
        traceback.print_exc()
        return "**no**"
    return "yes"


def table(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table under its head."""
    head = ["server", "transport", "KV through", *CHECKS]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the matrix; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--only", nargs="+", default=peer.KNOWN_VERSIONS, help="releases to run")
    arguments = parser.parse_args()
    rows = []
    for cell in CELLS:
        if cell.version in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_cell(cell, Path(folder)))
            print(" ".join(rows[-1]), flush=True)
    if arguments.write:
        arguments.write.write_text(_PAGE.format(table=table(rows)))
    return int(any("**no**" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
