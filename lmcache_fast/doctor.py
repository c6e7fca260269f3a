"""``lmcache-fast doctor``: checks a server as a client would use it."""

from __future__ import annotations

import argparse
import secrets
import time
import warnings

import torch

from lmcache_fast.client import KVClient
from lmcache_fast.errors import LMCacheFastError
from lmcache_fast.layout import KVLayout
from lmcache_fast.protocol.channel import transport_of
from lmcache_fast.protocol.registrations import RegisteredModel
from lmcache_fast.protocol.server_info import ServerInfo, read_models, read_server_info

#: What the round trip uses where no registered model's layout is known: a small one of its own.
PRIVATE_MODEL = "lmcache_fast-doctor"
PRIVATE_LAYOUT = KVLayout(2, 1, 16, torch.bfloat16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("--url", default="tcp://localhost:6555", help="the server's address")
    parser.add_argument(
        "--http-url", default="http://localhost:8080", help="the server's HTTP address"
    )
    parser.add_argument("--model", help="a model that must be registered, by its engine's name")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds one answer may take")


def run(args: argparse.Namespace) -> int:
    """Print one line a check; return 0 if none failed, else 1."""
    report = _Report()
    try:
        info = read_server_info(args.http_url, args.timeout, transport_of(args.url))
        _report_info(report, info)
        models = read_models(args.http_url, args.timeout)
    except LMCacheFastError as error:
        report.fail("server", str(error))
        return report.exit_code
    model, layout = _choose_model(report, models, args.model)
    try:
        _check_transfer(report, args, model, layout)
    except LMCacheFastError as error:
        report.fail("transfer", str(error))
    return report.exit_code


class _Report:
    def __init__(self) -> None:
        self.exit_code = 0

    def ok(self, what: str, text: str) -> None:
        print(f"ok    {what}: {text}", flush=True)

    def note(self, what: str, text: str) -> None:
        """Say what works less well than it could."""
        print(f"note  {what}: {text}", flush=True)

    def fail(self, what: str, text: str) -> None:
        print(f"FAIL  {what}: {text}", flush=True)
        self.exit_code = 1


def _report_info(report: _Report, info: ServerInfo) -> None:
    report.ok("server", f"LMCache {info.version}, spoken to as {info.dialect.release}")
    report.ok("transfer mode", f"{info.transfer_mode} over {info.transport}")
    report.ok(
        "settings",
        f"{info.chunk_size} tokens a chunk, read locks {info.read_ttl:g} s, "
        f"write locks {info.write_ttl:g} s",
    )


def _choose_model(
    report: _Report, models: dict[str, RegisteredModel], wanted: str | None
) -> tuple[str, KVLayout]:
    """Report the registered models; return the one to try a transfer with, and its layout."""
    for name, model in sorted(models.items()):
        if model.layout is None:
            report.note("model", f"{name!r}: layout unknown: {model.problem}")
        else:
            report.ok("model", f"{name!r}: {_describe(model.layout)}")
    if not models:
        report.note("models", "no engine has registered one")
    if wanted is not None and wanted not in models:
        report.fail("model", f"{wanted!r} is not registered; the engine's name for it is wanted")
    for name in models if wanted is None else [wanted]:
        layout = models[name].layout if name in models else None
        if layout is not None:
            return name, layout
    return PRIVATE_MODEL, PRIVATE_LAYOUT


def _describe(layout: KVLayout) -> str:
    heads = layout.num_kv_heads  # one also where the registration does not tell
    return (
        f"{layout.num_layers} layers, "
        f"{f'{heads} heads' if heads > 1 else 'rows'} of {layout.head_dim} elements, "
        f"{layout.dtype_name}, {layout.planes} plane{'s' * (layout.planes > 1)}, "
        f"{layout.token_bytes} bytes a token"
    )


def _check_transfer(
    report: _Report, args: argparse.Namespace, model: str, layout: KVLayout
) -> None:
    """Register, and store and retrieve one chunk under a salt that nobody else has."""
    salt = f"lmcache_fast-doctor-{secrets.token_hex(8)}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = KVClient(args.url, args.http_url, model, layout=layout, timeout=args.timeout)
    with client:
        report.ok("messages", f"{args.url} answers; registered as {model!r}")
        for warning in caught:
            report.note("warning", str(warning.message))
        if client.transport_name == "shm":
            report.ok("transport", "shm: the server's pool is mapped")
        else:
            report.note("transport", f"{client.transport_name}: chunks travel inside the messages")
        tokens = [secrets.randbits(31) for _ in range(client.chunk_size)]
        noise = torch.randint(0, 256, (*layout.kv_shape(len(tokens))[:-1], layout.row_bytes))
        kv = noise.to(torch.uint8).view(layout.dtype)
        start = time.perf_counter()
        stored = client.store(kv, tokens, salt)
        middle = time.perf_counter()
        found = client.retrieve(tokens, salt)
        end = time.perf_counter()
        if not stored or found is None:
            what = "stored" if not stored else "found again"
            report.fail("round trip", f"a chunk could not be {what}")
        elif not torch.equal(found.view(torch.uint8), kv.view(torch.uint8)):
            report.fail("round trip", "the chunk came back with other bytes")
        else:
            report.ok(
                "round trip",
                f"one chunk of {kv.nbytes} bytes, bit for bit: store "
                f"{1e3 * (middle - start):.1f} ms, retrieve {1e3 * (end - middle):.1f} ms",
            )
