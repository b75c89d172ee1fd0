from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import KVFormat
from mpjax.kernels.gemm.plans import Plan, forced
from mpjax.models import Decoder, DecoderLayer
from mpjax.models.state import DecoderCache, StepContext
from tests.models.small import (
    CONFIG,
    cast_around_kernels,
    dequantize_kernels,
    forward,
    quantize_kernels,
    small_config,
    small_model,
)
from tests.pallas_kernels.oracles import relative_error, wide
from tests.sweeps import combinations, in_sweep

SHALLOW = small_config(windows=(None,))  # where a layer shows it: half to compile
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, with biases everywhere": {
        "tie_word_embeddings": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "normed, windowed, multi-query": {"qk_norm": True, "windows": (5, None), "num_kv_heads": 1},
}


def random_tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def compiled_step(model: Decoder):
    """The model's step with the weights as arguments, so that all models share what is compiled."""
    graph, state = nnx.split(model)
    return functools.partial(_step, graph, state)


@functools.partial(jax.jit, static_argnums=0, static_argnames="fresh")
def _step(graph, state, tokens, counts, cache, *, fresh=False):
    return nnx.merge(graph, state).step(tokens, counts, cache, fresh=fresh)


@functools.partial(jax.jit, static_argnums=0)
def _call(graph, state, tokens):
    return nnx.merge(graph, state)(tokens)


def call(model: Decoder, tokens: np.ndarray) -> jax.Array:
    return _call(*nnx.split(model), tokens)


def run(
    model: Decoder,
    cache: DecoderCache,
    tokens: np.ndarray,
    sizes: list[int],
    fresh: bool = True,
) -> tuple[np.ndarray, DecoderCache]:
    """Feeds tokens [batch, all] in pieces; logits after each piece [pieces, batch, vocabulary]."""
    step, at, logits = compiled_step(model), 0, []
    for size in sizes:
        counts = np.full(len(tokens), size, np.int32)
        piece = tokens[:, at : at + size]
        last, cache = step(piece, counts, cache, fresh=fresh and at == 0)
        logits.append(last)
        at += size
    return np.stack(logits), cache


@pytest.mark.parametrize(
    "changes",
    [changes if changes else in_sweep(changes) for changes in VARIANTS.values()],
    ids=VARIANTS,
)
def test_forward_and_steps_equal_numpy(changes, rng):
    """A prompt, five steps across a page boundary, and a chunk; float32 with a 16-bit cache."""
    model = small_model(small_config(**changes))
    tokens = random_tokens(rng, 2, 70)
    expected = forward(model, tokens)
    logits = call(model, tokens)
    assert logits.dtype == jnp.float32
    assert relative_error(logits, expected) < 1e-5
    sizes = [61, 1, 1, 1, 1, 5]
    stepped, cache = run(model, model.create_cache(2, 80, KVFormat(16), 64), tokens, sizes)
    for last, end in zip(stepped, np.cumsum(sizes), strict=True):
        assert relative_error(last, expected[:, end - 1]) < 1e-5
    np.testing.assert_array_equal(cache.lengths, [70, 70])


def test_a_ragged_batch_equals_single_rows(rng):
    model = small_model()
    step = compiled_step(model)
    lengths = np.array([3, 9, 1], np.int32)
    prompts, following = random_tokens(rng, 3, 9), random_tokens(rng, 3, 1)
    ones = np.ones(3, np.int32)
    first, cache = step(prompts, lengths, model.create_cache(3, 64, KVFormat(16), 64), fresh=True)
    second, cache = step(following, ones, cache)
    np.testing.assert_array_equal(cache.lengths, lengths + 1)
    for row, length in enumerate(lengths):
        text = np.concatenate([prompts[row, :length], following[row]])[None]
        expected = forward(model, text)
        assert relative_error(first[row], expected[0, -2]) < 1e-5
        assert relative_error(second[row], expected[0, -1]) < 1e-5


def test_padding_and_idle_rows_change_nothing(rng):
    model = small_model(SHALLOW)
    step = compiled_step(model)
    empty = model.create_cache(2, 64, KVFormat(8), 64)
    tokens, padding = random_tokens(rng, 2, 6), random_tokens(rng, 2, 6)
    counts = np.array([4, 0], np.int32)
    other = np.where(np.arange(6) < counts[:, None], tokens, padding)
    logits, cache = step(tokens, counts, empty)
    other_logits, other_cache = step(other, counts, empty)
    np.testing.assert_array_equal(logits[0], other_logits[0])
    jax.tree.map(np.testing.assert_array_equal, cache, other_cache)
    np.testing.assert_array_equal(cache.lengths, counts)
    idle = empty.tables[0][1]
    for pages, before in zip(cache.layers, empty.layers, strict=True):
        np.testing.assert_array_equal(pages.keys[idle], before.keys[idle])
    assert np.isfinite(logits).all()


