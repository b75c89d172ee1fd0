from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.kernels.packed_shapes import packed_shapes

FORMATS = (
    *("uint4:g32", "uint4:g128:sym", "uint8:gK", "table3:g64", "table2:g256", "float8:g128"),
    *("float8:gK/float8", "int8", "liquid4:g64"),
)


def shapes(tensor: QuantizedTensor):
    return jax.tree.map(lambda array: (array.shape, array.dtype), tensor)


@pytest.mark.parametrize("name", FORMATS)
def test_they_are_those_of_a_packed_weight(name, rng):
    format = WeightFormat.parse(name)
    weight = jnp.asarray(rng.standard_normal((256, 48), np.float32))
    packed = quantize(weight, format)
    found = packed_shapes((256, 48), format, packed.scale_dtype)
    assert shapes(found) == shapes(packed)
    permuted = packed_shapes((256, 48), format, packed.scale_dtype, permuted=True)
    assert permuted.permutation is not None
    assert (permuted.permutation.shape, permuted.permutation.dtype) == ((256,), jnp.int32)
    assert found.shape == packed.shape == (256, 48)


@pytest.mark.parametrize("name", FORMATS)
def test_those_of_a_stack(name):
    format = WeightFormat.parse(name)
    weight = jax.ShapeDtypeStruct((2, 3, 256, 8), jnp.float32)
    packed = jax.eval_shape(lambda weight: quantize(weight, format), weight)
    found = packed_shapes((2, 3, 256, 8), format, packed.scale_dtype)
    assert shapes(found) == shapes(packed)
    assert found.shape == (2, 3, 256, 8)
    assert found.nbytes == format.nbytes((2, 3, 256, 8)) == 6 * format.nbytes((256, 8))


@pytest.mark.parametrize(
    ("shape", "name", "scale_dtype", "message"),
    [
        ((100, 48), "uint4:g32", "float16", "100 input channels can't be split into groups of 32"),
        ((128, 48), "uint4:g32", "float32", "scale_dtype is 'float32': expected float16 or bf"),
        ((128, 48), "bfloat16", "float16", "bfloat16 is not packed"),
    ],
)
def test_what_can_not_be_packed(shape, name, scale_dtype, message):
    with pytest.raises(ValueError, match=message):
        packed_shapes(shape, WeightFormat.parse(name), scale_dtype)
