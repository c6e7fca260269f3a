"""Reports."""

from __future__ import annotations

import copy
import io
import json

import pytest

from lmcache_fast.errors import InvalidInputError
from lmcache_fast.metrics import Metrics, StreamPerfMetrics


def sample(fmt: str = "terminal", width: int = 80) -> Metrics:
    results = {"duration": 2.0, "output_tokens": 3000, "output_tput": 1500.0}
    return Metrics("Batch decode", {"num_request_streams": 4}, results, fmt, width)


def test_to_dict_has_the_published_form() -> None:
    assert sample().to_dict() == {
        "title": "Batch decode",
        "metrics": {
            "config": {"num_request_streams": 4},
            "results": {"duration": 2.0, "output_tokens": 3000, "output_tput": 1500.0},
        },
    }


def test_every_value_is_an_attribute_too() -> None:
    metrics = copy.copy(sample())
    assert (metrics.duration, metrics.output_tput, metrics.num_request_streams) == (2.0, 1500.0, 4)
    with pytest.raises(AttributeError, match="input_tokens"):
        _ = metrics.input_tokens


def test_the_table_has_every_value_and_keeps_to_its_width() -> None:
    out = io.StringIO()
    sample(width=50).emit(out)
    lines = out.getvalue().splitlines()
    assert {len(line) for line in lines} == {50}
    for shown in ("Batch decode", "4", "2.00", "3,000", "1,500.00"):
        assert any(shown in line for line in lines)


def test_emit_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    sample("json").emit()
    assert json.loads(capsys.readouterr().out) == sample().to_dict()


@pytest.mark.parametrize(("fmt", "width"), [("xml", 80), ("terminal", 0)])
def test_an_unknown_format_or_width_is_refused(fmt: str, width: int) -> None:
    with pytest.raises(InvalidInputError):
        sample(fmt, width)


def test_stream_metrics_are_worked_out_from_the_times_of_the_tokens() -> None:
    perf = StreamPerfMetrics.of(input_tokens=10, begin=1.0, token_times=[2.0, 2.5, 4.0], end=5.0)
    assert perf == StreamPerfMetrics(4.0, 10, 3, 2.5, 0.75, [0.5, 1.5], 1.0)
    assert StreamPerfMetrics.of(10, 1.0, [], 1.0) == StreamPerfMetrics(input_tokens=10)