def test_fewer_bits_in_the_cache_cost_more(rng):
    model = small_model(SHALLOW)
    tokens = random_tokens(rng, 2, 40)
    expected = forward(model, tokens)[:, -1]
    errors = []
    for text in ("KV16", "KV8", "KV4"):
        cache = model.create_cache(2, 64, KVFormat.parse(text), 64)
        [last], _ = run(model, cache, tokens, [40], fresh=False)  # which attends the cache
        errors.append(relative_error(last, expected))
    assert errors[0] < 1e-5 < errors[1] < 0.02
    assert 4 * errors[1] < errors[-1] < 0.3


def test_a_block_at_a_time_is_a_token_at_a_time(rng):
    """A token attends its own block as it is, however many come at once."""
    model = small_model(SHALLOW)
    tokens = random_tokens(rng, 2, 134)
    last = []
    for sizes in ([122, 12], [122] + [1] * 12):
        cache = model.create_cache(2, 134, KVFormat("4cg32"), 64)
        last.append(wide(run(model, cache, tokens, sizes)[0][-1]))
    assert relative_error(jnp.asarray(last[0]), last[1]) < 1e-4
    assert 1e-4 < relative_error(jnp.asarray(last[0]), forward(model, tokens)[:, -1]) < 0.3


@pytest.mark.parametrize("text", ["KV4cg32", in_sweep("KV8")])
def test_varlen_steps_equal_steps_of_rows(text, rng):
    """Also where the residual of a row lies elsewhere, if no step passes the end of a block."""
    model = small_model(SHALLOW)
    prompts, format = random_tokens(rng, 3, 140), KVFormat.parse(text)
    rows = model.create_cache(3, 192, format, 32)
    expected = run(model, rows, prompts, [128, 12], fresh=False)[0][-1]
    states = model.create_states([18], 5, format, 32)
    tables = rng.permutation(18).astype(np.int32).reshape(3, 6)
    slots = np.array([4, 0, 1], np.int32)
    cache = DecoderCache(states, (tables,), np.zeros(3, np.int32), format, 32, slots)
    graph, state = nnx.split(model)

    @jax.jit
    def step(tokens, counts, cache):
        return nnx.merge(graph, state).step_varlen(tokens, counts, cache)

    starts = np.zeros(3, np.int32)
    for counts in ([128, 0, 50], [12, 0, 78], [0, 0, 12]):
        parts = [row[s : s + c] for row, s, c in zip(prompts, starts, counts, strict=True)]
        tokens = np.pad(np.concatenate(parts), (0, 180 - sum(counts)), constant_values=7)
        logits, cache = step(tokens, np.array(counts, np.int32), cache)
        starts += np.array(counts, np.int32)
        for row in np.flatnonzero(starts * (np.array(counts) > 0) == 140):
            assert relative_error(logits[row], wide(expected[row])) < 1e-4
    np.testing.assert_array_equal(cache.lengths, [140, 0, 140])


def test_a_window_hides_older_tokens(rng):
    model = small_model(small_config(windows=(4,)))
    tokens = random_tokens(rng, 1, 12)
    logits = call(model, tokens)[0, -1]
    for position, visible in ((7, False), (8, True)):
        changed = tokens.copy()
        changed[0, position] = (changed[0, position] + 1) % CONFIG.vocab_size
        difference = np.abs(call(model, changed)[0, -1] - logits).max()
        assert (difference > 1e-3) == visible


@pytest.mark.parametrize("text", ["uint4:g32", in_sweep("uint8:gK:sym")])
def test_quantized_kernels_equal_the_weights_they_stand_for(text, rng):
    model = quantize_kernels(small_model(SHALLOW), text)
    plain = dequantize_kernels(quantize_kernels(small_model(SHALLOW), text))
    tokens = random_tokens(rng, 2, 12)
    expected = forward(plain, tokens)
    assert relative_error(call(model, tokens), expected) < 1e-5
    cache = model.create_cache(2, 64, KVFormat(16), 64)
    [last], _ = run(model, cache, tokens, [12], fresh=False)
    assert relative_error(last, expected[:, -1]) < 1e-5
    assert relative_error(jnp.asarray(forward(small_model(SHALLOW), tokens)), expected) > 1e-3


