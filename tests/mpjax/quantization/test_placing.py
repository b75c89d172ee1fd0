"""A mesh of one device here; tests/mpjax/on_devices.py has several."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mpjax
from mpjax.quantization import placing
from tests.models.sharded_decoders import require_same_arrays

TEXTS = ["the quick brown fox " * 40]
LITTLE = mpjax.Calibration(window=64, tokens=256, batch=2)


def test_layers_that_are_done_are_placed_before_the_next(tiny_folder, tmp_path, monkeypatch):
    recipe = mpjax.Recipe.of("W4g32A16KV8s", "awq")
    whole = mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE)
    left, move = [], placing.move_layer

    def counted(model, number, divided):
        move(model, number, divided)
        left.append([type(x) for x in jax.tree.leaves(model.layers[number])])

    monkeypatch.setattr("mpjax.quantization.api.move_layer", counted)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    given = {"calibration": LITTLE, "work": tmp_path / "work", "devices": mesh}
    for _ in range(2):  # the second takes the layers that are done from the folder
        found = mpjax.quantize(tiny_folder, recipe, TEXTS, **given)
        assert (found.model.mesh, found.precision) == (mesh, whole.precision)
        joined = found.model.whole()
        scales = joined.cache_scales.get_value()
        # Calls of several devices are other programs, which round otherwise.
        np.testing.assert_allclose(scales, whole.model.cache_scales.get_value(), rtol=1e-2)
        joined.put_cache_scales(whole.model.cache_scales.get_value())
        require_same_arrays(whole.model, joined)
    assert len(left) == 2 * whole.config.num_layers
    assert {kind for kinds in left for kind in kinds} == {jax.ShapeDtypeStruct}
    mpjax.save(found, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved").model.cache_scales.get_value()
    np.testing.assert_array_equal(again, scales)


def test_devices_are_for_a_folder(tiny, tiny_folder):
    with pytest.raises(ValueError, match="work and devices are for a folder: leave them out"):
        mpjax.quantize(tiny, "W4A16KV8", TEXTS, devices=2)
    with pytest.raises(ValueError, match="devices is 64, and JAX sees"):
        mpjax.quantize(tiny_folder, "W4A16KV8", TEXTS, devices=64)
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        mpjax.quantize(tiny_folder, "W4A16KV8", TEXTS, device=2)
