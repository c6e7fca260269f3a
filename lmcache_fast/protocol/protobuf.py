"""The few parts of protobuf's wire format that LMCache's messages need.

A message is its fields one after the other: a varint with the field's number and kind, then the
value. That is all there is to it, so a compiler and its runtime would be more code than this.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from lmcache_fast.errors import ProtocolError

#: A field as it was read: a varint's or fixed number's bits, or the bytes of anything else.
Value: TypeAlias = "int | memoryview"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def varint(value: int) -> bytes:
    """Encode a number from 0 on: seven bits a byte, lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer(field: int, value: int | None) -> bytes:
    """Encode an integer (from 0 on) or truth value; None leaves the field out."""
    return b"" if value is None else varint(field << 3 | _VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    """Encode a floating point number of 64 bits."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def head(field: int, length: int) -> bytes:
    """Encode what stands before ``length`` bytes of a string, message or packed list."""
    return varint(field << 3 | _BYTES) + varint(length)


def data(field: int, value: bytes | str | None) -> bytes:
    """Encode a string, bytes or an encoded message; None leaves the field out."""
    if value is None:
        return b""
    content = value.encode() if isinstance(value, str) else value
    return head(field, len(content)) + content


def read(message: bytes) -> dict[int, Value]:
    """Split a message into its fields by number; of a field that comes twice, the last counts.

    Raises:
        ProtocolError: this is no protobuf message.
    """
    view = memoryview(message)
    fields: dict[int, Value] = {}
    position = 0
    while position < len(view):
        tag, position = _read_varint(view, position)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            fields[field], position = _read_varint(view, position)
            continue
        if kind == _BYTES:
            length, position = _read_varint(view, position)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise ProtocolError(f"no protobuf message: field {field} is of the kind {kind}")
        if length > len(view) - position:
            raise ProtocolError(f"no protobuf message: field {field} is cut off")
        content = view[position : position + length]
        fields[field] = content if kind == _BYTES else int.from_bytes(content, "little")
        position += length
    return fields


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(view[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 2**64 - 1, position + index + 1
    raise ProtocolError("no protobuf message: a number is cut off or has more than 64 bits")