@pytest.mark.parametrize(
    ("text", "gap"),
    [("int8/int8", 0.05), in_sweep("liquid4:g64/int8", 0.05), ("float8:gK/float8", 0.15)],
)
def test_eight_bit_activations_through_a_whole_model(text, gap, rng):
    """Against plain kernels of the same values: what is left is the rounding of activations."""
    model = quantize_kernels(small_model(SHALLOW), text)
    plain = dequantize_kernels(quantize_kernels(small_model(SHALLOW), text))
    tokens = random_tokens(rng, 2, 12)
    cache = model.create_cache(2, 64, KVFormat(16), 64)
    [last], _ = run(model, cache, tokens, [12], fresh=False)
    assert 1e-4 < relative_error(last, forward(plain, tokens)[:, -1]) < gap


@pytest.mark.parametrize("splits", [in_sweep(1), 3])
def test_a_layer_is_the_plain_formula_on_a_stream_and_terms(splits, rng):
    model = small_model(small_config(qk_norm=True, mlp_bias=True))
    layer = model.layers[0]
    terms = jnp.asarray(rng.standard_normal((splits, 2, 5, 64)).astype(np.float32))
    residual = jnp.asarray(rng.standard_normal((2, 5, 64)).astype(np.float32))
    angles = jnp.asarray(rng.uniform(-9, 9, (2, 5, 8)).astype(np.float32))
    context = StepContext({"global": angles})

    @jax.jit
    def both(layer, stream):
        x = terms.sum(0) + (0.0 if stream is None else stream)
        x = x + layer.attention(layer.attention_norm(x), context)[0]
        return layer(terms, stream, context, None), x, layer.mlp(layer.mlp_norm(x))

    for stream in (residual, None):
        (more, after, pages), x, mlp = both(layer, stream)
        assert pages is None
        assert more.shape[1:] == x.shape
        np.testing.assert_allclose(after, x, atol=1e-4)
        np.testing.assert_allclose(more.sum(0), mlp, atol=1e-4)


KERNEL_CONFIG = small_config(head_dim=64, qk_norm=True, windows=(6,))


def half_precision_error(rng, text: str | None, bits: int, dtype: str, **how: Any) -> float:
    """The error of logits in `dtype` against float32, with the same weights and cache format."""
    exact = small_model(KERNEL_CONFIG)
    if text is not None:
        quantize_kernels(exact, text)
    half = cast_around_kernels(exact, dtype)
    tokens = random_tokens(rng, 2, 12)
    results = []
    for model in (half, exact):
        cache = model.create_cache(2, 64, KVFormat(bits), 64)
        results.append(run(model, cache, tokens, **how)[0])
    return relative_error(jnp.asarray(results[0]), wide(results[1]))


def test_interpreted_kernels_inside_a_model(rng, interpreted_triton):
    how = {"sizes": [12], "fresh": False}  # all kernels in one program
    assert half_precision_error(rng, "uint4:g32", 8, "float16", **how) < 0.005


@pytest.mark.parametrize(
    ("text", "bits", "gates"),
    [
        ("uint4:g32", 16, 0),
        in_sweep("uint4:g32", 4, 0),
        ("liquid4:g64/int8", 8, 1),
        ("uint4:g32", 2, 0),
    ],
)
def test_a_decoding_step_lowers_for_cuda(text, bits, gates, pretend_gpu, lower_for_cuda):
    config = dataclasses.replace(KERNEL_CONFIG, dtype="bfloat16")
    model = nnx.eval_shape(lambda: quantize_kernels(Decoder(config, nnx.Rngs(0)), text))
    graph, state = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(2, 64, KVFormat(bits)))
    appended, flushed = (16, 1) if bits == 2 else (bits, 0)  # to the tokens that wait
    tokens, counts = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)

    def step(state, tokens, counts, cache):
        return nnx.merge(graph, state).step(tokens, counts, cache)

    program = lower_for_cuda(step, state, tokens, counts, cache)
    layers = len(KERNEL_CONFIG.windows)
    for name, times in (
        (f"matmul_{text.split(':')[0]}", 4 * layers),
        ("add_rms_norm", 2 * layers + 1),
        (f"rotate_and_append_kv{appended}", layers),
        (f"flush_kv{bits}", flushed * layers),
        (f"attention_kv{bits}", layers),
        ("gated_silu", gates * layers),
    ):
        assert program.count(f'name = "{name}"') == times, name


