"""docs/environment.md names every environment variable that the package and its tests read."""

from __future__ import annotations

import re

from tests.pages import ROOT, text_of

_VARIABLE = re.compile(r"[\"'](LMCACHE_FAST_[A-Z_]+)[\"']")


def test_every_variable_in_the_code_is_on_the_page_and_the_other_way_round() -> None:
    in_code: set[str] = set()
    for folder in ("lmcache_fast", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            in_code |= set(_VARIABLE.findall(path.read_text(encoding="utf-8")))
    assert "LMCACHE_FAST_TRANSPORT" in in_code
    assert in_code == set(re.findall(r"`(LMCACHE_FAST_\w+)`", text_of("docs/environment.md")))
