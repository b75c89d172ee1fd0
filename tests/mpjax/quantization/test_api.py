from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.activation_widths import count_blocks
from mpjax.cli.info import inspect
from mpjax.models import ExpertsSpec, LayerSpec, Mixtral
from mpjax.quantization import api
from tests.models.small import CONFIG, small_model

TEXTS = ["the quick brown fox " * 40, "jumps over the lazy dog " * 40]
LITTLE = mpjax.Calibration(window=64, tokens=512, batch=2)


def leaves_of(lm):
    return jax.tree.leaves(nnx.state(lm.model))


def test_a_folder_and_its_model_give_the_same(tiny_folder, tiny, tmp_path):
    recipe = mpjax.Recipe.of("W4g32A16KV8", "rotate+awq")
    before = leaves_of(tiny)
    found = mpjax.quantize(tiny, recipe, TEXTS, calibration=LITTLE)
    assert all(map(np.array_equal, leaves_of(tiny), before))
    assert found.precision == "W4g32A32KV8H8"
    assert tiny.precision == "W32A32KV16"  # as it was
    assert found.updates is not tiny.updates
    assert found.adapters is not tiny.adapters
    streamed = mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE, dtype="float32")
    for leaves in zip(leaves_of(found), leaves_of(streamed), strict=True):
        np.testing.assert_array_equal(*leaves)
    mpjax.save(found, tmp_path / "saved")
    assert mpjax.load(tmp_path / "saved").precision == found.precision


def test_rounding_to_nearest_is_what_load_does(tiny_folder):
    for quantized, loaded in (("W4A16KV8H16", "W4A16KV8"), ("W4A16KV8", "W4A16KV8H8")):
        expected = mpjax.load(tiny_folder, precision=loaded)
        found = mpjax.quantize(tiny_folder, mpjax.Recipe.of(quantized, "rtn"))
        assert found.precision == expected.precision == loaded
        for leaves in zip(leaves_of(found), leaves_of(expected), strict=True):
            np.testing.assert_array_equal(*leaves)


def test_an_interrupted_run_goes_on(tiny_folder, tmp_path, monkeypatch):
    recipe, work = mpjax.Recipe.of("W4g32A16KV16", "range"), tmp_path / "work"
    expected = mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE)
    done, real = [], api.FinishedLayers.save

    def save(self, model, number):
        real(self, model, number)
        done.append(number)
        if len(done) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(api.FinishedLayers, "save", save)
    with pytest.raises(KeyboardInterrupt):
        mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE, work=work)
    assert [file.name for file in sorted(work.glob("layer-*.safetensors"))] == [
        "layer-00000.safetensors"
    ]
    loaded = []
    original = api.FinishedLayers.load

    def load(self, model, number, recipe):
        loaded.append(original(self, model, number, recipe))
        return loaded[-1]

    monkeypatch.setattr(api.FinishedLayers, "load", load)
    found = mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE, work=work)
    assert loaded == [True, *[False] * (found.config.num_layers - 1)]
    for leaves in zip(leaves_of(found), leaves_of(expected), strict=True):
        np.testing.assert_array_equal(*leaves)
    assert len(list(work.glob("layer-*.safetensors"))) == found.config.num_layers


def test_text_that_nothing_reads_is_said(tiny):
    with pytest.warns(UserWarning, match="the text is not used, because no method of the recipe"):
        mpjax.quantize(tiny, mpjax.Recipe.of("W8g64A16KV16", "rtn"), TEXTS, calibration=LITTLE)


def test_static_scales_of_the_cache_are_measured(tiny):
    found = mpjax.quantize(tiny, mpjax.Recipe.of("W8g64A16KV8s", "rtn"), TEXTS, calibration=LITTLE)
    assert found.model.cache_scales.get_value().ndim == 4
    assert tiny.model.cache_scales is None


