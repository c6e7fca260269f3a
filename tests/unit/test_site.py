"""The documentation's site: what its build takes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Lay out a small repository with the real settings and hooks, and pages of its own."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = "nav: [README.md, docs/guide.md, examples/tour.md]\n"
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"^nav:\n(?: .*\n)+", nav, settings, flags=re.M))
    for folder in ("docs", "examples", "bench/results"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("hooks.py", "site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    (tmp_path / "bench/results/speed.png").write_bytes(PNG)
    (tmp_path / "README.md").write_text(
        "# Front\n[Guide](docs/guide.md#what-if-), [tour](examples/tour.ipynb)\n"
    )
    (tmp_path / "docs/guide.md").write_text(
        "# Guide\n## What *if* ...\n![speed](../bench/results/speed.png) and the\n"
        "[hooks](hooks.py), [elsewhere](https://example.org/a#b), [back](../README.md)\n"
        "```python\nprint([nothing](here))\n```\n"
    )
    cells = [
        {"cell_type": "markdown", "source": ["# Tour\n", "[Guide](../docs/guide.md)"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["it printed\n", "this"]},
                {"output_type": "display_data", "data": {"image/png": "aGVs\nbG8="}},
            ],
        },
    ]
    (tmp_path / "examples/tour.ipynb").write_text(json.dumps({"cells": cells}))
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(tree / "mkdocs.yml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_links_of_the_repository_hold_on_the_site(tree: Path) -> None:
    built = build(tree)
    assert built.returncode == 0, built.stdout
    site = tree / "build/site"
    front = (site / "index.html").read_text()
    assert 'href="docs/guide.html#what-if-"' in front and 'href="examples/tour.html"' in front
    guide = (site / "docs/guide.html").read_text()
    assert 'id="what-if-"' in guide
    assert 'src="../bench/results/speed.png"' in guide
    assert (site / "bench/results/speed.png").read_bytes() == PNG
    assert (site / "docs/hooks.py").is_file()
    assert 'href="docs/site.css"' in front and (site / "docs/site.css").is_file()


def test_a_notebook_is_a_page_with_its_output_and_can_be_had_itself(tree: Path) -> None:
    assert build(tree).returncode == 0
    tour = (tree / "build/site/examples/tour.html").read_text()
    assert "it printed\nthis" in tour and 'src="data:image/png;base64,aGVsbG8="' in tour
    assert 'href="../docs/guide.html"' in tour and 'href="tour.ipynb"' in tour
    assert (tree / "build/site/examples/tour.ipynb").is_file()


#: Links that lead nowhere, as a page below docs/ has them, and what the build says of each.
BROKEN = {
    "[gone](../docs/gone.md)": "a link '../docs/gone.md'",
    "[gone](../bench/gone.py)": "a link '../bench/gone.py'",
    "![gone](../bench/results/gone.png)": "a link '../bench/results/gone.png'",
    "[guide](../docs/guide.md#nothing)": "a link '../docs/guide.md#nothing'",
    "[here](#nowhere)": "a link '#nowhere'",
    "[plain](http://example.org/)": "the link 'http://example.org/' is no https address",
    "[typing error](https:/example.org)": "the link 'https:/example.org' is no https address",
    "[outside](../../outside.md)": "a link '../../outside.md'",
}


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "examples/tour.ipynb"])
def test_every_link_to_nothing_fails_the_build(tree: Path, page: str) -> None:
    (tree.parent / "outside.md").write_text("# Not ours\n")
    path = tree / page
    text = "\n" + " ".join(BROKEN)
    complaints = list(BROKEN.values())
    if page == "README.md":
        text, complaints = (
            text.replace("../", ""),
            [line.replace("../", "") for line in complaints],
        )
    if path.suffix == ".ipynb":
        notebook = json.loads(path.read_text())
        notebook["cells"][0]["source"].append(text)
        path.write_text(json.dumps(notebook))
    else:
        path.write_text(path.read_text() + text)
    built = build(tree)
    assert built.returncode != 0
    assert [complaint for complaint in complaints if complaint not in built.stdout] == []


def test_a_page_that_the_navigation_leaves_out_fails_the_build(tree: Path) -> None:
    (tree / "docs/forgotten.md").write_text("# Forgotten\n")
    built = build(tree)
    assert built.returncode != 0 and "forgotten.md" in built.stdout
