"""Plans of runs: coding them and cutting them down to chunks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast import runs


def expand(plan: np.ndarray) -> dict[int, int]:
    """Target row -> source row, one entry a row."""
    return {
        int(target) + i: int(source) + i for source, target, count in plan for i in range(count)
    }


def test_no_tokens_are_no_runs() -> None:
    assert runs.whole(0).shape == (0, 3)
    assert runs.from_positions(np.zeros(0, np.int64)).shape == (0, 3)


def test_the_whole_is_one_run() -> None:
    assert runs.whole(5).tolist() == [[0, 0, 5]]


def test_neighbouring_positions_share_a_run() -> None:
    positions = np.array([0, 1, 2, 7, 8, 5], np.int64)
    assert runs.from_positions(positions).tolist() == [[0, 0, 3], [7, 3, 2], [5, 5, 1]]


@given(st.lists(st.integers(0, 60), max_size=60))
def test_run_length_coding_keeps_every_row(positions: list[int]) -> None:
    plan = runs.from_positions(np.array(positions, np.int64))
    assert expand(plan) == dict(enumerate(positions))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.integers(1, 9),
    st.data(),
)
def test_cutting_to_chunks_keeps_their_rows_and_says_where_they_came_from(
    positions: list[int], chunk: int, data: st.DataObject
) -> None:
    plan = runs.from_positions(np.array(positions, np.int64))
    num_chunks = len(positions) // chunk
    wanted = sorted(data.draw(st.sets(st.integers(0, max(num_chunks - 1, 0)))))
    wanted = [index for index in wanted if index < num_chunks]

    cut, origins = runs.for_chunks(plan, wanted, chunk)

    expected = {
        place * chunk + i: positions[index * chunk + i]
        for place, index in enumerate(wanted)
        for i in range(chunk)
    }
    assert expand(cut) == expected
    for (source, _, _), (run, skipped) in zip(cut, origins, strict=True):
        assert plan[run, 0] + skipped == source
