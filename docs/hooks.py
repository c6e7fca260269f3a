"""Makes the site of the repository's own paths, so that one link holds on both.

README.md, docs/*.md and examples/*.ipynb are pages; whatever else a page links to lies beside them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(<?([^)\s>]+)")
_FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2", re.M | re.S)
log = get_plugin_logger("site")


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that they have on the repository's pages."""
    config.mdx_configs["toc"]["slugify"] = _slug


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the pages, the theme's own files, and every other file that a page links to."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    taken = Files([file for file in files if file.src_dir != config.docs_dir])
    linked = {ROOT / str(name) for name in config.extra_css}
    for path in pages + notebooks:
        name = path.relative_to(ROOT)
        if path.suffix == ".ipynb":
            text = _notebook(json.loads(path.read_text(encoding="utf-8")), path.name)
            taken.append(File.generated(config, str(name.with_suffix(".md")), content=text))
            linked.add(path)
        else:
            text = path.read_text(encoding="utf-8")
            taken.append(_file(name, config))
        linked |= {(path.parent / target.partition("#")[0]).resolve() for target in _targets(text)}
    for path in sorted(linked - set(pages)):
        if path.is_file() and path.is_relative_to(ROOT):
            taken.append(_file(path.relative_to(ROOT), config))
    return taken


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Check the form of links to elsewhere; lead links to a notebook to its page."""
    for target in _targets(markdown):
        try:
            parts = urlsplit(target)
            good = parts.scheme in ("", "mailto", "data") or (
                parts.scheme == "https" and "." in (parts.hostname or "")
            )
        except ValueError:
            good = False
        if not good:
            log.warning("%s: the link %r is no https address", page.file.src_uri, target)
    if page.file.generated_by:  # a notebook's own page leads to the notebook
        return markdown
    return re.sub(r"(\]\([^):\s]+)\.ipynb(?=[)#])", r"\1.md", markdown)


def _file(name: Path, config: MkDocsConfig) -> File:
    return File(str(name), str(ROOT), config.site_dir, config.use_directory_urls)


def _targets(markdown: str) -> list[str]:
    """Return what the text links to, outside of its code."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", markdown))
    return _LINK.findall(prose)


def _slug(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def _notebook(notebook: dict[str, Any], name: str) -> str:
    """Write a notebook as Markdown: its text, its code, and what that printed and drew."""
    parts = [f"[Download this notebook]({name})"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    text = "".join(data.get("text/plain", "")).rstrip("\n")
    return f"```text\n{text}\n```" if text else ""
