"""Small models with strong random weights, and what a decoder computes, in numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import (
    Decoder,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    Linear,
    Packed,
    llama_layers,
)
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import MixerSpec
from mpjax.models.eagle import tokens_place, with_eagle
from mpjax.models.gated_delta import GatedDeltaSpec
from mpjax.models.latent import LatentSpec
from mpjax.models.mamba2 import Mamba2Spec
from mpjax.models.mtp import with_mtp
from mpjax.models.parallel import ParallelSpec
from mpjax.models.qwen_hybrid import Qwen35, Qwen35MoE
from mpjax.models.short_conv import ShortConvSpec
from mpjax.models.state import StepContext
from tests.pallas_kernels.oracles import softmax_attention

CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=llama_layers((None, None), 128),
    max_position_embeddings=256,
    dtype="float32",
)

# The context of a token behind another one, enough for modules that use no positions.
ONE = jnp.ones(1, jnp.int32)
CACHED = StepContext({}, ONE, ONE)


def small_config(windows: Sequence[int | None] = (None, None), **changes: Any) -> DecoderConfig:
    """CONFIG with other windows; switches of `llama_layers`, or fields of the whole, may differ."""
    switches = ("qkv_bias", "output_bias", "qk_norm", "mlp_bias")
    flags = {name: changes.pop(name) for name in switches if name in changes}
    inner = changes.pop("intermediate_size", 128)
    layers = llama_layers(windows, inner, **flags)
    return dataclasses.replace(CONFIG, layers=layers, **changes)


# One program each for all layers of a shape: op by op takes longer to compile.
_quantize = jax.jit(quantize, static_argnums=1)
_dequantize = jax.jit(QuantizedTensor.dequantize, static_argnums=1)


def small_model(
    config: DecoderConfig = CONFIG, seed: int = 0, family: type[Decoder] = Decoder
) -> Decoder:
    """Weights so strong that every part of the model shows in the logits."""
    model = nnx.eval_shape(lambda: family(config, nnx.Rngs(seed)))  # whose draws take compiling
    rng = np.random.default_rng(seed)

    def strong(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) == 2 and x.shape[0] != config.vocab_size:
            noise = rng.standard_normal(x.shape) / np.sqrt(x.shape[0])
        elif len(x.shape) == 2:
            noise = rng.standard_normal(x.shape)
        elif len(x.shape) == 3 and "experts" in jax.tree_util.keystr(path):
            noise = rng.standard_normal(x.shape) / np.sqrt(x.shape[1])
        else:
            center = 0.0 if "bias" in jax.tree_util.keystr(path) else 1.0  # of a norm's weight
            noise = center + 0.3 * rng.standard_normal(x.shape)
        return jnp.asarray(noise.astype(np.float32)).astype(x.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(strong, nnx.state(model)))
    return model


def hybrid_model(seed: int = 0, **changes: Any) -> Decoder:
    """A model whose layers keep states of sequences: delta rule, Mamba2 beside attention, and conv.

    Its mixers are of one layer each. changes: of fields of the configuration.
    """
    plain = CONFIG.layers[0]
    mamba = Mamba2Spec(heads=4, head_dim=8, groups=2, states=8, epsilon=1e-6)
    mixers: tuple[MixerSpec, ...] = (
        GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=16),
        ParallelSpec(plain.attention, mamba),
        ShortConvSpec(channels=48),
    )
    layers = tuple(dataclasses.replace(plain, attention=mixer) for mixer in mixers)
    return small_model(dataclasses.replace(CONFIG, layers=layers, **changes), seed)


def latent_model(seed: int = 0, **changes: Any) -> Decoder:
    """A model of two layers with latent attention; changes: of fields of the configuration."""
    spec = LatentSpec(rank=64, rotary=64, keys=16, values=24, query_rank=48)
    layers = (dataclasses.replace(CONFIG.layers[0], attention=spec),) * 2
    return small_model(dataclasses.replace(CONFIG, head_dim=64, layers=layers, **changes), seed)


def mtp_model(seed: int = 0, *, experts: bool = False, **changes: Any) -> Decoder:
    """A small Qwen3.5 of two layers, or with experts, with an MTP head.

    changes: of fields of the configuration.
    """
    mlp = ExpertsSpec(32, num_experts=4, shared_size=48, shared_gate=True)
    plain = CONFIG.layers[0].mlp
    mixers: tuple[MixerSpec, ...] = (
        GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=16),
        GroupedQuerySpec(qk_norm=True, output_gate=True),
    )
    layers = tuple(LayerSpec(mixer, mlp if experts else plain) for mixer in mixers)
    config = dataclasses.replace(CONFIG, layers=layers, rotary_dim=8, **changes)
    family = Qwen35MoE if experts else Qwen35
    return small_model(with_mtp(config, family.draft_names), seed, family)


def eagle_model(
    seed: int = 0, tokens: int = 32, fields: Any = MappingProxyType({}), **changes: Any
) -> Decoder:
    """A small Llama of three layers with an EAGLE-3 head of its own sizes and vocabulary.

    tokens: of the head's vocabulary. fields: of EagleSpec. changes: of the configuration.
    """
    config = small_config((None, 24, None), **changes)
    head = small_config((None,), intermediate_size=96, rope_theta=5e3, rms_norm_eps=1e-6)
    sizes = {"num_heads": 8, "num_kv_heads": 4, "vocab_size": config.vocab_size}
    head = dataclasses.replace(head, **sizes)
    tokens = min(tokens, config.vocab_size)
    spec = with_eagle(config, head, (1, 2, 3), vocabulary=tokens, **fields)
    model = small_model(spec, seed)
    ids = np.random.default_rng(1).permutation(config.vocab_size)[:tokens]
    model.put_array(tokens_place(model.config), jnp.asarray(np.sort(ids), jnp.int32))
    return model


def small_mixture(shared: bool, **changes: Any) -> Decoder:
    """A model of one layer with experts and strong weights.

    It is like Mixtral; shared: like Qwen2-MoE, with an MLP for all tokens that has a gate, and with
    biases in experts. changes: of fields of the configuration.
    """
    mlp = ExpertsSpec(32, num_experts=4, bias=shared, renormalize=not shared)
    if shared:
        mlp = dataclasses.replace(mlp, shared_size=96, shared_gate=True)
    layer = LayerSpec(CONFIG.layers[0].attention, mlp)
    config = dataclasses.replace(CONFIG, layers=(layer,), **changes)
    model = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def strong(x: jax.ShapeDtypeStruct) -> jax.Array:
        is_vector = len(x.shape) < 2
        noise = rng.standard_normal(x.shape) * (0.3 if is_vector else x.shape[-2] ** -0.5)
        return jnp.asarray(noise + is_vector, x.dtype)

    nnx.update(model, jax.tree.map(strong, nnx.state(model)))
    return model


def linear_layers(model: Decoder) -> list[Linear]:
    layers: list[Linear] = []
    for layer in model.layers:
        for fused in (layer.attention.qkv, layer.mlp.gate_up):
            layers.extend(fused.parts)
        layers.extend([layer.attention.output, layer.mlp.down])
    return layers


def quantize_kernels(model: Decoder, text: str) -> Decoder:
    """In place; returns the model."""
    for layer in linear_layers(model):
        layer.kernel = Packed(_quantize(layer.kernel.get_value(), WeightFormat.parse(text)))
    return model


def dequantize_kernels(model: Decoder) -> Decoder:
    """In place: plain kernels of the values that quantised ones stand for; returns the model."""
    for layer in linear_layers(model):
        kernel = layer.kernel.get_value()
        assert isinstance(kernel, QuantizedTensor)
        layer.kernel = nnx.Param(_dequantize(kernel, model.config.dtype))
    return model


@jax.jit
def logits_of(model: Decoder, tokens: jax.Array) -> jax.Array:
    """The forward pass as one program: outside of `jit`, each operation compiles its own."""
    return model(tokens)


def attend(
    layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None
) -> np.ndarray:
    """Causal attention of whole sequences [batch, tokens, heads, head dim] over themselves."""
    batch, length, _, dim = query.shape
    positions = np.broadcast_to(np.arange(length), (batch, length))
    lengths = np.full(batch, length)
    return softmax_attention(query, key, value, positions, lengths, dim**-0.5, window)


def forward(
    model: Decoder, tokens: np.ndarray, attend: Callable[..., np.ndarray] = attend
) -> np.ndarray:
    """Logits float64 [batch, tokens, vocabulary] of a model with plain kernels.

    attend: what a layer's queries make of keys and values, in the place of the function `attend`.
    """
    config = model.config

    def array(parameter: nnx.Param) -> np.ndarray:
        return np.asarray(parameter.get_value()).astype(np.float64)

    def norm(x, layer):
        root = np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x / root * array(layer.weight)

    def linear(x, layer):
        return x @ array(layer.kernel) + (0 if layer.bias is None else array(layer.bias))

    def turn(x):
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(half) / half)
        angles = np.arange(x.shape[1])[:, None, None] * frequencies
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    batch, length = tokens.shape
    x = array(model.embedding)[tokens]
    for number, (layer, window) in enumerate(zip(model.layers, config.windows, strict=True)):
        attention = layer.attention
        [qkv] = attention.qkv.parts
        heads = linear(norm(x, layer.attention_norm), qkv)
        heads = heads.reshape(batch, length, -1, config.head_dim)
        ends = np.cumsum([config.num_heads, config.num_kv_heads])
        query, key, value = np.split(heads, ends, axis=2)
        if attention.query_norm is not None:
            query, key = norm(query, attention.query_norm), norm(key, attention.key_norm)
        attended = attend(number, turn(query), turn(key), value, window=window)
        x = x + linear(attended.reshape(batch, length, -1), attention.output)
        [gate_up] = layer.mlp.gate_up.parts
        gate, up = np.split(linear(norm(x, layer.mlp_norm), gate_up), 2, axis=-1)
        x = x + linear(gate / (1 + np.exp(-gate)) * up, layer.mlp.down)
    head = model.embedding if model.head is None else model.head
    return norm(x, model.norm) @ array(head).T


def cast_around_kernels(model: Decoder, dtype: str) -> Decoder:
    """The same weights in another dtype; packed ones stay as they are, in dtypes of their own."""
    graph, state = nnx.split(model)

    def is_packed(x: Any) -> bool:
        return isinstance(x, QuantizedTensor)

    def narrow(x: Any) -> Any:
        return x if is_packed(x) else x.astype(dtype)

    result = nnx.merge(graph, jax.tree.map(narrow, state, is_leaf=is_packed))
    result.config = dataclasses.replace(model.config, dtype=dtype)
    return result
