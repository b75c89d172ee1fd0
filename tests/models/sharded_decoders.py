"""Decoders divided among devices against whole ones: logits, the cache, the shares joined again.

They need a process of its own with several devices; sharded_families.py runs them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import QuantizedTensor, quantize
from mpjax.models import Decoder, ExpertsSpec, Packed
from mpjax.models.division import Division
from mpjax.models.qwen_moe import Qwen2MoE
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.share import ExpertDivision
from tests.models.small import small_config, small_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)

EXPERTS = ExpertsSpec(
    64,
    num_experts=4,
    experts_per_token=2,
    bias=True,
    shared_size=96,
    shared_gate=True,
)
WIDE_EXPERTS = dataclasses.replace(EXPERTS, intermediate_size=256, shared_size=512)
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
IN_ACT_ORDER = " in act-order"
SHAPE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 256}
WHOLE = {"experts": "whole"}
MIXED = dataclasses.replace(EXPERTS, hadamard=32)
# Number of devices, what differs from SHAPE, the format of linear maps, and that of the cache.
CASES = (
    # Each KV head is on two devices, and four don't divide the vocabulary.
    (4, BIASES, "uint4:g32", "KV8"),
    (3, {"num_kv_heads": 4, "qk_norm": True}, None, "KV16"),  # three don't divide the heads
    (8, {}, "float8:gK", "KV4"),  # half of the devices have no heads
    (2, {"hidden_size": 128}, "uint4:g128", "KVfp8"),
    (2, {"num_kv_heads": 1, "num_heads": 2, "head_dim": 64}, "liquid4:g64/int8", "KV2"),
    (4, {"hadamard": 64}, "float8:gK/float8", "KV16"),
    (4, {"mlp": EXPERTS}, "uint4:g32", "KV16"),
    (4, {"mlp": EXPERTS} | WHOLE, "float8:gK/float8", "KV16"),
    (3, {"mlp": MIXED} | WHOLE, "uint4:g32 in act-order", "KV16"),  # two experts, one and one
    (2, {"mlp": MIXED}, "uint4:g32 in act-order", "KV16"),
    (2, {"hidden_size": 128, "head_dim": 64, "mlp": WIDE_EXPERTS}, "int4:g128", "KV16"),
)


def divide(model: Decoder, count: int, experts: ExpertDivision = "divided") -> ShardedDecoder:
    places = model.linear_places(model.config)
    formats = {place.path: [part.format for part in place.parts(model)] for place in places}
    division = Division.of(type(model), model.config, count, formats, experts)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("model",))
    divided = ShardedDecoder.of(division, mesh)
    for array in model.array_places(model.config):
        divided.put_array(array, array.read(model))
    for place in places:
        divided.put_linears(place, place.parts(model))
    if model.cache_scales is not None:
        divided.put_cache_scales(model.cache_scales.get_value())
    return divided


def build(mlp: ExpertsSpec | None = None, hadamard: int | None = None, **changes: Any) -> Decoder:
    config = small_config((None,), **changes)
    gated = dataclasses.replace(config.layers[0].mlp, hadamard=hadamard)
    layers = (dataclasses.replace(config.layers[0], mlp=mlp or gated),)
    config = dataclasses.replace(config, layers=layers)
    if mlp is None:
        return small_model(config)
    state = nnx.state(small_model(config))
    model = nnx.eval_shape(lambda: Qwen2MoE(config, nnx.Rngs(0)))  # which has names for all maps
    nnx.update(model, state)
    for linear in (model.layers[0].mlp.experts.gate_up, model.layers[0].mlp.experts.down):
        kernel = linear.kernel.get_value()
        noise = np.random.default_rng(3).standard_normal(kernel.shape)
        linear.kernel = nnx.Param(jnp.asarray(noise * kernel.shape[1] ** -0.5, kernel.dtype))
    return model


_quantize = jax.jit(quantize, static_argnums=1)  # op by op takes longer to compile


def quantize_all(model: Decoder, format: str) -> None:
    for place in model.linear_places(model.config):
        for linear in place.parts(model):
            kernel = _quantize(linear.kernel.get_value(), format.removesuffix(IN_ACT_ORDER))
            if format.endswith(IN_ACT_ORDER) and "experts" in place.path:
                kernel = with_orders(kernel)
            if format == "int4:g128":
                is_ordered = place.path.endswith(("output", "experts.gate_up"))
                kernel = with_blocks(kernel, is_ordered=is_ordered)
            linear.kernel = Packed(kernel)


def with_orders(kernel: QuantizedTensor) -> QuantizedTensor:
    """A stack of kernels, each with input channels in another order."""
    rng, (experts, channels, _) = np.random.default_rng(6), kernel.shape
    orders = np.stack([rng.permutation(channels) for _ in range(experts)]).astype(np.int32)
    return dataclasses.replace(kernel, permutation=jnp.asarray(orders))


def with_blocks(kernel: QuantizedTensor, *, is_ordered: bool) -> QuantizedTensor:
    """The kernel with blocks of activations in 8 and in 4 bits, also in an order of their own."""
    *experts, channels, _ = kernel.shape
    order = np.arange(channels, dtype=np.int32) * np.ones((*experts, 1), np.int32)
    order = np.random.default_rng(4).permuted(order, axis=-1)
    bits = np.resize(np.array([8, 4, 4], np.uint8), (*experts, channels // 128))
    permutation = jnp.asarray(order) if is_ordered else None
    return dataclasses.replace(kernel, activation_bits=jnp.asarray(bits), permutation=permutation)


def require_same_arrays(whole: Decoder, joined: Decoder) -> None:
    expected, found = jax.tree.leaves(whole), jax.tree.leaves(joined)
    for one, other in zip(expected, found, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def check(count: int, changes: dict[str, Any], format: str | None, kv: str) -> None:
    experts = changes.get("experts", "divided")
    model = build(**{k: v for k, v in (SHAPE | changes).items() if k != "experts"})
    if format is not None:
        quantize_all(model, format)
    if kv == "KVfp8":
        scales = np.random.default_rng(2).uniform(0.01, 0.02, (1, 2, model.config.num_kv_heads))
        model.put_cache_scales(jnp.asarray(scales, jnp.float32))
    divided = divide(model, count, experts)
    require_same_arrays(model, divided.whole())
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 5)), jnp.int32)

    def run(model: Decoder) -> list[np.ndarray]:
        cache = model.create_cache(2, 16, kv, 128 if kv in ("KV2", "KV4c") else 16)
        step = jax.jit(lambda m, *a: m.step(*a))  # one program for both steps
        logits, cache = step(model, tokens, jnp.asarray([5, 3], jnp.int32), cache)
        more, cache = step(model, tokens, jnp.ones(2, jnp.int32), cache)
        assert cache.lengths.tolist() == [6, 4]
        return [np.asarray(logits), np.asarray(more)]

    # Sums in another order can round to the next code, and the codes of float8 are far apart.
    is_rounded = kv == "KVfp8" or format in ("int4:g128", "float8:gK/float8")
    tolerance = 2e-2 if is_rounded else 2e-4
    for expected, found in zip(run(model), run(divided), strict=True):
        assert found.shape[1] >= 50
        assert np.all(found[:, 50:] == -np.inf)
        error = np.abs(found[:, :50] - expected).max() / np.abs(expected).max()
        assert error < tolerance, (count, changes, format, kv, error)
