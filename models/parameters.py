"""Places of a Decoder's parameters: paths in the module, names in Hugging Face's files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from mpjax.models.config import DecoderConfig
from mpjax.models.join import join, split
from mpjax.models.layers import FusedLinear, Linear
from mpjax.models.maps import LinearMaps
from mpjax.models.per_layer import array_shapes
from mpjax.models.stack import alternating, halves_of, stack, unstack
from mpjax.models.streams import map_shapes
from mpjax.models.window import Window

# Path in the Decoder → name of the tensor in Hugging Face's files. For linear maps, the names are
# of modules, to which `.weight` or a scheme's suffix is added. Paths inside a layer omit
# `layers.<number>.`; in a name, `{layer}` stands for the layer's number and `{expert}` for the
# expert's. Consecutive maps with equal names are one tensor in the files.
Names = Mapping[str, str | tuple[str, ...]]

NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
    "attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "attention.qkv": (
        "model.layers.{layer}.self_attn.q_proj",
        "model.layers.{layer}.self_attn.k_proj",
        "model.layers.{layer}.self_attn.v_proj",
    ),
    "attention.query_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "attention.key_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    "attention.sinks": "model.layers.{layer}.self_attn.sinks",
    "attention.output": "model.layers.{layer}.self_attn.o_proj",
    "mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp.gate_up": (
        "model.layers.{layer}.mlp.gate_proj",
        "model.layers.{layer}.mlp.up_proj",
    ),
    "mlp.down": "model.layers.{layer}.mlp.down_proj",
    # Scales of an FP8 cache, for keys and for values, in checkpoints that were calibrated for one.
    "cache_scales": (
        "model.layers.{layer}.self_attn.k_scale",
        "model.layers.{layer}.self_attn.v_scale",
    ),
}


EMBEDDING, HEAD = TABLES = ("embedding", "head")  # paths
HEAD_BIAS = "head_bias"
OF_TOKENS = (*TABLES, HEAD_BIAS)  # paths of arrays whose rows are tokens


def expert_names(
    block: str = "model.layers.{layer}.mlp",
    maps: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
) -> dict[str, str | tuple[str, ...]]:
    """Tensor names of a mixture whose module in files is `block`, to be added to NAMES.

    maps: of each expert. shared: the name of the shared expert inside the block.
    """
    gate, up, down = (f"{block}.experts.{{expert}}.{name}" for name in maps)
    return {
        "mlp.router": f"{block}.gate.weight",
        "mlp.router_correction": f"{block}.gate.e_score_correction_bias",
        "mlp.experts.gate_up": (gate, up),
        "mlp.experts.down": down,
        "mlp.shared.gate_up": (f"{block}.{shared}.gate_proj", f"{block}.{shared}.up_proj"),
        "mlp.shared.down": f"{block}.{shared}.down_proj",
    }


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """A parameter that is not quantised, such as a norm's weight or a table that is not packed.

    path: of the nnx.Param in the Decoder, such as `layers.0.mlp_norm.weight`.
    name: of the tensor in Hugging Face's files. shape: of the parameter. leading: the number of
    leading axes of size 1 that the tensor has in addition.
    offset: parameter minus tensor; 0 if they are equal.
    dtype: of the parameter; None for the model's dtype.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    leading: int = 0
    dtype: str | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (1,) * self.leading + self.shape

    def read(self, model: nnx.Module) -> jax.Array:
        """The parameter's array in the model."""
        return find(model, self.path).get_value()

    def assign(self, model: nnx.Module, value: Any) -> None:
        """Replaces the parameter's array in the model."""
        _replace(model, self.path, nnx.Param(value))


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """Place of linear maps of one input, which the module computes as one product if it can.

    A packed table is a LinearPlace, too: the head maps hidden states to logits, and the embedding
    is the transpose of such a map. Modules that store their maps differently, such as stacks of
    experts, have a subclass.

    path: of the Linear or FusedLinear in the Decoder, such as `layers.0.attention.qkv`.
    names: of the maps in Hugging Face's files, such as `model.layers.0.self_attn.q_proj`.
    shapes: (input channels, output channels) of each map. bias: whether all maps have biases.
    is_precise, is_plain: as in LinearMaps.
    """

    path: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    bias: bool
    is_precise: bool = dataclasses.field(default=False, kw_only=True)
    is_plain: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def is_table(self) -> bool:
        """Whether this is a packed table, which is outside of the layers."""
        return self.path in TABLES

    def parts(self, model: nnx.Module) -> list[Linear]:
        """The Linear at the path, or the parts of the FusedLinear at the path."""
        node = find(model, self.path)
        return list(node.parts) if isinstance(node, FusedLinear) else [node]

    def kernels(self, model: nnx.Module) -> list[Any]:
        """Kernels of the parts, plain arrays or QuantizedTensors."""
        return [part.kernel.get_value() for part in self.parts(model)]

    @property
    def joined_maps(self) -> int:
        """The number of maps that `join` has in memory at a time, besides its result."""
        return len(self.names)

    def join(self, maps: Iterable[Linear]) -> list[Linear]:
        """Joins one Linear for each of `names` to one part; returns them all if formats differ."""
        return join(list(maps))

    def maps(self, model: nnx.Module) -> list[Linear]:
        """One Linear for each of `names`."""
        return self.maps_of(self.parts(model))

    def maps_of(self, parts: Sequence[Linear]) -> list[Linear]:
        """One Linear for each of `names`: undoes `join`."""
        if len(parts) == len(self.names):
            return list(parts)
        [joint] = parts
        return split(joint, [outputs for _, outputs in self.shapes])

    def within(self, windows: Sequence[Window] | None) -> LinearPlace:
        """The place itself; an ExpertPlace keeps only the experts of the windows."""
        return self

    def part_shapes(self, count: int) -> list[tuple[int, ...]]:
        """Kernel shapes (in, out) of `count` parts: one part for all maps, or a part for each.

        Raises ValueError for any other count.
        """
        if count == len(self.shapes):
            return list(self.shapes)
        if count != 1:
            raise ValueError(f"{self.path} has {count} parts: expected 1 or {len(self.shapes)}")
        return [(self.shapes[0][0], sum(outputs for _, outputs in self.shapes))]

    def assign(self, model: nnx.Module, parts: Sequence[Linear]) -> None:
        """Replaces the parts at the path."""
        node = find(model, self.path)
        if isinstance(node, FusedLinear):
            node.parts = nnx.List(parts)
        else:
            _replace(model, self.path, *parts)


