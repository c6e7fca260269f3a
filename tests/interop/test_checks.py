"""The checks of the compatibility table, on the servers of this run."""

from __future__ import annotations

import pytest

from tests.interop.checks import CHECKS
from tests.interop.servers import Server


@pytest.mark.parametrize("check", CHECKS)
def test_it_works_on_this_server(server: Server, check: str) -> None:
    CHECKS[check](server)
