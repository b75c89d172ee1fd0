"""Named shapes, which benchmarks, tuning and tests share."""

from __future__ import annotations

import pytest

from mpjax.kernels.experts.shapes import MODELS
from mpjax.models import ExpertPlace, ExpertsSpec
from mpjax.models.presets import PUBLISHED


@pytest.mark.parametrize("name", [name for name in MODELS if name in PUBLISHED])
def test_shapes_are_those_of_the_models(name):
    decoder, config = PUBLISHED[name]
    places = [p for p in decoder.linear_places(config) if isinstance(p, ExpertPlace)][:2]
    mlp = config.layers[0].mlp
    assert isinstance(mlp, ExpertsSpec)
    for shape, place in zip(MODELS[name], places, strict=True):
        assert place.part_shapes(1) == [(shape.experts, shape.channels, shape.outputs)]
        assert shape.per_token == mlp.experts_per_token
        assert shape.gate in (None, mlp.gate)
        assert (shape.gate is None) == place.path.endswith("down")
