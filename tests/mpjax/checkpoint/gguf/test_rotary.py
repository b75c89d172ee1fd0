"""The rotary embedding of GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpjax.checkpoint.gguf import rotary
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.models import RopeScaling
from mpjax.models.rotary import scaled_frequencies


def read(values, factors=None, **others):
    prefixed = {f"llama.rope.{key}": value for key, value in values.items()}
    given = others if factors is None else {rotary.LLAMA3: factors}
    return rotary.read(Metadata(Path("m.gguf"), prefixed), "llama", given)


def test_scaling():
    assert read({}) == {"rope_theta": 10000.0}
    linear = {"freq_base": 5e5, "scaling.type": "linear", "scaling.factor": 4.0}
    expected = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert read(linear) == expected
    expected["rope_scaling"]["original_max_position_embeddings"] = 2048
    assert read(linear | {"scaling.original_context_length": 2048}) == expected
    with pytest.raises(CheckpointError, match=r"scaling\.type is 'other': expected none, linear"):
        read({"scaling.type": "other"})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3(factor):
    plain = scaled_frequencies(128, 5e5, None)
    factors = plain / scaled_frequencies(128, 5e5, RopeScaling("llama3", factor))
    found = read({"freq_base": 5e5}, np.asarray(factors))["rope_scaling"]
    assert (found["rope_type"], found["factor"]) == ("llama3", factor)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight divides .* by 1\.5 to 1\.5, as"):
        read({"freq_base": 5e5}, np.full(64, 1.5, np.float32))


def test_factors_of_phi():
    factors = {rotary.SHORT: np.array([1.0, 2.0]), rotary.LONG: np.array([3.0, 4.0])}
    values = {"scaling.original_context_length": 64, "scaling.attn_factor": 1.5}
    found = read(values, **factors)
    assert found["original_max_position_embeddings"] == 64
    assert found["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 4.0],
        "attention_factor": 1.5,
    }