def test_gradients_reach_every_weight_and_are_right(rng):
    model = small_model(small_config(**VARIANTS["normed, windowed, multi-query"]))
    graph, state = nnx.split(model)
    tokens = jnp.asarray(random_tokens(rng, 2, 8))

    @jax.jit
    @jax.value_and_grad
    def loss(state):
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -chosen.mean()

    _, gradient = loss(state)
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0
    norm = np.sqrt(sum((wide(leaf) ** 2).sum() for leaf in jax.tree.leaves(gradient)))

    def moved(distance):
        return float(loss(jax.tree.map(lambda w, g: w + distance / norm * g, state, gradient))[0])

    assert (moved(1e-2) - moved(-1e-2)) / 2e-2 == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize(("text", "error"), [("uint4:g32", 1e-4), in_sweep("int8/int8", 0.1)])
def test_gradients_pass_through_packed_kernels(text, error, rng):
    """As with plain kernels of the same values; gemm/test_gradient.py has all formats."""
    model = quantize_kernels(small_model(SHALLOW), text)
    plain = dequantize_kernels(quantize_kernels(small_model(SHALLOW), text))
    tokens = jnp.asarray(random_tokens(rng, 2, 8))

    def gradient(model):
        graph, state = nnx.split(model)

        def loss(embedding):
            changed = nnx.merge(graph, state)
            changed.embedding = nnx.Param(embedding)
            logprobs = jax.nn.log_softmax(changed(tokens[:, :-1]))
            return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1).mean()

        return jax.jit(jax.grad(loss))(model.embedding.get_value())

    found, expected = gradient(model), wide(gradient(plain))
    assert relative_error(found, expected) < error


def test_modules_hold_no_hidden_state(rng):
    """A tracer that a call left in the model would take the place of its array."""
    model = small_model()
    before = nnx.split(model)
    tokens, counts = jnp.asarray(random_tokens(rng, 1, 3)), jnp.full(1, 3, jnp.int32)
    jax.eval_shape(model, tokens)
    jax.eval_shape(model.step, tokens, counts, model.create_cache(1, 64, KVFormat(8), 64))
    after = nnx.split(model)
    assert before[0] == after[0]
    leaves = [jax.tree.leaves(state) for _, state in (before, after)]
    assert all(one is other for one, other in zip(*leaves, strict=True))


def test_other_values_and_other_layers_do_not_retrace(rng, trace_counter, monkeypatch):
    layers = trace_counter(DecoderLayer.__call__)
    monkeypatch.setattr(DecoderLayer, "__call__", lambda *layer: layers(*layer))
    model = small_model(small_config(windows=(None,) * 4))
    step = jax.jit(counted := trace_counter(model.step), donate_argnums=2)
    cache = model.create_cache(2, 64, KVFormat(8), 64)
    for counts in ([1, 1], [0, 1], [1, 0]):
        _, cache = step(random_tokens(rng, 2, 1), np.array(counts, np.int32), cache)
    assert cache.lengths.tolist() == [2, 2]
    assert (counted.count, layers.count) == (1, 2)  # the first layer adds to no stream
    with forced(Plan("dequantize")):  # a plan that changes is another program's
        jax.eval_shape(model.step, random_tokens(rng, 2, 1), np.ones(2, np.int32), cache)
    assert layers.count == 4


def test_a_cache_fits_the_model():
    cache = small_model().create_cache(3, 100, "KV16", 64)
    assert (len(cache.layers), cache.capacity) == (2, 128)
    assert cache.layers[0].keys.aval.str_short() == "float32[6,2,64,16]"


def test_the_dtype_of_the_config_is_that_of_the_weights():
    config = small_config(dtype="bfloat16", qkv_bias=True)
    model = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}
    logits = jax.eval_shape(Decoder.__call__, model, jnp.zeros((1, 2), jnp.int32))
    assert logits.dtype == jnp.float32


def test_only_families_read_config_files():
    with pytest.raises(NotImplementedError, match=r"Decoder does not read config\.json"):
        Decoder.config_from_hf({})


@pytest.mark.gpu
@combinations(
    1,
    case=[
        *((None, 16), ("uint4:g32", 16), ("uint4:g32", 8), ("uint8:g64", 4), ("uint8:gK:sym", 8)),
        *(("int8/int8", 8), ("liquid4:g64/int8", 16), ("float8:gK/float8", 8)),
    ],
    dtype=["bfloat16", "float16"],
)
def test_a_model_on_the_gpu(case, dtype, rng):
    """The float32 model goes through the reference implementations."""
    text, bits = case
    # An activation that is rounded to FP8 the other way moves by up to 2⁻³ of itself, whatever the
    # dtype: where values differ by 2⁻¹¹, that is a mean square of 2⁻¹¹ · 2⁻³, or 2⁻⁷ a product.
    gate = {"bfloat16": 0.05, "float16": 0.05 if text == "float8:gK/float8" else 0.03}[dtype]
    assert half_precision_error(rng, text, bits, dtype, sizes=[10, 2]) < gate


