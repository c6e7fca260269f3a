"""The drop-in: imports of lmcache.sdk give ours, with lmcache installed and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = {
    "lmcache/__init__.py": "__version__ = '0.0'",
    "lmcache/other.py": "from lmcache.sdk.inside import WHO",
    "lmcache/sdk/__init__.py": "raise AssertionError('upstream was imported')",
    "lmcache/sdk/kvcache.py": "raise AssertionError('upstream was imported')",
    "lmcache/sdk/inside.py": "from lmcache.sdk.cache_kind import LMCacheSDKCacheKind as WHO",
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT), str(folder / "site"), *(p for p in sys.path if p and p != str(ROOT))]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output(folder: Path, *arguments: str) -> list[str]:
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(params=[True, False], ids=["installed", "not-installed"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    """Whether the programs find an lmcache; it is a made-up one."""
    files = INSTALLED if request.param else {}
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return bool(request.param)


IMPORTS = """
import importlib
import lmcache.sdk
import lmcache.sdk.kvcache as lmc_sdk
from lmcache.sdk import LMCacheSDKCacheKind, batch, connect
from lmcache.sdk.request import create_request
import lmcache_fast.sdk as ours
for name in "batch cache_kind context kvcache qcache request stream".split():
    theirs = importlib.import_module("lmcache.sdk." + name)
    assert theirs is importlib.import_module("lmcache_fast.sdk." + name), name
    assert getattr(lmcache.sdk, name) is theirs, name
assert lmc_sdk is ours.kvcache and batch is ours.batch and connect is ours.connect
assert create_request is ours.request.create_request
assert LMCacheSDKCacheKind is ours.LMCacheSDKCacheKind
assert lmc_sdk.__name__ == lmc_sdk.__spec__.name == "lmcache_fast.sdk.kvcache"
"""


OTHERS = """
try:
    import lmcache.other
    assert lmcache.other.WHO is LMCacheSDKCacheKind
    from lmcache.sdk import inside
    print(lmcache.__version__, inside.__name__)
except ModuleNotFoundError as error:
    print(error)
try:
    import lmcache.sdk.waiting
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_sdk_is_ours_and_everything_else_stays_what_it_is(
    installed: bool, tmp_path: Path
) -> None:
    other = "0.0 lmcache.sdk.inside" if installed else "No module named 'lmcache.other'"
    expected = [other, "No module named 'lmcache.sdk.waiting'"]
    assert output(tmp_path, "-c", f"import lmcache_fast.dropin{IMPORTS}{OTHERS}") == expected


DOCUMENTED = """
import torch
from tests.unit.sdk_fakes import FakeClient, FakeEngine, as_client, kv_for
fake = FakeClient()
ctx, post_completion, prompt_token_ids = as_client(fake), FakeEngine(fake), list(range(8))
{blocks}
tensors = {{Kind.KV: kv_for(range(8)), Kind.QUERY: kv_for(range(8))[:1]}}
kv, tokens = keep_what_is_asked_for(tensors, list(range(8)))
assert tokens == [4, 5, 6, 7] and torch.equal(kv, kv_for(tokens))
stream.generate({{"max_tokens": 1}})
stream.modify_kv(lambda tensors, tokens: (tensors[Kind.KV] * 2, tokens))
assert stream.cache_salt
print("done")
"""


def test_the_examples_of_the_documentation_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 4
    text = DOCUMENTED.format(blocks="\n".join(blocks))
    assert output(tmp_path, "-c", text) == ["done"]


SHOW = """
import sys, beside
print(__name__, type(sys.meta_path[0]).__module__, sys.argv)
sys.exit(7)
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_program_is_run_as_python_would_run_it(tmp_path: Path, as_module: bool) -> None:
    folder = tmp_path if as_module else tmp_path / "scripts"
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").touch()
    (folder / "program.py").write_text(SHOW)
    script = os.path.join("scripts", "program.py")
    program = ["-m", "program"] if as_module else [script]
    done = run(tmp_path, "-m", "lmcache_fast.dropin", *program, "--flag", "one")
    assert (done.returncode, done.stderr) == (7, "")
    argv = [str(folder / "program.py") if as_module else script, "--flag", "one"]
    assert done.stdout == f"__main__ lmcache_fast.dropin.finder {argv}\n"


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["-x"], 2), (["-m"], 2), (["-h"], 0)])
def test_a_wrong_command_line_shows_the_right_one(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    done = run(tmp_path, "-m", "lmcache_fast.dropin", *arguments)
    assert done.returncode == code
    assert "usage: python -m lmcache_fast.dropin" in done.stdout + done.stderr


def test_coming_too_late_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lmcache" / "sdk").mkdir(parents=True)
    (tmp_path / "lmcache" / "sdk" / "batch.py").touch()
    done = run(tmp_path, "-c", "import lmcache.sdk.batch\nimport lmcache_fast.dropin")
    assert done.returncode == 1
    assert "lmcache.sdk, lmcache.sdk.batch had been imported before" in done.stderr


def test_importing_it_twice_changes_nothing(tmp_path: Path) -> None:
    text = """
import sys, lmcache_fast.dropin
before = list(sys.meta_path)
lmcache_fast.dropin.install()
print(before == sys.meta_path)
"""
    assert output(tmp_path, "-c", text) == ["True"]
