"""KVLayout: the shape of one model's KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of the keys (and of the values).
        head_dim: elements a head.
        dtype: element type, a ``torch.dtype`` or its name.
        block_size: tokens a block of the engine's paged cache.
        planes: 2 for split keys and values; 1 where a token has one row (MLA, and engines whose
            rows are opaque: whole chunks can be moved, nothing finer).

    Raises:
        InvalidInputError: a count is not a positive integer, or the dtype is unknown.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = 16
    planes: int = 2

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
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))

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

    def object_shape(self, chunk_size: int) -> tuple[int, ...]:
        """Shape of one stored chunk: ``[2, L, chunk, D]``, or ``[L, chunk, D]`` for one plane."""
        shape = self.kv_shape(chunk_size)
        return shape if self.planes == 2 else shape[1:]

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
