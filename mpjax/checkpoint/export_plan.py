"""Plans an export: the tensors of a model under Hugging Face's names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.fused_experts import is_joint, join_experts
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.compressed_tensors import METHOD
from mpjax.checkpoint.schemes.writing import REMEDY, Modules, Writer, Writing
from mpjax.kernels import PlainCodes, QuantizedTensor, unpack
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import are_finite, did_you_mean, is_known, nearest, shown
from mpjax.models import ArrayPlace, Decoder, Linear, LinearPlace
from mpjax.models.gathered import abstract, gather
from mpjax.models.parameters import name_of, names_of
from mpjax.precision import describe_weights

PLAIN = "plain"  # the layout without quantised modules


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """The tensors and the `quantization_config` of an export.

    writer: encodes packed maps; None if all are dequantised. quantization: the
    `quantization_config`, or None. cache: `tensor` or `attn_head`, the strategy of the FP8 cache
    scales in the export; None for no scales. dequantized: names of packed tables that are
    dequantised, because the format can't hold them or on request. caution: which readers can't load
    the export, and a remedy; or None.
    """

    model: Decoder
    writer: Writer | None
    quantization: dict[str, Any] | None
    cache: str | None
    dequantized: tuple[str, ...] = ()
    caution: str | None = None

    def tensors(self, read: Callable[[Any], Any] = gather) -> Iterator[tuple[str, Any]]:
        """Yields all names and arrays, each computed on demand.

        read: converts arrays of a model divided among devices to whole ones.
        """
        model, config = self.model, self.model.config
        for place in model.array_places(config):
            yield place.name, _as_in_files(place, read(place.read(model)), config.dtype)
        for linear_place in model.linear_places(config):
            maps = _maps(linear_place, model, read)
            found = self._linears(linear_place, maps)
            yield from join_experts(found) if is_joint(linear_place) else found
        if self.cache is not None and model.cache_scales is not None:
            scales = np.asarray(model.cache_scales.get_value())
            for layer, pair in enumerate(scales[: config.depth]):
                for name, heads in zip(
                    names_of(model.names, "cache_scales", layer), pair, strict=True
                ):
                    yield name, heads[:1] if self.cache == "tensor" else heads[:, None, None]

    def specs(self) -> dict[str, Any]:
        """Shapes and dtypes of all tensors, in the order of `tensors`; computes nothing.

        Raises ValueError for shapes that the layout can't represent.
        """
        order: list[str] = []
        host: dict[str, np.ndarray] = {}  # kept from JAX, which has no int64

        def arrays() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, array in self.tensors(abstract):
                order.append(name)
                (host if isinstance(array, np.ndarray) else found)[name] = array
            return found

        specs = jax.eval_shape(arrays) | host
        return {name: specs[name] for name in order}

    def _linears(self, place: LinearPlace, maps: list[Linear]) -> Iterator[tuple[str, Any]]:
        for name, linear in zip(place.names, maps, strict=True):
            found = self._linear(name, linear.kernel.get_value())
            if is_joint(place) and "weight" in found:  # [in, out] in the file
                found["weight"] = found["weight"].T
            if linear.bias is not None:
                found["bias"] = linear.bias.get_value()
            for suffix, array in found.items():
                yield f"{name}.{suffix}", array

    def _linear(self, name: str, kernel: Any) -> dict[str, Any]:
        """The tensors of a map, by suffix."""
        if not isinstance(kernel, QuantizedTensor):
            return {"weight": kernel.T}
        if self.writer is not None and name not in self.dequantized:
            return self.writer.encode(unpack(kernel), name)
        dtype = self.model.config.dtype
        weight = unpack(kernel).dequantize(dtype)
        if is_known(weight) and not are_finite(weight):
            raise ValueError(
                f"{name} has weights beyond the range of {dtype}: load the model with "
                "dtype='bfloat16'"
            )
        return {"weight": weight.T}


def _maps(place: LinearPlace, model: Decoder, read: Callable[[Any], Any]) -> list[Linear]:
    """The linear maps of a place. read: as in `ExportPlan.tensors`."""
    held = [
        (part.kernel.get_value(), None if part.bias is None else part.bias.get_value())
        for part in place.parts(model)
    ]
    return place.maps_of([Linear(*read(arrays)) for arrays in held])


def _as_in_files(place: ArrayPlace, array: jax.Array, dtype: str) -> jax.Array:
    """The parameter in the shape, dtype and offset of Hugging Face's files."""
    array = array.reshape(place.file_shape) if place.leading else array
    return (array - jnp.float32(place.offset)).astype(dtype) if place.offset else array


