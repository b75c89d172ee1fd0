"""Calls that together launch every kernel: all formats, and shapes with different plans."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax import kernels
from mpjax.bench import mixers
from mpjax.bench.random_model import random_model
from mpjax.kernels import KVFormat, KVLayout, Masks, PagedKVCache, Span, WeightFormat
from mpjax.kernels.attention.shapes import DECODE, AttentionShape
from mpjax.kernels.gemm.shapes import GemmShape, named
from mpjax.kernels.recurrent.shapes import PUBLISHED as RECURRENT
from mpjax.kernels.recurrent.shapes import RecurrentShape
from mpjax.kernels.rowwise.projection import project_rms_norm
from mpjax.models import Decoder, DecoderConfig
from mpjax.models.llama import llama_layers
from mpjax.sampling.draw import process_logits
from mpjax.sampling.greedy import likeliest
from mpjax.sampling.settings import RowSettings

WEIGHTS = (
    *("uint4:g128", "uint4:g32", "uint4:g128:sym", "uint8:g128", "uint8:g128:sym", "table4:g64"),
    *("table3:g64", "table2:g64", "float8:g128", "float8:gK", "int8/int8", "liquid4:g64/int8"),
    *("float8:gK/float8", "float8:g128/float8", "float4:g32", "int4:g128/int8"),
    *("affine4:g32", "affine8:g32"),
)
[LARGEST, DOWN, SQUARE] = named(["qwen3-8b.gate_up", "qwen3-8b.down", "qwen3-8b.output"])
EDGES = GemmShape("edges", 1536, 320)  # no tile of 128 outputs divides it
# Rows of x: one, tiles of all sizes, and so many that a weight is dequantised to memory.
PRODUCTS = {
    LARGEST: (1, 8, 16, 48, 256, 4096),
    DOWN: (1, 16, 48, 4096),
    EDGES: (1, 16, 48, 4096),
}

# Weights of 16 experts: a format of each kind of codes, and 16-bit weights.
EXPERTS = (
    *("uint4:g128", "uint4:g32", "table4:g64", "float8:g128", "float4:g32", "liquid4:g64/int8"),
    *("affine4:g32", "bfloat16"),
)

# Qwen3's routing, and DeepSeek-V3's group-limited routing.
ROUTINGS = {
    "softmax": (128, kernels.Routing(8)),
    "groups": (256, kernels.Routing(8, "sigmoid", True, 2.5, 8, 4, "top_two")),
}

CACHES = ("KV16", "KV8", "KV8s", "KVfp8", "KV4", "KV4t", "KV4c", "K4cV4c", "K8V4", "KV2", "KV2t")
DECODING = (
    *(DECODE[number] for number in (0, 1, 3, 5, 8)),
    # Multi-query heads; heads of 256 channels; heads of 64 channels beside a long context.
    AttentionShape.parse("b64-h12/1-d128-c4096"),
    AttentionShape.parse("b8-h16/16-d256-c8192"),
    AttentionShape.parse("b16-h64/8-d64-c131072"),
)
SHORT = AttentionShape.parse("b64-h32/8-d128-c128")
MASKED = AttentionShape.parse("b2-h16/8-d128-c2048-q64")
PROMPT = AttentionShape.parse("b2-h32/8-d128-c2048-q512")
APPENDED = AttentionShape.parse("b4-h8/8-d128-c4096")
MODELS = (
    ("uint4:g128", "KV8"),
    ("liquid4:g64/int8", "KV4"),
    ("int4:g128/int8", "KV4"),
    ("table3:g64", "KV2"),
)
STEPS = ((1, 1), (1, 64), (256, 4))  # new tokens of each sequence, sequences

# A function and its arguments, whose arrays are ShapeDtypeStructs.
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Array = jax.ShapeDtypeStruct


def calls() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yields the name of each call, and a function that makes the call."""
    yield from _calls_of_products()
    yield from _calls_of_caches()
    for text, tokens in itertools.product(EXPERTS, (1, 16, 64, 1024)):
        yield f"experts {text} {tokens}", functools.partial(_experts, text, tokens)
    for text in ("uint8:g128", "int8/int8", "int4:g128/int8"):  # by warpgroups
        yield f"experts {text} 1024", functools.partial(_experts, text, 1024)
    # Between the products, rows are not copied.
    for text in ("uint4:g128", "int8/int8", "float4:g32", "bfloat16"):
        yield f"experts mlp {text} 1024", functools.partial(_expert_mlp, text, 1024)
    for tokens in (1, 1024):
        name = f"experts mlp uint4:g128 hadamard {tokens}"
        yield name, functools.partial(_expert_mlp, "uint4:g128", tokens, 256)
    for tokens in (1, 64, 1024):  # each expert has its own blocks of activations
        yield f"experts mlp blocks {tokens}", functools.partial(_expert_blocks, tokens)
    for text in ("uint4:g128", "float4:g32", "bfloat16"):  # with routing in the first product
        yield f"experts routed {text} 1", functools.partial(_routed_mlp, text)
    for name in ROUTINGS:
        yield f"route {name}", functools.partial(_route, name)
    for rows, outputs in itertools.product((1, 64, 2048), ((4096, 1024, 1024), (12288,) * 2, ())):
        make = functools.partial(_adapters, rows, outputs)
        name = f"adapters {rows} {len(outputs) or 'gated'}"
        yield name, make if outputs else functools.partial(_gated_adapters, rows)
    for (weights, cache), (tokens, batch) in itertools.product(MODELS, STEPS):
        name = f"step {weights} {cache} {tokens} {batch}"
        yield name, functools.partial(_step, weights, cache, tokens, batch)


