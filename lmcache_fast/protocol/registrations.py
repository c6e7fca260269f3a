"""What a server's ``/status`` tells of the engines that registered with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmcache_fast.errors import InvalidInputError, UnknownModelError
from lmcache_fast.layout import KVLayout


@dataclass(frozen=True)
class RegisteredModel:
    """One model that an engine has registered.

    Attributes:
        layout: the whole cache, all ranks' heads together; None where ``problem`` says why.
        problem: why there is no layout.
        world_size: ranks that store a part each; None where registrations disagree.
        num_kv_readers: readers of each stored object.
        is_hybrid: its layers form groups of different layouts, so that no one layout would do.
    """

    layout: KVLayout | None
    problem: str = ""
    world_size: int | None = 1
    num_kv_readers: int = 1
    is_hybrid: bool = False


class _Hybrid(ValueError):
    """The layers form groups of different layouts."""


def models_of(status: Mapping[str, Any]) -> dict[str, RegisteredModel]:
    """Return the models that ``/status`` lists, by name."""
    known: dict[str, dict[str, RegisteredModel]] = {}
    for instance, entry in _entries(status, "cache_context_meta"):
        known.setdefault(entry["model_name"], {})[instance] = _model_of(entry)
    for instance, entry in _entries(status, "q_context_meta"):
        model = _model_of({**entry, "kv_cache_layout": entry.get("q_ring_layout")})
        known.setdefault(entry["model_name"], {})[instance] = model
    driven: dict[str, dict[str, RegisteredModel]] = {}
    for instance, entry in _entries(status, "non_cuda_context_meta"):
        driven.setdefault(entry["model_name"], {})[instance] = _engine_driven(entry)
    # Of an engine with both entries only one tells a layout.
    return {name: _merged(models) for name, models in {**driven, **known}.items()}


def resolve(
    model_name: str,
    models: Mapping[str, RegisteredModel],
    layout: KVLayout | Literal["opaque"] | None,
    world_size: int | None,
) -> tuple[KVLayout, int]:
    """Return the whole layout of a model and its ranks, from what the user and ``/status`` say.

    Args:
        model_name: the model.
        models: what is registered.
        layout: the user's word; None to ask ``/status``, ``"opaque"`` to ask it and take the rows
            for no tokens.
        world_size: the user's word, or None to ask ``/status``.

    Raises:
        InvalidInputError: an argument is wrong, or not what ``/status`` says.
        UnknownModelError: the model is hybrid, or ``/status`` does not tell what is wanted.
    """
    if layout is not None and layout != "opaque" and not isinstance(layout, KVLayout):
        raise InvalidInputError(f"layout is {layout!r}; expected a KVLayout, 'opaque' or None")
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int)):
        raise InvalidInputError(f"world_size is {world_size!r}; expected an integer or None")
    if world_size is not None and not 1 <= world_size <= 255:
        raise InvalidInputError(f"world_size is {world_size}; expected 1 to 255")
    model = models.get(model_name)
    if model is not None and model.is_hybrid:
        raise UnknownModelError(f"the model {model_name!r} cannot be served: {model.problem}")
    if isinstance(layout, KVLayout):
        found = layout
    elif model is None:
        names = ", ".join(repr(name) for name in sorted(models)) or "none"
        raise UnknownModelError(
            f"no engine has registered the model {model_name!r}; registered: {names}. Start the "
            "engine first, or pass layout=..."
        )
    elif model.layout is None:
        raise UnknownModelError(f"the layout of {model_name!r} cannot be told: {model.problem}")
    else:
        found = model.layout.as_opaque() if layout == "opaque" else model.layout
        if world_size not in (None, model.world_size):
            raise InvalidInputError(
                f"world_size is {world_size}, but the engine of {model_name!r} registered "
                f"{model.world_size}"
            )
    if world_size is None:
        world_size = 1 if model is None else model.world_size
    if world_size is None:
        raise UnknownModelError(
            f"engines registered {model_name!r} with different world sizes; pass world_size=..."
        )
    found.for_rank(world_size)
    return found, world_size


def _entries(status: Mapping[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    """The entries of one section that name a model, with their instance's id."""
    entries = status.get(section)
    return [
        (str(instance), entry)
        for instance, entry in (entries.items() if isinstance(entries, dict) else ())
        if isinstance(entry, dict) and isinstance(entry.get("model_name"), str)
    ]


