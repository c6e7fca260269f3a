"""Our SDK takes what upstream's does: the same names in the same order, with the same defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop import peer

DUMPER = Path(__file__).with_name("dump_signatures.py")
MODULES = {
    "0.5.2": ["", "kvcache", "stream", "batch"],
    "0.5.6": ["", "cache_kind", "context", "kvcache", "qcache", "request", "batch"],
}
#: Upstream's insides that its modules happen to show.
INSIDES = {
    "ContiguousTransferWrapper",
    "transfer_ctx",
    "maybe_submit_lookup_request",
    "check_lookup_result",
    "end_session",
}
#: Methods in the first generation, properties in the second; ours are both.
ACCESSORS = {
    "stream_id",
    "suffix_tokens",
    "decoded_tokens",
    "output_text",
    "output_tokens",
    "is_done",
}
#: One module serves both generations, so where they differ ours has every name, by keyword.
BY_KEYWORD_ONLY = {
    ("0.5.2", "batch.LMCacheBatchedStream.add"),  # stream
    ("0.5.6", "batch.LMCacheBatchedStream.add"),  # request_stream
    ("0.5.6", "batch.LMCacheBatchedStream.modify"),  # stream_ids comes last
}


def dump(
    python: object, environment: dict[str, str], package: str, owner: str, version: str
) -> Any:
    done = subprocess.run(
        [str(python), DUMPER, package, owner, *MODULES[version]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("signatures ")]
    return json.loads(line.removeprefix("signatures "))


def differences(theirs: Any, ours: Any, where: str) -> dict[str, str]:
    """Return what ours lacks, by the place where it lacks it."""
    name = where.rpartition(".")[2]
    if theirs == ours:
        return {}
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: dict[str, str] = {}
        for member in theirs:
            if member not in INSIDES:
                place = f"{where}.{member}"
                missing = {place: "missing"}
                found |= (
                    differences(theirs[member], ours[member], place) if member in ours else missing
                )
        return found
    if ours == "property" and name in ACCESSORS and [p[0] for p in theirs] == ["self"]:
        return {}
    if isinstance(theirs, list) and isinstance(ours, list):
        more = ours[len(theirs) :]
        optional = all(default is not None for _, _, default in more)
        if ours[: len(theirs)] == theirs and optional:
            return {}
    return {where: f"upstream {theirs}, ours {ours}"}


def takes_by_keyword(theirs: list[Any], ours: list[Any]) -> bool:
    defaults = {name: default for name, _, default in ours}
    return all(
        name in defaults and default in (None, defaults[name]) for name, _, default in theirs
    )


@pytest.mark.parametrize("version", MODULES)
def test_signatures_are_upstreams(version: str) -> None:
    upstream = peer.ensure(version)
    theirs = dump(upstream.python, upstream.environment(), "lmcache.sdk", "lmcache.sdk", version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ours = dump(sys.executable, environment, "lmcache_fast.sdk", "lmcache_fast", version)

    found: dict[str, str] = {}
    compared = 0
    for module, names in theirs.items():
        assert names, module
        compared += len(names)
        found |= differences(names, ours[module], module)
    assert compared > 15
    expected = {place for release, place in BY_KEYWORD_ONLY if release == version}
    assert set(found) == expected, found
    for place in expected:
        module, kind, method = place.split(".")
        assert takes_by_keyword(theirs[module][kind][method], ours[module][kind][method]), place
