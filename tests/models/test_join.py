from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Linear
from mpjax.models.join import join, split
from tests.pallas_kernels.oracles import random_array

FORMAT = WeightFormat.parse("uint4:g32")
SYMMETRIC = WeightFormat.parse("uint4:g32:sym")


def linear(rng, format: WeightFormat | str | None, outputs: int, bias: bool = False) -> Linear:
    kernel: Any = random_array(rng, (64, outputs), "float32")
    offset = random_array(rng, (outputs,), "float32") if bias else None
    return Linear(kernel if format is None else quantize(kernel, format), offset)


def format_of(linear: Linear) -> WeightFormat | None:
    kernel: Any = linear.kernel.get_value()
    return kernel.format if isinstance(kernel, QuantizedTensor) else None


def test_maps_of_one_format_are_one(rng):
    x = random_array(rng, (3, 64), "float32")
    for format, bias in ((None, True), (FORMAT, False), (SYMMETRIC, True)):
        maps = [linear(rng, format, outputs, bias) for outputs in (16, 8)]
        [joint] = join(maps)
        assert format_of(joint) == format
        assert (joint.bias is not None) == bias
        apart = jnp.concatenate([one(x) for one in maps], -1)
        np.testing.assert_allclose(joint(x), apart, atol=1e-4)


def test_symmetric_maps_join_others(rng):
    maps = [linear(rng, format, 8) for format in (SYMMETRIC, FORMAT)]
    [joint] = join(maps)
    assert format_of(joint) == FORMAT
    x = random_array(rng, (3, 64), "float32")
    apart = jnp.concatenate([one(x) for one in maps], -1)
    np.testing.assert_allclose(joint(x), apart, atol=1e-4)


def test_maps_of_other_formats_stay_apart(rng):
    for formats in ((None, FORMAT), (FORMAT, WeightFormat.parse("uint8:g32"))):
        maps = [linear(rng, format, 8, bias=True) for format in formats]
        assert [format_of(one) for one in join(maps)] == [*formats]
        assert [one.bias.get_value().shape for one in join(maps) if one.bias] == [(8,), (8,)]


def test_split_undoes_join(rng):
    for format, bias in ((None, True), (FORMAT, False), (SYMMETRIC, True), ("liquid4:g64", False)):
        maps = [linear(rng, format, outputs, bias) for outputs in (16, 8, 24)]
        [joint] = join(maps)
        for one, other in zip(maps, split(joint, (16, 8, 24)), strict=True):
            found = jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other))
            for a, b in zip(*found, strict=True):
                np.testing.assert_array_equal(a, b)
            assert format_of(one) == format_of(other)