def _calls_of_products() -> Iterator[tuple[str, Callable[[], Call]]]:
    for text in WEIGHTS:
        for shape, all_rows in PRODUCTS.items():
            for rows in all_rows:
                name = f"matmul {text} {rows} {shape.channels}x{shape.outputs}"
                yield name, functools.partial(_matmul, text, rows, shape)
        yield f"dequantize {text}", functools.partial(_dequantize, text)
        yield f"triton {text}", functools.partial(_terms, text)
    for rows in (1, 16, 256):
        yield f"head {rows}", functools.partial(_head, rows)
        yield f"likeliest {rows}", functools.partial(_likeliest, rows)
        yield f"filtered {rows}", functools.partial(_filtered, rows)
    yield "gradient", _gradient
    yield "rows router 1", _router_rows
    for text in ("uint4:g128", "int8/int8"):
        yield f"rows {text}", functools.partial(_rows, text)
        yield f"hadamard {text}", functools.partial(_hadamard, text)


def _calls_of_caches() -> Iterator[tuple[str, Callable[[], Call]]]:
    for layer, rows in itertools.product(RECURRENT, (1, 64)):
        yield f"recurrent {layer.name} {rows}", functools.partial(_recurrent, layer, rows)
    for layer, tokens in itertools.product((RECURRENT[0], RECURRENT[-1]), (4, 4096)):
        name = f"recurrent prompt {layer.name} {tokens}"
        yield name, functools.partial(_recurrent_prompt, layer, tokens)
    for text in ("KV4", "K4cV4c"):  # rounded by one program, where several are joined, and balanced
        for scene in (DECODE[8], DECODE[0], DECODE[4], SHORT):
            yield f"attention blocks {text} {scene.name}", functools.partial(_rounded, text, scene)
    for text in CACHES:
        for scene in DECODING:
            yield f"attention {text} {scene.name}", functools.partial(_attention, text, scene)
        yield f"attention {text} prompt", functools.partial(_prompt, text)
        yield f"attention {text} masks", functools.partial(_masked, text)
        for tokens in (1, 512):
            yield f"append {text} {tokens}", functools.partial(_append, text, tokens)


def _likeliest(rows: int) -> Call:
    return likeliest, (Array((rows, 151_936), "float32"),)


