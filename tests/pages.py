"""README.md and the pages below docs/, and the code in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def text_of(page: str) -> str:
    """Read a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    """Return the page's code in these languages, block by block."""
    return [code for language, code in _BLOCK.findall(text_of(page)) if language in languages]


def program(page: str) -> str:
    """Return the page's Python alone, each line where it is on the page."""
    page_text = text_of(page)
    parts = []
    end = 0
    for block in _BLOCK.finditer(page_text):
        if block.group(1) == "python":
            parts.append("\n" * page_text.count("\n", end, block.start(2)) + block.group(2))
            end = block.end(2)
    return "".join(parts)


def inline_code(page: str) -> list[str]:
    """Return what stands in single backticks outside of the blocks; a line's end is a space."""
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", text_of(page)))
    return [" ".join(span.split()) for span in spans]


def commands(page: str) -> list[list[str]]:
    """Return the words of every command in the page's shell blocks."""
    found: list[list[str]] = [[]]
    for block in blocks(page, "bash", "sh", "shell"):
        text = re.sub(r"(?m)(^|\s)#\s.*$", "", block.replace("\\\n", " ")) + "\n"
        lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
        lexer.whitespace_split = True
        lexer.whitespace = " \t"
        lexer.commenters = ""
        for word in lexer:
            if set(word) <= set(lexer.punctuation_chars):
                found.append([])
            else:
                found[-1].append(word)
    return [words for words in map(without_settings, found) if words]


def without_settings(words: list[str]) -> list[str]:
    """Leave out ``NAME=value`` before a program, and the folder that it lies in."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return [words[0].rpartition("/")[2], *words[1:]] if words else []
