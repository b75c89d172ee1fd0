from __future__ import annotations

import math

import pytest

from mpjax.models import Qwen3, presets


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("qwen3-8b", 8.19), ("llama3.1-8b", 8.03), ("llama3-70b", 70.55)),
        *(("qwen3-30b-a3b", 30.52), ("mixtral-8x7b", 46.70), ("gpt-oss-20b", 20.91)),
        *(("qwen3.6-27b", 26.89), ("qwen3.6-35b-a3b", 34.64)),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    decoder, config = presets.published(name)
    maps = [shape for place in decoder.linear_places(config) for shape in place.shapes]
    tables = 2 * config.vocab_size * config.hidden_size
    assert (sum(map(math.prod, maps)) + tables) / 1e9 == pytest.approx(billions, abs=0.005)


def test_models_have_names():
    assert presets.published("qwen3-8b") == (Qwen3, presets.QWEN3_8B)
    with pytest.raises(ValueError, match=r"unknown shapes 'qwen': expected one of qwen3-8b, llama"):
        presets.published("qwen")
