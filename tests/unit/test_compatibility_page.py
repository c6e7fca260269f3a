"""The page that says which servers work was made from the table that is there now."""

from __future__ import annotations

from pathlib import Path

from tests.interop.checks import CHECKS
from tests.interop.matrix import CELLS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_has_every_server_and_nothing_fails() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    assert head[3:] == list(CHECKS)
    found = [(row[0], row[2] == "shm", row[1]) for row in rows]
    assert found == [(cell.version, cell.shared_memory, cell.transport) for cell in CELLS]
    assert all(row[3:] == ["yes"] * len(CHECKS) for row in rows)
