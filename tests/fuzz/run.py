"""``python -m tests.fuzz.run --minutes 30 [TARGET ...]``: fuzz, with atheris where it is installed.

Without it inputs are mutated blindly. Each target gets its share of the time in a process of its
own. A finding is written to tests/corpus/TARGET/, where the unit tests replay it from then on, and
ends the run with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "corpus"


def keep(target: str, data: bytes) -> Path:
    """Write a finding to the corpus."""
    path = CORPUS / target / hashlib.sha1(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def mutate(rng: random.Random, samples: list[bytes]) -> bytes:
    """Change a sample a little."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(data):
                data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                other = rng.choice(samples)
                start = rng.randrange(len(other) + 1)
                data[place:place] = other[start : start + rng.randrange(64)]
            case _:
                del data[place:]
    return bytes(data)


def fuzz_blindly(target: str, seconds: float) -> None:
    """Fuzz one target with random changes of its samples."""
    from tests.fuzz.targets import TARGETS, seeds

    rng = random.Random()
    samples = seeds()[target] + [path.read_bytes() for path in (CORPUS / target).glob("*")]
    deadline = time.monotonic() + seconds
    runs = 0
    while time.monotonic() < deadline:
        data = mutate(rng, samples)
        runs += 1
        try:
            TARGETS[target](data)
        except BaseException as error:
            print(f"{target}: {error!r}; kept as {keep(target, data)}")
            sys.exit(1)
    print(f"{target}: {runs} runs")


def fuzz_with_atheris(target: str, seconds: float) -> None:
    """Fuzz one target, led by what it covers."""
    import atheris

    with atheris.instrument_imports(include=["lmcache_fast"]):
        from tests.fuzz.targets import TARGETS, seeds

    with tempfile.TemporaryDirectory() as folder:
        for index, data in enumerate(seeds()[target]):
            Path(folder, f"seed{index}").write_bytes(data)
        arguments = [
            sys.argv[0],
            f"-max_total_time={seconds:.0f}",
            "-max_len=8192",
            "-timeout=20",
            "-rss_limit_mb=3000",
            f"-artifact_prefix={folder}/finding-",
            "-print_final_stats=1",
            folder,
            *([str(CORPUS / target)] if (CORPUS / target).is_dir() else []),
        ]

        def run(data: bytes) -> None:
            try:
                TARGETS[target](data)
            except BaseException:
                print(f"{target}: kept as {keep(target, data)}", flush=True)
                raise

        atheris.Setup(arguments, run)
        atheris.Fuzz()


def main() -> None:
    """Fuzz from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (target,) = arguments.targets
        has_atheris = importlib.util.find_spec("atheris") is not None
        (fuzz_with_atheris if has_atheris else fuzz_blindly)(target, arguments.minutes * 60)
        return
    from tests.fuzz.targets import TARGETS

    targets = arguments.targets or list(TARGETS)
    failed = []
    for target in targets:
        share = arguments.minutes / len(targets)
        command = [sys.executable, "-m", "tests.fuzz.run", "--one", f"--minutes={share}", target]
        print(f"== {target}, {share:.1f} minutes", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(target)
    print(f"fuzzed {len(targets)} targets; findings in: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