def test_bad_input_is_refused_before_anything_is_read(tiny, tiny_folder, tmp_path):
    def refuses(message, *arguments, **options):
        with pytest.raises(ValueError, match=message):
            mpjax.quantize(*arguments, **options)

    refuses("gptq needs text", tiny, "W4A16KV8")
    refuses("has scales that are measured", tiny, mpjax.Recipe.of("W4A16KV8s", "rtn"))
    refuses("documents is a text", tiny, "W4A16KV8", TEXTS[0])
    refuses("the documents are empty", tiny, "W4A16KV8", [])
    refuses("the documents are empty", tiny, "W4A16KV8", ["", "  "])
    refuses("does not say what weights become", tiny, "A16KV8", TEXTS)
    refuses("dtype, work and devices are for a folder", tiny, "W4A16KV8", TEXTS, dtype="float16")
    refuses("documents is 3", tiny, "W4A16KV8", 3)
    refuses("calibration is", tiny, "W4A16KV8", TEXTS, calibration=3)
    packed = mpjax.quantize(tiny, mpjax.Recipe.of("W8g64A16KV16", "rtn"))
    refuses("is quantised already", packed, mpjax.Recipe.of("W4A16KV16", "rtn"))
    mpjax.save(packed, tmp_path / "saved")
    refuses("is a model that mpjax saved", tmp_path / "saved", "W4A16KV16", TEXTS)
    rules = [{"modules": "no.*", "method": "rtn"}]
    recipe = mpjax.Recipe.parse({"precision": "W4A16KV8", "rules": rules})
    refuses(r"'no\.\*' matches no linear map", tiny, recipe, TEXTS)
    with pytest.raises(ValueError, match="Calibration: window is 0"):
        mpjax.Calibration(window=0)


def test_blocks_are_calibrated_saved_and_described(tiny_folder, tmp_path):
    recipe = mpjax.Recipe.of("W4Ax4KV4", "rtn")
    with pytest.raises(ValueError, match="which blocks of activations have 8 bits depends on text"):
        mpjax.quantize(tiny_folder, recipe)
    found = mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE)
    assert count_blocks(found.model) == (2, 8)  # of each layer one of four
    mpjax.save(found, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"precision is W4A4KV4, but .* are W4Ax: ask for A"):
        mpjax.load(tmp_path / "saved", precision="W4A4KV4")
    loaded = mpjax.load(tmp_path / "saved", precision="W4AxKV4")
    for leaves in zip(leaves_of(found), leaves_of(loaded), strict=True):
        np.testing.assert_array_equal(*leaves)
    described = dict(inspect(tmp_path / "saved").describe())
    assert described["activations in 8 bits"] == "2 of 8 blocks, 25.0%; the others in 4"
    assert len(mpjax.generate(loaded, ["the quick"], max_new_tokens=2).tokens[0]) == 2


def test_scales_of_experts_are_not_learned():
    layers = (LayerSpec(CONFIG.layers[0].attention, ExpertsSpec(32, num_experts=4)),)
    model = Mixtral(dataclasses.replace(CONFIG, layers=layers), nnx.Rngs(0))
    lm = mpjax.LanguageModel(model, None, mpjax.Precision.parse("A16KV16").kv, Path())
    recipe = mpjax.Recipe.of("WNF4g32A16KV16", "range+learn")
    with pytest.raises(ValueError, match="whose scales are not learned: leave `learn` out"):
        mpjax.quantize(lm, recipe, TEXTS)


@pytest.mark.parametrize("norms", ["post", "both"])
def test_models_with_norms_behind_the_halves_are_not_rotated(norms):
    layers = tuple(dataclasses.replace(spec, norms=norms) for spec in CONFIG.layers)
    model = small_model(dataclasses.replace(CONFIG, layers=layers))
    lm = mpjax.LanguageModel(model, None, mpjax.Precision.parse("A32KV16").kv, Path())
    with pytest.raises(ValueError, match="outputs of attention and MLP have norms"):
        mpjax.quantize(lm, mpjax.Recipe.of("W4A32KV16", "rotate+rtn"))
