from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import ActivationFormat, QuantizedActivations, WeightFormat, quantize
from mpjax.models import GatedMLPSpec, LinearMaps, Packed
from mpjax.models.state import WHOLE
from tests.models.small import CACHED, CONFIG
from tests.pallas_kernels.oracles import random_array, relative_error, wide


def test_linear_maps():
    assert GatedMLPSpec(96, bias=True).linear_maps(CONFIG) == (
        LinearMaps("gate_up", ((64, 96), (64, 96)), True),
        LinearMaps("down", ((96, 64),), True),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias, rng):
    mlp = GatedMLPSpec(128, bias).build(CONFIG, nnx.Rngs(0))
    [fused] = mlp.gate_up.parts
    for linear in (fused, mlp.down):
        assert (linear.bias is not None) == bias
        if linear.bias is not None:
            linear.bias = nnx.Param(random_array(rng, linear.bias.get_value().shape, "float32"))
    x = random_array(rng, (2, 64), "float32") * 20

    def apply(x, linear):
        offset = 0 if linear.bias is None else wide(linear.bias.get_value())
        return x @ wide(linear.kernel.get_value()) + offset

    gate, up = np.split(apply(wide(x), fused), 2, axis=-1)
    gated = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(mlp.gated(x), gated, atol=1e-4)
    np.testing.assert_allclose(mlp(x), apply(gated, mlp.down), atol=1e-4)


@pytest.mark.parametrize("text", ["int8/int8", "liquid4:g64/int8", "float8:gK/float8"])
def test_gated_activations_come_as_the_last_kernel_takes_them(text, rng):
    mlp = GatedMLPSpec(128).build(CONFIG, nnx.Rngs(0))
    x = random_array(rng, (2, 64), "float32") * 20
    expected = wide(mlp.gated(x))
    kernel: Any = mlp.down.kernel.get_value()
    mlp.down.kernel = Packed(quantize(kernel, WeightFormat.parse(text)))
    gated = mlp.gated(x, CACHED)
    assert isinstance(gated, QuantizedActivations)
    assert gated.dtype == "float32"
    assert 1e-4 < relative_error(gated.dequantize(), expected) < 0.05
    plain = wide(gated.dequantize()) @ wide(mlp.down.kernel.get_value().dequantize())
    assert relative_error(mlp(x), plain) < 1e-5


@pytest.mark.parametrize("quantized", [False, True])
def test_terms_are_those_of_the_last_map(quantized, rng):
    mlp = GatedMLPSpec(128).build(CONFIG, nnx.Rngs(0))
    for linear in (mlp.gate_up.parts[0], mlp.down):
        kernel: Any = linear.kernel.get_value()
        linear.kernel = Packed(quantize(kernel, WeightFormat.parse("int8/int8")))
    assert mlp.activations == mlp.gate_up.activations == ActivationFormat.of("int8/int8")
    x = random_array(rng, (2, 64), "float32") * 20
    context = CACHED if quantized else WHOLE
    gated = mlp.gated(x, context)
    assert isinstance(gated, QuantizedActivations) == quantized
    np.testing.assert_array_equal(mlp.terms(x, context), mlp.down.terms(gated))
