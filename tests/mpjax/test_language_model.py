from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.checkpoint import huggingface
from mpjax.kernels import KVFormat
from mpjax.language_model import LanguageModel, weight_precisions
from mpjax.models import CacheScales
from mpjax.precision import Precision
from mpjax.tokenizer import Tokenizer
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    GPTQ,
    linear_shapes,
    pack_random,
    random_tensors,
    write_checkpoint,
)
from tests.mpjax.tokenizer_folders import byte_level


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


@pytest.mark.parametrize("precision", ["W4g32A16KV8", "W8gKsymA16KV4", "W16A16KV16"])
def test_precision_is_what_was_asked_for(precision, tmp_path, rng):
    lm = load(
        write_checkpoint(tmp_path, CONFIGS["llama"], random_tensors(CONFIGS["llama"], rng)),
        precision,
    )
    assert lm.precision == precision


def test_precision_is_what_is_there(tmp_path, rng):
    hf = CONFIGS["llama"] | {"quantization_config": GPTQ | {"group_size": 64}}
    tensors = random_tensors(hf, rng, np.float16)
    for name in linear_shapes(hf):
        if name != "model.layers.1.self_attn.v_proj":
            pack_random(tensors, hf, name, rng)
    lm = load(write_checkpoint(tmp_path, hf, tensors), "A16KV8")
    assert lm.precision == "W16+W4g64A16KV8"
    assert weight_precisions(lm.model) == ["W16", "W4g64"]
    rows = dict(lm.describe())
    assert rows["attention.qkv"] == "W4g64 in 1 layer, W4g64 | W4g64 | W16 in 1 layer"
    assert rows["mlp.down"] == "W4g64 in 2 layers"


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
        ((2, 2, 2), "of heads, for KVfp8"),
        ((2, 2, 2, 16), "of channels, for KV8s"),
    ):
        lm.model.cache_scales = CacheScales(jnp.ones(shape))
        assert dict(lm.describe())["cache scales"] == text
        assert lm.summary()["cache_scales"] == text.split()[1].strip(",")


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
