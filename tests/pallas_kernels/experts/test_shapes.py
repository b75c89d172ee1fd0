from __future__ import annotations

import pytest

from mpjax.kernels.experts.shapes import GPT_OSS_20B, MIXTRAL_8X7B, MODELS, named, named_mlps
from mpjax.models import ExpertPlace, ExpertsSpec
from mpjax.models.presets import PUBLISHED


def test_names():
    assert named(["mixtral-8x7b", "mixtral-8x7b.down"]) == MIXTRAL_8X7B
    assert named(["gpt-oss-20b.down"]) == GPT_OSS_20B[1:]
    with pytest.raises(
        ValueError, match=r"unknown shape 'qwen': expected a model with experts \(qw"
    ):
        named(["qwen"])


def test_both_products_at_once():
    mlp, *others = named_mlps(["mixtral-8x7b.mlp", "mixtral-8x7b", "mixtral-8x7b.mlp"])
    assert tuple(others) == MIXTRAL_8X7B
    assert (mlp.per_token, mlp.experts, mlp.gate) == (2, 8, MIXTRAL_8X7B[0].gate)
    weights = sum(shape.channels * shape.outputs for shape in MIXTRAL_8X7B)
    assert mlp.channels * mlp.outputs == weights


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
