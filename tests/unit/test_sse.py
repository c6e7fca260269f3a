"""The event stream parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.sse import SSEParser

PAYLOADS = st.lists(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20),
    min_size=1,
    max_size=3,
)


def parse(*pieces: bytes) -> tuple[list[str], str | None]:
    parser = SSEParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events, parser.close()


@given(
    events=st.lists(PAYLOADS, max_size=5),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    bom=st.booleans(),
    data=st.data(),
)
def test_any_split_of_the_bytes_gives_the_same_events(
    events: list[list[str]], ending: str, bom: bool, data: st.DataObject
) -> None:
    text = "\ufeff" if bom else ""
    for lines in events:
        text += f": comment{ending}event: x{ending}"
        text += "".join(f"data: {line}{ending}" for line in lines) + ending
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    expected = (["\n".join(lines) for lines in events], None)
    assert parse(*pieces) == expected
    assert parse(*(raw[i : i + 1] for i in range(len(raw)))) == expected


@given(st.binary(max_size=200))
def test_no_bytes_break_it(raw: bytes) -> None:
    parse(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data:no space\n\n", ["no space"]),
        (b"data:  two spaces\n\n", [" two spaces"]),
        (b"data\n\n", [""]),
        (b"\n\n: only a comment\n\n", []),
        (b"id: 1\nretry: 5\ndatax: y\n\n", []),
        (b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n", ["a\nb", "c"]),
        # What ends a line for str.splitlines() does not here.
        ("data: a\u2028b\u2029c\x85d\x0be\n\n".encode(), ["a\u2028b\u2029c\x85d\x0be"]),
    ],
)
def test_fields(raw: bytes, expected: list[str]) -> None:
    assert parse(raw) == (expected, None)


@pytest.mark.parametrize("raw", [b"data: x\n", b"data: x"])
def test_an_event_that_was_not_ended_is_told_apart(raw: bytes) -> None:
    assert parse(raw) == ([], "x")
