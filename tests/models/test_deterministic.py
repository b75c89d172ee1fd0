"""Decoders in deterministic mode: steps with a cache have the bits of a forward pass."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.bench.random_model import random_model
from mpjax.kernels import KVFormat, UnsupportedError, WeightFormat, device
from mpjax.models import ExpertsSpec, Qwen3, Qwen3MoE
from mpjax.models.deterministic import CPU_HAS_EXPERTS, with_determinism
from tests.eight_devices import run
from tests.models.small import (
    hybrid_model,
    latent_model,
    small_config,
    small_mixture,
    small_model,
)
from tests.sweeps import in_sweep

MODELS = {
    "windows, norms of heads and biases": lambda: small_model(
        small_config(windows=(None, 20), qk_norm=True, qkv_bias=True)
    ),
    "recurrent layers": hybrid_model,
    "latents": latent_model,
    "mixture": lambda: small_mixture(shared=False),
    "mixture with a shared expert": lambda: small_mixture(shared=True),
}
_step = jax.jit(lambda model, *arguments: model.step(*arguments, every_position=True))
_call = jax.jit(lambda model, tokens: model(tokens))


# tests/mpjax/rollouts/test_deterministic.py has engines of the models that are left to the sweep.
@pytest.mark.parametrize(
    "name", [in_sweep(name) if name in ("recurrent layers", "latents") else name for name in MODELS]
)
def test_steps_have_the_bits_of_a_forward_pass(name):
    if "mixture" in name and not CPU_HAS_EXPERTS:
        with pytest.raises(UnsupportedError, match="experts on a CPU need JAX"):
            with_determinism(MODELS[name](), KVFormat.parse("KV8"))
        return
    check_bits(MODELS[name]())


@pytest.mark.parametrize(
    ("count", "architecture"),
    [
        ("4", "Olmo2ForCausalLM"),  # four terms have an order, and its norms cover all heads
        in_sweep("2", "Qwen2MoeForCausalLM"),
        in_sweep("2", "Qwen3NextForCausalLM"),
        in_sweep("2", "DeepseekV3ForCausalLM"),
        in_sweep("2", "FalconH1ForCausalLM"),
    ],
)
def test_devices_add_in_their_order(count, architecture):
    if "Moe" in architecture and not CPU_HAS_EXPERTS:
        pytest.skip("experts on a CPU need JAX 0.11")
    assert run("tests.models.deterministic_on_devices", count, architecture) == "equal\n"


def of_gpu(name):
    """A model whose every part has a kernel for GPUs."""
    config = small_config(windows=(None, 20), qk_norm=True, head_dim=64, dtype="bfloat16")
    if name == "recurrent layers":
        return hybrid_model(head_dim=64, dtype="bfloat16")
    if name == "latents":
        return latent_model(dtype="bfloat16")
    if name == "mixture":
        mlp = ExpertsSpec(32, num_experts=4)
        layers = [dataclasses.replace(layer, mlp=mlp) for layer in config.layers]
        config = dataclasses.replace(config, layers=tuple(layers))
    family = Qwen3MoE if name == "mixture" else Qwen3
    return random_model(family, config, WeightFormat.of("uint4:g32"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["packed", "mixture", "recurrent layers", "latents"])
def test_a_gpu_s_steps_have_the_bits_of_a_forward_pass(name):
    check_bits(of_gpu(name))


def check_bits(model):
    """Alone, among others and in pieces, logits have the bits of a forward pass."""
    model = with_determinism(model, KVFormat.parse("KV8"))
    tokens = np.random.default_rng(0).integers(1, 50, (3, 30)).astype(np.int32)
    expected = np.asarray(_call(model, tokens[1:2]))[0]
    np.testing.assert_array_equal(np.asarray(_call(model, tokens))[1], expected)
    for rows, pieces in ((tokens, (9, 1, 20)), (tokens[1:2], (29, 1))):
        cache, begin, found = model.create_cache(len(rows), 30, "KV8", 16), 0, []
        for size in pieces:
            counts = np.full(len(rows), size, np.int32)
            logits, cache = _step(model, rows[:, begin : begin + size], counts, cache)
            found.append(np.asarray(logits)[len(rows) // 2, :, : expected.shape[1]])
            begin += size
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("packed", ("matmul_uint4", "attention_kv8", "attention_combine")),
        ("recurrent layers", ("gated_delta_step", "state_space_step", "convolution_step")),
        ("latents", ("latent_attention_kv8", "attention_combine")),
    ],
)
def test_a_gpu_runs_the_kernels_in_every_case(name, kernels, lower_for_cuda):
    """No case goes to cuDNN, and attention is not plain JAX: warnings are errors."""
    model = with_determinism(of_gpu(name), KVFormat.parse("KV8"))
    with device.described_as():
        for batch, tokens in ((1, 1), (64, 1), (1, 2048)):
            create = functools.partial(model.create_cache, batch, 2048, "KV8")
            shape = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
            counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
            text = lower_for_cuda(
                lambda *arguments: model.step(*arguments), shape, counts, jax.eval_shape(create)
            )
            for kernel in kernels:
                assert kernel in text
            assert "cudnn" not in text
