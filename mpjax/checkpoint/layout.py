"""Where the parameters of a Decoder lie: their paths in the module, their names on the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

from mpjax.models import Decoder, DecoderConfig, Linear


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """A parameter that is never quantised: an embedding, a head, the weight of a norm.

    path: of the nnx.Param in the module, such as `layers.0.mlp_norm.weight`.
    name: of the tensor in Hugging Face's files. shape: the same in both.
    """

    path: str
    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """Linear maps of one input, which the module computes as one product where it can.

    path: of the Linear or FusedLinear in the module, such as `layers.0.attention.qkv`.
    names: the maps in Hugging Face's files, such as `model.layers.0.self_attn.q_proj`.
    shapes: [input, output channels] of each map. bias: whether each has one.
    """

    path: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    bias: bool


def array_places(config: DecoderConfig) -> list[ArrayPlace]:
    """All parameters outside linear maps, in the order of the computation."""
    hidden, head = (config.hidden_size,), (config.head_dim,)
    table = (config.vocab_size, config.hidden_size)
    places = [ArrayPlace("embedding", "model.embed_tokens.weight", table)]
    for layer in range(config.num_layers):
        norms = [("attention_norm", "input_layernorm", hidden)]
        if config.qk_norm:
            norms.append(("attention.query_norm", "self_attn.q_norm", head))
            norms.append(("attention.key_norm", "self_attn.k_norm", head))
        norms.append(("mlp_norm", "post_attention_layernorm", hidden))
        for path, name, shape in norms:
            path, name = f"layers.{layer}.{path}.weight", f"model.layers.{layer}.{name}.weight"
            places.append(ArrayPlace(path, name, shape))
    places.append(ArrayPlace("norm.weight", "model.norm.weight", hidden))
    if not config.tie_word_embeddings:
        places.append(ArrayPlace("head", "lm_head.weight", table))
    return places


def linear_places(config: DecoderConfig) -> list[LinearPlace]:
    """All linear maps of the layers, in the order of the computation."""
    kinds = [
        ("attention.qkv", "self_attn", {"q": "query", "k": "key", "v": "value"}, config.qkv_bias),
        ("attention.output", "self_attn", {"o": "output"}, config.output_bias),
        ("mlp.gate_up", "mlp", {"gate": "gate", "up": "up"}, config.mlp_bias),
        ("mlp.down", "mlp", {"down": "down"}, config.mlp_bias),
    ]
    return [
        LinearPlace(
            f"layers.{layer}.{path}",
            tuple(f"model.layers.{layer}.{block}.{short}_proj" for short in maps),
            tuple(config.projection_shapes[long] for long in maps.values()),
            bias,
        )
        for layer in range(config.num_layers)
        for path, block, maps, bias in kinds
    ]


def find(model: Decoder, path: str) -> Any:
    """What lies at a path of attributes and list indices, such as `layers.0.attention.qkv`."""
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def assign_array(model: Decoder, place: ArrayPlace, value: Any) -> None:
    """Puts an array in its place."""
    parent, _, name = place.path.rpartition(".")
    setattr(find(model, parent) if parent else model, name, nnx.Param(value))


def linear_parts(model: Decoder, place: LinearPlace) -> list[Linear]:
    """The Linear at a place, or the parts of the FusedLinear there."""
    node = find(model, place.path)
    return [node] if isinstance(node, Linear) else list(node.parts)


def linear_kernels(model: Decoder, place: LinearPlace) -> list[Any]:
    """The kernels of those parts, plain arrays or QuantizedTensors."""
    return [part.kernel.get_value() for part in linear_parts(model, place)]


def assign_linear(model: Decoder, place: LinearPlace, parts: Sequence[Linear]) -> None:
    """Puts linear maps in their place: one for all of its maps, or one for each."""
    if len(place.names) > 1:
        find(model, place.path).parts = nnx.List(parts)
    else:
        parent, _, name = place.path.rpartition(".")
        setattr(find(model, parent), name, *parts)
