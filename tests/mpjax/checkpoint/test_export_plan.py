from __future__ import annotations

import jax
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import export_plan
from mpjax.checkpoint.export_plan import make_plan
from mpjax.checkpoint.schemes import registry
from tests.mpjax.checkpoint.saved_models import mixed, plain


def test_specs_are_those_of_the_tensors(rng, tmp_path):
    lm = mpjax.load(mixed(tmp_path, rng))
    for layout in ("gptq_v2", "plain"):
        plan = make_plan(lm.model, layout)
        tensors = dict(plan.tensors())
        specs = plan.specs()
        assert [*specs] == [*tensors]  # in order
        for name, array in tensors.items():
            assert (specs[name].shape, specs[name].dtype) == (array.shape, array.dtype)
            assert specs[name].size == array.size


def test_nothing_is_computed_for_a_plan(rng, tmp_path, monkeypatch):
    lm = mpjax.load(plain(tmp_path, rng), precision="W4g32symA16KV8")
    before = len(jax.live_arrays())
    plan = make_plan(lm.model, None)
    plan.specs()
    assert len(jax.live_arrays()) == before


def test_the_head_is_left_out_by_name(rng, tmp_path):
    lm = mpjax.load(plain(tmp_path, rng), precision="W4g32symA16KV8")
    said = make_plan(lm.model, None).quantization
    assert said is not None
    assert said["ignore"] == ["lm_head"]
    assert make_plan(lm.model, "plain").quantization is None
    assert make_plan(lm.model, "awq").cache is None


def test_layouts():
    assert [*registry.layouts(), "plain"] == export_plan.layouts()
    assert len(set(export_plan.layouts())) == len(export_plan.layouts())
    for layout in (None, *export_plan.layouts()):
        export_plan.require_layout(layout)
    with pytest.raises(ValueError, match=r"format is 'awk' \(did you mean 'awq'\?\): expected one"):
        export_plan.require_layout("awk")


def test_plain_maps_are_transposed(rng, tmp_path):
    lm = mpjax.load(plain(tmp_path, rng))
    [place, *_] = lm.model.linear_places(lm.config)
    tensors = dict(make_plan(lm.model, None).tensors())
    [kernel] = place.kernels(lm.model)
    joint = np.concatenate([tensors[f"{name}.weight"] for name in place.names])
    np.testing.assert_array_equal(joint.T, kernel)