@pytest.mark.parametrize(
    ("count", "length", "fresh", "message"),
    [
        (5, 60, False, "holds 64 tokens per sequence, but 65 are needed"),
        (6, 0, True, r"counts are \[6\]: expected 0 to 5, the number of tokens"),
        (-1, 9, False, r"counts are \[-1\]: expected 0 to 5"),
        (2, 1, True, r"the cache holds \[1\] tokens, and fresh says that it is empty"),
        (4, 60, False, None),
        (5, 0, True, None),
        (0, 64, False, None),
    ],
)
def test_a_step_that_does_not_fit_is_refused_first(count, length, fresh, message, monkeypatch):
    def computed(*arguments):
        raise NotImplementedError("reached")

    monkeypatch.setattr(Decoder, "_hidden", computed)
    model = small_model(SHALLOW)
    empty = model.create_cache(1, 64, KVFormat(), 64)
    cache = dataclasses.replace(empty, lengths=jnp.array([length]))
    arguments = jnp.ones((1, 5), jnp.int32), jnp.array([count]), cache
    error = NotImplementedError if message is None else ValueError
    with pytest.raises(error, match=message or "reached"):
        model.step(*arguments, fresh=fresh)
    with pytest.raises(NotImplementedError):  # where nothing is known
        jax.jit(model.step, static_argnames="fresh")(*arguments, fresh=fresh)


def test_tokens_beyond_the_positions_are_refused(monkeypatch):
    model = small_model(dataclasses.replace(SHALLOW, max_position_embeddings=8))
    message = "a sequence of 9 tokens would pass the 8 positions of this model: shorten it, or load"
    jax.eval_shape(model, jnp.ones((2, 8), jnp.int32))
    for call in (model, jax.jit(model.__call__)):
        with pytest.raises(ValueError, match=message):
            call(jnp.ones((2, 9), jnp.int32))

    def computed(*arguments):
        raise NotImplementedError("reached")

    monkeypatch.setattr(Decoder, "_hidden", computed)
    cache = dataclasses.replace(model.create_cache(2, 64, "KV16"), lengths=jnp.array([2, 5]))
    tokens = jnp.ones((2, 4), jnp.int32)
    for counts, error in (([4, 3], NotImplementedError), ([0, 4], ValueError)):
        with pytest.raises(error, match="reached" if error is NotImplementedError else message):
            model.step(tokens, jnp.array(counts), cache)
        with pytest.raises(NotImplementedError):  # where nothing is known
            jax.jit(model.step)(tokens, jnp.array(counts), cache)


@pytest.mark.parametrize("tied", [False, in_sweep(True)])
def test_packed_tables(tied, rng):
    config = dataclasses.replace(SHALLOW, tie_word_embeddings=tied)
    model, tokens = small_model(config), random_tokens(rng, 2, 5)
    exact = call(model, tokens)
    for path in config.tables:
        model.pack_table(path, "uint8:g32:sym")
    assert model.config.packed_tables == config.tables
    found = call(model, tokens)
    assert not np.array_equal(found, exact)
    assert relative_error(found, exact) < 0.03
    step, cache = compiled_step(model), model.create_cache(2, 8, "KV16")
    _, cache = step(tokens[:, :4], jnp.array([4, 4]), cache)
    logits, _ = step(tokens[:, 4:], jnp.array([1, 1]), cache)
    np.testing.assert_allclose(logits, found[:, -1], rtol=1e-4, atol=1e-3)
    for path, format, message in (
        ("head", "uint8", r"path is 'head': expected a table that is not packed, of \[\]$"),
        ("norm", "uint8", "path is 'norm': expected a table"),
    ):
        with pytest.raises(ValueError, match=message):
            model.pack_table(path, format)


def test_a_table_is_rounded_to_a_packed_format():
    model = small_model(SHALLOW)
    with pytest.raises(ValueError, match="bfloat16 is not packed: expected a format such as uint8"):
        model.pack_table("head", "bfloat16")
    with pytest.raises(ValueError, match="embedding: 64 input channels can't be split into groups"):
        model.pack_table("embedding", "uint8:g128")
    assert model.config.packed_tables == ()
