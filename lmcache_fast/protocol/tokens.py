"""Token ids as the protocol wants them, encoded once and without a Python loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_fast.arguments import TokenIds, check_tokens

_UINT32 = 0xCE  # msgpack: a big-endian uint32 follows
_ARRAY32 = b"\xdd"  # msgpack: an array with a big-endian uint32 length follows


class PackedTokens:
    """Token ids in the forms that go over the wire; prefixes share the encoded bytes.

    Args:
        tokens: token ids, each from 0 to 2³² - 1.

    Raises:
        InvalidInputError: not a flat list of such integers.
    """

    __slots__ = ("_big_endian", "_msgpack", "_packed", "_source", "_varints", "array")

    def __init__(self, tokens: TokenIds | PackedTokens) -> None:
        #: The ids, read-only.
        self.array: npt.NDArray[np.uint32]
        if isinstance(tokens, PackedTokens):
            self.array = tokens.array
        else:
            self.array = check_tokens("PackedTokens", tokens).copy()
            self.array.flags.writeable = False
        self._source: PackedTokens | None = None
        self._packed: npt.NDArray[Any] | None = None
        self._msgpack: bytes | None = None
        self._big_endian: bytes | None = None
        self._varints: bytes | None = None

    def __len__(self) -> int:
        return self.array.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedTokens):
            return NotImplemented
        return np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)} tokens)"

    def prefix(self, num_tokens: int, nonce: int | None = None) -> PackedTokens:
        """Return the first ``num_tokens`` tokens, sharing what is encoded already.

        With ``nonce`` one more token follows them, which makes the key of this request unlike any
        other's for the same prefix; nothing is shared then.
        """
        if nonce is not None:
            return PackedTokens(np.append(self.array[:num_tokens], nonce))
        part = PackedTokens(self)
        part.array = self.array[:num_tokens]
        part._source = self._source or self
        return part

    def _pack(self) -> npt.NDArray[Any]:
        """Each id as 0xce and four big-endian bytes, all in one buffer."""
        if self._packed is None:
            if self._source is not None:
                self._packed = self._source._pack()[: len(self)]
            else:
                packed = np.empty(len(self), np.dtype([("tag", "u1"), ("id", ">u4")]))
                packed["tag"] = _UINT32
                packed["id"] = self.array
                self._packed = packed
        return self._packed

    def as_msgpack_array(self) -> bytes:
        """The ids as one msgpack array of integers."""
        if self._msgpack is None:
            self._msgpack = _ARRAY32 + len(self).to_bytes(4, "big") + self._pack().tobytes()
        return self._msgpack

    def as_big_endian(self) -> bytes:
        """The ids as big-endian uint32, four bytes each."""
        if self._big_endian is None:
            self._big_endian = self.array.astype(">u4").tobytes()
        return self._big_endian

    def as_varints(self) -> bytes:
        """The ids as protobuf varints: seven bits a byte, lowest first.

        Each has five bytes, the last of them zero where fewer would do, so that no id's place
        depends on the others.
        """
        if self._varints is None:
            varints = np.empty((len(self), 5), np.uint8)
            for index in range(5):
                varints[:, index] = self.array >> 7 * index & 0x7F
            varints[:, :4] |= 0x80
            self._varints = varints.tobytes()
        return self._varints
