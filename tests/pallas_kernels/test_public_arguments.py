"""Arguments of public functions: lists may stand for arrays, and wrong ones are named.

Every call below is right. With one argument replaced by something odd it still gives a result, or
a ValueError of the library's own, in one sentence that names the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import kernels
from tests.refusals import require_a_result_or_its_name

WEIGHT = jnp.linspace(-1, 1, 64 * 16).reshape(64, 16)
STACK = jnp.linspace(-1, 1, 4 * 64 * 16).reshape(4, 64, 16)
CHOSEN = jnp.array([[0, 3], [3, 3], [1, 0]], jnp.int32)
PACKED = kernels.quantize(WEIGHT, "uint4:g32")
CACHE = kernels.PagedKVCache.create(
    kernels.KVLayout(2, 32, "KV8", page_size=16), layers=1, batch=2, max_tokens=32
)
LATENTS = kernels.PagedKVCache.create(
    kernels.KVLayout(1, 32, "KV8", page_size=16, value_dim=16), layers=1, batch=2, max_tokens=32
).layers[0]
HEADS = jnp.linspace(-1, 1, 2 * 8 * 2 * 32).reshape(2, 8, 2, 32)
PLACES = {
    "block_tables": CACHE.block_tables,
    "starts": jnp.zeros(2, jnp.int32),
    "counts": jnp.full(2, 8, jnp.int32),
}
SPAN = kernels.Span(**PLACES)
MASKS = kernels.Masks(scale=0.1, window=4, softcap=2.0, sinks=jnp.ones(4), chunked=True)
ANGLES = {"cosines": jnp.ones((2, 8, 16)), "sines": jnp.zeros((2, 8, 16))}
QUERIES = HEADS[:, :, [0, 0, 1, 1]]
X = jnp.linspace(-1, 1, 3 * 64).reshape(3, 64)
PLAIN = kernels.unpack(PACKED)
SCALES = PLAIN.scales
NORMS = kernels.HeadNorms(jnp.ones(32), jnp.ones(32), 1e-6)


def in_span(operation):
    """An operation that is given the fields of its span apart."""

    def call(block_tables, starts, counts, fresh, longest, **others):
        span = kernels.Span(block_tables, starts, counts, fresh=fresh, longest=longest)
        return operation(span=span, **others)

    return call


def masked(operation):
    """An operation that is given the fields of its masks apart."""

    def call(scale, window, softcap, sinks, chunked, **others):
        return operation(masks=kernels.Masks(scale, window, softcap, sinks, chunked), **others)

    return call


def rotated(cosines, sines, heads, norms, transform_queries, keys_as_values, **others):
    """`rotate_and_append`, given the fields of its rotation apart."""
    own = cosines, sines, heads, norms, transform_queries, keys_as_values
    rotation = kernels.Rotation(*own)
    return kernels.rotate_and_append(rotation=rotation, **others)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "append": (
        kernels.append,
        {"pages": CACHE.layers[0], "keys": HEADS, "values": HEADS, "span": SPAN}
        | {"implementation": "reference"},
    ),
    "append to the fields of a span": (
        in_span(functools.partial(kernels.append, CACHE.layers[0], HEADS, HEADS)),
        {**PLACES, "fresh": True, "longest": 8},
    ),
    "paged_attention": (
        kernels.paged_attention,
        {"queries": QUERIES, "pages": CACHE.layers[0], "span": SPAN, "masks": MASKS}
        | {"transformed": False, "blocks": None, "implementation": "reference"},
    ),
    "paged_attention with the fields of masks": (
        masked(functools.partial(kernels.paged_attention, QUERIES, CACHE.layers[0], SPAN)),
        vars(MASKS),
    ),
    "prefill_attention": (
        kernels.prefill_attention,
        {"queries": QUERIES, "keys": HEADS, "values": HEADS, "masks": MASKS}
        | {"implementation": "reference"},
    ),
    "prefill_attention with the fields of masks": (
        masked(functools.partial(kernels.prefill_attention, QUERIES, HEADS, HEADS)),
        vars(MASKS),
    ),
    "rotate_and_append": (
        kernels.rotate_and_append,
        {"terms": jnp.ones((1, 2, 8, 256)), "pages": CACHE.layers[0], "span": SPAN}
        | {"rotation": kernels.Rotation(**ANGLES, heads=(4, 2)), "dtype": "float32"}
        | {"implementation": "reference"},
    ),
    "rotate_and_append with the fields of a rotation": (
        rotated,
        {"terms": jnp.ones((1, 2, 8, 256)), "pages": CACHE.layers[0], "span": SPAN, **ANGLES}
        | {"dtype": "float32", "heads": (4, 2), "norms": NORMS, "transform_queries": False}
        | {"keys_as_values": False},
    ),
    "rotate": (kernels.rotate, {"x": HEADS, **ANGLES}),
    "matmul": (
        kernels.matmul,
        {"x": X, "weight": PACKED, "implementation": "reference", "out_dtype": None}
        | {"scales": SCALES, "activations": None},
    ),
    "matmul of a plain weight": (kernels.matmul, {"x": X, "weight": WEIGHT, "out_dtype": "fp32"}),
    "matmul_terms": (kernels.matmul_terms, {"x": X, "weight": PACKED, "scales": SCALES}),
    "grouped_matmul": (
        kernels.grouped_matmul,
        {"x": X, "weight": STACK, "experts": CHOSEN, "routing_weights": jnp.ones((3, 2))}
        | {"bias": jnp.ones((4, 16)), "gate": None, "implementation": None},
    ),
    "grouped_matmul_terms": (
        kernels.grouped_matmul_terms,
        {"x": X, "weight": STACK, "experts": CHOSEN, "routing_weights": jnp.ones((3, 2))}
        | {"bias": None, "activations": None, "implementation": None},
    ),
    "expert_mlp_terms": (
        kernels.expert_mlp_terms,
        {"x": X, "mlp": kernels.ExpertMLP(STACK, jnp.ones((4, 8, 16))), "experts": CHOSEN}
        | {"routing_weights": jnp.ones((3, 2)), "activations": None, "implementation": None},
    ),
    "add_low_rank": (
        kernels.add_low_rank,
        {"terms": jnp.ones((2, 3, 5)), "x": X, "down": STACK[..., :4], "adapters": CHOSEN[:, 0]}
        | {"ups": [jnp.ones((4, 2, 3)), jnp.ones((4, 2, 2))], "implementation": None},
    ),
    "sum_over_devices": (
        lambda **given: jax.vmap(
            lambda x: kernels.sum_over_devices(**{"x": x} | given), axis_name="i"
        )(X),
        {"axis": "i", "inbox": None, "has_terms": True},
    ),
    "matmul_low_rank_terms": (
        kernels.matmul_low_rank_terms,
        {"x": X, "weight": PACKED, "down": STACK[..., :4], "adapters": CHOSEN[:, 0]}
        | {"ups": [jnp.ones((4, 2, 10)), jnp.ones((4, 2, 6))]},
    ),
    "gated_low_rank": (
        kernels.gated_low_rank,
        {"x": X, "weight": PACKED, "down": STACK[..., :4], "adapters": CHOSEN[:, 0]}
        | {"ups": [jnp.ones((4, 2, 8))] * 2, "activation": "silu"},
    ),
    "route": (
        kernels.route,
        {"logits": X[:, :8], "routing": kernels.Routing(2), "correction": jnp.ones(8)}
        | {"bias": jnp.ones(8)},
    ),
    "RouterLogits": (
        lambda **fields: kernels.RouterLogits(**fields).route(),
        {"logits": X[:, :8], "routing": kernels.Routing(2), "correction": jnp.ones(8)}
        | {"bias": jnp.ones(8), "gain": jnp.ones(8)},
    ),
    "Routing": (
        kernels.Routing,
        {"per_token": 2, "scoring": "softmax", "renormalize": True, "scale": 1.0}
        | {"groups": 4, "groups_per_token": 2, "group_score": "max"},
    ),
    "Gate": (kernels.Gate, {"limit": 7.0, "alpha": 1.0, "activation": "silu"}),
    "quantize": (
        kernels.quantize,
        {"weight": WEIGHT, "format": "table2:g32", "table": [0, 1, 2, 3]},
    ),
    "pack": (
        lambda **arguments: kernels.pack(kernels.PlainCodes(**arguments)),
        {"codes": PLAIN.codes, "scales": SCALES, "zeros": PLAIN.zeros, "format": "uint4:g32"}
        | {"permutation": None, "channel_scales": None, "table": None},
    ),
    "pack of plain codes": (kernels.pack, {"plain": PLAIN}),
    "unpack": (kernels.unpack, {"tensor": PACKED}),
    "replace_scales": (kernels.replace_scales, {"tensor": PACKED, "scales": SCALES}),
    "dequantize": (PACKED.dequantize, {"dtype": "bf16", "scales": SCALES}),
    "quantize_activations": (
        kernels.quantize_activations,
        {"x": X, "format": "int8", "dtype": "half"},
    ),
    "quantize_rows": (kernels.quantize_rows, {"x": X, "format": "int8", "implementation": None}),
    "add_rms_norm": (
        kernels.add_rms_norm,
        {"terms": X[None], "residual": X, "weight": jnp.ones(64), "epsilon": 1e-5}
        | {"format": None, "dtype": "f32", "implementation": "reference"},
    ),
    "rms_norm": (kernels.rms_norm, {"x": X, "weight": jnp.ones(64), "epsilon": 1e-5}),
    "gated_silu": (
        kernels.gated_silu,
        {"terms": X[None], "dtype": "f32", "format": None, "implementation": "reference"},
    ),
    "gated": (
        kernels.gated,
        {"terms": X[None], "activation": "gelu", "dtype": "f32", "format": None}
        | {"hadamard": 16, "implementation": "reference"},
    ),
    "hadamard": (
        kernels.hadamard,
        {"x": X, "block": 32, "dtype": "f32", "implementation": "reference"},
    ),
    "latent_attention": (
        kernels.latent_attention,
        {"queries": QUERIES, "rotated": QUERIES[..., :16], "pages": LATENTS, "span": SPAN}
        | {"scale": 0.1, "implementation": "reference"},
    ),
    "latent_format": (kernels.latent_format, {"format": "KV8"}),
    "causal_convolution": (
        kernels.causal_convolution,
        {"x": HEADS[:, :, 0], "weight": jnp.ones((32, 4)), "state": jnp.ones((2, 3, 32))}
        | {"counts": jnp.array([8, 2]), "bias": jnp.ones(32), "activation": "silu"},
    ),
    "state_space_scan": (
        kernels.state_space_scan,
        {"x": HEADS, "steps": jnp.ones(HEADS.shape[:3]), "rates": -jnp.ones(HEADS.shape[2])}
        | {"b": HEADS, "c": HEADS, "counts": jnp.array([8, 2])}
        | {"state": jnp.ones((2, HEADS.shape[2], 32, 32))},
    ),
    "gated_delta_rule": (
        lambda query, key, value, decay, rate, **others: kernels.gated_delta_rule(
            kernels.DeltaInputs(query, key, value, decay, rate), **others
        ),
        {"query": HEADS, "key": HEADS, "value": HEADS, "decay": -(HEADS[..., 0] ** 2)}
        | {"rate": HEADS[..., 1], "state": jnp.ones((2, 2, 32, 32))}
        | {"counts": jnp.array([8, 2]), "implementation": "reference"},
    ),
    "convolution_step": (
        lambda slots, is_new, **others: kernels.convolution_step(
            rows=kernels.StateRows(slots, is_new), **others
        ),
        {"x": HEADS[0, :3, 0], "weight": jnp.ones((32, 4)), "states": jnp.ones((4, 3, 32))}
        | {"slots": jnp.array([2, 4, 0]), "is_new": jnp.array([True, False, False])}
        | {"bias": jnp.ones(32), "activation": "silu", "implementation": "reference"},
    ),
    "gated_delta_step": (
        lambda slots, is_new, decay, rate, speed, shift, scale, **others: kernels.gated_delta_step(
            gates=kernels.DeltaGates(decay, rate, speed, shift, scale),
            rows=kernels.StateRows(slots, is_new),
            **others,
        ),
        {"channels": jnp.ones((3, 2 * 32 + 2 * 16)), "states": jnp.ones((4, 2, 32, 16))}
        | {"slots": jnp.array([2, 4, 0]), "is_new": jnp.array([True, False, False])}
        | {"decay": X[:, :2], "rate": X[:, :2], "speed": jnp.ones(2), "shift": jnp.ones(2)}
        | {"scale": 2.0, "implementation": "reference"},
    ),
    "state_space_step": (
        lambda slots, is_new, steps, speed, shift, skip, least, most, **others: (
            kernels.state_space_step(
                gates=kernels.ScanGates(steps, speed, shift, skip, least, most),
                rows=kernels.StateRows(slots, is_new),
                **others,
            )
        ),
        {"channels": jnp.ones((3, 2 * 32 + 2 * 16)), "states": jnp.ones((4, 2, 16, 32))}
        | {"slots": jnp.array([2, 4, 0]), "is_new": jnp.array([True, False, False])}
        | {"steps": X[:, :2], "speed": jnp.ones(2), "shift": jnp.ones(2), "skip": jnp.ones(2)}
        | {"least": 0.1, "most": 2.0, "implementation": "reference"},
    ),
    "inputs of gated_delta_rule": (
        kernels.gated_delta_rule,
        {"inputs": kernels.DeltaInputs(*[HEADS] * 3, *[HEADS[..., 0]] * 2)},
    ),
    "cache_scales": (kernels.cache_scales, {"x": HEADS, "format": "KV8s"}),
    "KVLayout": (
        kernels.KVLayout,
        {"kv_heads": 2, "head_dim": 32, "format": "KVfp8", "page_size": 16, "dtype": "bf16"},
    ),
    "PagedKVCache.create": (
        kernels.PagedKVCache.create,
        {"layout": kernels.KVLayout(2, 32, "KVfp8", 16), "layers": 1, "batch": 2}
        | {"max_tokens": 8, "scales": jnp.ones((1, 2, 2))},
    ),
    "require_room": (CACHE.require_room, {"tokens": jnp.ones(2, jnp.int32)}),
    "WeightFormat": (
        kernels.WeightFormat,
        {"codes": "uint4", "group_size": 32, "symmetric": False, "operand": None},
    ),
    "WeightFormat.of": (kernels.WeightFormat.of, {"format": "uint4:g32"}),
    "ActivationBlocks": (
        lambda **fields: kernels.quantize_activations(X, kernels.ActivationBlocks(**fields)),
        {"bits": jnp.full(1, 4), "permutation": jnp.arange(64)},
    ),
    "LocalExperts.of": (
        kernels.LocalExperts.of,
        {"experts": jnp.ones((2, 1), jnp.int32), "first": 1, "count": 2, "total": 4},
    ),
    "DividedRows": (
        kernels.DividedRows,
        {"format": kernels.ActivationFormat("int8"), "axis": "model"},
    ),
    "StaticRows": (
        lambda **fields: kernels.quantize_activations(X, kernels.StaticRows(**fields)),
        {"format": kernels.ActivationFormat("int8"), "scale": jnp.ones(1)},
    ),
    "ActivationFormat": (kernels.ActivationFormat, {"values": "int8", "group_size": None}),
    "ActivationFormat.of": (kernels.ActivationFormat.of, {"format": "int8"}),
    "ProductFormat.of": (
        kernels.ProductFormat.of,
        {"format": "int8", "activations": kernels.ActivationFormat("int8")},
    ),
    "partition_specs": (
        kernels.partition_specs,
        {"tensor": PACKED, "mesh": jax.sharding.AbstractMesh((2,), ("a",))}
        | {"k": None, "n": "a", "leading": None},
    ),
    "KVFormat": (kernels.KVFormat, {"keys": 8, "values": 8}),
    "KVFormat.of": (kernels.KVFormat.of, {"format": "KV8"}),
}
ODD = {
    "None": None,
    "text": "text",
    "bytes": b"x",
    "number": 2.5,
    "negative": -1,
    "bool": True,
    "object": object(),
    "mapping": {},
    "list": [1, 2],
    "ragged": [[1], [1, 2]],
    "scalar": jnp.float32(1),
    "texts": np.array(["a", "b"]),
    "complex": jnp.ones((2, 2), complex),
}
# How a field that is a name is called in messages, which tell it from others by its value.
NAMED = {"WeightFormat": "unknown weight format 'text'", "KVFormat": "is not a KV format"}
each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_what_is_wrong_is_named_or_taken(name):
    call, arguments = CALLS[name]
    for argument in arguments:
        for odd in ODD.values():
            words = NAMED.get(name, argument)
            require_a_result_or_its_name(call, arguments, argument, odd, words)


IMPLEMENTED = [name for name, (_, fields) in CALLS.items() if "implementation" in fields]


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_an_implementation_is_known_and_kernels_need_a_gpu(name):
    call, arguments = CALLS[name]
    with pytest.raises(ValueError, match=r"unknown implementation 'cuda': .*reference"):
        call(**arguments | {"implementation": "cuda"})
    with pytest.raises(kernels.UnsupportedError, match="'triton' can't run: "):
        call(**arguments | {"implementation": "triton"})


@each_call
def test_lists_are_arrays(name):
    """Also NumPy's arrays, as they come from files: in 64 bits."""
    call, arguments = CALLS[name]
    expected = jax.tree.leaves(call(**arguments))
    for argument, value in arguments.items():
        if not isinstance(value, jax.Array) or (name, argument) in EXACT:
            continue
        lists = np.asarray(value).tolist()
        for other in (lists, np.asarray(lists)):
            found = jax.tree.leaves(call(**arguments | {argument: other}))
            for one, two in zip(found, expected, strict=True):
                assert one.dtype == two.dtype
                np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


# Arrays that are packed unchanged must come in the dtype that is stored.
EXACT = {("pack", "codes"), ("pack", "scales")}
