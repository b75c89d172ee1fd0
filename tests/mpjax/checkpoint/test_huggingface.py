from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mpjax.checkpoint import huggingface
from mpjax.checkpoint.plan import make_plan
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.memory import DeviceMemoryError
from mpjax.models import FAMILIES
from mpjax.precision import Precision
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CONFIGS,
    GPTQ,
    LLAMA,
    SQUARE,
    linear_shapes,
    pack_random,
    random_tensors,
    write_checkpoint,
)

dequantize = jax.jit(lambda kernel: kernel.dequantize())  # one program, not one for each step


def kernel_values(model, place):
    """The kernels of a place, dequantised and side by side, float32 [K, N]."""
    kernels = place.kernels(model)
    values = [dequantize(k) if isinstance(k, QuantizedTensor) else k for k in kernels]
    return np.concatenate([np.asarray(value, np.float32) for value in values], 1)


def nbytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def require_weights(model, tensors, weights):
    """Compares every parameter of a model with the file's, and with `weights` [K, N] by module."""
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    for array in model.array_places(model.config):
        value = array.read(model)
        assert value.dtype == model.config.dtype
        np.testing.assert_array_equal(
            np.asarray(value, np.float32), tensors[array.name].astype(np.float32)
        )
    for place in model.linear_places(model.config):
        expected = [
            weights[name] if name in weights else tensors[f"{name}.weight"].T.astype(np.float32)
            for name in place.names
        ]
        np.testing.assert_array_equal(kernel_values(model, place), np.concatenate(expected, 1))
        biases: list[Any] = [part.bias for part in place.parts(model)]
        if not place.bias:
            assert biases == [None] * len(biases)
            continue
        found = np.concatenate([bias.get_value() for bias in biases])
        expected = [tensors[f"{name}.bias"].astype(np.float32) for name in place.names]
        np.testing.assert_array_equal(found.astype(np.float32), np.concatenate(expected))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_plain_checkpoints(name, shards, tmp_path, rng):
    tensors = random_tensors(CONFIGS[name], rng, ml_dtypes.bfloat16)
    write_checkpoint(tmp_path, CONFIGS[name], tensors, shards)
    model = huggingface.load(tmp_path)
    assert type(model) is FAMILIES[CONFIGS[name]["architectures"][0]]
    assert model.config.dtype == "bfloat16"
    require_weights(model, tensors, {})
    assert (model.head is None) == ("tied" in name)
    assert all(len(place.parts(model)) == 1 for place in model.linear_places(model.config))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("computed", [None, "float32", jnp.float16])
def test_dtypes(stored, computed, tmp_path, rng):
    hf = LLAMA | SQUARE
    tensors = random_tensors(hf, rng, stored)
    write_checkpoint(tmp_path, hf, tensors)
    model = huggingface.load(tmp_path, dtype=computed)
    assert model.config.dtype == jnp.dtype(computed or "bfloat16").name
    require_weights(model, tensors, {})


def test_a_quantised_head(tmp_path, rng):
    """The head's codes are kept, and the logits are those of its dequantised weight."""
    plain = random_tensors(hf := LLAMA | SQUARE | {"torch_dtype": "float32"}, rng)
    written = hf | {"quantization_config": GPTQ | {"lm_head": True}}
    quantized = dict(plain)
    for name in ("lm_head", *linear_shapes(hf)):
        weight = pack_random(quantized, written, name, rng)
        plain[f"{name}.weight"] = np.ascontiguousarray(weight.T)
    found = huggingface.load(write_checkpoint(tmp_path / "q", written, quantized))
    assert found.head.kernel.format == WeightFormat("uint4", 32)
    expected = huggingface.load(write_checkpoint(tmp_path / "p", hf, plain))
    tokens = np.arange(8, dtype=np.int32)[None]
    want = np.asarray(expected(tokens))
    assert abs(want).max() > 0.01
    np.testing.assert_allclose(found(tokens), want, atol=1e-5 * abs(want).max())