def make_plan(model: Decoder, layout: str | None, *, plain_head: bool = False) -> ExportPlan:
    """Plans how a model is exported.

    layout: one of `layouts()`; None chooses one by the model's weights. plain_head: whether to
    dequantise a packed head. Raises ValueError for an unknown layout, and for one that can't hold
    the weights.
    """
    require_layout(layout)
    if any(model.config.hadamard_blocks):
        raise ValueError(
            "a model with Hadamard's transform before its down projections can't be exported, "
            "because no format has a place for it: save it with mpjax.save, or quantise without "
            "`hadamard` in the method"
        )
    maps = _shapes(model)
    packed = {name: plain for name, plain in maps.items() if plain is not None}
    tables = {name: packed.pop(name) for name in _packed_tables(model)}
    if layout == PLAIN or (layout is None and not packed):
        # With `plain`, all is dequantised on request, so no table is reported.
        return ExportPlan(model, None, None, None, () if layout == PLAIN else tuple(tables))
    if not packed:
        raise ValueError(
            f"format {layout!r} holds quantised weights, and the model has none: export with "
            f"format={PLAIN!r}, or load the model with a precision such as W4A16KV8"
        )
    joint = _joint_experts(model)
    writing, writer = _usual(packed, joint) if layout is None else _of_layout(layout, packed, joint)
    head = name_of(model.names, "head").removesuffix(".weight")
    remedy = f"export with format={PLAIN!r}"
    can_pack = head in tables and not plain_head
    if can_pack and (wider := _with_head(writing, packed, {head: tables[head]})):
        if wider.caution != writer.caution:
            remedy = "export with plain_head=True (--plain-head), which dequantises the head"
        writer = wider
        packed[head] = tables.pop(head)
    left = [head, *_routers(model), *(name for name in maps if name not in tables)]
    left = [name for name in left if name not in packed]
    cache = _cache_strategy(model)
    quantization = writer.config(left, cache)
    # Only compressed-tensors can hold cache scales.
    cache = cache if quantization["quant_method"] == METHOD else None
    caution = writer.caution and f"{writer.caution}: for it, {remedy}"
    return ExportPlan(model, writer, quantization, cache, tuple(tables), caution)


def require_layout(layout: str | None) -> None:
    """Raises ValueError for an unknown export layout; None stands for the model's own."""
    if layout is not None and layout not in layouts():
        hint = did_you_mean(nearest(str(layout), layouts()))
        raise ValueError(
            f"format is {shown(layout)}{hint}: expected one of {', '.join(layouts())}, or None for "
            "that of the model's weights"
        )


def layouts() -> list[str]:
    """The names of all export layouts."""
    return [*registry.layouts(), PLAIN]


def _joint_experts(model: Decoder) -> set[str]:
    """The names of the maps that files store as one tensor for all experts."""
    places = model.linear_places(model.config)
    return {name for place in places if is_joint(place) for name in place.names}


def _routers(model: Decoder) -> list[str]:
    """The names of matrices outside LinearPlaces: routers, and gates of shared experts."""
    places = model.array_places(model.config)
    matrices = [p for p in places if p.path.startswith("layers.") and len(p.shape) == 2]
    return [place.name.removesuffix(".weight") for place in matrices]


def _of_layout(layout: str, packed: Modules, joint: Collection[str]) -> tuple[Writing, Writer]:
    """The writer of a layout for modules. Raises ValueError if it can't hold them."""
    writing = registry.layouts()[layout]
    for name in packed:
        if (name in joint) != writing.joins_experts:
            kind = "no" if name in joint else "only"
            raise ValueError(
                f"format {layout!r} holds {kind} experts that share one tensor, as gpt-oss's do, "
                f"and {name} is {describe_weights(packed[name].format)}: {REMEDY}"
            )
    return writing, writing.begin(layout, packed)


def _usual(packed: Modules, joint: Collection[str]) -> tuple[Writing, Writer]:
    """The writer of the modules' default layout, or of the first layout that can hold them.

    Raises ValueError if none can.
    """
    formats = [plain.format for plain in packed.values()]
    kinds = {code_kinds.key(format.codes, symmetric=format.symmetric) for format in formats}
    choices = registry.layouts().items()
    for layout, _ in sorted(choices, key=lambda choice: not kinds <= {*choice[1].default_for}):
        with contextlib.suppress(ValueError):
            return _of_layout(layout, packed, joint)
    found = sorted({describe_weights(plain.format) for plain in packed.values()})
    raise ValueError(
        f"the weights are {' and '.join(found)}, which no format that others read can hold: "
        f"{REMEDY}"
    )


def _packed_tables(model: Decoder) -> list[str]:
    """The names of a model's packed tables."""
    places = model.linear_places(model.config)
    return [name for place in places if place.is_table for name in place.names]


def _with_head(writing: Writing, packed: Modules, head: Modules) -> Writer | None:
    """The writer of modules and a packed head; None if the layout can't hold the head."""
    if writing.packs_heads:
        with contextlib.suppress(ValueError):
            return writing.begin(writing.layouts[0], {**packed, **head})
    return None


def _shapes(model: Decoder) -> dict[str, PlainCodes | None]:
    """The PlainCodes of each packed map, with shapes instead of arrays; None for other maps."""
    places = model.linear_places(model.config)

    def codes() -> dict[str, PlainCodes | None]:
        return {
            name: unpack(kernel) if isinstance(kernel, QuantizedTensor) else None
            for place in places
            for name, linear in zip(place.names, _maps(place, model, abstract), strict=True)
            for kernel in [linear.kernel.get_value()]
        }

    found = jax.eval_shape(codes)
    return {name: found[name] for place in places for name in place.names}


def _cache_strategy(model: Decoder) -> str | None:
    """`tensor` or `attn_head`: one FP8 cache scale per layer or per head; None without any."""
    scales = None if model.cache_scales is None else np.asarray(model.cache_scales.get_value())
    if scales is None or scales.ndim != 3:  # scales of channels belong to another cache format
        return None
    return "tensor" if bool(np.all(scales == scales[..., :1])) else "attn_head"