def _merged(models: Mapping[str, RegisteredModel]) -> RegisteredModel:
    """What several instances of one model name say together."""
    told = {i: m for i, m in models.items() if m.layout is not None or m.is_hybrid}
    told = told or dict(models)
    first, *others = told.items()
    for instance, model in others:
        if model.layout != first[1].layout or model.is_hybrid != first[1].is_hybrid:
            return RegisteredModel(
                None,
                f"the instances {first[0]} and {instance} registered it with different layouts "
                f"({_words(first[1])}; {_words(model)}); pass layout=...",
                _same(m.world_size for m in told.values()),
                is_hybrid=any(m.is_hybrid for m in told.values()),
            )
        if model.world_size != first[1].world_size and model.layout is not None:
            return RegisteredModel(
                None,
                f"the instances {first[0]} and {instance} run on {first[1].world_size} and "
                f"{model.world_size} ranks; pass layout=... and world_size=...",
                None,
            )
    model = first[1]
    return RegisteredModel(
        model.layout,
        model.problem,
        _same(m.world_size for m in told.values()),
        max(m.num_kv_readers for m in told.values()),
        model.is_hybrid,
    )


def _same(values: Any) -> int | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _words(model: RegisteredModel) -> str:
    return str(model.layout) if model.layout is not None else model.problem


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _engine_driven(entry: Mapping[str, Any]) -> RegisteredModel:
    how = "KVLayout(...)"
    if entry.get("use_mla"):
        how = "KVLayout.packed(...), KVLayout(..., planes=1) for MLA, or KVLayout.opaque(...) where"
        how += " vLLM runs on a CPU"
    return RegisteredModel(
        None,
        "its engine registered engine-driven, of which the server publishes neither layers nor "
        f"heads; pass layout={how}",
        _count(entry.get("world_size")),
    )


def _model_of(entry: Mapping[str, Any]) -> RegisteredModel:
    world_size = _count(entry.get("world_size"))
    readers = _count(entry.get("num_kv_readers"))
    try:
        layout = _layout_of(entry["kv_cache_layout"]).for_all_ranks(world_size)
    except _Hybrid as error:
        return RegisteredModel(None, str(error), world_size, readers, is_hybrid=True)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        why = f"/status has no {error}" if isinstance(error, KeyError) else str(error)
        return RegisteredModel(None, f"{why}; pass layout=...", world_size, readers)
    return RegisteredModel(layout, "", world_size, readers)


def _layout_of(described: Mapping[str, Any]) -> KVLayout:
    """Read ``kv_cache_layout``, one rank's; ValueError says why it cannot be."""
    groups = described["kernel_groups"]
    if len(groups) != 1:
        names = "; ".join(_group_words(index, group) for index, group in enumerate(groups))
        raise _Hybrid(
            f"its layers form {len(groups)} groups of different layouts, each stored by itself, "
            f"and hybrid models are not supported ({names})"
        )
    group = groups[0]
    kv_format = str(group["engine_kv_format"]).rpartition(".")[2]
    shape = str(group["engine_kv_concrete_shape"])
    match = re.fullmatch(r"[\w\s]*\[([\d,\s]+)\]\s*", shape)
    if match is None:
        raise ValueError(f"its layout {kv_format} has the shape {shape!r}, which says no sizes")
    # Axes are named from the outside in, lists of tensors with _X_ behind each.
    *lists, inner = kv_format.split("_X_")
    axes = inner.split("_")
    if not _AXES.issuperset((*lists, *axes)):
        raise ValueError(f"its layout {kv_format} is unknown here")
    sizes = dict(zip(axes, (int(size) for size in match[1].split(",")), strict=False))
    if len(match[1].split(",")) != len(axes):
        raise ValueError(f"its layout {kv_format} has the shape {shape!r}; expected {axes}")
    num_layers, block_size = int(described["num_layers"]), int(group["tokens_per_block"])
    dtype = group["dtype"]
    if axes[-1] == "CS" or axes[-2:] == ["TWO", "HS"]:
        head_dim = sizes["CS"] // 2 if "CS" in sizes else sizes["HS"]
        layout = KVLayout.packed(num_layers, sizes["NH"], head_dim, dtype, block_size)
        # vLLM's CPU kernels arrange each block as suits them, under the same name.
        where = f"{group.get('attention_backend')} {group.get('device')} {described.get('device')}"
        return layout.as_opaque() if re.search(r"\bcpu\b", where, re.IGNORECASE) else layout
    if "TWO" in (*lists, *axes) and "NH" in sizes:
        return KVLayout(num_layers, sizes["NH"], sizes["HS"], dtype, block_size)
    if (group.get("is_mla") or kv_format in _MLA) and "NP" not in lists and "HS" in sizes:
        return KVLayout(num_layers, 1, sizes["HS"], dtype, block_size, planes=1)
    raise ValueError(f"its layout {kv_format} is unknown here")


#: Blocks, tokens of a block, both in one; heads, their elements, those of key and value in one.
_AXES = {"NB", "BS", "NBBS", "NH", "HS", "CS", "NL", "ONE", "TWO", "NP"}
_MLA = ("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS")


def _group_words(index: int, group: Any) -> str:
    if not isinstance(group, Mapping):
        return f"group {index}"
    return (
        f"group {index}: {group.get('num_layers', '?')} layers of "
        f"{group.get('engine_kv_format', '?')}, {group.get('engine_kv_concrete_shape', '?')}, "
        f"{group.get('dtype', '?')}"
    )
