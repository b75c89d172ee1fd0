from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax import language_model
from mpjax.checkpoint import huggingface
from mpjax.kernels import KVFormat, WeightFormat, device
from mpjax.language_model import LanguageModel, weight_formats
from mpjax.models import CacheScales
from mpjax.precision import Precision
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    FP8,
    FP8_SIZES,
    GPTQ,
    linear_shapes,
    pack_module_fp8,
    pack_random,
    random_tensors,
    write_checkpoint,
)
from tests.mpjax.tokenizer_folders import byte_level
from tests.sweeps import in_sweep


def load(folder, precision=None, dtype=None):
    precision = Precision() if precision is None else Precision.parse(precision)
    model = huggingface.load(folder, precision=precision, dtype=dtype)
    return LanguageModel(model, None, precision.kv, Path("the/source"))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", [None, "W4g32A16KV8"])
def test_parameters_are_counted_however_they_are_stored(name, precision, tmp_path, rng):
    tensors = random_tensors(CONFIGS[name], rng)
    lm = load(write_checkpoint(tmp_path, CONFIGS[name], tensors), precision)
    assert lm.num_parameters == sum(array.size for array in tensors.values())
    assert lm.config is lm.model.config


@pytest.mark.one_of(2)
@pytest.mark.parametrize("precision", ["W4g32A16KV8", "W8gKsymA16KV4", "W16A16KV16"])
def test_precision_is_what_was_asked_for(precision, tmp_path, rng):
    lm = load(
        write_checkpoint(tmp_path, CONFIGS["llama"], random_tensors(CONFIGS["llama"], rng)),
        precision,
    )
    assert lm.precision == precision


def test_a_model_is_shown_in_a_line(tmp_path, rng):
    hf = CONFIGS["llama"]
    lm = load(write_checkpoint(tmp_path, hf, random_tensors(hf, rng)), "W4g32A16KV8")
    size = f"{lm.nbytes / 1e6:.1f} MB"
    assert repr(lm) == f"LanguageModel(Llama, W4g32A16KV8, {size}, from the/source)"


def test_precision_is_what_is_there(tmp_path, rng):
    hf = CONFIGS["llama"] | {"quantization_config": GPTQ | {"group_size": 64}}
    tensors = random_tensors(hf, rng, np.float16)
    for name in linear_shapes(hf):
        if name != "model.layers.1.self_attn.v_proj":
            pack_random(tensors, hf, name, rng)
    lm = load(write_checkpoint(tmp_path, hf, tensors), "A16KV8")
    assert lm.precision == "W16+W4g64A16KV8"
    assert weight_formats(lm.model) == {WeightFormat("bfloat16"), WeightFormat("uint4", 64)}
    rows = dict(lm.describe())
    assert rows["attention.qkv"] == "W4g64 in 1 layer, W4g64 | W4g64 | W16 in 1 layer"
    assert rows["mlp.down"] == "W4g64 in 2 layers"


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "precision",
    [
        "W16A16KV16",
        in_sweep("W32A32KV8"),
        "W4A16KV8",
        in_sweep("W4g32A32KV4"),
        "W4gKsymA16KV4t",
        in_sweep("W8g64A16K8V4"),
        in_sweep("W8symA32KV16"),
        "WNF4A16KV4cg64",
        "WNF3g128A16K4cV4c",
        "WNF2g32A16KV2t",
        "WFP8A16KVfp8",
        in_sweep("WFP8gKA16KV2"),
        in_sweep("WFP8AFP8KV8"),
        "WFP8g128AFP8KV8s",
        "W8A8K4cg32V8",
        "W4A8KV4",
    ],
)
def test_every_format_can_be_loaded_as_it_is_called(precision, tiny_folder, tmp_path):
    """From a float32 checkpoint, and from what was saved."""
    lm = mpjax.load(tiny_folder, precision=precision)
    assert lm.precision == precision
    assert lm.config.dtype == ("float32" if "A32" in precision else "bfloat16")
    again = mpjax.load(tiny_folder, precision=lm.precision)
    assert (again.precision, again.config) == (lm.precision, lm.config)
    if lm.kv_format.scaling != "static":  # which needs a calibration to be saved
        mpjax.save(lm, tmp_path / "saved")
        assert mpjax.load(tmp_path / "saved", precision=lm.precision).precision == precision


