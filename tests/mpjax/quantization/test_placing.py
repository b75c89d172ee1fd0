"""A mesh of one device here; tests/mpjax/on_devices.py has several."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mpjax
from mpjax.quantization import placing
from tests.models.sharded_decoders import require_same_arrays

TEXTS = ["the quick brown fox " * 40]
MESH = jax.sharding.Mesh(jax.devices()[:1], ("model",))
LITTLE = mpjax.Calibration(window=64, tokens=256, batch=2)


@pytest.fixture
def left(monkeypatch):
    """The types of the arrays of a layer that the model keeps when the layer is placed."""
    found, move = [], placing.move_layer

    def counted(model, number, divided):
        move(model, number, divided)
        found.append({type(x) for x in jax.tree.leaves(model.layers[number])})

    monkeypatch.setattr("mpjax.quantization.api.move_layer", counted)
    return found


def test_layers_that_are_done_are_placed_before_the_next(tiny_folder, tmp_path, left):
    recipe = mpjax.Recipe.of("W4g32A16KV8H8", "rtn")
    whole = mpjax.load(tiny_folder, precision="W4g32A16KV8H8")  # which rounds to nearest, too
    for _ in range(2):  # the second takes the layers that are done from the folder
        found = mpjax.quantize(tiny_folder, recipe, work=tmp_path / "work", devices=MESH)
        assert (found.model.mesh, found.precision) == (MESH, whole.precision)
        require_same_arrays(whole.model, found.model.whole())  # type: ignore[attr-defined]
    assert left == [{jax.ShapeDtypeStruct}] * 2 * whole.config.num_layers


@pytest.mark.sweep
def test_the_cache_of_a_divided_model_is_calibrated(tiny_folder, tmp_path):
    recipe = mpjax.Recipe.of("W4g32A16KV8s", "rtn")
    whole, found = (
        mpjax.quantize(tiny_folder, recipe, TEXTS, calibration=LITTLE, devices=devices)
        for devices in (None, MESH)
    )
    joined = found.model.whole()  # type: ignore[attr-defined]
    scales = np.asarray(joined.cache_scales.get_value())
    # Calls of several devices are other programs, which round otherwise.
    np.testing.assert_allclose(scales, whole.model.cache_scales.get_value(), rtol=1e-2)
    joined.put_cache_scales(whole.model.cache_scales.get_value())
    require_same_arrays(whole.model, joined)
    mpjax.save(found, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved").model.cache_scales.get_value()
    np.testing.assert_array_equal(again, scales)
