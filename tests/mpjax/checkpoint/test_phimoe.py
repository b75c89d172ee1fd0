"""PhiMoE's head with a bias, also packed and saved, and its LongRoPE in long sequences."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from mpjax.models import ConfigError
from mpjax.models.phi import PhiMoE
from tests.models.sharded_families import VOCABULARY, keys
from tests.mpjax.checkpoint.test_every_family import build
from tests.mpjax.checkpoint.test_huggingface_parity import edit_config

torch = pytest.importorskip("torch")

ARCHITECTURE = "PhimoeForCausalLM"
SHORT, LONG = [1.0] * 16, [4.0] * 16
ROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"short_mscale": 1.2, "long_mscale": 1.2, "short_factor": SHORT, "long_factor": LONG},
}


def test_a_long_sequence_has_the_long_factors_and_a_packed_head_a_bias(tmp_path):
    """transformers has the short factors for any length, so here they are the long ones."""
    theirs = ROPE | {"short_factor": LONG}
    model = build(
        ARCHITECTURE, keys(ARCHITECTURE) | {"rope_parameters": theirs, "rope_theta": None}
    )
    model.save_pretrained(tmp_path / "source")
    edit_config(tmp_path / "source", rope_parameters=ROPE)
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 24))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    lm = mpjax.load(tmp_path / "source", dtype="float32", progress=False)
    found = np.asarray(lm.model(tokens.astype(np.int32)))
    assert abs(found - expected).max() < 1e-5 * abs(expected).max()
    packed = mpjax.load(
        tmp_path / "source", dtype="float32", precision="W8g32A16KV8H8", progress=False
    )
    assert packed.config.packed_tables == ("head",)
    near = np.asarray(packed.model(tokens.astype(np.int32)))
    assert abs(near - expected).mean() < 0.1 * abs(expected).mean()
    mpjax.save(packed, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved", progress=False)
    np.testing.assert_array_equal(again.model(tokens.astype(np.int32)), near)


def test_two_factors_of_attention_are_refused():
    hf = keys(ARCHITECTURE) | {"rope_parameters": ROPE | {"long_mscale": 1.5}}
    with pytest.raises(ConfigError, match=r"long_mscale is 1\.5: expected 1\.2, the short_mscale"):
        PhiMoE.config_from_hf(hf)
