"""Three machines for all tests of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines import Machines, machines


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """The machines, started for all tests."""
    with machines(tmp_path_factory.mktemp("cluster"), ["north", "east", "south"]) as found:
        yield found


@pytest.fixture
def cluster(running: Machines) -> Iterator[Machines]:
    """The machines, all alive; after the test nothing may be locked on those that still are."""
    running.revive()
    yield running
    for machine in running:
        if machine.alive:
            machine.server.wait_nothing_held()