def _filtered(rows: int) -> Call:
    """Logits after each row's top-k and top-p."""

    def process(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        return process_logits(logits, RowSettings(temperature=top_p, top_k=top_k, top_p=top_p))

    arrays = Array((rows, 151_936), "float32"), Array((rows,), "int32"), Array((rows,), "float32")
    return process, arrays


def _head(rows: int) -> Call:
    """The logits of an 8-bit head (H8) of Qwen3's vocabulary, in float32."""
    shape = GemmShape("head", 4096, 151_936)
    x = Array((rows, shape.channels), jnp.bfloat16)
    multiply = functools.partial(kernels.matmul, out_dtype=jnp.float32)
    return multiply, (x, _weight("uint8:gK:sym", shape))


def _matmul(text: str, rows: int, shape: GemmShape) -> Call:
    x = Array((rows, shape.channels), jnp.bfloat16)
    return kernels.matmul, (x, _weight(text, shape))


def _experts(text: str, tokens: int) -> Call:
    """Both products of a layer with 16 experts, 4 per token."""
    gate_up, down = (
        jax.eval_shape(lambda w: kernels.quantize(w, text), Array((16, k, n), jnp.bfloat16))
        for k, n in ((2048, 1536), (768, 2048))
    )
    x, chosen, weights = (
        Array((tokens, size), dtype)
        for size, dtype in ((2048, jnp.bfloat16), (4, jnp.int32), (4, jnp.float32))
    )

    def layer(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        gated = kernels.grouped_matmul(x, gate_up, chosen, gate=kernels.Gate())
        return kernels.grouped_matmul_terms(gated, down, chosen, weights)

    return layer, (x, chosen, weights, gate_up, down)


def _expert_mlp(text: str, tokens: int, hadamard: int | None = None) -> Call:
    """The layer of `_experts` in one call. hadamard: the block of Hadamard's transform, or None."""
    _, (*tokens_and_experts, gate_up, down) = _experts(text, tokens)
    mlp = kernels.ExpertMLP(gate_up, down, hadamard=hadamard)

    def layer(x: Any, chosen: Any, weights: Any, mlp: Any) -> Any:
        return kernels.expert_mlp_terms(x, mlp, chosen, weights)

    return layer, (*tokens_and_experts, mlp)


def _expert_blocks(tokens: int) -> Call:
    """The layer of `_expert_mlp` in calibrated W4Ax, with permutations and widths."""
    layer, (*others, mlp) = _expert_mlp("int4:g128/int8", tokens)
    order, *widths = (
        Array((16, size), dtype) for size, dtype in ((2048, "int32"), (16, "uint8"), (6, "uint8"))
    )
    gate_up = dataclasses.replace(mlp.gate_up, permutation=order, activation_bits=widths[0])
    down = dataclasses.replace(mlp.down, activation_bits=widths[1])
    return layer, (*others, kernels.ExpertMLP(gate_up, down))


def _routed_mlp(text: str) -> Call:
    """The layer of `_experts` for one token, with routing to 8 experts in the same call."""
    _, (x, *_, gate_up, down) = _experts(text, 1)

    def layer(x: Any, logits: Any, bias: Any, mlp: Any) -> Any:
        own = kernels.RouterLogits(logits, kernels.Routing(8), bias=bias)
        return kernels.expert_mlp_terms(x, mlp, own)

    logits, bias = Array((1, 16), jnp.float32), Array((16,), jnp.bfloat16)
    return layer, (x, logits, bias, kernels.ExpertMLP(gate_up, down))


def _route(name: str) -> Call:
    """The routing of 64 tokens, with a selection bias."""
    experts, routing = ROUTINGS[name]
    logits, correction = Array((64, experts), jnp.bfloat16), Array((experts,), jnp.float32)
    return lambda *arrays: kernels.route(arrays[0], routing, arrays[1]), (logits, correction)


def _adapters(rows: int, outputs: tuple[int, ...]) -> Call:
    """The contributions of 16 adapters of rank 16 to linear maps that share an input."""
    ups = [Array((16, 16, size), jnp.bfloat16) for size in outputs]
    arrays = [
        Array(shape, jnp.bfloat16)
        for shape in ((1, rows, sum(outputs)), (rows, 4096), (16, 4096, 16 * len(outputs)))
    ]
    return kernels.add_low_rank, (*arrays, ups, Array((rows,), jnp.int32))


def _gated_adapters(rows: int) -> Call:
    """A gated MLP's first product with the changes of 16 adapters of rank 16."""
    shape = GemmShape("gate_up", 4096, 24576)
    ups = [Array((16, 16, 12288), jnp.bfloat16)] * 2
    x, down = Array((rows, 4096), jnp.bfloat16), Array((16, 4096, 32), jnp.bfloat16)
    call = functools.partial(kernels.gated_low_rank, activation="silu")
    return call, (x, _weight("uint4:g128", shape), down, ups, Array((rows,), jnp.int32))


def _recurrent(shape: RecurrentShape, rows: int) -> Call:
    """A decoding step of a recurrent layer, with its convolution."""
    arguments = jax.eval_shape(lambda: mixers.random_step(shape, rows, 0))
    channels = arguments[0]
    states, inputs = (
        Array((64, *shape.state), "float32"),
        Array((64, 3, channels.shape[1]), "float32"),
    )

    def layer(weight: Any, inputs: Any, states: Any, channels: Any, gates: Any, rows: Any) -> Any:
        channels, inputs = kernels.convolution_step(
            channels, weight, inputs, rows, activation="silu"
        )
        return mixers.step(shape, states, (channels, gates, rows)), inputs

    return layer, (Array((channels.shape[1], 4), "bfloat16"), inputs, states, *arguments)


def _recurrent_prompt(shape: RecurrentShape, tokens: int) -> Call:
    """The prefill of a prompt in a recurrent layer."""
    inputs = jax.eval_shape(lambda: mixers.random_tokens(shape, 1, tokens))
    return functools.partial(mixers.read, shape), (Array((1, *shape.state), "float32"), inputs)


def _dequantize(text: str) -> Call:
    function = functools.partial(kernels.matmul, implementation="dequantize")
    return function, (Array((64, SQUARE.channels), jnp.float16), _weight(text, SQUARE))


def _terms(text: str) -> Call:
    function = functools.partial(kernels.matmul_terms, implementation="triton")
    return function, (Array((64, SQUARE.channels), jnp.float16), _weight(text, SQUARE))


def _gradient() -> Call:
    gradient = jax.grad(lambda x, weight: kernels.matmul(x, weight).astype(jnp.float32).sum())
    return gradient, (Array((64, SQUARE.channels), jnp.bfloat16), _weight("uint4:g128", SQUARE))


def _weight(text: str, shape: GemmShape) -> kernels.QuantizedTensor:
    matrix = Array((shape.channels, shape.outputs), jnp.float32)
    return jax.eval_shape(lambda w: kernels.quantize(w, text), matrix)


def _attention(text: str, shape: AttentionShape) -> Call:
    cache = _cache(text, shape)
    heads = shape.query_heads, shape.head_dim
    queries = Array((shape.batch, shape.queries, *heads), jnp.bfloat16)
    return kernels.paged_attention, (queries, cache.layers[0], _span(cache))


def _rounded(text: str, shape: AttentionShape) -> Call:
    """Attention whose outputs are quantised to blocks of 4 and 8 bits."""
    function, arguments = _attention(text, shape)
    bits = Array((shape.query_heads * shape.head_dim // 128,), jnp.uint8)

    def attend(bits: Any, *arguments: Any) -> Any:
        return function(*arguments, blocks=kernels.ActivationBlocks(bits))

    return attend, (bits, *arguments)


def _prompt(text: str) -> Call:
    function, arguments = _attention(text, PROMPT)
    return functools.partial(function, implementation="triton"), arguments


def _masked(text: str) -> Call:
    """Attention of varlen queries with a window, a softcap and sinks."""
    function, (queries, *others) = _attention(text, MASKED)
    queries = Array((MASKED.batch * MASKED.queries, *queries.shape[2:]), queries.dtype)
    sinks: Any = Array(queries.shape[1:2], jnp.bfloat16)
    return function, (queries, *others, Masks(window=1000, softcap=30.0, sinks=sinks))


def _rows(text: str) -> Call:
    """Gemma's gate, and Gemma's norm, whose weight is float32."""

    def compute(terms: jax.Array, both: jax.Array, weight: jax.Array) -> Any:
        narrow: dict[str, Any] = {"dtype": "bfloat16", "format": text, "implementation": "triton"}
        gated = kernels.gated(both, "gelu", **narrow)
        return gated, kernels.add_rms_norm(terms, None, weight, 1e-6, **narrow)

    terms, both = Array((2, 16, 2304), jnp.float32), Array((1, 16, 18432), jnp.bfloat16)
    return compute, (terms, both, Array((2304,), jnp.float32))


def _router_rows() -> Call:
    """A norm of Qwen3-30B-A3B fused with the router's logits, for one token."""
    shapes = (2, 1, 2048), (1, 2048), (2048,), (128, 2048)
    dtypes = (jnp.float32, *[jnp.bfloat16] * 3)
    project = functools.partial(project_rms_norm, epsilon=1e-6)
    return project, tuple(map(Array, shapes, dtypes))


def _hadamard(text: str) -> Call:
    """The gate before Qwen3-8B's down projection, with Hadamard's transform."""
    options: dict[str, Any] = {"dtype": "bfloat16", "format": text, "hadamard": 512}
    gate = functools.partial(kernels.gated, activation="silu", **options)
    return gate, (Array((2, 16, 24576), jnp.float32),)


def _append(text: str, tokens: int) -> Call:
    cache = _cache(text, APPENDED)
    heads = APPENDED.kv_heads, APPENDED.head_dim
    new = Array((APPENDED.batch, tokens, *heads), jnp.bfloat16)
    return kernels.append, (cache.layers[0], new, new, _span(cache))


def _cache(text: str, shape: AttentionShape) -> PagedKVCache:
    scales = 1.0 if KVFormat.parse(text).scaling else None
    layout = KVLayout(shape.kv_heads, shape.head_dim, text, page_size=128, dtype="bfloat16")
    create = functools.partial(PagedKVCache.create, layout, layers=1, scales=scales)
    return jax.eval_shape(lambda: create(batch=shape.batch, max_tokens=shape.context))


def _span(cache: PagedKVCache) -> Span:
    return Span(cache.block_tables, cache.lengths, cache.lengths)


def _step(weights: str, kv: str, tokens: int, batch: int) -> Call:
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        layers=llama_layers((None, 512), 3072, qk_norm=True),
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    model = nnx.eval_shape(lambda: random_model(Decoder, config, WeightFormat.parse(weights)))
    graph, state = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(batch, 4096, KVFormat.parse(kv)))
    new, counts = Array((batch, tokens), jnp.int32), Array((batch,), jnp.int32)
    return lambda state, *inputs: nnx.merge(graph, state).step(*inputs), (state, new, counts, cache)