def test_act_order(tmp_path, rng):
    # Layer 0: q, k and v share their order; layer 1: each has its own.
    hf = LLAMA | SQUARE | {"quantization_config": GPTQ | {"desc_act": True}}
    tensors = random_tensors(hf, rng, np.float16)
    shared, weights = rng.permutation(np.arange(64) // 32), {}
    for name, (channels, _) in linear_shapes(hf).items():
        g_idx = rng.permutation(np.arange(channels) // 32)
        if name.startswith("model.layers.0") and "down" not in name:
            g_idx = shared
        weights[name] = pack_random(tensors, hf, name, rng, g_idx)
    write_checkpoint(tmp_path, hf, tensors)
    model = huggingface.load(tmp_path)
    require_weights(model, tensors, weights)
    assert len(model.layers[0].attention.qkv.parts) == len(model.layers[0].mlp.gate_up.parts) == 1
    assert len(model.layers[1].attention.qkv.parts) == 3
    assert len(model.layers[1].mlp.gate_up.parts) == 2
    logits = jax.eval_shape(lambda tokens: model(tokens), jnp.ones((1, 5), jnp.int32))
    assert logits.shape == (1, 5, 96)


def test_modules_that_were_left_in_16_bits(tmp_path, rng):
    rule = {r"-:.*layers\.0\.self_attn\.v_proj": {}, r".*down_proj": {"bits": 8}}
    hf = CONFIGS["qwen2"] | {"quantization_config": GPTQ | {"dynamic": rule}}
    tensors, weights = random_tensors(hf, rng, np.float16), {}
    for name in linear_shapes(hf):
        if name != "model.layers.0.self_attn.v_proj":
            bits = 8 if "down_proj" in name else 4
            module = hf | {"quantization_config": GPTQ | {"bits": bits}}
            weights[name] = pack_random(tensors, module, name, rng)
    write_checkpoint(tmp_path, hf, tensors)
    model = huggingface.load(tmp_path)
    require_weights(model, tensors, weights)
    kernels = model.linear_places(model.config)[0].kernels(model)
    assert [isinstance(kernel, QuantizedTensor) for kernel in kernels] == [True, True, False]
    [down] = model.linear_places(model.config)[-1].kernels(model)
    assert down.format.bits == 8
    logits = jax.eval_shape(lambda tokens: model(tokens), jnp.ones((1, 5), jnp.int32))
    assert logits.shape == (1, 5, 96)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "text", ["W4g32A16KV16", "W8gKsymA16KV16", "W16A16KV16", "A16KV4", "WFP8A16KV16"]
)
def test_rounding_on_load(text, tmp_path, rng):
    hf = LLAMA | SQUARE
    tensors = random_tensors(hf, rng, ml_dtypes.bfloat16)
    write_checkpoint(tmp_path, hf, tensors)
    precision = Precision.parse(text)
    model = huggingface.load(tmp_path, precision=precision)
    weights = {}
    if precision.weights is not None and precision.weights.is_packed:
        weights = {
            name: np.asarray(quantize(tensors[f"{name}.weight"].T, precision.weights).dequantize())
            for name in linear_shapes(hf)
        }
    require_weights(model, tensors, weights)
    for place in model.linear_places(model.config):
        [kernel] = place.kernels(model)
        assert (kernel.format == precision.weights) if weights else kernel.dtype == jnp.bfloat16


def test_a_quantised_checkpoint_keeps_its_precision(tmp_path, rng):
    hf = LLAMA | {"quantization_config": AWQ}
    tensors = random_tensors(hf, rng, np.float16)
    for name in linear_shapes(hf):
        pack_random(tensors, hf, name, rng)
    write_checkpoint(tmp_path, hf, tensors)
    huggingface.load(tmp_path, precision=Precision.parse("W4g32A16KV8"))
    for text in ("W8g32A16KV8", "W4A16KV8", "W4gKA16KV8", "W16A16KV8", "W8g32symA16KV8"):
        message = f"precision is {text}, but .* is an AWQ checkpoint of W4g32 .* W4g32A16KV8, or"
        with pytest.raises(ValueError, match=message):
            huggingface.load(tmp_path, precision=Precision.parse(text))


def test_what_is_called_padding_may_be_anything_finite(tmp_path, rng):
    tensors = random_tensors(LLAMA, rng, ml_dtypes.bfloat16)
    table = tensors["model.embed_tokens.weight"]
    table[90:] = ml_dtypes.finfo(ml_dtypes.bfloat16).max
    table[91:] = 0
    write_checkpoint(tmp_path, LLAMA, tensors)
    require_weights(huggingface.load(tmp_path), tensors, {})
    table[95, :3] = np.nan
    write_checkpoint(tmp_path, LLAMA, tensors)
    message = "model.embed_tokens.weight: 3 of the 6144 values are NaN or infinite: the checkpoint"
    assert message in str(read_error(tmp_path).value)


def test_needed_memory_is_known_before_anything_is_allocated(tmp_path, rng, monkeypatch):
    write_checkpoint(tmp_path, LLAMA, random_tensors(LLAMA, rng))
    enough_but_for_converting = nbytes(huggingface.load(tmp_path))
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: enough_but_for_converting)
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(DeviceMemoryError, match=r"^loading /.* needs 0\.00 GB on .* has 0\.00 GB"):
        huggingface.load(tmp_path)


@pytest.mark.parametrize("written", [None, AWQ, GPTQ | {"desc_act": True}])
def test_planned_bytes_are_what_the_model_takes(written, tmp_path, rng):
    hf = CONFIGS["qwen2"] | ({"quantization_config": written} if written else {})
    tensors = random_tensors(hf, rng, np.float16)
    for name, (channels, _) in linear_shapes(hf).items() if written else ():
        act_order = written.get("desc_act")
        g_idx = np.arange(channels) % 2 if act_order else None
        if act_order and channels == 128:
            g_idx = np.arange(channels) % 4
        pack_random(tensors, hf, name, rng, g_idx)
    write_checkpoint(tmp_path, hf, tensors)
    model = huggingface.load(tmp_path)
    packing = huggingface.read_policy(tmp_path, hf)
    plan = make_plan(Checkpoint.open(tmp_path), type(model), model.config, packing, None)
    shared = 2 * 4 * 64 * 3 if written and written.get("desc_act") else 0  # int32, once for q, k, v
    assert plan.device_bytes - shared == nbytes(model)


def test_weights_do_not_share_memory_with_the_file(tmp_path, rng):
    tensors = random_tensors(LLAMA, rng, np.float32)
    write_checkpoint(tmp_path, LLAMA, tensors)
    model = huggingface.load(tmp_path, dtype="float32")
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    require_weights(model, tensors, {})


def read_error(folder, **keywords):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (callers check the message)
        huggingface.load(folder, **keywords)
    assert "\n" not in str(caught.value)
    return caught


def test_a_precision_has_16_bit_activations_unless_a_dtype_is_asked_for(tmp_path, rng):
    folder = write_checkpoint(
        tmp_path, LLAMA | {"torch_dtype": "float32"}, random_tensors(LLAMA, rng)
    )
    precision = Precision.parse("W16A16KV8")
    assert huggingface.load(folder).config.dtype == "float32"
    assert huggingface.load(folder, precision=precision).config.dtype == "bfloat16"
    kept = huggingface.load(folder, precision=precision, dtype="float32")
    assert kept.config.dtype == "float32"
