"""The config.json of Llama 4; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import re

import pytest

from mpjax.models import ConfigError
from mpjax.models.llama4 import Llama4

pytestmark = pytest.mark.any_version

HF = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize(("written", "growth"), [(True, 0.1), (4, 0.1), (0, None), (False, None)])
def test_the_tuning_of_temperatures_is_a_boolean_or_an_integer(written, growth):
    config = Llama4.config_from_hf(HF | {"attn_temperature_tuning": written})
    assert [layer.attention.growth for layer in config.layers] == [None, None, None, growth]  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", [-1, 0.5, "true"])
def test_another_tuning_is_refused(written):
    expected = f"attn_temperature_tuning is {written!r}: expected an integer from 0 on"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Llama4.config_from_hf(HF | {"attn_temperature_tuning": written})
