"""Chunks as pickles: what real servers load and send, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_fast.errors import PayloadError
from lmcache_fast.layout import CACHE_DTYPES, KVLayout
from lmcache_fast.transport.pickle import decode_chunks, encode_chunks
from tests.unit.transport_chunks import CHUNK, LAYOUT, make_chunks, raw


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_plain_pickle_loads_what_we_write_and_so_do_we(dtype: str, planes: int) -> None:
    layout = KVLayout(3, 2, 5, CACHE_DTYPES[dtype], planes=planes)
    for count in (0, 1, 3):
        chunks = make_chunks(layout, count)
        data = encode_chunks(chunks)
        for loaded in (pickle.loads(data), decode_chunks(data, layout, CHUNK)):
            assert [(c.dtype, c.shape) for c in loaded] == [(c.dtype, c.shape) for c in chunks]
            assert [raw(c) for c in loaded] == [raw(c) for c in chunks]


def test_what_we_write_needs_nothing_of_ours() -> None:
    program = (
        "import pickle, sys; chunks = pickle.loads(sys.stdin.buffer.read()); chunks[0].zero_(); "
        "ours = [name for name in sys.modules if name.split('.')[0].startswith('lmcache')]; "
        "assert not ours; print(len(chunks))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-I", "-c", program],
        input=encode_chunks(make_chunks(LAYOUT, 2)),
        capture_output=True,
        timeout=120,
    )
    assert (done.stdout.strip(), done.stderr) == (b"2", b"")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_torch_tensors_of_every_dtype_are_read(dtype: str, protocol: int) -> None:
    layout = KVLayout(3, 2, 5, CACHE_DTYPES[dtype])
    chunks = [chunk.contiguous() for chunk in make_chunks(layout, 2)]
    data = pickle.dumps(chunks, protocol=protocol)
    if protocol == 2:  # bytes go as text there, through a call; no server does so
        with pytest.raises(PayloadError, match="_codecs"):
            decode_chunks(data, layout, CHUNK)
        return
    assert [raw(c) for c in decode_chunks(data, layout, CHUNK)] == [raw(c) for c in chunks]


def test_the_tensors_keep_the_message_alive_and_cost_no_copy() -> None:
    data = encode_chunks(make_chunks(LAYOUT, 1))
    expected = raw(pickle.loads(data)[0])
    start = np.frombuffer(data, np.uint8).ctypes.data
    (chunk,) = decode_chunks(data, LAYOUT, CHUNK)
    assert start < chunk.data_ptr() < start + len(data)
    del data
    gc.collect()
    assert raw(chunk) == expected


class Reduces:
    """Pickles as a call of ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_call_raises_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    command = f"touch {touched}"
    good = make_chunks(LAYOUT, 1)[0].contiguous()
    inner = pickle.dumps(Reduces(os.system, command))
    hostile: list[Any] = [
        Reduces(os.system, command),
        [Reduces(eval, f"open({str(touched)!r}, 'w')")],
        [Reduces(exec, f"open({str(touched)!r}, 'w')")],
        [Reduces(subprocess.Popen, ["touch", str(touched)])],
        [good, Reduces(os.popen, command)],
        [Reduces(pickle.loads, inner)],
        [Reduces(getattr, Reduces(__import__, "os"), "system")],
        [Reduces(torch.load, str(touched))],
        [Reduces(torch.storage._load_from_bytes, inner)],
        [Reduces(torch.storage._load_from_bytes, pickle.dumps(good))],
        [Reduces(torch.hub.load, "a/b", "c")],
        [Reduces(collections.OrderedDict, [(1, Reduces(os.system, command))])],
        [Reduces(torch.reshape, Reduces(os.system, command), (1,))],
    ]
    for value in hostile:
        try:
            data = pickle.dumps(value, protocol=protocol)
        except (pickle.PicklingError, TypeError):
            continue
        with pytest.raises(PayloadError):
            decode_chunks(data, LAYOUT, CHUNK)
    assert not touched.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch touched'\ntR.",  # protocol 0
        b"(S'touch touched'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch touched'\no.",  # OBJ
        b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00a\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01a\x85R.",
        b"\x80\x02cposix\nsystem\n)\x81.",  # NEWOBJ
        b"\x80\x04cposix\nsystem\n)}\x92.",  # NEWOBJ_EX
        b"\x80\x02cfunctools\npartial\ncposix\nsystem\n\x85}\x92.",
        b"\x80\x04cfunctools\npartial\nctorch\nfrombuffer\n\x85}\x8c\x05dtypecos\nsystem\ns\x92.",
        b"\x80\x02}cos\nsystem\n}b.",  # BUILD
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x02Pabc\n.",  # PERSID
        b"\x80\x02NQ.",  # BINPERSID
    ],
)
def test_no_opcode_leads_to_a_call(data: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_chunks(data, LAYOUT, CHUNK)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b".",
        b"\x80\xff].",
        b"\x80\x04].x",
        b"\x80\x04N.",
        b"\x80\x04]N" + b"a.",
        b"\x80\x04e.",
        b"\x80\x04](]\x94h\x00ae.",
        b"\x80\x04\x85.",
        b"h\x07.",
        b"\x8a\xff" + b"\xff" * 255 + b".",
        b"\x8e" + b"\xff" * 8 + b".",  # BINBYTES8 of 2^64 - 1
        b"\x96" + b"\x00" * 7 + b"\x7f.",  # BYTEARRAY8
        b"B\xff\xff\xff\xff.",
        b"X\xff\xff\xff\xff.",
        b"c" + b"a" * 1000,
        b"\x8c\x01\xff.",
    ],
)
def test_broken_pickles_and_huge_lengths_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_chunks(data, LAYOUT, CHUNK)