@dataclasses.dataclass(frozen=True)
class ExpertPlace(LinearPlace):
    """Place of the linear maps of all experts, which the module stores as one stack.

    path: of a Linear with a kernel [experts, in, out]. names, shapes: of all maps of the first
    expert, then of the next. experts: their number. is_alternating, is_transposed: as in
    LinearMaps.
    """

    experts: int
    is_alternating: bool = False
    is_transposed: bool = False

    @property
    def joined_maps(self) -> int:
        """The number of maps of one expert: `join` processes one expert after another."""
        return len(self.names) // self.experts

    def join(self, maps: Iterable[Linear]) -> list[Linear]:
        """Joins the maps of each expert and stacks the experts: a list of one Linear.

        Raises ValueError if formats differ.
        """
        if self.is_alternating:
            maps = (halves_of(each) for each in maps)
        return [stack(maps, self.names, self.joined_maps)]

    def maps_of(self, parts: Sequence[Linear]) -> list[Linear]:
        """One Linear for each of `names`: undoes `join`."""
        [stacked] = parts
        sizes = [outputs for _, outputs in self.shapes[: self.joined_maps]]
        maps = [each for one in unstack(stacked, self.experts) for each in split(one, sizes)]
        return [alternating(each) for each in maps] if self.is_alternating else maps

    def within(self, windows: Sequence[Window] | None) -> ExpertPlace:
        """The place with only the experts of these windows; None: all experts."""
        if not windows or not windows[0].is_of_experts:
            return self
        window, each = windows[0], self.joined_maps
        mine = slice(window.begin * each, window.end * each)
        return dataclasses.replace(
            self, names=self.names[mine], shapes=self.shapes[mine], experts=window.length
        )

    def pieces(self, bytes: int) -> list[Window]:
        """Windows of equally many experts, with at most `bytes` in 16 bits or one expert each."""
        inputs, outputs = self.shapes[0][0], sum(n for _, n in self.shapes[: self.joined_maps])
        count = -(-self.experts // max(bytes // (2 * inputs * outputs), 1))
        size = -(-self.experts // count)
        begins = range(0, self.experts, size)
        return [Window(False, at, min(at + size, self.experts), True) for at in begins]

    def part_shapes(self, count: int) -> list[tuple[int, ...]]:
        """The kernel shape [experts, in, out] of the stack. Raises ValueError unless count is 1."""
        if count != 1:
            raise ValueError(f"{self.path} has {count} parts: expected 1")
        inputs, outputs = self.shapes[0][0], sum(n for _, n in self.shapes[: self.joined_maps])
        return [(self.experts, inputs, outputs)]


def array_places(
    config: DecoderConfig, names: Names, draft_names: Names = MappingProxyType({})
) -> list[ArrayPlace]:
    """Places of all parameters outside linear maps, in the order of computation.

    Packed tables are not included: they are linear maps. draft_names: of a layer that drafts.
    """
    hidden = (config.hidden_size,)
    table = (config.vocab_size, config.hidden_size)
    plain = [path for path in config.tables if path not in config.packed_tables]
    tables = [ArrayPlace(path, name_of(names, path), table) for path in plain]
    places = [place for place in tables if place.path == EMBEDDING]
    for path, shape in (array_shapes(config) | map_shapes(config)).items():
        key = path.rstrip("0123456789")
        name = name_of(names, key, int(path.removeprefix(key) or 0))
        places.append(ArrayPlace(path, name, shape))
    for number, layer in enumerate(config.layers):
        shapes: dict[str, tuple[int, ...]] = {}
        wide: list[str] = []
        for half, spec in layer.halves.items():
            if (norm := f"{half}_norm") in layer.pre_norms.values():
                shapes[f"{norm}.weight"] = hidden
            shapes |= {f"{half}.{path}": shape for path, shape in spec.arrays(config).items()}
            wide += [f"{half}.{path}" for path in spec.wide_arrays(config)]
            if layer.has_post_norms:
                shapes[f"{half}_post_norm.weight"] = hidden
        shapes |= {"scale": (1,)} if layer.scaled else {}
        own = _own_names(config, number, names, draft_names)
        places += [
            ArrayPlace(
                f"layers.{number}.{path}",
                name_of(own, path, number),
                shape,
                dtype="float32" if path in wide else None,
            )
            for path, shape in shapes.items()
        ]
    places.append(ArrayPlace("norm.weight", name_of(names, "norm.weight"), hidden))
    if config.norm_bias:
        places = [each for place in places for each in _with_bias(place)]
    if config.offset_norms:
        places = [_with_offset(place) for place in places]
    if config.labels is not None:
        shape = config.labels, config.hidden_size
        places.append(ArrayPlace("score", name_of(names, "score"), shape))
    places += [place for place in tables if place.path == HEAD]
    if config.head_bias and config.predicts:
        name = f"{name_of(names, HEAD).removesuffix('.weight')}.bias"
        places.append(ArrayPlace(HEAD_BIAS, name, (config.vocab_size,)))
    return places


def _own_names(config: DecoderConfig, number: int, names: Names, draft_names: Names) -> Names:
    """The names of a layer's tensors: a layer that drafts may have names of its own."""
    if number < config.depth:
        return names
    return getattr(config.layers[number].attention, "names", None) or draft_names


def unread_names(config: DecoderConfig, names: Names) -> tuple[str, ...]:
    """Prefixes of tensors that files may have of layers that read another layer's keys."""
    readers = (number for number, source in enumerate(config.sources) if source is not None)
    return tuple(
        f"{name.removesuffix('.weight')}."
        for number in readers
        for path, first in (("attention.qkv", 1), ("attention.key_norm.weight", 0))
        for name in names_of(names, path, number)[first:]
    )


def _with_bias(place: ArrayPlace) -> list[ArrayPlace]:
    """The place, and if it is a norm's weight the place of the norm's bias."""
    if not place.path.endswith("norm.weight"):
        return [place]
    path, name = (f"{x.removesuffix('weight')}bias" for x in (place.path, place.name))
    return [place, dataclasses.replace(place, path=path, name=name)]


def _with_offset(place: ArrayPlace) -> ArrayPlace:
    """The place, with offset 1 if it is a norm's weight; float32 represents the sum exactly."""
    is_norm = place.path.endswith("norm.weight")
    return dataclasses.replace(place, offset=1.0, dtype="float32") if is_norm else place


def linear_places(
    config: DecoderConfig, names: Names, draft_names: Names = MappingProxyType({})
) -> list[LinearPlace]:
    """Places of all linear maps, in the order of computation: of layers, and packed tables.

    draft_names: of a layer that drafts.
    """
    shape = config.hidden_size, config.vocab_size
    tables = [
        LinearPlace(path, (name_of(names, path).removesuffix(".weight"),), (shape,), False)
        for path in config.packed_tables
    ]
    layers = [
        _place(own, f"{half}.{maps.path}", maps, number)
        for number, layer in enumerate(config.layers)
        for own in [_own_names(config, number, names, draft_names)]
        for half, spec in layer.halves.items()
        for maps in spec.linear_maps(config)
    ]
    first = [place for place in tables if place.path == EMBEDDING]
    return first + layers + [place for place in tables if place.path == HEAD]


def _place(names: Names, path: str, maps: LinearMaps, number: int) -> LinearPlace:
    of_maps, at = names_of(names, path, number), f"layers.{number}.{path}"
    if len(of_maps) == 1:  # files store all maps as one tensor
        of_maps *= len(maps.shapes)
    # Some layers have only the first maps, as those whose keys are their values.
    pairs = zip(of_maps[: len(maps.shapes)], maps.shapes, strict=True)
    alike = [[*each] for _, each in itertools.groupby(pairs, lambda pair: pair[0])]
    found = tuple(each[0][0] for each in alike)
    shapes = tuple((maps.shapes[0][0], sum(outputs for _, (_, outputs) in each)) for each in alike)
    if maps.experts is None:
        flags = {"is_precise": maps.is_precise, "is_plain": maps.is_plain}
        return LinearPlace(at, found, shapes, maps.bias, **flags)
    each = tuple(
        name.replace("{expert}", str(expert)) for expert in range(maps.experts) for name in found
    )
    shapes = shapes * maps.experts
    layout = maps.is_alternating, maps.is_transposed
    return ExpertPlace(at, each, shapes, maps.bias, maps.experts, *layout)


def names_of(names: Names, path: str, layer: int = 0) -> tuple[str, ...]:
    """The names in Hugging Face's files of the parameter or the maps at a path.

    path: a key of `names`. Raises ValueError for a path to which the family gives no name.
    """
    if path not in names:
        raise ValueError(
            f"the family's names have no {path!r}: add the tensor's name in Hugging Face's files"
        )
    found = names[path]
    return tuple(
        name.replace("{layer}", str(layer))
        for name in ([found] if isinstance(found, str) else found)
    )


def name_of(names: Names, path: str, layer: int = 0) -> str:
    """The name in Hugging Face's files of the parameter at a path; see `names_of`."""
    [name] = names_of(names, path, layer)
    return name


def find(model: nnx.Module, path: str) -> Any:
    """The module or variable at a path of attributes and indices: `layers.0.attention.qkv`."""
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def _replace(model: nnx.Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(find(model, parent) if parent else model, name, value)
