"""Where the parameters of a Decoder lie: their paths in the module, their names in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from mpjax.models.config import DecoderConfig
from mpjax.models.join import join, split
from mpjax.models.layers import FusedLinear, Linear

# Of each path in the module, the tensor in Hugging Face's files; of linear maps, the modules.
# Paths in a layer have no number, and `{layer}` in a name is its number.
Names = Mapping[str, str | tuple[str, ...]]

NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "attention.qkv": (
        "model.layers.{layer}.self_attn.q_proj",
        "model.layers.{layer}.self_attn.k_proj",
        "model.layers.{layer}.self_attn.v_proj",
    ),
    "attention.query_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "attention.key_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    "attention.output": "model.layers.{layer}.self_attn.o_proj",
    "mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp.gate_up": (
        "model.layers.{layer}.mlp.gate_proj",
        "model.layers.{layer}.mlp.up_proj",
    ),
    "mlp.down": "model.layers.{layer}.mlp.down_proj",
    # Scales of an FP8 cache, for keys and for values, where a checkpoint was calibrated for one.
    "cache_scales": (
        "model.layers.{layer}.self_attn.k_scale",
        "model.layers.{layer}.self_attn.v_scale",
    ),
}


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """A parameter that is never quantised: an embedding, a head, the weight of a norm.

    path: of the nnx.Param in the module, such as `layers.0.mlp_norm.weight`.
    name: of the tensor in Hugging Face's files. shape: the same in both.
    """

    path: str
    name: str
    shape: tuple[int, ...]

    def read(self, model: nnx.Module) -> Any:
        """The array that lies there."""
        return find(model, self.path).get_value()

    def assign(self, model: nnx.Module, value: Any) -> None:
        """Puts an array there."""
        _replace(model, self.path, nnx.Param(value))


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """Linear maps of one input, which the module computes as one product where it can.

    Where a module holds its maps otherwise, such as experts in a stack, a subclass says how.

    path: of the Linear or FusedLinear in the module, such as `layers.0.attention.qkv`.
    names: the maps in Hugging Face's files, such as `model.layers.0.self_attn.q_proj`.
    shapes: [input, output channels] of each map. bias: whether each has one.
    """

    path: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    bias: bool

    def parts(self, model: nnx.Module) -> list[Linear]:
        """The Linear there, or the parts of the FusedLinear there."""
        node = find(model, self.path)
        return list(node.parts) if isinstance(node, FusedLinear) else [node]

    def kernels(self, model: nnx.Module) -> list[Any]:
        """The kernels of those parts, plain arrays or QuantizedTensors."""
        return [part.kernel.get_value() for part in self.parts(model)]

    def join(self, maps: Sequence[Linear]) -> list[Linear]:
        """The parts that one Linear for each name makes: as few as their formats allow."""
        return join(maps)

    def maps(self, model: nnx.Module) -> list[Linear]:
        """One Linear for each name: undoes `join`."""
        parts = self.parts(model)
        if len(parts) == len(self.names):
            return parts
        [joint] = parts
        return split(joint, [outputs for _, outputs in self.shapes])

    def part_shapes(self, count: int) -> list[tuple[int, int]]:
        """The shapes of that many parts: one for all maps, or one for each.

        Raises ValueError for another number.
        """
        if count == len(self.shapes):
            return list(self.shapes)
        if count != 1:
            raise ValueError(f"{self.path} has {count} parts: expected 1 or {len(self.shapes)}")
        return [(self.shapes[0][0], sum(outputs for _, outputs in self.shapes))]

    def assign(self, model: nnx.Module, parts: Sequence[Linear]) -> None:
        """Puts parts there."""
        node = find(model, self.path)
        if isinstance(node, FusedLinear):
            node.parts = nnx.List(parts)
        else:
            _replace(model, self.path, *parts)


def array_places(config: DecoderConfig, names: Names) -> list[ArrayPlace]:
    """All parameters outside linear maps, in the order of the computation."""
    hidden = (config.hidden_size,)
    table = (config.vocab_size, config.hidden_size)
    places = [ArrayPlace("embedding", name_of(names, "embedding"), table)]
    for number, layer in enumerate(config.layers):
        shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": hidden}
        shapes |= {f"attention.{path}": s for path, s in layer.attention.arrays(config).items()}
        shapes |= {"mlp_norm.weight": hidden}
        shapes |= {f"mlp.{path}": shape for path, shape in layer.mlp.arrays(config).items()}
        places += [
            ArrayPlace(f"layers.{number}.{path}", name_of(names, path, number), shape)
            for path, shape in shapes.items()
        ]
    places.append(ArrayPlace("norm.weight", name_of(names, "norm.weight"), hidden))
    if not config.tie_word_embeddings:
        places.append(ArrayPlace("head", name_of(names, "head"), table))
    return places


def linear_places(config: DecoderConfig, names: Names) -> list[LinearPlace]:
    """All linear maps of the layers, in the order of the computation."""
    return [
        LinearPlace(
            f"layers.{number}.{half}.{maps.path}",
            names_of(names, f"{half}.{maps.path}", number),
            maps.shapes,
            maps.bias,
        )
        for number, layer in enumerate(config.layers)
        for half, spec in (("attention", layer.attention), ("mlp", layer.mlp))
        for maps in spec.linear_maps(config)
    ]


def names_of(names: Names, path: str, layer: int = 0) -> tuple[str, ...]:
    """The names in files of what lies at a path; ValueError where a family doesn't say them."""
    if path not in names:
        raise ValueError(
            f"the family's names have no {path!r}: expected what it is called in files"
        )
    found = names[path]
    return tuple(
        name.replace("{layer}", str(layer))
        for name in ([found] if isinstance(found, str) else found)
    )


def name_of(names: Names, path: str, layer: int = 0) -> str:
    """The one name in files of what lies at a path; see `names_of`."""
    [name] = names_of(names, path, layer)
    return name


def find(model: nnx.Module, path: str) -> Any:
    """What lies at a path of attributes and list indices, such as `layers.0.attention.qkv`."""
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def _replace(model: nnx.Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(find(model, parent) if parent else model, name, value)
