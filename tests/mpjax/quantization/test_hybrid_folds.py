"""Folds of layers whose mixers keep a state, and of layers of one half."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.quantization import folds
from tests.models.sharded_families import build


@pytest.mark.parametrize(
    "architecture", ["Lfm2ForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM"]
)
def test_scales_move_without_a_change_of_outputs(architecture, rng):
    model, found = build(architecture), []
    hidden = jnp.asarray(rng.normal(size=(1, 9, model.config.hidden_size)), jnp.float32)
    angles = model.angles_by_rope(jnp.arange(9)[None])
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        expected = np.asarray(layer.inputs(hidden, angles)[0])
        for fold in spec.folds(model.config):
            if not fold.is_linear or fold.repeats is not None:  # those of attention: test_folds.py
                continue
            changed = nnx.clone(layer)
            shape = folds.linear_of(changed, fold.target).kernel.get_value().shape[-2:-1]
            folds.apply(changed, fold, jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32))
            np.testing.assert_allclose(
                changed.inputs(hidden, angles)[0], expected, atol=1e-5 * abs(expected).max()
            )
            found.append(fold.target)
    assert any(target.endswith("out_proj") for target in found)
    assert len(found) > 3