def gptq_mixture(folder, rng):
    """Maps of 4 bits, of 8, and one that is not packed."""
    written = GPTQ | {"group_size": 64, "dynamic": {"+:.*down_proj": {"bits": 8}}}
    hf = CONFIGS["llama"] | {"quantization_config": written}
    tensors = random_tensors(hf, rng, np.float16)
    for name in linear_shapes(hf):
        bits = 8 if name.endswith("down_proj") else 4
        of_map = hf | {"quantization_config": written | {"bits": bits}}
        if name != "model.layers.1.self_attn.v_proj":
            pack_random(tensors, of_map, name, rng)
    return write_checkpoint(folder, hf, tensors)


def fp8_mixture(folder, rng):
    """Maps in FP8, and one that is not packed."""
    hf = CONFIGS["qwen3"] | FP8_SIZES | {"quantization_config": FP8}
    tensors = random_tensors(hf, rng, ml_dtypes.bfloat16)
    for name in linear_shapes(hf):
        if name != "model.layers.1.mlp.down_proj":
            pack_module_fp8(tensors, FP8, name)
    return write_checkpoint(folder, hf, tensors)


@pytest.mark.parametrize(
    ("write", "asked", "precision", "others"),
    [
        (gptq_mixture, None, "W16+W4g64+W8g64A16KV16", ["W16+W4g64A16KV16", "W16+W4+W8A16KV8"]),
        (gptq_mixture, "A32KV8", "W32+W4g64+W8g64A32KV8", ["W32+W4g64A32KV8", "W4g64+W8g64A32KV8"]),
        (fp8_mixture, None, "W16A16+WFP8g128AFP8KV16", ["W4A16+WFP8g128AFP8KV16"]),
        (fp8_mixture, "WFP8A16KV8", "W16+WFP8A16KV8", ["W16+W8A16KV8"]),
    ],
)
def test_mixtures_can_be_loaded_as_they_are_called(write, asked, precision, others, tmp_path, rng):
    folder = write(tmp_path / "mixture", rng)
    lm = mpjax.load(folder, precision=asked)
    assert lm.precision == precision
    assert mpjax.load(folder, precision=precision.lower()).precision == precision
    mpjax.save(lm, tmp_path / "saved")
    assert mpjax.load(tmp_path / "saved", precision=precision).precision == precision
    for other in others:
        for place in (folder, tmp_path / "saved"):
            with pytest.raises(ValueError, match=f"precision is {re.escape(other)}, but"):
                mpjax.load(place, precision=other)


def test_a_mixture_is_not_made_of_16_bits(tmp_path, rng):
    folder = write_checkpoint(tmp_path, CONFIGS["llama"], random_tensors(CONFIGS["llama"], rng))
    message = r"precision is W16\+W4g32A16KV8, but the weights in .* are W16: ask for A16KV8"
    with pytest.raises(ValueError, match=message):
        mpjax.load(folder, precision="W16+W4g32A16KV8")


def test_float32_is_not_called_16_bits(tmp_path, rng):
    folder = write_checkpoint(tmp_path, CONFIGS["llama"], random_tensors(CONFIGS["llama"], rng))
    assert load(folder, dtype="float32").precision == "W32A32KV16"


def test_bytes(tmp_path, rng):
    tensors = random_tensors(CONFIGS["llama"], rng)
    folder = write_checkpoint(tmp_path, CONFIGS["llama"], tensors)
    plain, packed = load(folder), load(folder, "W4g32A16KV8")
    assert plain.nbytes == 2 * plain.num_parameters
    linear = sum(k * n for k, n in linear_shapes(CONFIGS["llama"]).values())
    # Half a byte for a code and four for the scale and zero point of 32; 64 channels are padded to
    # the 128 of a block.
    padded = sum(max(k, 128) * n for k, n in linear_shapes(CONFIGS["llama"]).values())
    assert packed.nbytes == plain.nbytes - 2 * linear + padded // 2 + padded // 32 * 4