@pytest.mark.parametrize("data", [b"\x95" + b"\xff" * 8 + b"].", b"]r\xff\xff\xff\xff."])
def test_a_huge_frame_or_memo_costs_nothing(data: bytes) -> None:
    assert decode_chunks(data, LAYOUT, CHUNK) == []


def test_other_tensors_are_refused() -> None:
    good = make_chunks(LAYOUT, 1)[0].contiguous()
    wrong: list[Any] = [
        good,
        (good,),
        {"a": good},
        [[good]],
        [good.float()],
        [good.view(torch.float16)],
        [good[:1]],
        [good[..., :-1].contiguous()],
        [good.reshape(-1)],
        [good.transpose(0, 1).contiguous().transpose(0, 1)],
        [good.expand(2, *good.shape)[1:]],
        [good.new_zeros(1).expand(good.shape)],
        [good.float().requires_grad_()],
        [torch.nn.Parameter(good)],
        [good.to("meta")],
        [good.to_sparse()],
        [good.float().numpy()],
        [None],
        [b"x" * good.nbytes],
    ]
    for value in wrong:
        with pytest.raises(PayloadError):
            decode_chunks(pickle.dumps(value), LAYOUT, CHUNK)


def test_a_tensor_that_reaches_beyond_its_storage_is_refused() -> None:
    chunk = make_chunks(LAYOUT, 1)[0].contiguous()
    rebuild, (storage, _, shape, stride, *rest) = chunk.__reduce_ex__(4)
    for offset in (1, 2**40, 2**62, -1, 2**70, True, 0.0, None):
        value = [Reduces(rebuild, storage, offset, shape, stride, *rest)]
        with pytest.raises(PayloadError):
            decode_chunks(pickle.dumps(value), LAYOUT, CHUNK)


def test_nested_references_do_not_grow_the_work() -> None:
    doubled = b")" + b"".join(b"\x94h%c\x86" % depth for depth in range(200))
    for tail in (b"\x85.", b"\x940]h\xc8a.", b"0ctorch\nreshape\nh\xc7R."):
        with pytest.raises(PayloadError):
            decode_chunks(doubled + tail, LAYOUT, CHUNK)


@given(st.data())
def test_a_damaged_pickle_gives_the_right_shapes_or_an_error(data: st.DataObject) -> None:
    layout = KVLayout(1, 1, 2, torch.float16)
    torch_made = data.draw(st.booleans())
    chunks = [torch.zeros(layout.object_shape(CHUNK), dtype=layout.dtype) for _ in range(2)]
    message = bytearray(pickle.dumps(chunks) if torch_made else encode_chunks(chunks))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))] or message
    try:
        decoded = decode_chunks(bytes(message), layout, CHUNK)
    except PayloadError:
        return
    for chunk in decoded:
        assert chunk.dtype == layout.dtype and chunk.shape == layout.object_shape(CHUNK)
        assert len(raw(chunk)) == layout.token_bytes * CHUNK


@given(st.binary(max_size=200))
def test_any_bytes_give_a_list_or_an_error(data: bytes) -> None:
    with contextlib.suppress(PayloadError):
        assert isinstance(decode_chunks(data, LAYOUT, CHUNK), list)


def test_our_pickle_is_one_that_the_standard_library_can_disassemble() -> None:
    opcodes = [op.name for op, _, _ in pickletools.genops(encode_chunks(make_chunks(LAYOUT, 2)))]
    assert opcodes.count("BYTEARRAY8") == 2 and opcodes[-1] == "STOP"
