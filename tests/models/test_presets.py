from __future__ import annotations

import math

import pytest

from mpjax.models import DecoderConfig, presets


def parameters(config: DecoderConfig) -> int:
    layer = sum(math.prod(shape) for shape in config.projection_shapes.values())
    return config.num_layers * layer + 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize(
    ("config", "billions"), [(presets.QWEN3_8B, 8.19), (presets.LLAMA3_1_8B, 8.03)]
)
def test_presets_have_the_published_number_of_parameters(config, billions):
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.005)


def test_presets_are_computed_in_bfloat16():
    assert presets.QWEN3_8B.dtype == presets.LLAMA3_1_8B.dtype == "bfloat16"
