"""Named shapes, which benchmarks, tuning and tests share."""

from __future__ import annotations

import pytest

from mpjax.kernels.attention import shapes
from mpjax.kernels.experts.shapes import MODELS
from mpjax.kernels.gemm import shapes as gemm_shapes
from mpjax.models import ExpertPlace, ExpertsSpec
from mpjax.models.presets import PUBLISHED

ALL = (*shapes.DECODE, *shapes.RAGGED, *shapes.PREFILL, *shapes.SMALL)


def test_shapes_by_name_each_once():
    down = gemm_shapes.QWEN3_8B[3]
    assert gemm_shapes.named(["llama3-70b"]) == gemm_shapes.LLAMA3_70B
    assert gemm_shapes.named(["qwen3-8b.down", "qwen3-8b"]) == (down, *gemm_shapes.QWEN3_8B[:3])
    for model, members in gemm_shapes.MODELS.items():
        assert all(shape.name.startswith(f"{model}.") for shape in members)


def test_an_unknown_name_is_met_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gpt': expected a model \(qwen3-8b, llama3-70b\)"):
        gemm_shapes.named(["qwen3-8b", "gpt"])


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
