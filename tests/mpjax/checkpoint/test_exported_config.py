from __future__ import annotations

import dataclasses
import json

import pytest

import mpjax
from mpjax.checkpoint import exported_config
from mpjax.models import llama_layers
from tests.mpjax.bad_files.ways import REMOVED, config, pipe
from tests.mpjax.checkpoint.saved_models import plain

SAID = {"quant_method": "awq"}


@pytest.fixture
def lm(rng, tmp_path):
    folder = plain(tmp_path / "source", rng, bos_token_id=7, quantization_config={"a": 1})
    config(quantization_config=REMOVED)(folder)
    return mpjax.load(folder)


def test_the_rest_is_that_of_the_source(lm):
    written = json.loads((lm.source / "config.json").read_text())
    mark = {"mpjax_version": mpjax.__version__}
    assert exported_config.make(lm, None) == written | mark
    assert exported_config.make(lm, SAID) == written | mark | {"quantization_config": SAID}
    config(quantization_config={"a": 1}, compression_config={"b": 1})(lm.source)
    assert exported_config.make(lm, None) == written | mark


@pytest.mark.parametrize("keys", [("torch_dtype",), ("dtype",), ("dtype", "torch_dtype"), ()])
def test_the_dtype_is_that_of_the_model(keys, lm):
    lm = mpjax.load(lm.source, dtype="float16")
    config(**{"torch_dtype": REMOVED} | dict.fromkeys(keys, "bfloat16"))(lm.source)
    found = exported_config.make(lm, None)
    assert {key: found[key] for key in found if "dtype" in key} == dict.fromkeys(
        keys or ("torch_dtype",), "float16"
    )


def test_limits_and_stop_tokens_are_those_of_the_source(lm):
    lm = mpjax.load(lm.source, max_positions=17)
    lm.model.config = dataclasses.replace(lm.config, stop_ids=(1, 5))
    found = exported_config.make(lm, None)
    assert (found["max_position_embeddings"], found["eos_token_id"]) == (256, 2)


def test_a_source_of_another_model(lm):
    lm.model.config = dataclasses.replace(lm.config, rope_theta=5e5)
    with pytest.raises(ValueError, match=r"says another rope_theta \(10000.0\) than"):
        exported_config.make(lm, None)
    lm.model.config = dataclasses.replace(
        lm.config, rope_theta=1e4, layers=llama_layers((8, 8), 128)
    )
    with pytest.raises(ValueError, match=r"says another layers .* set the model's source to a"):
        exported_config.make(lm, None)
    config(architectures=["Qwen2ForCausalLM"])(lm.source)
    with pytest.raises(ValueError, match=r"config.json is of a Qwen2, and the model is a Llama:"):
        exported_config.make(lm, None)
    (lm.source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"source has no config.json, which an export begins with"):
        exported_config.make(lm, None)


def test_marks(lm, tmp_path):
    assert not exported_config.is_marked(lm.source)
    config(mpjax_version="0")(lm.source)
    assert exported_config.is_marked(lm.source)
    assert not exported_config.is_marked(tmp_path / "nothing")
    pipe("config.json")(lm.source)
    assert not exported_config.is_marked(lm.source)
