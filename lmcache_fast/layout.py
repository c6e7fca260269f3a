"""KVLayout: the shape of one model's KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lmcache_fast.errors import InvalidInputError

#: Element types that an engine may keep its cache in.
CACHE_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "uint8",
        "int8",
    )
}


#: How a stored token's rows look; see :class:`KVLayout`.
Rows = Literal["plain", "packed", "opaque"]


def parse_dtype(value: torch.dtype | str) -> torch.dtype:
    """Return the cache dtype named by ``value`` (``torch.bfloat16`` or its name).

    Raises:
        InvalidInputError: it is none of :data:`CACHE_DTYPES`.
    """
    name = str(value).removeprefix("torch.")
    name = {"half": "float16", "float": "float32", "fp8_e4m3": "float8_e4m3fn"}.get(name, name)
    if name not in CACHE_DTYPES:
        raise InvalidInputError(
            f"KVLayout: dtype is {value!r}; expected one of {', '.join(CACHE_DTYPES)}"
        )
    return CACHE_DTYPES[name]


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache: ``[planes, num_layers, tokens, width]``.

    That is what users see. The engine may store it otherwise, which ``rows`` tells:

    - ``plain``: each plane by itself, ``[2, L, T, D]``, or ``[L, T, D]`` for one plane;
    - ``packed``: ``[L, T, heads, 2, head_dim]``, a head's key and its value behind one another;
    - ``opaque``: ``[L, T, D]`` whose rows are no tokens (vLLM on a CPU arranges each block its own
      way): whole chunks can be moved and dropped, nothing finer.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of the keys (and of the values).
        head_dim: elements a head.
        dtype: element type, a ``torch.dtype`` or its name.
        block_size: tokens a block of the engine's paged cache.
        planes: 2 for keys and values; 1 where a token has one row (MLA, queries, opaque rows).
        rows: how tokens are stored; easier said by :meth:`packed` and :meth:`opaque`.

    Raises:
        InvalidInputError: a count is not a positive integer, the dtype is unknown, or rows and
            planes do not go together.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = 16
    planes: int = 2
    rows: Rows = "plain"

    if TYPE_CHECKING:  # the dtype may come by its name

        def __init__(
            self,
            num_layers: int,
            num_kv_heads: int,
            head_dim: int,
            dtype: torch.dtype | str,
            block_size: int = 16,
            planes: int = 2,
            rows: Rows = "plain",
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check the counts and turn a dtype's name into the dtype."""
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInputError(
                    f"KVLayout: {name} is {value!r}; expected a positive integer"
                )
        if self.planes not in (1, 2):
            raise InvalidInputError(f"KVLayout: planes is {self.planes!r}; expected 1 or 2")
        if self.rows not in get_args(Rows):
            raise InvalidInputError(
                f"KVLayout: rows is {self.rows!r}; expected one of {', '.join(get_args(Rows))}"
            )
        if self.rows != "plain" and self.planes != (2 if self.rows == "packed" else 1):
            raise InvalidInputError(
                f"KVLayout: planes is {self.planes} and rows {self.rows!r}; expected 2 planes "
                "where keys and values are packed, and 1 where rows are opaque"
            )
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))

    @classmethod
    def packed(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | str,
        block_size: int = 16,
    ) -> KVLayout:
        """Keys and values of a head stored behind one another (vLLM on GPUs from 0.29 on).

        ``head_dim`` is that of the keys, half of what one head takes.
        """
        return cls(num_layers, num_kv_heads, head_dim, parse_dtype(dtype), block_size, 2, "packed")

    @classmethod
    def opaque(
        cls, num_layers: int, width: int, dtype: torch.dtype | str, block_size: int = 16
    ) -> KVLayout:
        """Rows of ``width`` elements, no tokens (vLLM on a CPU: ``2 * heads * head_dim``)."""
        return cls(num_layers, 1, width, parse_dtype(dtype), block_size, 1, "opaque")

    @property
    def width(self) -> int:
        """Elements of one token's row in one plane of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one plane of one layer."""
        return self.width * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes and layers."""
        return self.planes * self.num_layers * self.row_bytes

    @property
    def dtype_name(self) -> str:
        """The dtype's name without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    def kv_shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """Shape of a user's tensor of ``num_tokens`` tokens: ``[planes, L, T, D]``."""
        return (self.planes, self.num_layers, num_tokens, self.width)

    @property
    def object_planes(self) -> int:
        """Planes of a stored chunk: 1 where each token has one row of everything."""
        return 2 if self.planes == 2 and self.rows == "plain" else 1

    @property
    def object_width(self) -> int:
        """Elements of one row of a stored chunk."""
        return self.planes // self.object_planes * self.width

    def object_shape(self, chunk_size: int) -> tuple[int, ...]:
        """Shape of one stored chunk: ``[2, L, chunk, D]``, or ``[L, chunk, W]`` for one plane."""
        shape = (self.num_layers, chunk_size, self.object_width)
        return (2, *shape) if self.object_planes == 2 else shape

    def is_object_shape(self, shape: Sequence[int], chunk_size: int) -> bool:
        """Whether ``shape`` is that of one stored chunk.

        One plane is ``[L, chunk, W]`` where a client stored it, and ``[1, L, chunk, W]`` where the
        server itself copied it from its engine's device; the bytes are the same.
        """
        expected = self.object_shape(chunk_size)
        if self.object_planes == 1 and len(shape) == 4:
            expected = (1, *expected)
        return tuple(shape) == expected

    def by_head(self, stored: torch.Tensor) -> torch.Tensor:
        """View a stored chunk as ``[planes, L, chunk, heads, head_dim]``."""
        heads = (self.num_kv_heads, self.head_dim)
        if self.rows == "packed":
            pairs: torch.Tensor = stored.unflatten(-1, (heads[0], 2, heads[1]))
            return pairs.permute(3, 0, 1, 2, 4)
        planes = stored if self.planes == 2 else stored.unsqueeze(0)
        split: torch.Tensor = planes.unflatten(-1, heads)
        return split

    def from_object(self, stored: torch.Tensor) -> torch.Tensor:
        """Show a stored chunk as ``[planes, L, chunk, D]``; copies it only where it is packed."""
        shown: torch.Tensor = self.by_head(stored).flatten(3)
        return shown

    def to_object(self, kv: torch.Tensor) -> torch.Tensor:
        """Turn ``[planes, L, chunk, D]`` into a stored chunk; copies only where that is packed."""
        if self.rows == "packed":
            heads: torch.Tensor = kv.unflatten(-1, (self.num_kv_heads, self.head_dim))
            return heads.permute(1, 2, 3, 0, 4).flatten(2)
        return kv if self.planes == 2 else kv[0]

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks of an engine hold the same: MLA's one row has no heads to share."""
        return self.planes == 1 and self.num_kv_heads == 1 and self.rows == "plain"

    def for_rank(self, world_size: int) -> KVLayout:
        """Return what each of ``world_size`` tensor-parallel ranks stores of this cache.

        Raises:
            InvalidInputError: the heads cannot be shared out evenly.
        """
        if world_size == 1 or self.is_replicated:
            return self
        name = "head_dim" if self.rows == "opaque" else "num_kv_heads"
        share, rest = divmod(getattr(self, name), world_size)
        if rest:
            raise InvalidInputError(
                f"KVLayout: {name} is {getattr(self, name)}; expected a multiple of the "
                f"{world_size} ranks that the engine stores its cache from (ranks that repeat a "
                "head count it once each)"
            )
        return replace(self, **{name: share})

    def for_all_ranks(self, world_size: int) -> KVLayout:
        """Return the whole cache of which each rank stores ``self``; undoes :meth:`for_rank`."""
        if self.is_replicated:
            return self
        name = "head_dim" if self.rows == "opaque" else "num_kv_heads"
        return replace(self, **{name: getattr(self, name) * world_size})

    def as_opaque(self) -> KVLayout:
        """Return a packed layout as one whose rows are no tokens.

        Raises:
            InvalidInputError: keys and values are not packed, so each row is a token's.
        """
        if self.rows == "plain":
            raise InvalidInputError(
                "KVLayout: rows is 'plain'; expected packed keys and values, the only ones known "
                "to be opaque"
            )
        if self.rows == "opaque":
            return self
        return KVLayout.opaque(self.num_layers, 2 * self.width, self.dtype, self.block_size)

    def __str__(self) -> str:
        """The layout in a few words."""
        rows = "" if self.rows == "plain" else f" {self.rows}"
        return (
            f"{self.num_layers} layers, {self.num_kv_heads} heads of {self.head_dim}, "
            f"{self.dtype_name}, {self.planes}{rows} plane{'s' * (self.planes > 1)}, blocks of "
            f"{self.block_size}"
        )

    @classmethod
    def from_hf_config(
        cls,
        config: str | Path | Mapping[str, Any] | Any,
        dtype: torch.dtype | str | None = None,
        block_size: int = 16,
    ) -> KVLayout:
        """Build the layout from a Hugging Face model config.

        Args:
            config: a ``PretrainedConfig``, its dictionary, a ``config.json`` or the folder with it.
            dtype: the cache's dtype where it is not the model's own.
            block_size: tokens a block of the engine's paged cache.

        Raises:
            InvalidInputError: the config has no such fields, or the model caches no keys and values
                per head.
        """
        fields = hf_config_fields(config)
        if fields.get("kv_lora_rank"):
            rows = int(fields["kv_lora_rank"]) + int(fields.get("qk_rope_head_dim") or 0)
            heads, head_dim, planes = 1, rows, 1
        else:
            attention_heads = _required(fields, "num_attention_heads")
            heads = int(fields.get("num_key_value_heads") or attention_heads)
            head_dim = int(
                fields.get("head_dim") or _required(fields, "hidden_size") // attention_heads
            )
            planes = 2
        if dtype is None:
            dtype = fields.get("dtype") or fields.get("torch_dtype")
        if dtype is None:
            raise InvalidInputError(
                "KVLayout.from_hf_config: the config names no dtype; expected the argument dtype"
            )
        return cls(
            _required(fields, "num_hidden_layers"), heads, head_dim, dtype, block_size, planes
        )


def hf_config_fields(config: str | Path | Mapping[str, Any] | Any) -> dict[str, Any]:
    """Return a Hugging Face config's fields; a multimodal model's text part where it has one.

    Raises:
        InvalidInputError: the path cannot be read, or ``config`` is no config.
    """
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"hf_config: cannot read {str(path)!r}: {error}") from error
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        if to_dict is None:
            raise InvalidInputError(
                f"hf_config: got {type(config).__name__}; expected a config, its dict, or its path"
            )
        config = to_dict()
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"hf_config: got {type(config).__name__}; expected a dictionary")
    text = config.get("text_config")
    return dict(text) if isinstance(text, Mapping) else dict(config)


def _required(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int):
        raise InvalidInputError(
            f"KVLayout.from_hf_config: {name} is {value!r}; expected an integer in the config"
        )
    return value
