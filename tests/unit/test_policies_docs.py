"""The examples of docs/policies.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {"__name__": "docs_policies"}
    for block in blocks:
        exec(block, namespace)