def test_describe(tmp_path, rng):
    tensors = random_tensors(CONFIGS["llama"], rng)
    folder = write_checkpoint(tmp_path, CONFIGS["llama"], tensors)
    lm = load(folder, "W4g32A16KV8")
    assert lm.kv_format == KVFormat(8)
    rows = lm.describe()
    assert rows[:2] == [("model", "Llama from the/source"), ("precision", "W4g32A16KV8")]
    assert dict(rows) | {
        "layers": "2",
        "hidden size": "64",
        "heads": "4, 2 for keys and values",
        "longest context": "256",
        "parameters": "0.1 million",
        "other weights": "0.0 MB in bfloat16",
        "cache scales": "none",
        "attention.output": "W4g32 in 2 layers",
    } == dict(rows)
    for shape, text in (
        ((2, 2, 2), "for each head, for KVfp8"),
        ((2, 2, 2, 16), "for each channel, for KV8s"),
    ):
        kind = "heads" if len(shape) == 3 else "channels"
        lm.model.cache_scales = CacheScales(jnp.ones(shape))
        assert dict(lm.describe())["cache scales"] == text
        assert lm.summary()["cache_scales"] == kind


def test_summary_is_json_with_figures(tmp_path, rng):
    tensors = random_tensors(CONFIGS["llama"], rng)
    lm = load(write_checkpoint(tmp_path, CONFIGS["llama"], tensors), "W4g32A16KV8")
    found = lm.summary()
    assert json.loads(json.dumps(found)) == found
    assert found["packed_bytes"] > 0
    assert found["packed_bytes"] + found["other_bytes"] == lm.nbytes
    assert (
        found
        | {
            "model": "Llama",
            "source": "the/source",
            "precision": "W4g32A16KV8",
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_position_embeddings": 256,
            "parameters": lm.num_parameters,
            "dtype": "bfloat16",
            "cache_scales": None,
        }
        == found
    )
    assert found["linear_maps"]["attention.output"] == {"W4g32": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.model", r"has tokenizer\.model but no tokenizer\.json: convert it once with"),
        (
            "config.json",
            r"has no tokenizer\.json; it holds config\.json\. Without it there is no text",
        ),
    ],
)
def test_without_a_tokenizer_it_is_said_what_to_do(name, message, tmp_path):
    (tmp_path / name).write_text("{}")
    lm = LanguageModel(None, None, KVFormat(), tmp_path)
    with pytest.raises(ValueError, match=message):
        lm.require_tokenizer()
    tokenizer = Tokenizer(byte_level([], 256))
    assert dataclasses.replace(lm, tokenizer=tokenizer).require_tokenizer() is tokenizer


@pytest.mark.parametrize(
    ("precision", "bits"),
    [
        ("W16A16KV16", 16),
        ("W4A16KV8", 4.25),
        ("WNF3A16KV16", 3.5),
        ("W8A8KV16", 8.25),
        ("W4A8KV16", 4.25),
    ],
)
def test_bits_of_a_weight_count_its_scales(tiny_folder, precision, bits):
    """K is 128 everywhere."""
    lm = mpjax.load(tiny_folder, precision=precision, dtype="bfloat16")
    assert lm.bits_per_weight == bits


def test_a_cpu_computes_with_a_decoded_copy_while_the_weights_are_the_same(
    tiny_folder, monkeypatch
):
    lm = mpjax.load(tiny_folder, dtype="bfloat16")
    copy = lm.for_device
    assert copy is lm.for_device is not lm.model
    lm.model.norm.weight = nnx.Param(lm.model.norm.weight.get_value() * 2)
    assert lm.for_device is not copy
    with device.described_as():
        assert lm.for_device is lm.model
    monkeypatch.setattr(language_model, "free_bytes", lambda: 1)
    lm = dataclasses.replace(lm)
    with pytest.warns(UserWarning, match="stay packed"):
        assert lm.for_device is lm.model


def test_changed_weights_change_what_is_generated(tiny_folder):
    lm = mpjax.load(tiny_folder, dtype="bfloat16")
    before = mpjax.generate(lm, [[1, 2, 3]], max_new_tokens=4).logprobs
    lm.model.norm.weight = nnx.Param(-lm.model.norm.weight.get_value())
    assert mpjax.generate(lm, [[1, 2, 3]], max_new_tokens=4).logprobs != before
