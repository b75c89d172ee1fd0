"""Decoders in deterministic mode: steps with a cache have the bits of a forward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, UnsupportedError, device
from mpjax.models.deterministic import CPU_HAS_EXPERTS, with_determinism
from tests.models.small import quantize_kernels, small_config, small_mixture, small_model

MODELS = {
    "windows, norms of heads and biases": lambda: small_model(
        small_config(windows=(None, 20), qk_norm=True, qkv_bias=True)
    ),
    "mixture": lambda: small_mixture(shared=False),
    "mixture with a shared expert": lambda: small_mixture(shared=True),
}
_step = jax.jit(lambda model, *arguments: model.step(*arguments, every_position=True))
_call = jax.jit(lambda model, tokens: model(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_bits_of_a_forward_pass(name):
    if "mixture" in name and not CPU_HAS_EXPERTS:
        with pytest.raises(UnsupportedError, match="experts on a CPU need JAX"):
            with_determinism(MODELS[name](), KVFormat.parse("KV8"))
        return
    model = with_determinism(MODELS[name](), KVFormat.parse("KV8"))
    tokens = np.random.default_rng(0).integers(1, 50, (3, 30)).astype(np.int32)
    expected = np.asarray(_call(model, tokens[1:2]))[0]
    np.testing.assert_array_equal(np.asarray(_call(model, tokens))[1], expected)
    for rows, pieces in ((tokens, (9, 1, 20)), (tokens[1:2], (29, 1))):
        cache, begin, found = model.create_cache(len(rows), 30, "KV8", 16), 0, []
        for size in pieces:
            counts = np.full(len(rows), size, np.int32)
            logits, cache = _step(model, rows[:, begin : begin + size], counts, cache)
            found.append(np.asarray(logits)[len(rows) // 2])
            begin += size
        np.testing.assert_array_equal(np.concatenate(found), expected)


def test_a_gpu_runs_the_kernels_in_every_case(lower_for_cuda):
    """No case goes to cuDNN, and attention is not plain JAX: warnings are errors."""
    config = small_config(windows=(None,), head_dim=64, dtype="bfloat16")
    model = quantize_kernels(small_model(config), "uint4:g64")
    model = with_determinism(model, KVFormat.parse("KV8"))
    with device.described_as():
        for batch, tokens in ((1, 1), (64, 1), (1, 2048)):
            create = functools.partial(model.create_cache, batch, 2048, "KV8")
            shape = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
            counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
            text = lower_for_cuda(
                lambda *arguments: model.step(*arguments), shape, counts, jax.eval_shape(create)
            )
            for kernel in ("matmul_uint4", "attention_kv8", "attention_combine"):
                assert kernel in text
            assert "cudnn" not in text
