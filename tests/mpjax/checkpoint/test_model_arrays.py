from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.checkpoint import model_arrays
from mpjax.kernels import WeightFormat
from mpjax.language_model import LanguageModel
from mpjax.models import CacheScales
from tests.mpjax.checkpoint.saved_models import load, mixed, require_same_bits


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A model of packed, plain, permuted and fused linear maps, with biases and cache scales."""
    folder = tmp_path_factory.mktemp("model") / "mixed"
    lm = load(mixed(folder, np.random.default_rng(3)))
    shape = (lm.config.num_layers, 2, lm.config.num_kv_heads)
    lm.model.cache_scales = CacheScales(jnp.ones(shape))
    return lm


def test_what_is_taken_can_be_put(lm):
    arrays, parts = model_arrays.take(lm.model), model_arrays.take_parts(lm.model)
    assert len(arrays) == len(jax.tree.leaves(nnx.state(lm.model)))
    assert parts["layers.0.attention.qkv"][0] == (WeightFormat.parse("uint4:g32"), "float16")
    assert "layers.0.attention.qkv.0.permutation" in arrays
    model_arrays.require_fitting(type(lm.model), lm.config, parts, arrays)
    other = nnx.eval_shape(lambda: type(lm.model)(lm.config, nnx.Rngs(0)))
    model_arrays.put(other, arrays, parts)
    require_same_bits(lm, LanguageModel(other, None, lm.kv_format, lm.source))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("norm.weight", (63,), "float16", r"float16 \[63\]: expected bfloat16 or .*32 \[64\]"),
        ("layers.0.attention.qkv.2.bias", None, "", "0.attention.qkv.2.bias is missing"),
        ("layers.0.attention.qkv.3.bias", (4,), "float16", "is an array 'layers.0.attention.qkv.3"),
        ("layers.0.attention.qkv.0.permutation", (3,), "int32", r"\[3\]: expected int32 \[64\]"),
        ("layers.0.attention.qkv.0.words", (1, 2, 3), "uint16", r"\[1, 2, 3\]: expected uint16"),
        ("layers.0.attention.qkv.0.table", (16,), "float32", "which such a model does not have"),
        ("cache_scales", (2, 2), "float32", r"\[2, 2\]: expected float32 \[2, 2, 4\] or \[2, 2, 4"),
    ],
)
def test_other_arrays_do_not_fit(name, shape, dtype, message, lm):
    arrays = dict(model_arrays.take(lm.model))
    if shape is None:
        del arrays[name]
    else:
        arrays[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    with pytest.raises(ValueError, match=message):
        model_arrays.require_fitting(
            type(lm.model), lm.config, model_arrays.take_parts(lm.model), arrays
        )


def test_linear_maps_are_those_of_the_configuration(lm):
    arrays, parts = model_arrays.take(lm.model), model_arrays.take_parts(lm.model)
    for wrong in ({k: v for k, v in parts.items() if "down" not in k}, parts | {"x": [None]}):
        with pytest.raises(ValueError, match="is missing, or no model has it"):
            model_arrays.require_fitting(type(lm.model), lm.config, wrong, arrays)
