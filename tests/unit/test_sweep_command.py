"""The sweep's arguments: what is wrong is said before anything is started or asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_fast import cli

ENGINE = ["--engine-url", "http://127.0.0.1:9", "--model", "m", "--url", "tcp://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "Knorm,Nothing"], "'Nothing'; expected some of StreamingLLM"),
        (["--policies", ","], "names none"),
        (["--ratios", "0.5,half"], "--ratios: could not convert"),
        (["--ratios", "1.0"], "compression_ratio is 1.0"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--model", "large"], "expected one of tiny, small"),
        (["--url", "tcp://127.0.0.1:9"], "--url belongs to an engine"),
        (["--hf-config", "config.json"], "--hf-config belongs to an engine"),
        (["--json", "/nowhere/at/all.json"], "there is no folder '/nowhere/at'"),
        (ENGINE, "expected --model and --prompts too"),
        ([*ENGINE, "--prompts", "/nowhere/prompts"], "No such file"),
        ([*ENGINE, "--prompts", "{folder}/empty"], "has none"),
        ([*ENGINE, "--prompts", "{folder}/wrong"], "line 2 of"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "wrong").write_text("[1, 2]\n{}\n")
    assert cli.main(["sweep", *(word.format(folder=tmp_path) for word in arguments)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "starting" not in captured.err and not captured.out
