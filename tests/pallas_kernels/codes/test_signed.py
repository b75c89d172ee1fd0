from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax.kernels import PlainCodes, WeightFormat, codes, pack

FORMAT = WeightFormat.parse("int8/int8")


def test_words_are_the_operand(decode):
    words = np.tile(np.arange(-128, 128, dtype=np.int8), (16, 1))
    scales = np.linspace(0.1, 1, 16, dtype=np.float32)
    planes = decode(
        words, scales.view(np.uint32), format="int8/int8", operand="int8", scale_dtype="float32"
    )
    np.testing.assert_array_equal(planes, words[None])


def test_parameters_are_a_scale():
    scales = np.array([0.1, 3e-5, 7.0], np.float32)
    group = codes.of(FORMAT).load(
        jnp.asarray(scales.view(np.uint32)), "float32", jnp.dtype("int8"), 64
    )
    assert group.scale is not None
    np.testing.assert_array_equal(group.scale, scales[:, None])
    assert group.arguments == ()


def test_dequantizes_by_output_channel(rng):
    integers = rng.integers(-128, 128, (100, 7)).astype(np.int8)
    scales = rng.uniform(0.01, 1, (1, 7)).astype(np.float32)
    tensor = pack(PlainCodes(FORMAT, integers, scales))
    np.testing.assert_array_equal(tensor.dequantize(), integers.astype(np.float32) * scales)
