from typing import type_check_only

import numpy as np
import numpy.typing as npt
from typing_extensions import Never

__version__: str

@type_check_only
class _Extension(type): ...

class SharedRegion(metaclass=_Extension):
    def __init__(self, name: str, size: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def is_intact(self) -> bool: ...
    def check_slot(self, offset: int, length: int, alignment: int = 1) -> None: ...
    def view(self, offset: int, length: int, writable: bool = False) -> memoryview: ...
    def populate(self, offsets: npt.ArrayLike, length: int) -> None: ...
    def close(self) -> None: ...

class ChunkedSide(metaclass=_Extension):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only made by others
    @staticmethod
    def from_region(
        region: SharedRegion,
        offsets: npt.ArrayLike,
        *,
        tokens_per_chunk: int,
        planes: int,
        layers: int,
        row_bytes: int,
        plane_stride: int | None = None,
        layer_stride: int | None = None,
        token_stride: int | None = None,
        row_pieces: int = 1,
        piece_stride: int = 0,
    ) -> ChunkedSide: ...
    @staticmethod
    def from_addresses(
        addresses: npt.ArrayLike,
        owner: object,
        *,
        tokens_per_chunk: int,
        planes: int,
        layers: int,
        row_bytes: int,
        plane_stride: int,
        layer_stride: int,
        token_stride: int | None = None,
        row_pieces: int = 1,
        piece_stride: int = 0,
        writable: bool = True,
    ) -> ChunkedSide: ...
    @property
    def num_tokens(self) -> int: ...

class Rotation(metaclass=_Extension):
    def __init__(
        self,
        cos: npt.NDArray[np.float32],
        sin: npt.NDArray[np.float32],
        run_rows: npt.ArrayLike,
        row_step: int,
        *,
        num_heads: int,
        head_dim: int,
        rotary_dim: int,
        interleaved: bool,
        dtype: str,
        rotary_offset: int = 0,
    ) -> None: ...

def copy_runs(
    source: ChunkedSide,
    target: ChunkedSide,
    runs: npt.ArrayLike,
    rotation: Rotation | None = None,
    num_threads: int = 0,
) -> None: ...
def num_threads() -> int: ...
def kernel_name() -> str: ...
def set_kernel(name: str) -> None: ...
def kernels() -> list[str]: ...

class Buffer(metaclass=_Extension):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only made by others
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

class BufferPool(metaclass=_Extension):
    def __init__(self, limit_bytes: int) -> None: ...
    def take(self, nbytes: int) -> Buffer: ...
    def clear(self) -> None: ...
    @property
    def held_bytes(self) -> int: ...

def knorm_scores(
    side: ChunkedSide, *, head_dim: int, dtype: str, reduce: str, num_threads: int = 0
) -> npt.NDArray[np.float64]: ...
def keydiff_scores(
    side: ChunkedSide, *, head_dim: int, dtype: str, reduce: str, num_threads: int = 0
) -> npt.NDArray[np.float64]: ...
def lagkv_scores(
    side: ChunkedSide,
    *,
    num_sink: int,
    lag_size: int,
    cross_scoring: bool,
    head_dim: int,
    dtype: str,
    reduce: str,
    num_threads: int = 0,
) -> npt.NDArray[np.float64]: ...
def attention_scores(
    side: ChunkedSide,
    queries: npt.NDArray[np.float32],
    *,
    kernel_size: int,
    head_dim: int,
    dtype: str,
    reduce: str,
    num_threads: int = 0,
) -> npt.NDArray[np.float64]: ...
