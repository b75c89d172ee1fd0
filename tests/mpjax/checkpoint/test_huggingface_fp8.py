"""FP8 checkpoints from the folder to the loaded model, and on to what `mpjax convert` saves."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.checkpoint import CheckpointError, huggingface
from mpjax.cli import info
from mpjax.cli.application import app
from tests.models.small import forward, logits_of
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.test_huggingface import require_weights
from tests.mpjax.checkpoint.write_checkpoint import (
    CACHE,
    CONFIGS,
    FP8,
    FP8_SIZES,
    compressed_fp8,
    linear_shapes,
    pack_module_fp8,
    random_tensors,
    write_checkpoint,
)
from tests.sweeps import in_sweep

STATIC = compressed_fp8("tensor", "tensor", dynamic=False)
QUANTIZED = {
    "fine-grained": (FP8, "WFP8g128AFP8"),
    "dynamic": (compressed_fp8("channel", "token"), "WFP8AFP8"),
    "weights only": (compressed_fp8("channel", None), "WFP8gKA16"),
}
# No map's input or output channels are whole blocks.
CUT = {"hidden_size": 200, "intermediate_size": 328, "head_dim": 24}


def write(folder, written, rng, model="qwen3", plain=(), **changes):
    """A checkpoint in FP8 but for the modules `plain`; its folder, tensors and weights."""
    hf = CONFIGS[model] | FP8_SIZES | {"quantization_config": written} | changes
    tensors = random_tensors(hf, rng, ml_dtypes.bfloat16)
    weights = {
        name: pack_module_fp8(tensors, written, name)
        for name in linear_shapes(hf)
        if name not in plain
    }
    return write_checkpoint(folder, hf, tensors), tensors, weights


@pytest.mark.parametrize(
    ("name", "sizes"),
    [in_sweep("fine-grained", {}), ("fine-grained", CUT), ("dynamic", {}), ("weights only", {})],
)
def test_the_logits_are_those_of_the_weights(name, sizes, tmp_path, rng):
    # FP8 activations have errors of up to 1/16, which average out; 16-bit ones here have none.
    folder, tensors, weights = write(tmp_path / "fp8", QUANTIZED[name][0], rng, **sizes)
    plain = {key: array for key, array in tensors.items() if not key.endswith(("scale", "_inv"))}
    plain |= {f"{name}.weight": weight.T for name, weight in weights.items()}
    hf = CONFIGS["qwen3"] | FP8_SIZES | sizes
    plain = {key: np.ascontiguousarray(array, np.float32) for key, array in plain.items()}
    expected_lm = mpjax.load(write_checkpoint(tmp_path / "plain", hf, plain), dtype="float32")
    tokens = rng.integers(0, 96, (2, 8))
    expected = forward(expected_lm.model, tokens)
    size = "g128" if "g128" in QUANTIZED[name][1] else "gK"
    for precision, tolerance in ((None, 0.1), (f"WFP8{size}A16KV16", 1e-5)):
        lm = mpjax.load(folder, precision=precision, dtype="float32")
        found = logits_of(lm.model, jnp.asarray(tokens))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < tolerance, (precision, error)


@pytest.mark.parametrize("shape", [(1,), (), (2,), (2, 1, 1)])
def test_scales_of_the_cache_reach_it(shape, tmp_path, rng):
    """Scales of tensors or heads are saved with the model, and used if the cache is in FP8."""
    folder, tensors, _ = write(tmp_path / "original", compressed_fp8("channel", "token"), rng)
    hf = huggingface.read_config(folder)
    hf["quantization_config"]["kv_cache_scheme"] = CACHE
    layers, heads = hf["num_hidden_layers"], hf["num_key_value_heads"]
    scales = rng.uniform(0.01, 2, (layers, 2, *shape)).astype(ml_dtypes.bfloat16)
    for layer, side in np.ndindex(layers, 2):
        name = f"model.layers.{layer}.self_attn.{'kv'[side]}_scale"
        tensors[name] = np.asarray(scales[layer, side])
    write_checkpoint(folder, hf, tensors)
    lm = mpjax.load(folder, precision="A16KVfp8")
    assert lm.model.cache_scales is not None
    expected = np.broadcast_to(scales.reshape(layers, 2, -1).astype(np.float32), (layers, 2, heads))
    np.testing.assert_array_equal(lm.model.cache_scales.get_value(), expected)
    cache = lm.model.create_cache(1, 16, lm.kv_format)
    np.testing.assert_array_equal(cache.layers[1].key_parameters, expected[1, 0])
    assert info.inspect(folder).nbytes == lm.nbytes
    if shape == (1,):
        mpjax.save(lm, tmp_path / "saved")
        require_same_bits(lm, mpjax.load(tmp_path / "saved"))


def test_scales_of_the_cache_must_be_there_and_positive(tmp_path, rng):
    written = compressed_fp8("channel", "token") | {"kv_cache_scheme": CACHE}
    folder, tensors, _ = write(tmp_path, written, rng)
    hf = huggingface.read_config(folder)
    for value, message in (
        (None, r"lacks 4 tensors \(model\.layers\.0\.self_attn\.k_scale"),
        (np.ones(3, np.float32), r"k_scale is float32 .*3.*one for each of the 2 KV heads"),
        (np.zeros(1, np.float32), r"k_scale is \[0\.0\]: expected positive, finite scales"),
    ):
        if value is not None:
            for layer in range(hf["num_hidden_layers"]):
                for side in "kv":
                    tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = value
            write_checkpoint(folder, hf, tensors)
        with pytest.raises(CheckpointError, match=message):
            mpjax.load(folder)


def test_weights_agree_with_a_precision_and_activations_follow_it(tmp_path, rng):
    blocks, tensors, weights = write(tmp_path / "blocks", FP8, rng)
    channels, *_ = write(tmp_path / "channels", compressed_fp8("channel", "token"), rng)
    for folder, text, found in (
        (blocks, "A16KV8", "WFP8g128AFP8KV8"),  # without a W part, all as in the checkpoint
        (blocks, "WFP8g128AFP8KV4", "WFP8g128AFP8KV4"),
        (blocks, "WFP8A16KVfp8", "WFP8A16KVfp8"),
        (channels, "WFP8AFP8KV8", "WFP8AFP8KV8"),
        (channels, "WFP8gKA16KV8", "WFP8gKA16KV8"),
    ):
        lm = mpjax.load(folder, precision=text)
        assert lm.precision == found
        if folder == blocks:
            require_weights(lm.model, tensors, weights)
    for folder, text, names in (
        (blocks, "WFP8AFP8KV8", "WFP8A16KV8 or WFP8g128AFP8KV8"),
        (blocks, "W4A16KV8", "WFP8A16KV8 or WFP8g128AFP8KV8"),
        (channels, "WFP8A16KV4", "WFP8gKA16KV4 or WFP8AFP8KV4"),
        (channels, "W16A16KV16", "WFP8gKA16KV16 or WFP8AFP8KV16"),
    ):
        message = f"precision is {text}, but {folder} is an FP8 checkpoint .* ask for {names}, or"
        with pytest.raises(ValueError, match=message):
            mpjax.load(folder, precision=text)


def test_other_scales_of_activations_need_a_choice(tmp_path, rng):
    folder, tensors, weights = write(tmp_path, STATIC, rng)
    for name in weights:
        tensors[f"{name}.input_scale"] = np.ones(1, np.float32)
    hf = huggingface.read_config(folder)
    inputs = hf["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    inputs["dynamic"] = True  # of all tokens together
    write_checkpoint(folder, hf, tensors)
    message = (
        f"{folder}/config.json: the checkpoint was made for activations in 8-bit float with "
        "dynamic scales (strategy 'tensor'), which are not implemented: ask for the precision "
        "WFP8gKA16KV16 or WFP8AFP8KV16"
    )
    rows = CliRunner().invoke(app, ["info", str(folder)]).stdout
    assert re.search(r"^precision +WFP8gKA16KV16$", rows, re.MULTILINE)
    assert re.search(
        r"^activations +made for 8-bit float with dynamic scales \(strategy 'tensor'\), not "
        "implemented: load it as WFP8gKA16KV16 or WFP8AFP8KV16$",
        rows,
        re.MULTILINE,
    )
    found = json.loads(CliRunner().invoke(app, ["info", str(folder), "--json"]).stdout)
    assert found["activations"].endswith("load it as WFP8gKA16KV16 or WFP8AFP8KV16")
    for precision in (None, "A16KV16"):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            mpjax.load(folder, precision=precision)
    for precision in ("WFP8gKA16KV16", "WFP8AFP8KV16"):
        lm = mpjax.load(folder, precision=precision)
        assert lm.precision == precision
        require_weights(lm.model, tensors, weights)
        assert (info.inspect(folder).describe() == lm.describe()) == ("A16" in precision)
    # In a checkpoint of plain numbers they are foreign.
    del hf["quantization_config"]
    plain = {name: array for name, array in tensors.items() if not name.endswith("weight_scale")}
    plain = {
        name: array.astype(np.float32) if name.endswith(".weight") else array
        for name, array in plain.items()
    }
    write_checkpoint(folder, hf, plain)
    with pytest.raises(CheckpointError, match=r"tensors \(model.layers.0.mlp.down_proj.input_sc"):
        mpjax.load(folder)
