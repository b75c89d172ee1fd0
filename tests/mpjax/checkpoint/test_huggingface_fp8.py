"""FP8 checkpoints from the folder to the loaded model, and on to what `mpjax convert` saves."""

from __future__ import annotations

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.checkpoint import CheckpointError, huggingface
from mpjax.checkpoint.plan import make_plan
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.cli import info
from mpjax.cli.application import app
from tests.models.small import forward, logits_of
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.test_huggingface import nbytes, require_weights
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
    "tensor": (compressed_fp8("tensor", "token"), "WFP8AFP8"),
    "block": (compressed_fp8("block", "group"), "WFP8g128AFP8"),
    "weights only": (compressed_fp8("channel", None), "WFP8gKA16"),
}
# No map's input or output channels are whole blocks.
CUT = {"hidden_size": 200, "intermediate_size": 328, "head_dim": 24}
each = pytest.mark.parametrize("name", QUANTIZED)
# One for each format on the device.
distinct = pytest.mark.parametrize("name", ["fine-grained", "dynamic", "weights only"])


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
    ("name", "model", "sizes"),
    [
        *((name, model, {}) for name in QUANTIZED for model in ("qwen2", "qwen3")),
        *((name, "qwen2", CUT) for name in ("fine-grained", "block")),
    ],
)
def test_every_weight_is_what_the_file_says(name, model, sizes, tmp_path, rng):
    written, precision = QUANTIZED[name]
    folder, tensors, weights = write(tmp_path, written, rng, model, **sizes)
    lm = mpjax.load(folder)
    assert lm.precision == f"{precision}KV16"
    require_weights(lm.model, tensors, weights)
    assert all(
        len(place.kernels(lm.model)) == 1 for place in lm.model.linear_places(lm.model.config)
    )
    plan = make_plan(
        Checkpoint.open(folder),
        type(lm.model),
        lm.model.config,
        huggingface.read_scheme(folder, huggingface.read_config(folder)),
        None,
    )
    assert plan.device_bytes == nbytes(lm.model)
    assert info.inspect(folder).describe() == lm.describe()


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


def test_modules_that_were_left_in_16_bits(tmp_path, rng):
    plain = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
    folder, tensors, weights = write(tmp_path, FP8, rng, plain=plain)
    lm = mpjax.load(folder)
    require_weights(lm.model, tensors, weights)
    assert lm.precision == "W16A16+WFP8g128AFP8KV16"
    assert info.inspect(folder).describe() == lm.describe()
    logits = jax.eval_shape(lambda tokens: lm.model(tokens), jnp.ones((1, 5), jnp.int32))
    assert logits.shape == (1, 5, 96)


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


@pytest.mark.parametrize("written", [None, {"quant_method": "awq", "bits": 4, "group_size": 128}])
def test_a_config_of_another_checkpoint(written, tmp_path, rng):
    folder, tensors, _ = write(tmp_path, FP8, rng)
    hf = huggingface.read_config(folder) | {"quantization_config": written}
    write_checkpoint(folder, hf, tensors)
    message = r"self_attn.q_proj is an FP8 module \(weight, weight_scale_inv\), but config.json"
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(folder)


def test_an_fp8_config_of_another_checkpoint(tmp_path, rng):
    folder, tensors, _ = write(tmp_path, FP8, rng)
    name = "model.layers.1.mlp.up_proj"
    del tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.qweight"] = np.zeros((16, 256), np.int32)
    tensors[f"{name}.scales"] = np.zeros((1, 256), np.float16)
    write_checkpoint(folder, huggingface.read_config(folder), tensors)
    with pytest.raises(CheckpointError, match=r"up_proj: .* 'fp8', but .* packed as GPTQ"):
        mpjax.load(folder)


def test_what_is_wrong_with_a_tensor_is_said_before_any_is_read(tmp_path, rng, monkeypatch):
    folder, tensors, _ = write(tmp_path, FP8, rng)
    hf, name = huggingface.read_config(folder), "model.layers.1.mlp.up_proj"
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
    scales = f"{name}.weight_scale_inv"
    without = {key: array for key, array in tensors.items() if key != scales}
    for changed, message in (
        (
            without,
            " has no tensor weight_scale_inv: expected float16 or bfloat16 or float32 [2, 1]",
        ),
        (tensors | {scales: np.ones((1, 2), np.float32)}, ".weight_scale_inv is float32 [1, 2]: e"),
        (
            tensors | {f"{name}.weight": np.ones((8, 8), np.int8)},
            " holds a weight of 8 input and 8",
        ),
    ):
        write_checkpoint(folder, hf, changed)
        message = re.escape(f"{folder}/model.safetensors: {name}{message}")
        with pytest.raises(CheckpointError, match=message):
            mpjax.load(folder)
    write_checkpoint(folder, hf, {k: v for k, v in tensors.items() if k != f"{name}.weight"})
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor \({name}.weight\)"):
        mpjax.load(folder)


def test_damaged_numbers(tmp_path, rng):
    folder, tensors, _ = write(tmp_path, FP8, rng)
    name, hf = "model.layers.1.mlp.up_proj", huggingface.read_config(folder)
    for suffix, message in (("weight", "up_proj.weight has w"), ("weight_scale_inv", "1 of the 2")):
        array = tensors[f"{name}.{suffix}"].copy()
        array[-1, -1] = np.nan
        write_checkpoint(folder, hf, tensors | {f"{name}.{suffix}": array})
        with pytest.raises(CheckpointError, match=f"{message}.* NaN.* damaged"):
            mpjax.load(folder)


@distinct
def test_convert_and_back(name, tmp_path, rng):
    sizes = CUT if name == "fine-grained" else {}
    folder, *_ = write(tmp_path / "original", QUANTIZED[name][0], rng, **sizes)
    lm = mpjax.load(folder)
    target = tmp_path / "converted"
    result = CliRunner().invoke(app, ["convert", str(folder), str(target)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"of weights, {lm.precision}," in result.stdout
    shutil.rmtree(folder)
    restored = mpjax.load(target)
    require_same_bits(lm, restored)
    assert mpjax.load(target, precision="A16KV8").precision == lm.precision.replace("KV16", "KV8")


def test_generate(tmp_path, rng):
    folder, *_ = write(tmp_path, FP8, rng, vocab_size=2048, num_hidden_layers=1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mpjax.bundled_model() / file, folder / file)
    command = ["generate", "--model", str(folder), "--max-new-tokens", "4", "def f"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
